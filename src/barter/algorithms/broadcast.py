"""Averaging whose rounds end with everybody having the average: what FedBN and Per-FedAvg have in common.

Both judge a client by what it makes of the average, not by what its own training left behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.evaluation import note_before
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.average import Average, average

__all__ = ["Broadcast", "Caster"]


class Caster(Server):
    """A server that knows who has heard."""

    average: State = {}  # nothing before the first round: the clients' own weights
    heard: list[int] = []  # the clients that have this average


S = TypeVar("S", bound=Caster, default=Caster)
C = TypeVar("C", bound=Client, default=Client)


@dataclass(frozen=True, kw_only=True)
class Broadcast(Algorithm[S, C]):
    """Trained weights go up from some clients, their average comes down to all."""

    one_architecture = True
    crosses = {
        "client_update": "up: the client's weights (whoever missed the last average gets it first)",
        "receive": "down: the average",
    }

    fraction: Fraction = 1.0  # C: share of clients that train in a round
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 32  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD
    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    def round(self, server: S, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        lacking = {k: {} if k in server.heard else server.average for k in active}
        server.average = average(active.scatter(self.client_update, lacking), by=self.average)
        server.heard = list(clients.run(self.receive, server.average))

    def client_update(self, client: C, w: State) -> State:
        self.begin(client, w)
        self.train(client)
        note_before(client)
        return self.outgoing(client.model)

    def begin(self, client: C, w: State) -> None:
        """The client's network as training starts from it."""
        client.model.load_state_dict({**client.model.state_dict(), **w})

    def train(self, client: C) -> None:
        raise NotImplementedError

    def receive(self, client: C, w: State) -> None:
        """The client's network as it is judged."""
        raise NotImplementedError
