"""FedGH: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1 (arXiv:2303.13137).

One round:

1. Sampled clients train with the shared head and upload their prototypes: the mean features of each
   of their classes.
2. The server trains the head on all prototypes. The head has then seen all classes and all clients'
   features.
3. All clients receive the head, and their next training starts from it.

Differences from the paper:

- `server_epochs`: the authors' server takes one step for each prototype that it receives. As in
  HtFLlib, it passes over them many times here, in batches. The authors' published code takes those
  steps with the clients' optimizer, so that its head never changes.
- In the first round clients have their own untrained heads and the server's is a new one, as in the
  authors' code. In HtFLlib all clients start with the first client's head.
- `global` and `local` are accuracies of networks after local training, with the heads they trained,
  as the authors measure. HtFLlib evaluates with the server's head: `shared_global` and
  `shared_local`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.core.algorithm import Crossing
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.params import Count, Positive
from barter.core.payload import State
from barter.ops.fit import fit_rows, sgd
from barter.ops.modules import copy_state, restore_module
from barter.ops.prototypes import ByClass, concatenate_tables, prototypes_of, select_trusted_tables

__all__ = ["FedGH", "fedgh_loss"]


def fedgh_loss(head: nn.Linear, vectors: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross entropy of the head on prototypes with their classes."""
    return F.cross_entropy(head(vectors), classes)


@dataclass(frozen=True, kw_only=True)
class FedGH(SharedHead):
    """Train a shared head on the class prototypes of all clients."""

    aggregates = ("sets",)
    crosses = {
        "learn": Crossing(
            up="mean features of the client's classes (a client that missed the head "
            "receives it first)",
        ),
        "receive": Crossing(down="the head, trained on all clients' mean features"),
    }

    server_epochs: Count = 100  # passes of the server over the prototypes; one in the paper
    server_lr: Positive = 0.01  # η_θ: learning rate of the server's SGD

    def setup(self, server: HeadServer, clients: Clients) -> None:
        """Do nothing: clients keep their heads in round 1, as in the authors' code."""

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        prototypes = active.run(self.learn, self.missing_head(server, active))
        head = self.train_head(server, concatenate_tables(select_trusted_tables(prototypes)))
        self.share_head(server, clients, head)

    def learn(
        self, client: HeadClient, head: State
    ) -> Annotated[ByClass, Named("vector", "features")]:
        """Train with the shared head; return mean features of each class of the client.

        Args:
            client: The client that trains.
            head: The shared head; empty if the client has it already, or if there is none yet.
        """
        self.put_head_on(client, head)
        self.train(client)
        return prototypes_of(client.model, client.data)

    def train_head(self, server: HeadServer, prototypes: ByClass) -> State:
        """Train the shared head on all clients' prototypes and return its weights.

        Training starts from `server.head`, which is not changed, or from a new head if it is empty.
        """
        new = nn.Linear(self.features, server.spec.classes)
        head = restore_module(server, "head", new, server.head)
        fit_rows(
            server,
            "head",
            head,
            partial(fedgh_loss, head),
            (prototypes["vectors"], prototypes["classes"]),
            epochs=self.server_epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.server_lr),
        )
        return copy_state(head)
