"""Central training: all data in one place, as a reference for federations.

Every client uploads its images and trains its own architecture on the pooled images of all clients.
The byte counts show what that would cost: the private data itself crosses the wire, in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import mode
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm, Crossing
from barter.core.clients import Clients
from barter.core.contracts import Labels, Pixels, Within
from barter.core.errors import PayloadError
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.fit import adam, fit

__all__ = ["Central"]


# Images have the size of the client's files, which must be the same for all clients.
ImageSide: TypeAlias = Annotated[int, Within(1, 1e6, "side")]
Gift: TypeAlias = tuple[
    Annotated[Tensor, Pixels("examples", "side", "side")], Annotated[Tensor, Labels("examples")]
]


def require_side(side: int, client: int, own: int) -> int:
    """Return the side of a client's images if it is the most frequent one.

    Args:
        side: The most frequent side, in pixels.
        client: The client's id; unused, but `Replies.map` passes it.
        own: The side of this client's images.

    Raises:
        PayloadError: If the sides differ.
    """
    if own != side:
        raise PayloadError(f"images have {own} pixels a side, those of most clients have {side}")
    return own


@dataclass(frozen=True, kw_only=True)
class Central(Algorithm):
    """Train every client's network on all clients' pooled data, without privacy."""

    crosses = {
        "measure": Crossing(up="the number of pixels on a side of the images"),
        "give": Crossing(down="the most frequent side", up="every private image and label"),
        "learn": Crossing(down="all clients' images and labels"),
    }

    tau: Fraction = 0.98  # τ: training stops when an epoch's training accuracy reaches it
    max_epochs: Count = 100  # largest number of epochs
    lr: Positive = 1e-3  # η: Adam's learning rate
    weight_decay: NonNegative = 1e-5  # Adam's weight decay
    batch_size: Count = 100  # B: images per step

    def round(self, server: Server, clients: Clients, t: int) -> None:
        """Pool all clients' images, and let every client train on the pool.

        Clients whose image size is not the most frequent one upload nothing. The server trains no
        model.
        """
        sides = clients.run(self.measure)
        side = mode(sides.values())
        compatible = clients.only(sides.map(partial(require_side, side)))
        uploads = compatible.run(self.give, side)
        pool = [torch.cat(parts) for parts in zip(*uploads.values(), strict=True)]
        clients.run(self.learn, pool)

    def measure(self, client: Client) -> ImageSide:
        """Return the number of pixels on a side of the client's images."""
        return client.data.side

    def give(self, client: Client, side: ImageSide) -> Gift:
        """Return all of the client's images, as bytes, and their labels.

        Args:
            client: The client.
            side: The number of pixels on a side that the answer must have; it resizes nothing.
        """
        return client.data.pixels, client.data.labels

    def learn(self, client: Client, pool: list[Tensor]) -> None:
        """Train the client's network on the images of all clients.

        `pool` holds their pixels (bytes) and labels. Training stops at `max_epochs`, or when the
        training accuracy reaches τ. The client's own augmentation applies to all images.
        """
        pixels, labels = pool
        fit(
            client,
            data=Images(pixels, labels, client.data.spec, client.data.augment),
            epochs=self.max_epochs,
            goal=self.tau,
            batch_size=self.batch_size,
            recipe=adam(self.lr, self.weight_decay),
        )
