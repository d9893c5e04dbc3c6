"""Label inference: which classes a client has, and how often."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from barter.attacks.measures import share_error
from barter.attacks.overheard import Upload, clients_of, guard_of
from barter.attacks.result import Result, mean_result
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import Payload
from barter.experiment import Experiment
from barter.privacy.parts import answer_parts, take_part

__all__ = ["estimate_prior", "label_attacks"]


def label_attacks(
    experiment: Experiment, uploads: Mapping[int, Upload], public: Images
) -> list[Result]:
    """Infer labels and class frequencies from uploads; compare with the truth.

    Args:
        experiment: The attacked run.
        uploads: What each client uploaded.
        public: The attacker's images.

    Returns:
        One result for each way to infer them, with the share of correct labels (`right`) where
        labels belong to single images, and the L1 error of class frequencies (`distance`); a note
        if there is no way. The last is the guess that all classes are equally frequent.
    """
    clients = {k: client for k, client in clients_of(experiment).items() if k in uploads}
    found: dict[str, dict[int, dict[str, float]]] = {}
    for k, client in clients.items():
        for attack, values in _readings(experiment, client, uploads[k], public).items():
            found.setdefault(attack, {})[k] = values
    even = torch.ones(experiment.task.spec.classes)
    guess = {
        k: {"distance": share_error(even, client.data.class_counts())}
        for k, client in clients.items()
    }
    results = [mean_result("labels", attack, values) for attack, values in found.items()]
    if not results:
        results = [
            Result("labels", "classes", note="nothing that left the clients is about classes")
        ]
    if guess:
        results.append(mean_result("labels", "all classes alike", guess, guess=True))
    return results


def _readings(
    experiment: Experiment, client: Client, upload: Upload, public: Images
) -> dict[str, dict[str, float]]:
    """Return measures of each way to infer labels from an upload, by attack name."""
    true = client.data.class_counts()
    found: dict[str, dict[str, float]] = {}

    def measure_labels(inferred: Tensor, part: str) -> dict[str, float]:
        distance = share_error(torch.bincount(inferred, minlength=len(true)), true)
        if upload.places is None or not _of_images(experiment, part):
            return {"distance": distance}
        right = inferred == client.data.labels[upload.places]
        return {"right": float(right.double().mean()), "distance": distance}

    if upload.labels is not None:
        name, labels = upload.labels
        found[name] = measure_labels(labels, name)
    if upload.rows is not None and upload.network is not None:
        name, rows = upload.rows
        features = rows if rows.ndim == 2 else rows[:, 0]  # the first of several views
        with torch.no_grad():
            found[f"{name} and weights"] = measure_labels(
                upload.network.logits(features).argmax(1), name
            )
    for name, counts in _counts_in_answers(experiment, upload.answers):
        found[name] = {"distance": share_error(counts, true)}
    if upload.network is not None:
        found[upload.source] = {
            "distance": share_error(estimate_prior(upload.network, public), true)
        }
    return found


def _of_images(experiment: Experiment, part: str) -> bool:
    """Return whether each row of a part belongs to one image, and not to a class."""
    plan = guard_of(experiment).plan
    return part not in plan.covers or plan.mechanisms[plan.covers[part]].second_key is None


def _counts_in_answers(
    experiment: Experiment, answers: Mapping[str, Payload]
) -> list[tuple[str, Tensor]]:
    """Find class counts in answers: in counts per class and lists of class indices.

    Of a part that is a dictionary, its "counts" and "classes" are read. Parts that the algorithm
    declares to tell nothing are skipped.

    Args:
        experiment: The experiment.
        answers: Name of a client function -> its answer.

    Returns:
        Names of parts, and the class counts in them; a part may occur several times.
    """
    classes = experiment.task.spec.classes
    found: list[tuple[str, Tensor]] = []
    for method, parts in answer_parts(experiment.algorithm).items():
        if method not in answers:
            continue
        for part in parts:
            if experiment.algorithm.tells.get(part) == "nothing":
                continue
            key = part.partition(".")[2]
            for value in take_part(answers[method], key):
                for name, leaf in _class_fields(value, key):
                    counts = _class_counts(leaf, name, classes)
                    if counts is not None:
                        found.append((part, counts))
    return found


def _class_fields(value: Payload, key: str) -> list[tuple[str, Payload]]:
    """Return a part under its key, or of a dictionary the "counts" and "classes"."""
    if not isinstance(value, Mapping):
        return [(key, value)]
    return [(name, value[name]) for name in ("counts", "classes") if name in value]


def _class_counts(value: Payload, key: str, classes: int) -> Tensor | None:
    """Return a value as class counts; None if it cannot be read as such.

    An integer vector under the key "classes" is a list of classes. Otherwise, a vector of one
    non-negative number per class, not all 0, is taken for the counts. Under the key "counts", the
    number may be negative because of noise, and then counts as 0.
    """
    if not isinstance(value, Tensor):
        return None
    if key == "classes" and value.ndim == 1 and not value.is_floating_point():
        return torch.bincount(value, minlength=classes)
    counts = torch.clamp(value, min=0) if key == "counts" else value
    if counts.shape == (classes,) and bool((counts >= 0).all()) and float(counts.sum()) > 0:
        return counts
    return None


def estimate_prior(network: Classifier, public: Images) -> Tensor:
    """Estimate a network's class prior, up to a factor.

    This is the sum of the predicted probabilities of each class over public images, divided by the
    number of public images of the class (by 1 if there are none). The network is put into
    evaluation mode.
    """
    logits = predict(network.eval(), public.batch, torch.arange(len(public)))
    return logits.softmax(1).sum(0) / public.class_counts().clamp(min=1)
