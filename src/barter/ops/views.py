"""An image seen as a whole and in parts, each part in the size of the whole."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.models.generators import drawn_side, resized

__all__ = ["cut", "embeddings", "in_turn", "number", "of_view", "parts_of", "seen"]

LEAST = 8
OVERLAP = 1.25  # the side of a part, as a multiple of what would tile the image


def cut(parts: int, spec: Spec) -> int:
    """Into how many parts by as many an image is cut: so many, if each has `LEAST` pixels of what is drawn of it."""
    parts = min(parts, drawn_side(spec) // LEAST)
    return parts if parts > 1 else 0


def number(parts: int) -> int:
    """Views of an image that is cut into `parts` by `parts`: the whole is the first, then the parts row by row."""
    return 1 + parts**2


def parts_of(views: int) -> int:
    """The other way round."""
    return math.isqrt(views - 1)


def in_turn(images: int, parts: int, device: torch.device) -> Tensor:
    """Which view of each of some images is looked at: the whole of every `parts`-th one, and all parts alike."""
    at = torch.arange(images, device=device)
    if not parts:
        return torch.zeros_like(at)
    before = at - at // parts - 1  # how many parts were looked at before
    return torch.where(at % parts == 0, 0, 1 + before % parts**2)


def of_view(values: Tensor, views: Tensor) -> Tensor:
    """Of what there is for all views of each image, what belongs to this one."""
    return values[torch.arange(len(values), device=values.device), views]


def seen(images: Tensor, views: Tensor, parts: int, spec: Spec) -> Tensor:
    """One view of each image, in the size of the networks' inputs; gradients flow through."""
    if not parts:
        return resized(images, spec)
    side = torch.where(views == 0, 1.0, OVERLAP / parts)
    row, column = (views - 1) // parts, (views - 1) % parts
    places = []  # across and down, in -1 to 1: of each pixel of a view, in the image; in full precision
    for place, pixels in ((column, spec.width), (row, spec.height)):
        middle = (1 - side) * (2 * place / (parts - 1) - 1)
        steps = (2 * torch.arange(pixels, device=images.device) + 1) / pixels - 1
        places.append(middle[:, None] + side[:, None] * steps)
    across, down = places[0][:, None, :], places[1][:, :, None]
    grid = torch.stack([across.expand(-1, spec.height, -1), down.expand(-1, -1, spec.width)], 3)
    sampled = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return sampled.contiguous(memory_format=torch.channels_last)


def embeddings(model: Classifier, data: Images, index: Tensor, parts: int) -> Tensor:
    """What a network makes of each of these images: of the whole, then of its parts."""
    return predict(partial(_embedded, model.eval(), data.spec, parts), data.batch, index)


def _embedded(model: Classifier, spec: Spec, parts: int, images: Tensor) -> Tensor:
    views = (
        torch.full((len(images),), view, device=images.device) for view in range(number(parts))
    )
    return torch.stack([model.features(seen(images, view, parts, spec)) for view in views], 1)
