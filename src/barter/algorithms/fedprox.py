"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2 (arXiv:1812.06127).

FedAvg, with clients held near the server's model while they train: whoever has odd data does not run off with it. Their
loss has μ/2 times the square of the way that the weights have gone (Eq. 2), whose gradient every step adds.

The paper tunes μ for each task, among 0.001, 0.01, 0.1 and 1. Its clients that are too slow for all epochs are not
here: everyone does the same work.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.fedavg import FedAvg
from barter.core.nodes import Client
from barter.core.params import NonNegative
from barter.ops.fit import anchored, fit, sgd

__all__ = ["FedProx"]


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose clients stay near the server's model."""

    mu: NonNegative = 0.01  # μ: how much going away costs

    def train(self, client: Client) -> None:
        start = anchored(client, client.model.state_dict(), self.mu)
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr),
            anchor=start,
        )
