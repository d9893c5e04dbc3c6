"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS workshop 2019, Algorithm 1 (arXiv:2001.01523).

Every client keeps the part of its network that makes features to itself; the head behind them is everybody's, averaged
as FedAvg averages whole models. Networks may differ, but for the width of their features.

The paper starts from models that FedAvg trained together; here, as in HtFLlib, from new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.one_width import HeadServer, SharedHead
from barter.core.clients import Clients
from barter.core.nodes import Client
from barter.core.payload import State
from barter.ops.average import Average, average
from barter.ops.heads import Head, head_state, put_on

__all__ = ["LGFedAvg"]


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedHead):
    """One head for all, on features of one's own."""

    crosses = {"learn": "down: the head; up: the head, trained"}

    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        heads = clients.sample(self.fraction).run(self.learn, server.head)
        server.head = average(heads, by=self.average)

    def learn(self, client: Client, head: State) -> Head:
        put_on(client.model, head)
        self.train(client)
        return head_state(client.model)
