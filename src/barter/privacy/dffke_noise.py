"""The noise that DFFKE's paper calls differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from barter.core.images import Augment, prepared
from barter.core.params import Count, Positive
from barter.core.payload import Payload
from barter.privacy.mechanisms import Mechanism, Turn, alike, as_rows

__all__ = ["Paper"]


@dataclass(frozen=True)
class Paper(Mechanism):
    """DFFKE's noise on embeddings, which promises nothing: it looks at how far one pixel moves those of some images.

    That is a lower bound of what it should be an upper bound of, of a pixel instead of an image, and for one release.
    """

    name = "paper"
    epsilon: Positive = 1.0  # ε of the paper's formula
    images: Count = 200  # how many are looked at

    @property
    def needs_rows(self) -> bool:
        return True

    @property
    def promises(self) -> bool:
        return False

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        data = turn.client.data
        delta = min(0.5, 1 / max(1, len(data)))
        sigma = math.sqrt(2 * math.log(1.25 / delta)) * self.reach(turn) / self.epsilon
        return [
            v + alike(v, sigma * turn.source.normal(v.numel()))
            for v in (as_rows(x, str(self)) for x in values)
        ]

    @torch.no_grad()
    def reach(self, turn: Turn) -> float:
        """How far a random pixel's random value moves the embedding of an image, at most, of those looked at."""
        data, model = turn.client.data, turn.client.model
        count = min(self.images, len(data))
        pixels = data.pixels[:count].clone()
        changed = pixels.clone().flatten(1)
        where = (turn.source.uniform(count) * changed.shape[1]).long().to(data.device)
        values = (turn.source.uniform(count) * 256).to(data.device).to(changed.dtype)
        changed[torch.arange(count, device=data.device), where] = values
        modes = [part.training for part in model.modules()]
        model.eval()
        one, other = (
            model.features(prepared(x, data.spec, Augment())).double()
            for x in (pixels, changed.view_as(pixels))
        )
        for part, training in zip(model.modules(), modes, strict=True):
            part.training = training
        return float((one - other).norm(dim=1).max())
