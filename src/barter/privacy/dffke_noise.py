"""The noise of the DFFKE paper, which is not differentially private."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from barter.core.images import Augment, prepare_batch
from barter.core.params import Count, Positive
from barter.core.payload import Payload
from barter.privacy.mechanisms import Mechanism, ReleaseContext, as_rows, match_tensor

__all__ = ["Paper"]


@dataclass(frozen=True)
class Paper(Mechanism):
    """DFFKE's noise on embeddings, without a privacy guarantee.

    Its sensitivity is the largest observed change of some images' embeddings when one pixel changes.
    That is a lower bound where an upper bound is needed, for a pixel instead of an image, and for a
    single release.
    """

    name = "paper"
    epsilon: Positive = 1.0  # ε in the paper's formula
    images: Count = 200  # number of images whose embeddings are compared

    @property
    def needs_rows(self) -> bool:
        return True

    @property
    def promises(self) -> bool:
        return False

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        data = context.client.data
        delta = min(0.5, 1 / max(1, len(data)))
        sigma = math.sqrt(2 * math.log(1.25 / delta)) * self.reach(context) / self.epsilon
        released: list[Payload] = []
        for value in values:
            rows = as_rows(value, str(self))
            noise = sigma * context.source.normal(rows.numel())
            released.append(rows + match_tensor(rows, noise))
        return released

    @torch.no_grad()
    def reach(self, context: ReleaseContext) -> float:
        """Return the largest change (Euclidean distance) of an embedding by one pixel.

        One random value (a channel of a pixel) of each of the client's first `images` images is
        replaced by a random one from 0 to 255. Random numbers come from `context.source`.
        """
        data = context.client.data
        model = context.client.model
        count = min(self.images, len(data))
        pixels = data.pixels[:count].clone()
        changed = pixels.clone().flatten(1)
        positions = (context.source.uniform(count) * changed.shape[1]).long().to(data.device)
        values = (context.source.uniform(count) * 256).to(data.device).to(changed.dtype)
        changed[torch.arange(count, device=data.device), positions] = values
        modes = [part.training for part in model.modules()]
        model.eval()
        before, after = (
            model.features(prepare_batch(x, data.spec, Augment())).double()
            for x in (pixels, changed.view_as(pixels))
        )
        for part, training in zip(model.modules(), modes, strict=True):
            part.training = training
        return float((before - after).norm(dim=1).max())
