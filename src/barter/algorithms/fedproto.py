"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1
(arXiv:2105.00243).

Clients with different networks agree on what the features of each class should be: everyone sends the mean of its
features by class, and learns to keep its own near everybody's. An image is of the class whose prototype is nearest.

- Eq. 6 weights a client's prototype by its images of the class and divides by the number of clients once more, so that
  prototypes shrink; the authors' code takes the plain mean over clients, and so does this.
- The distance in the loss is the mean square, as in the code; `lam` is 1 there and in HtFLlib, other papers use 10.
- Features must have one width; networks with another are pooled to `features`, as HtFLlib does.
- Accuracies are by the nearest prototype, of everybody's after the round; `head_global` and `head_local` are by the
  network's own head, which other papers report.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.evaluation import evaluate, predict
from barter.core.images import Augment, Images, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import Count, NonNegative, Positive
from barter.ops.fit import fit_by, sgd
from barter.ops.prototypes import ByClass, class_means, lookup, mean_of, nearest

__all__ = ["FedProto", "Follower", "loss"]


class Follower(Client):
    """A client that keeps everybody's prototypes."""

    prototypes: list[ByClass] = []  # none before the first round, then one table


def loss(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    lam: float,
    pixels: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    known: Tensor,
) -> Tensor:
    """Cross entropy, and λ times the mean square between features and the prototype of their class (Eq. 5)."""
    features = model.features(prepared(pixels, spec, augment))
    apart = (features - prototypes[labels]).square().mean(1) * known[labels]
    return F.cross_entropy(model.logits(features), labels) + lam * apart.mean()


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm[Server, Follower]):
    """Prototypes of classes go up, their means come down."""

    crosses = {"learn": "up: mean features of the client's classes", "receive": "down: their means over clients"}

    features: Count = 512  # width of all clients' features
    lam: NonNegative = 1.0  # λ: how much the distance to prototypes counts
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD

    @property
    def feature_width(self) -> int:
        return self.features

    def round(self, server: Server, clients: Clients, t: int) -> None:
        prototypes = clients.run(self.learn)
        clients.run(self.receive, mean_of(prototypes.values()))

    def learn(self, client: Follower) -> ByClass:
        data = client.data
        near = partial(loss, client.model, data.spec, data.augment, self.lam)
        prototypes = lookup(client.prototypes, data.spec.classes, self.features, client.device)
        fit_by(client, near, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr), beside=prototypes)
        return class_means(_features(client, data), data.labels)

    def receive(self, client: Follower, prototypes: ByClass) -> None:
        client.prototypes = [prototypes]

    def evaluate(self, client: Follower) -> dict[str, float]:
        if not client.prototypes:
            return super().evaluate(client)
        report, client.report = client.report, {}
        by_head, found = evaluate(client), {}
        for name, data in client.tests.items():
            said = nearest(_features(client, data), client.prototypes[0])
            found[name] = float((said == data.labels).double().mean())
        return {**found, **{f"head_{name}": value for name, value in by_head.items()}, **as_numbers(report)}


def _features(client: Client, data: Images) -> Tensor:
    return predict(client.model.eval().features, data.batch, torch.arange(len(data), device=client.device))
