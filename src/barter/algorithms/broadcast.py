"""Averaging in which all clients receive the average at the end of a round.

The base of FedBN and Per-FedAvg. Both evaluate a client with the model that it derives from the
average, not with the model that its own training produced.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.evaluation import record_before_exchange
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.average import Average, average

__all__ = ["Broadcast", "Caster"]


class Caster(Server):
    """A server that remembers the average and which clients have received it."""

    average: State = {}  # empty before the first round: clients start from their own weights
    heard: list[int] = []  # clients that have received this average


S = TypeVar("S", bound=Caster, default=Caster)
C = TypeVar("C", bound=Client, default=Client)


@dataclass(frozen=True, kw_only=True)
class Broadcast(Algorithm[S, C]):
    """Average the weights that some clients trained; send the average to all."""

    server_model = ServerModel("shared")
    aggregates = ("states",)
    crosses = {
        "client_update": Crossing(
            up="the client's weights (a client that missed the last average receives it first)",
        ),
        "receive": Crossing(down="the average"),
    }

    fraction: Fraction = 1.0  # C: fraction of clients that train in a round
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 32  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD
    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    def round(self, server: S, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        # Clients that have the last average already are sent nothing.
        starts = {k: {} if k in server.heard else server.average for k in active}
        updates = active.scatter(self.client_update, starts)
        server.average = average(updates, by=self.average, since=self.common_start(server, active))
        server.heard = list(clients.run(self.receive, server.average))

    def common_start(self, server: S, active: Clients) -> State:
        """Return the weights that all clients started this round from.

        They are the last average; before there is one, the initial weights of the first client's
        architecture.
        """
        if server.average:
            return server.average
        return self.outgoing(server.architectures[active[0]]())

    def client_update(self, client: C, w: State) -> State:
        """Train the client's network and return the weights to be averaged.

        Args:
            client: The client that trains.
            w: The last average if the client has missed it, otherwise an empty state.
        """
        self.begin(client, w)
        self.train(client)
        record_before_exchange(client)
        return self.outgoing(client.model)

    def begin(self, client: C, w: State) -> None:
        """Load the weights from which the client's training starts.

        Tensors that `w` lacks, all of them if it is empty, keep the client's values.
        """
        client.model.load_state_dict({**client.model.state_dict(), **w})

    def train(self, client: C) -> None:
        """Train the client's network on its own data in place; subclasses implement this."""
        raise NotImplementedError

    def receive(self, client: C, w: State) -> None:
        """Turn the average into the network with which the client is evaluated, in place.

        Subclasses implement this.
        """
        raise NotImplementedError
