"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS workshop 2019, Algorithm 1 (arXiv:2001.01523).

Every client keeps the part of its network that makes features to itself; the head behind them is everybody's, averaged
as FedAvg averages whole models. Networks may differ, but for the width of their features.

- The paper starts from one model, which FedAvg trained. Here networks are new and have one head, the first client's,
  as in HtFLlib. `start` takes over the networks of another run, such as FedAvg's, with the heads they have.
- `global` and `local` are of networks after local training, with the heads they trained. The authors and HtFLlib judge
  networks with the averaged head put on: `shared_global` and `shared_local`.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.core.clients import Clients
from barter.core.payload import State
from barter.ops.average import Average, average
from barter.ops.heads import Head, head_state

__all__ = ["LGFedAvg"]


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedHead):
    """One head for all, on features of one's own."""

    crosses = {
        "learn": "down: the first head; up: the head, trained",
        "receive": "down: the averaged head",
    }

    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        heads = active.run(self.learn, self.missing_head(server, active))
        self.share_head(server, clients, average(heads, by=self.average))

    def learn(self, client: HeadClient, head: State) -> Head:
        self.put_head_on(client, head)
        self.train(client)
        return head_state(client.model)
