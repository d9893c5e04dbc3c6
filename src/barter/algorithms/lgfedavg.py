"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS workshop 2019, Algorithm 1 (arXiv:2001.01523).

Every client keeps the part of its network that makes features to itself; the head behind them is everybody's, averaged
as FedAvg averages whole models. Networks may differ, but for the width of their features.

- Networks with features of another width are pooled to `features`, as HtFLlib does; the head is then a new one.
- The paper starts from models that FedAvg trained together; here, as in HtFLlib, from new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.average import average
from barter.ops.fit import fit, sgd
from barter.ops.submodel import head_of

__all__ = ["HeadServer", "LGFedAvg"]


class HeadServer(Server):
    """A server whose model is a head."""

    head: State = {}  # everybody's; the clients' own before the first round


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Algorithm[HeadServer]):
    """One head for all, on features of one's own."""

    crosses = {"learn": "down: the head; up: the head, trained"}

    features: Count = 512  # width of all clients' features
    fraction: Fraction = 1.0  # C: share of clients per round
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD

    @property
    def feature_width(self) -> int:
        return self.features

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        server.head = average(clients.sample(self.fraction).run(self.learn, server.head))

    def learn(self, client: Client, head: State) -> State:
        names = sorted(head_of(client.model))  # bias and weight, whatever a network calls them
        client.model.load_state_dict({**client.model.state_dict(), **dict(zip(names, head.values(), strict=False))})
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        trained = client.model.state_dict()
        return {name.rpartition(".")[2]: trained[name] for name in names}
