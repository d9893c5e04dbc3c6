"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1 (arXiv:1602.05629).

One round:

1. The server samples a fraction of the clients and sends them its weights.
2. Each sampled client trains these weights on its own data with plain SGD and returns them.
3. The server averages the returned weights, weighted by the clients' numbers of examples.

All clients must have the same architecture.

Differences from the paper:

- `lr`: the paper tunes the learning rate for each task; 0.05 is a middle value of its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Primary
from barter.core.robust import Aggregate
from barter.ops.average import Average, average
from barter.ops.fit import fit, sgd

__all__ = ["FedAvg"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """Train one model for all clients by averaging their locally trained weights."""

    primary: ClassVar[Primary] = "server"
    server_model = ServerModel("shared")
    aggregates: ClassVar[tuple[Aggregate, ...]] = ("states",)
    crosses = {"client_update": Crossing(down="the server's weights", up="the client's weights")}

    fraction: Fraction = 1.0  # C: fraction of clients sampled per round
    epochs: Count = 5  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.05  # η: learning rate of SGD
    momentum: Momentum = 0.0  # momentum of SGD; 0, as in the paper, is plain SGD
    weight_decay: NonNegative = 0.0  # weight decay of the clients' optimizer
    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    def round(self, server: Server, clients: Clients, t: int) -> None:
        w = server.model.state_dict()
        updates = clients.sample(self.fraction).run(self.client_update, w)
        server.model.load_state_dict(average(updates, by=self.average, since=w))

    def client_update(self, client: Client, w: State) -> State:
        """Load the server's weights, train them on the client's data; return the result."""
        client.model.load_state_dict(w)
        self.train(client)
        return client.model.state_dict()

    def train(self, client: Client) -> None:
        """Train the client's model on its own data."""
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum, self.weight_decay),
        )
