"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1
(arXiv:2105.00243).

Clients with different networks agree on the features of each class. An image is assigned to the
class whose prototype is nearest.

One round:

1. Sampled clients minimise cross entropy plus λ times the distance between the features of an image
   and the global prototype of its class (Eq. 5).
2. They upload their prototypes: the mean features of each of their classes.
3. The server averages the prototypes of each class over clients.
4. All clients receive the averages.

Differences from the paper:

- Eq. 6 weights a client's prototype by its images of the class and then divides by the number of
  clients again, so that prototypes shrink. As in the authors' code, the plain mean over clients is
  used.
- `lam`: the distance in the loss is the mean square, as in the code; λ is 1 there and in HtFLlib,
  other papers use 10.
- `optimizer`, `lr`, `batch_size`: local training is HtFLlib's, SGD of rate 0.01 on batches of 10;
  the authors' has momentum 0.5 and batches of 4.
- A class that no client of a round has keeps its previous prototype.

Accuracies are by the nearest global prototype after the round; `head_global` and `head_local` are
by the network's own head, which other papers report.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar

from barter.algorithms.one_width import OneWidth
from barter.core.algorithm import Crossing
from barter.core.clients import Clients, Replies
from barter.core.contracts import Named
from barter.core.evaluation import evaluate_client, tests_due
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import NonNegative
from barter.core.robust import Aggregate
from barter.ops.prototypes import (
    ByClass,
    features_of,
    lookup,
    mean_table,
    nearest_class,
    prototypes_of,
    update_table,
)

__all__ = ["FedProto", "Follower", "fedproto_loss"]

S = TypeVar("S", bound=Server, default=Server)


class Follower(Client):
    """A client that stores the global prototypes."""

    prototypes: list[ByClass] = []  # none before the first round, then one table


def fedproto_loss(
    model: Classifier,
    lam: float,
    x: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    known: Tensor,
) -> Tensor:
    """Return cross entropy plus λ times the features' distance to prototypes (Eq. 5).

    Args:
        model: The network to train.
        lam: λ, the weight of the distance, which is the mean square.
        x: Images.
        labels: Their classes.
        prototypes: A prototype for each class (classes, features).
        known: 1 for classes that have a prototype, otherwise 0.
    """
    features = model.features(x)
    distances = (features - prototypes[labels]).square().mean(1) * known[labels]
    return F.cross_entropy(model.logits(features), labels) + lam * distances.mean()


@dataclass(frozen=True, kw_only=True)
class FedProto(OneWidth[S, Follower]):
    """Average class prototypes, and keep every client's features near the averages."""

    aggregates: ClassVar[tuple[Aggregate, ...]] = ("prototypes",)
    crosses = {
        "learn": Crossing(up="mean features of the client's classes"),
        "receive": Crossing(down="their means over clients"),
    }

    deferrable = frozenset({"receive"})

    lam: NonNegative = 1.0  # λ: weight of the distance to prototypes

    def round(self, server: S, clients: Clients, t: int) -> None:
        prototypes = clients.sample(self.fraction).run(self.learn)
        clients.run(self.receive, self.merge_prototypes(server, prototypes))

    def learn(self, client: Follower) -> Annotated[ByClass, Named("vector", "features")]:
        """Train with global prototypes, if there are any yet; return the client's own.

        They are the mean features of each of its classes in the trained network.
        """
        data = client.data
        table = lookup(client.prototypes, data.spec.classes, self.features, client.device)
        self.train(client, partial(fedproto_loss, client.model, self.lam), table)
        return prototypes_of(client.model, data)

    def merge_prototypes(self, server: S, prototypes: Replies[ByClass]) -> ByClass:
        """Return the global prototypes: each class's mean over the clients that have it.

        All clients have the same weight, unless the run has a defence on prototypes.
        """
        return mean_table(prototypes.values())

    def receive(self, client: Follower, prototypes: ByClass) -> None:
        """Store the global prototypes; classes without a new one keep the old one."""
        client.prototypes = [update_table(client.prototypes, prototypes)]

    def remaining(
        self, method: str, earlier: tuple[ByClass], later: tuple[ByClass]
    ) -> tuple[ByClass] | None:
        """Return the prototypes of classes that the later call does not replace, or None."""
        table = earlier[0]
        left = ~torch.isin(table["classes"], later[0]["classes"])
        if not left.any():
            return None
        return ({"classes": table["classes"][left], "vectors": table["vectors"][left]},)

    def evaluate(self, client: Follower) -> dict[str, float]:
        """Evaluate the client by the nearest prototype, and by its network's head.

        By prototype there are accuracies only, under the usual names. All metrics by the head are
        named head_METRIC. A client without prototypes is evaluated by the head alone, under the
        usual names. The client's report is included, then cleared.
        """
        if not client.prototypes:
            return super().evaluate(client)
        report = client.report
        client.report = {}
        by_head = {f"head_{name}": value for name, value in evaluate_client(client).items()}
        by_prototype: dict[str, float] = {}
        for name, data in tests_due(client).items():
            predicted = nearest_class(features_of(client.model, data), client.prototypes[0])
            by_prototype[name] = float((predicted == data.labels).double().mean())
        if "local" in by_prototype:
            by_prototype["local_images"] = len(client.tests["local"])
        return {**by_prototype, **by_head, **as_numbers(report)}
