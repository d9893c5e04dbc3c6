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
from barter.core.contracts import Labels, Pixels
from barter.core.errors import PayloadError
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.fit import adam, fit

__all__ = ["Central"]


# Images are as large as the client's files, and all clients' alike.
Gift: TypeAlias = tuple[Annotated[Tensor, Pixels("n", "side", "side")], Annotated[Tensor, Labels("n")]]


def of_side(side: int, client: int, gift: Gift) -> Gift:
    """The gift, if its images have this side, as most clients' have."""
    if gift[0].shape[-1] != side:
        raise PayloadError(f"images of {gift[0].shape[-1]} pixels a side, those of most have {side}")
    return gift


@dataclass(frozen=True, kw_only=True)
class Central(Algorithm):
    """No privacy at all."""

    crosses = {
        "give": "up: every private image and label",
        "learn": "down: everybody's images and labels",
    }

    tau: Fraction = 0.98  # τ: training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 100  # or after so many epochs
    lr: Positive = 1e-3  # η: Adam's learning rate
    weight_decay: NonNegative = 1e-5  # Adam's weight decay
    batch_size: Count = 100  # B: images per step

    def round(self, server: Server, clients: Clients, t: int) -> None:
        gifts = clients.run(self.give)
        side = mode(pixels.shape[-1] for pixels, _ in gifts.values())
        pool = [torch.cat(parts) for parts in zip(*gifts.each(partial(of_side, side)).values(), strict=True)]
        clients.run(self.learn, pool)

    def give(self, client: Client) -> Gift:
        return client.data.pixels, client.data.labels

    def learn(self, client: Client, pool: list[Tensor]) -> None:
        pixels, labels = pool
        everything = Images(pixels, labels, client.data.spec, client.data.augment)
        recipe, size = adam(self.lr, self.weight_decay), self.batch_size
        fit(client, data=everything, epochs=self.max_epochs, goal=self.tau, batch_size=size, recipe=recipe)
