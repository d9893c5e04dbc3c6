"""Central training: all data in one place, the upper bound that no federation can count on.

Every client gives its images away and trains its own architecture on everybody's. What that would cost is in the byte
counts: the private data itself crosses the wire, in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import mode
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.contracts import Labels, Pixels, Within
from barter.core.errors import PayloadError
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.fit import adam, fit

__all__ = ["Central"]


# Images are as large as the client's files, and all clients' alike.
Side: TypeAlias = Annotated[int, Within(1, 1e6, "side")]
Gift: TypeAlias = tuple[
    Annotated[Tensor, Pixels("examples", "side", "side")], Annotated[Tensor, Labels("examples")]
]


def as_most(side: int, client: int, own: int) -> int:
    """The side of a client's images, if it is this one, which most clients' have."""
    if own != side:
        raise PayloadError(f"images of {own} pixels a side, those of most have {side}")
    return own


@dataclass(frozen=True, kw_only=True)
class Central(Algorithm):
    """No privacy at all."""

    crosses = {
        "measure": "up: how many pixels are on a side of the images",
        "give": "down: the side of most; up: every private image and label",
        "learn": "down: everybody's images and labels",
    }

    tau: Fraction = 0.98  # τ: training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 100  # or after so many epochs
    lr: Positive = 1e-3  # η: Adam's learning rate
    weight_decay: NonNegative = 1e-5  # Adam's weight decay
    batch_size: Count = 100  # B: images per step

    def round(self, server: Server, clients: Clients, t: int) -> None:
        sides = clients.run(self.measure)
        side = mode(sides.values())
        gifts = clients.only(sides.each(partial(as_most, side))).run(self.give, side)
        pool = [torch.cat(parts) for parts in zip(*gifts.values(), strict=True)]
        clients.run(self.learn, pool)

    def measure(self, client: Client) -> Side:
        return client.data.side

    def give(self, client: Client, side: Side) -> Gift:
        return client.data.pixels, client.data.labels

    def learn(self, client: Client, pool: list[Tensor]) -> None:
        pixels, labels = pool
        everything = Images(pixels, labels, client.data.spec, client.data.augment)
        recipe, size = adam(self.lr, self.weight_decay), self.batch_size
        fit(
            client,
            data=everything,
            epochs=self.max_epochs,
            goal=self.tau,
            batch_size=size,
            recipe=recipe,
        )
