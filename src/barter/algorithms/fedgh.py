"""FedGH: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1 (arXiv:2303.13137).

Every client sends the mean of its features by class. The server trains a head on them, which so has seen all classes
and all clients' features, and everyone trains on with that head.

- The authors' server takes one step for each prototype that it gets; HtFLlib's goes over them many times, in batches,
  and so does this. The authors' published code takes those steps with the clients' optimizer: its head never changes.
- In the first round clients have their own untrained heads and the server's is a new one, as in the authors' code.
  HtFLlib's clients all start with the first client's.
- `global` and `local` are of networks after local training, with the heads they trained, as the authors measure.
  HtFLlib puts the server's head on before it measures: `shared_global` and `shared_local`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.compute import lanes
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.params import Count, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import fit_rows, sgd
from barter.ops.prototypes import ByClass, joined, prototypes_of

__all__ = ["FedGH", "loss"]


def loss(head: nn.Linear, vectors: Tensor, classes: Tensor) -> Tensor:
    """The head should name the class of a prototype."""
    return F.cross_entropy(head(vectors), classes)


@dataclass(frozen=True, kw_only=True)
class FedGH(SharedHead):
    """Prototypes of classes go up, a head that was trained on them comes down."""

    crosses = {
        "learn": "up: mean features of the client's classes (whoever missed the head gets it first)",
        "receive": "down: the head, trained on everybody's mean features",
    }

    server_epochs: Count = 100  # times that the server goes over the prototypes; once in the paper
    server_lr: Positive = 0.01  # η_θ: learning rate of the server's SGD

    def setup(self, server: HeadServer, clients: Clients) -> None:
        """Leave clients their own heads in the first round, as the authors do."""

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        prototypes = active.run(self.learn, self.missing_head(server, active))
        self.share_head(server, clients, self.generalised(server, joined(prototypes.values())))

    def learn(
        self, client: HeadClient, head: State
    ) -> Annotated[ByClass, Named("vector", "features")]:
        self.put_head_on(client, head)
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
