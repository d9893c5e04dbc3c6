"""Find out why DFFKE's accuracy falls after many rounds with skewed classes.

    python benchmarks/subset.py cifar100.npz cifar100-20k.npz --train 20000 --test 10000
    python -m benchmarks.paper_tables --suite benchmarks/suites/exchange-drift.toml --data DIR \\
        --measure benchmarks.exchange_drift:measure_exchange --out results.jsonl

After every round, what a client has learned from its peers is tested in two ways, on images of
theirs that were decoded in this round: on the decoded images ("peers-decoded") and on the private
images that they were decoded from ("peers-natural"). Nobody could do so in a federation.

- If clients memorise decoded images, both rise while accuracy on test images falls.
- If decoded images move away from natural ones, "peers-decoded" rises, and both others fall.

"likeness" is the mean correlation of a decoded image's pixels with those of its private image, and
"teachers" the clients' accuracy on decoded images of their own data. Columns are accuracies between
0 and 1, means over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.dffke import DFFKE, DFFKEClient
from barter.attacks.overheard import clients_of
from barter.core.evaluation import predict
from barter.core.model import Classifier
from barter.core.record import Round
from barter.experiment import Experiment
from barter.models.generators import resize_images
from barter.ops.fit import Subject
from barter.ops.transfer import Lesson

PER_CLIENT = 200  # images of each client that its peers are tested on


@dataclass(frozen=True, kw_only=True)
class BlendedExchange(DFFKE):
    """DFFKE whose students see blends of two transfer images, with the blended predictions."""

    def _subjects(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> list[Subject]:
        subjects = super()._subjects(client, lessons)
        private = subjects[: int(self.local_review)]
        lent = subjects[len(private) :]
        return private + [
            replace(
                subject,
                show=partial(show_blends, subject.show),
                loss=partial(blended_loss, subject.loss),
            )
            for subject in lent
        ]


def blend(rows: Tensor) -> Tensor:
    """Blend each row with another of the batch; the row's own weight is from 0.5 to 1."""
    weights = torch.linspace(0.5, 1, len(rows), device=rows.device)
    weights = weights.view(-1, *[1] * (rows.ndim - 1))
    return weights * rows + (1 - weights) * rows.flip(0)


def show_blends(show: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return a network's inputs for blends of images."""
    return blend(show(images))


def blended_loss(
    loss: Callable[..., Tensor], features: Tensor, target: Tensor, *extras: Tensor
) -> Tensor:
    """Return a loss on blends, of which the teachers' predictions are blended, too."""
    probabilities = blend(target.float().softmax(1))
    return loss(features, probabilities.clamp_min(1e-12).log(), *extras)


@torch.no_grad()
def measure_exchange(experiment: Experiment, record: Round) -> dict[str, float]:
    """Test the clients on images of their peers that were decoded in the last round.

    Clients that keep no images (memory=0) are left out as owners of images. If all are, there are
    no columns.
    """
    clients = clients_of(experiment)
    natural: dict[int, Tensor] = {}
    decoded: dict[int, Tensor] = {}
    labels: dict[int, Tensor] = {}
    likeness = []
    for k, client in clients.items():
        made = experiment.algorithm.transfer_images(client, experiment.round)
        if made is None:
            continue
        offered, images = made
        offered, images = offered[:PER_CLIENT], images[:PER_CLIENT].float()
        natural[k] = client.data.batch(offered)
        decoded[k] = resize_images(images, client.data.spec)
        labels[k] = client.data.labels[offered]
        small = F.interpolate(natural[k], images.shape[-2:], mode="area")
        likeness.append(correlate(small, images))
    if len(natural) < 2:
        return {}
    columns: dict[str, list[float]] = {"peers-natural": [], "peers-decoded": [], "teachers": []}
    for k, client in clients.items():
        model = client.model.eval()
        peers = [i for i in natural if i != k]
        columns["peers-natural"].append(accuracy(model, natural, labels, peers))
        columns["peers-decoded"].append(accuracy(model, decoded, labels, peers))
        if k in decoded:
            columns["teachers"].append(accuracy(model, decoded, labels, [k]))
    means = {name: sum(values) / len(values) for name, values in columns.items()}
    return {**means, "likeness": sum(likeness) / len(likeness)}


def accuracy(
    model: Classifier,
    images: Mapping[int, Tensor],
    labels: Mapping[int, Tensor],
    owners: Sequence[int],
) -> float:
    """Return a model's accuracy on images of some clients."""
    inputs = torch.cat([images[k] for k in owners])
    targets = torch.cat([labels[k] for k in owners])
    every = torch.arange(len(inputs), device=inputs.device)
    logits = predict(model, lambda part: inputs[part], every)
    return float((logits.argmax(1) == targets).double().mean())


def correlate(images: Tensor, others: Tensor) -> float:
    """Return the mean correlation of the pixels of each image with those of another."""
    rows = [x.flatten(1).double() for x in (images, others)]
    centred = [x - x.mean(1, keepdim=True) for x in rows]
    return float(F.cosine_similarity(centred[0], centred[1], dim=1).mean())
