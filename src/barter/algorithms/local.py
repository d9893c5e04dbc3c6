"""Local training: every client learns from its own data, and nothing crosses the wire.

The lower bound that an exchange has to beat. The training is the one of DFFKE's paper (Eq. 9): Adam until the accuracy
on the training data reaches a goal; with DFFKE's preset "paper" the first round of both is the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.fit import Optimizer, by_name, fit

__all__ = ["Local"]


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """No exchange at all."""

    crosses = {"learn": "nothing"}

    # τ: local training ends when an epoch's training accuracy reaches it; none: never
    tau: Fraction | None = 0.98
    max_epochs: Count = 100  # or after so many epochs
    optimizer: Optimizer = "adam"  # of local training; sgd is what other methods compare with
    lr: Positive = 1e-3  # η: learning rate
    weight_decay: NonNegative = 1e-5  # of the optimizer
    batch_size: Count = 100  # B: images per step

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.learn)

    def learn(self, client: Client) -> None:
        recipe = by_name(self.optimizer, self.lr, weight_decay=self.weight_decay)
        fitted = fit(
            client, epochs=self.max_epochs, goal=self.tau, batch_size=self.batch_size, recipe=recipe
        )
        client.report["epochs"] = fitted.epochs
