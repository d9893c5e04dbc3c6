"""Local training: every client learns from its own data; nothing is exchanged.

The lower bound that an exchange has to beat. Training follows the DFFKE paper (Eq. 9): Adam until
the accuracy on the training data reaches a goal. The first round is bitwise equal to the first
round of DFFKE's preset "paper".
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.core.algorithm import Algorithm, Crossing
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.fit import Optimizer, fit, recipe_by_name

__all__ = ["Local"]


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """Train every client on its own data only, without any exchange."""

    crosses = {"learn": Crossing()}

    # τ: local training stops when an epoch's training accuracy reaches it; none: no early stop
    tau: Fraction | None = 0.98
    max_epochs: Count = 100  # largest number of epochs
    optimizer: Optimizer = "adam"  # of local training; papers of other methods compare with sgd
    lr: Positive = 1e-3  # η: learning rate
    weight_decay: NonNegative = 1e-5  # weight decay of the optimizer
    batch_size: Count = 100  # B: images per step

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.learn)

    def learn(self, client: Client) -> None:
        """Train the client's network on its own data until τ or `max_epochs` is reached.

        The number of epochs is reported.
        """
        recipe = recipe_by_name(self.optimizer, self.lr, weight_decay=self.weight_decay)
        fitted = fit(
            client, epochs=self.max_epochs, goal=self.tau, batch_size=self.batch_size, recipe=recipe
        )
        client.report["epochs"] = fitted.epochs
