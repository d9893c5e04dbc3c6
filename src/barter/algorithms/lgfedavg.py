"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS workshop 2019, Algorithm 1 (arXiv:2001.01523).

Every client keeps its feature extractor; the head on top of it is shared and averaged, as FedAvg
averages whole models. Networks may differ, except for the width of their features.

One round:

1. Sampled clients replace their head by the shared one, train the whole network and upload the
   head.
2. The server averages the heads, weighted by numbers of images.
3. All clients receive the averaged head.

Differences from the paper:

- The paper starts from one model, which FedAvg trained. Here networks are new and have one head,
  the first client's, as in HtFLlib. The setting `start` takes over the networks of another run,
  such as FedAvg's, with their heads.
- `global` and `local` are accuracies of networks after local training, with the heads they trained.
  The authors and HtFLlib evaluate with the averaged head: `shared_global` and `shared_local`.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.core.algorithm import Crossing
from barter.core.clients import Clients
from barter.core.payload import State
from barter.ops.average import Average, average
from barter.ops.heads import Head, head_state

__all__ = ["LGFedAvg"]


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedHead):
    """Average the heads; every client keeps its own feature extractor."""

    aggregates = ("states",)
    crosses = {
        "learn": Crossing(down="the initial head", up="the trained head"),
        "receive": Crossing(down="the averaged head"),
    }

    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    def round(self, server: HeadServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        heads = active.run(self.learn, self.missing_head(server, active))
        self.share_head(server, clients, average(heads, by=self.average))

    def learn(self, client: HeadClient, head: State) -> Head:
        """Train the client's network with the shared head and return the head."""
        self.put_head_on(client, head)
        self.train(client)
        return head_state(client.model)
