"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1 (arXiv:1602.05629).

A sample of the clients trains the server's model on their own data; the server averages what comes back, weighted by
the number of examples. All clients must have the same architecture. As in the paper, plain SGD; the paper tunes the
learning rate per task, 0.05 is a middle value of its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.core.record import Primary
from barter.ops.average import Average, average
from barter.ops.fit import fit, sgd

__all__ = ["FedAvg"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """One model for all, averaged from what the clients make of it."""

    primary: ClassVar[Primary] = "server"
    one_architecture = True
    crosses = {"client_update": "down: the server's weights; up: the client's weights"}

    fraction: Fraction = 1.0  # C: share of clients per round
    epochs: Count = 5  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.05  # η: learning rate
    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    def round(self, server: Server, clients: Clients, t: int) -> None:
        w = server.model.state_dict()
        updates = clients.sample(self.fraction).run(self.client_update, w)
        server.model.load_state_dict(average(updates, by=self.average))

    def client_update(self, client: Client, w: State) -> State:
        client.model.load_state_dict(w)
        self.train(client)
        return client.model.state_dict()

    def train(self, client: Client) -> None:
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
