"""FedTGP: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1 (arXiv:2401.03230).

FedProto, but everybody's prototypes are not means, which lie closer together than the clients' own. The server learns
them: each should be nearer to the clients' prototypes of its class than any other is, by a margin.

- The margin is the largest distance from a class's mean prototype to that of its nearest neighbour, and at most τ, as
  in HtFLlib, which has the same authors.
- HtFLlib sends prototypes of the network as it was before the round's training; here they are of after it.
- The server goes over the prototypes 100 times in a round, as in HtFLlib; the authors' code has 1000 by default.
- All classes get a prototype, also those that nobody has: these are only pushed away.
- λ is 1 as in the code; distance in the clients' loss and predictions are FedProto's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.fedproto import FedProto
from barter.compute import lanes
from barter.core.clients import Replies
from barter.core.nodes import Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import fit_rows, sgd
from barter.ops.prototypes import ByClass, joined, mean_of

__all__ = ["FedTGP", "Prototypist", "TrainablePrototypes", "loss", "margin"]


class Prototypist(Server):
    """A server that learns prototypes."""

    prototypes: State = {}


class TrainablePrototypes(nn.Module):
    """A vector for each class, and two layers that make a prototype of it."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.names = nn.Parameter(torch.randn(classes, width))
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        prototypes: Tensor = self.body(self.names)
        return prototypes


def margin(prototypes: ByClass, most: float) -> Tensor:
    """δ: the largest distance of a class to its nearest neighbour, at most so much; none for a single class."""
    vectors = prototypes["vectors"]
    apart = torch.cdist(vectors, vectors) + torch.diag(vectors.new_full((len(vectors),), torch.inf))
    return apart.amin(1).amax().nan_to_num(posinf=0.0).clamp_max(most)


def loss(
    global_prototypes: TrainablePrototypes, vectors: Tensor, classes: Tensor, delta: Tensor
) -> Tensor:
    """Cross entropy of minus the distances, the one to the right prototype longer by δ."""
    distances = torch.cdist(vectors, global_prototypes())
    own = classes[:, None] == torch.arange(distances.shape[1], device=distances.device)
    return F.cross_entropy(-(distances + delta * own), classes)


@dataclass(frozen=True, kw_only=True)
class FedTGP(FedProto[Prototypist]):
    """Prototypes of classes go up, those that the server learnt of them come down."""

    crosses = {
        "learn": "up: mean features of the client's classes",
        "receive": "down: the learnt prototypes",
    }

    tau: NonNegative = 100.0  # τ: the margin is at most this
    server_epochs: Count = 100  # S: times that the server goes over the prototypes
    server_lr: Positive = 0.01  # η_S: learning rate of the server's SGD

    def gathered(self, server: Prototypist, prototypes: Replies[ByClass]) -> ByClass:
        learnt = lanes.keep(
            "prototypes", TrainablePrototypes(server.spec.classes, self.features).to(server.device)
        )
        if server.prototypes:
            learnt.load_state_dict(server.prototypes)
        every, delta = joined(prototypes.values()), margin(mean_of(prototypes.values()), self.tau)
        fit_rows(
            server,
            "prototypes",
            learnt,
            partial(loss, learnt),
            (every["vectors"], every["classes"]),
            epochs=self.server_epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.server_lr),
            beside=repeat((delta,)),
        )
        server.prototypes = isolate(dict(learnt.state_dict()))
        server.report["margin"] = float(delta)
        with torch.no_grad():
            return {
                "classes": torch.arange(server.spec.classes, device=server.device),
                "vectors": learnt(),
            }
