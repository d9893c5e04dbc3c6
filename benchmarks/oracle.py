"""DFFKE with an oracle for a decoder: its synthetic images are the private images themselves.

    barter run --algorithm benchmarks.oracle:OracleExchange
    barter compare --algorithms dffke,benchmarks.oracle:OracleExchange --seeds 0-1

Run these in the repository's root. Clients offer the same share of their images as in DFFKE, and the
same images with the same seed; teachers, lessons, memory and exchange are DFFKE's. Only decoding is
replaced, so the distance to DFFKE is what decoding loses, and the distance to central training what
the exchange loses. It is a measuring instrument without any privacy: clients upload their images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from barter.algorithms.dffke import DFFKE, DFFKEClient, DFFKEServer, Offer
from barter.core.algorithm import Crossing
from barter.core.clients import Replies
from barter.core.contracts import Halves
from barter.core.images import Augment, Images, prepare_batch
from barter.models.generators import decoder_side
from barter.ops.transfer import Entry

__all__ = ["OracleExchange"]


class ImageOffer(Offer):
    """A client's upload after local training: a share of its images, as the decoder would make them."""

    images: Annotated[Tensor, Halves("n", "channels", "side", "side")]


@dataclass(frozen=True, kw_only=True)
class OracleExchange(DFFKE):
    """DFFKE whose synthetic images are the clients' private images, to measure what decoding loses."""

    crosses = {
        **DFFKE.crosses,
        "learn": Crossing(up="a share of the private images themselves"),
    }
    tells = {**DFFKE.tells, "learn.images": "row"}

    @property
    def inverts(self) -> bool:
        return False  # The server needs no network of a client.

    @property
    def embeds(self) -> bool:
        return False

    def learn(self, client: DFFKEClient) -> ImageOffer:
        """Train locally and return a share of the images in the size that the decoder makes."""
        self.train(client)
        data = client.data
        examples = self.offer_size(len(data))
        # The same call as in DFFKE, so that the same images are offered.
        index = torch.randperm(len(data), device=client.device)[:examples]
        client.offered[0] = index
        side = decoder_side(data.spec)
        small = replace(data.spec, height=side, width=side)
        images = prepare_batch(data.pixels[index], small, Augment())
        return {"examples": examples, "images": images.half().contiguous()}

    def make_transfer_data(self, server: DFFKEServer, offers: Replies[Offer], t: int) -> Entry:
        """Return the offered images as the round's transfer data."""
        codes: dict[int, Tensor] = {k: offer["images"] for k, offer in offers.items()}  # type: ignore[typeddict-item]
        return {"round": t, "codes": codes, "decoder": {}}

    def augment(self, data: Images) -> Augment:
        """Return the client's augmentation in training, scaled as for decoded images."""
        side = decoder_side(data.spec)
        return data.augment.rescale(data.side, side) if self.augmented else Augment()
