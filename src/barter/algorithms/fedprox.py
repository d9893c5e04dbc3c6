"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2 (arXiv:1812.06127).

FedAvg with a proximal term, which keeps a client with unusual data near the server's model.

One round:

1. The server samples a fraction of the clients and sends them its weights w^t.
2. Each client minimises its loss plus μ/2 ‖w - w^t‖² (Eq. 2) and returns its weights. Every step
   of SGD adds the gradient of the proximal term.
3. The server averages the returned weights as in FedAvg.

Differences from the paper:

- `mu`: the paper tunes μ for each task among 0.001, 0.01, 0.1 and 1.
- Partial work of clients that are too slow for all epochs is not implemented: every client trains
  for `epochs` epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.fedavg import FedAvg
from barter.core.nodes import Client
from barter.core.params import NonNegative
from barter.ops.fit import fit, make_anchor, sgd

__all__ = ["FedProx"]


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps clients near the server's model."""

    mu: NonNegative = 0.01  # μ: weight of the proximal term

    def train(self, client: Client) -> None:
        anchor = make_anchor(client, client.model.state_dict(), self.mu)
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum, self.weight_decay),
            anchor=anchor,
        )
