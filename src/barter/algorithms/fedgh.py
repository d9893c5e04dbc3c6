"""FedGH: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1 (arXiv:2303.13137).

Every client sends the mean of its features by class. The server trains a head on them, which so has seen all classes
and all clients' features, and everyone trains on with that head.

- The authors' server takes one step for each prototype that it gets; HtFLlib's goes over them many times, in batches,
  and so does this. The authors' published code takes those steps with the clients' optimizer: its head never changes.
- In the first round clients have the heads they were born with; the server's is a new one.
- Predictions are those of the network after local training, as the authors measure. HtFLlib measures at the start of
  the next round, with the server's head just put on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.one_width import HeadServer, SharedHead
from barter.compute import lanes
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.nodes import Client
from barter.core.params import Count, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import fit_rows, sgd
from barter.ops.heads import put_on
from barter.ops.prototypes import ByClass, joined, prototypes_of

__all__ = ["FedGH", "loss"]


def loss(head: nn.Linear, vectors: Tensor, classes: Tensor) -> Tensor:
    """The head should name the class of a prototype."""
    return F.cross_entropy(head(vectors), classes)


@dataclass(frozen=True, kw_only=True)
class FedGH(SharedHead):
    """Prototypes of classes go up, a head that was trained on them comes down."""

    crosses = {"learn": "down: the head; up: mean features of the client's classes"}

    server_epochs: Count = 100  # times that the server goes over the prototypes; once in the paper
    server_lr: Positive = 0.01  # η_θ: learning rate of the server's SGD

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        prototypes = clients.sample(self.fraction).run(self.learn, server.head)
        server.head = self.generalised(server, joined(prototypes.values()))

    def learn(self, client: Client, head: State) -> Annotated[ByClass, Named("vector", "features")]:
        put_on(client.model, head)
        self.train(client)
        return prototypes_of(client.model, client.data)

    def generalised(self, server: HeadServer, prototypes: ByClass) -> State:
        """The head after training on everybody's prototypes."""
        head = lanes.keep("head", nn.Linear(self.features, server.spec.classes).to(server.device))
        if server.head:
            head.load_state_dict(server.head)
        rows, named = (prototypes["vectors"], prototypes["classes"]), partial(loss, head)
        recipe, epochs = sgd(self.server_lr), self.server_epochs
        fit_rows(
            server,
            "head",
            head,
            named,
            rows,
            epochs=epochs,
            batch_size=self.batch_size,
            recipe=recipe,
        )
        return isolate(dict(head.state_dict()))
