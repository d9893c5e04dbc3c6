"""FedTGP: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1 (arXiv:2401.03230).

FedProto with global prototypes that the server trains. Means of the clients' prototypes, which
FedProto uses, lie closer together than the clients' own.

One round:

1. Sampled clients train and upload their prototypes, as in FedProto.
2. The server trains a prototype for each class: it should be nearer to the clients' prototypes of
   its class than any other global prototype is, by a margin.
3. All clients receive the trained prototypes.

Differences from the paper:

- The margin is the largest distance from a class's mean prototype to that of its nearest neighbour,
  and at most τ, as in HtFLlib, which has the same authors.
- HtFLlib's clients send prototypes of the network before the round's training; here they send those
  after it.
- `server_epochs`: the server passes over the prototypes 100 times in a round, as in HtFLlib; the
  authors' code has 1000 by default.
- All classes get a prototype. That of a class that no client has is only pushed away from the
  others.
- `lam`: λ is 1 as in the code; the distance in the clients' loss and the predictions are
  FedProto's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.fedproto import FedProto
from barter.core.algorithm import Crossing
from barter.core.clients import Replies
from barter.core.nodes import Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State
from barter.ops.fit import fit_rows, sgd
from barter.ops.modules import copy_state, restore_module
from barter.ops.prototypes import ByClass, concatenate_tables, mean_table, select_trusted_tables

__all__ = ["FedTGP", "Prototypist", "TrainablePrototypes", "fedtgp_loss", "prototype_margin"]


class Prototypist(Server):
    """A server that trains global prototypes."""

    prototypes: State = {}


class TrainablePrototypes(nn.Module):
    """A learned vector for each class, and two layers that map it to a prototype."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.names = nn.Parameter(torch.randn(classes, width))
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        prototypes: Tensor = self.body(self.names)
        return prototypes


def prototype_margin(prototypes: ByClass, most: float) -> Tensor:
    """Return δ, the largest distance of a class to its nearest class, at most τ.

    It is 0 for a single class.

    Args:
        prototypes: The mean prototype of each class.
        most: τ, the upper limit of the margin.
    """
    vectors = prototypes["vectors"]
    to_itself = torch.diag(vectors.new_full((len(vectors),), torch.inf))
    distances = torch.cdist(vectors, vectors) + to_itself
    return distances.amin(1).amax().nan_to_num(posinf=0.0).clamp_max(most)


def fedtgp_loss(
    global_prototypes: TrainablePrototypes, vectors: Tensor, classes: Tensor, delta: Tensor
) -> Tensor:
    """Return the cross entropy of negative distances, with a margin δ.

    Distances are Euclidean, from each client's prototype to all global ones; δ is added to the
    distance to that of its own class.

    Args:
        global_prototypes: The prototypes to train, one per class.
        vectors: The clients' prototypes.
        classes: Their classes.
        delta: δ, the margin.
    """
    distances = torch.cdist(vectors, global_prototypes())
    own = classes[:, None] == torch.arange(distances.shape[1], device=distances.device)
    return F.cross_entropy(-(distances + delta * own), classes)


@dataclass(frozen=True, kw_only=True)
class FedTGP(FedProto[Prototypist]):
    """FedProto with global prototypes that the server trains to lie apart."""

    aggregates = ("prototypes", "sets")
    crosses = {
        "learn": Crossing(up="mean features of the client's classes"),
        "receive": Crossing(down="the trained prototypes"),
    }

    tau: NonNegative = 100.0  # τ: upper limit of the margin
    server_epochs: Count = 100  # S: passes of the server over the prototypes in a round
    server_lr: Positive = 0.01  # η_S: learning rate of the server's SGD

    def merge_prototypes(self, server: Prototypist, prototypes: Replies[ByClass]) -> ByClass:
        """Train the global prototypes on the clients' and return them for all classes.

        The server stores their state and reports the margin. A defence may leave clients out.
        """
        new = TrainablePrototypes(server.spec.classes, self.features)
        trainable = restore_module(server, "prototypes", new, server.prototypes)
        rows = concatenate_tables(select_trusted_tables(prototypes))
        delta = prototype_margin(mean_table(prototypes.values()), self.tau)
        fit_rows(
            server,
            "prototypes",
            trainable,
            partial(fedtgp_loss, trainable),
            (rows["vectors"], rows["classes"]),
            epochs=self.server_epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.server_lr),
            extras=repeat((delta,)),
        )
        server.prototypes = copy_state(trainable)
        server.report["margin"] = float(delta)
        with torch.no_grad():
            return {
                "classes": torch.arange(server.spec.classes, device=server.device),
                "vectors": trainable(),
            }
