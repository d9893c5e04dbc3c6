"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1
(arXiv:2105.00243).

Clients with different networks agree on what the features of each class should be: everyone sends the mean of its
features by class, and learns to keep its own near everybody's. An image is of the class whose prototype is nearest.

- Eq. 6 weights a client's prototype by its images of the class and divides by the number of clients once more, so that
  prototypes shrink; the authors' code takes the plain mean over clients, and so does this.
- The distance in the loss is the mean square, as in the code; `lam` is 1 there and in HtFLlib, other papers use 10.
- Local training is HtFLlib's, SGD of rate 0.01 on batches of 10; the authors' has momentum 0.5 and batches of 4.
- A class that nobody of a round has keeps the prototype that it had.
- Accuracies are by the nearest prototype, of everybody's after the round; `head_global` and `head_local` are by the
  network's own head, which other papers report.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar

from barter.algorithms.one_width import OneWidth
from barter.core.clients import Clients, Replies
from barter.core.contracts import Named
from barter.core.evaluation import evaluate, tests_due
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import NonNegative
from barter.ops.prototypes import (
    ByClass,
    features_of,
    lookup,
    mean_of,
    nearest,
    prototypes_of,
    renewed,
)

__all__ = ["FedProto", "Follower", "loss"]

S = TypeVar("S", bound=Server, default=Server)


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
class FedProto(OneWidth[S, Follower]):
    """Prototypes of classes go up, their means come down."""

    crosses = {
        "learn": "up: mean features of the client's classes",
        "receive": "down: their means over clients",
    }

    lam: NonNegative = 1.0  # λ: how much the distance to prototypes counts

    def round(self, server: S, clients: Clients, t: int) -> None:
        prototypes = clients.sample(self.fraction).run(self.learn)
        clients.run(self.receive, self.gathered(server, prototypes))

    def learn(self, client: Follower) -> Annotated[ByClass, Named("vector", "features")]:
        data = client.data
        near = partial(loss, client.model, data.spec, data.augment, self.lam)
        self.train(
            client, near, lookup(client.prototypes, data.spec.classes, self.features, client.device)
        )
        return prototypes_of(client.model, data)

    def gathered(self, server: S, prototypes: Replies[ByClass]) -> ByClass:
        """Everybody's prototypes, of each client's."""
        return mean_of(prototypes.values())

    def receive(self, client: Follower, prototypes: ByClass) -> None:
        client.prototypes = [renewed(client.prototypes, prototypes)]

    def evaluate(self, client: Follower) -> dict[str, float]:
        if not client.prototypes:
            return super().evaluate(client)
        report, client.report = client.report, {}
        by_head, found = evaluate(client), {}
        for name, data in tests_due(client).items():
            said = nearest(features_of(client.model, data), client.prototypes[0])
            found[name] = float((said == data.labels).double().mean())
        if "local" in found:
            found["local_images"] = len(client.tests["local"])
        return {
            **found,
            **{f"head_{name}": value for name, value in by_head.items()},
            **as_numbers(report),
        }
