"""Which classes does a client have, and of how many images each? What the server reads from what it was told."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from barter.attacks.measures import share_error
from barter.attacks.overheard import Told, clients_of, guard_of
from barter.attacks.result import Result, averaged
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import Payload
from barter.experiment import Experiment
from barter.privacy.parts import parts_of, take

__all__ = ["labels", "prior"]


def labels(experiment: Experiment, told: Mapping[int, Told], public: Images) -> list[Result]:
    """How many labels are right, and how far class shares are from the truth, by each way to read them."""
    clients = {k: client for k, client in clients_of(experiment).items() if k in told}
    found: dict[str, dict[int, dict[str, float]]] = {}
    for k, client in clients.items():
        for attack, values in _readings(experiment, client, told[k], public).items():
            found.setdefault(attack, {})[k] = values
    even = torch.ones(experiment.task.spec.classes)
    guess = {
        k: {"distance": share_error(even, client.data.class_counts())}
        for k, client in clients.items()
    }
    results = [averaged("labels", attack, values) for attack, values in found.items()]
    if not results:
        results = [
            Result("labels", "classes", note="nothing that left the clients is about classes")
        ]
    return (
        [*results, averaged("labels", "all classes alike", guess, guess=True)] if guess else results
    )


def _readings(
    experiment: Experiment, client: Client, told: Told, public: Images
) -> dict[str, dict[str, float]]:
    true, found = client.data.class_counts(), dict[str, dict[str, float]]()

    def read(told_labels: Tensor, part: str) -> dict[str, float]:
        values = {"distance": share_error(torch.bincount(told_labels, minlength=len(true)), true)}
        if told.places is not None and _of_images(experiment, part):
            right = told_labels == client.data.labels[told.places]
            values = {"right": float(right.double().mean()), **values}
        return values

    if told.labels is not None:
        found[told.labels[0]] = read(told.labels[1], told.labels[0])
    if told.rows is not None and told.network is not None:
        name, rows = told.rows
        whole = rows if rows.ndim == 2 else rows[:, 0]
        with torch.no_grad():
            found[f"{name} and weights"] = read(told.network.logits(whole).argmax(1), name)
    for name, counts in _counted(experiment, told.answers):
        found[name] = {"distance": share_error(counts, true)}
    if told.network is not None:
        found[told.source] = {"distance": share_error(prior(told.network, public), true)}
    return found


def _of_images(experiment: Experiment, part: str) -> bool:
    """Whether each row of a part is told of one image, and not of a class."""
    plan = guard_of(experiment).plan
    return part not in plan.covers or plan.mechanisms[plan.covers[part]].beside is None


def _counted(experiment: Experiment, answers: Mapping[str, Payload]) -> list[tuple[str, Tensor]]:
    """Parts that name classes, or have a number that is not negative for each of them."""
    count, found, tells = (
        experiment.task.spec.classes,
        list[tuple[str, Tensor]](),
        experiment.algorithm.tells,
    )
    for method, parts in parts_of(experiment.algorithm).items():
        for part in (part for part in parts if method in answers and tells.get(part) != "nothing"):
            key = part.partition(".")[2]
            for value in take(answers[method], key):
                if not isinstance(value, Tensor):
                    continue
                if key == "classes" and value.ndim == 1 and not value.is_floating_point():
                    found.append((part, torch.bincount(value, minlength=count)))
                elif (
                    value.shape == (count,) and bool((value >= 0).all()) and float(value.sum()) > 0
                ):
                    found.append((part, value))
    return found


def prior(network: Classifier, public: Images) -> Tensor:
    """What a network takes to be frequent: how much of each class it sees in images of all, for each there is."""
    logits = predict(network.eval(), public.batch, torch.arange(len(public)))
    return logits.softmax(1).sum(0) / public.class_counts().clamp(min=1)
