"""Images of nobody's data: random crops of scikit-learn's two photographs.

Every party has the photographs, so a seed is all that parties need to make the same images. Crops
of one photograph are enough to transfer much of what a network knows (Asano and Saeed 2021,
"Extrapolating from a Single Image to a Thousand Classes using Distillation").
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Spec, channel_statistics
from barter.models.generators import decoder_side

__all__ = ["photograph_images", "prepare_photographs"]

SMALLEST = 32  # side of the smallest crops, in pixels of a photograph
STRETCH = 4 / 3  # largest ratio of a crop's sides
# Crops with a smaller standard deviation, of values from 0 to 1, keep less contrast.
FLAT_DEVIATION = 0.05
CONTRAST = (1.0, 3.0)  # smallest and largest standard deviation of a normalised crop
BRIGHTNESS = 0.5  # largest mean of a normalised crop
TINT = 0.3  # largest shift of a single channel
NUMBERS = 13  # random numbers per crop
BOX_NUMBERS = 3  # random numbers per box
CROP_CHUNK = 4000  # images that are made at a time


def prepare_photographs(spec: Spec, device: torch.device) -> None:
    """Load the photographs, so that processes that are forked later need not.

    Raises:
        ConfigError: If the task's images have neither one channel (grey) nor three (colour).
    """
    if spec.channels not in (1, 3):
        raise ConfigError(
            f"substitute='photographs': the task's images have {spec.channels} channels, and a "
            "photograph has 1 (grey) or 3; use substitute='noise', or 'public' with data.public"
        )
    _pyramids(device)


def photograph_images(spec: Spec, index: Tensor, total: int, seed: int) -> Tensor:
    """Return some of a seed's images, normalised (N, channels, side, side).

    An image is a crop of a photograph of random size, place, angle and colours, with a box of
    another such crop in it. The side is `decoder_side`, which may be less than the input size of
    networks. The same seed and total give the same images on every device, but for rounding. The
    global random generator is not used.

    Args:
        spec: The task, whose size and channels count; images are grey if it has one channel. Pixels
            are clamped to its black and white.
        index: Which images, from 0 to total - 1.
        total: Number of images of the seed.
        seed: The seed.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(total, 2 * NUMBERS + BOX_NUMBERS, generator=generator)
    chunks = torch.split(numbers.to(index.device)[index], CROP_CHUNK)
    images = torch.cat([_crop_with_box(chunk, spec) for chunk in chunks])
    return images.contiguous(memory_format=torch.channels_last)


@cache
def _pyramids(device: torch.device) -> list[list[Tensor]]:
    """Return each photograph (1, 3, H, W) in 0..1, at full size, 1/2, 1/4 and so on."""
    # Importing scikit-learn's data sets takes a second.
    from sklearn.datasets import load_sample_images

    pyramids = []
    for photograph in load_sample_images().images:
        level = torch.tensor(photograph, device=device).permute(2, 0, 1)[None].float() / 255
        levels = [level]
        while min(level.shape[-2:]) >= 16:
            level = F.avg_pool2d(level, 2)
            levels.append(level)
        pyramids.append(levels)
    return pyramids


def _crop_with_box(numbers: Tensor, spec: Spec) -> Tensor:
    """Return one normalised image per row of numbers."""
    below, above, box = torch.split(numbers, [NUMBERS, NUMBERS, BOX_NUMBERS], 1)
    side = decoder_side(spec)
    images = torch.where(_box_mask(box, side), _crop(above, side), _crop(below, side))
    if spec.channels == 1:
        images = images.mean(1, keepdim=True)
    # Pixels stay between black and white.
    mean, std = channel_statistics(spec, images.device)
    return images.clamp(-mean / std, (1 - mean) / std)


def _crop(numbers: Tensor, side: int) -> Tensor:
    """Return one normalised crop (3, side, side) of a photograph per row of numbers."""
    pyramids = _pyramids(numbers.device)
    height, width = pyramids[0][0].shape[-2:]
    pick, size, ratio = numbers[:, :3].T
    x, y, angle = numbers[:, 3:6].T
    flip, contrast = numbers[:, 6:8].T
    invert, light = numbers[:, 8:10].T
    tints = numbers[:, 10:]
    # The crop's sides in pixels of the photograph, and its centre, which is at least half a crop
    # away from the edges.
    length = SMALLEST * torch.exp(size * math.log(height / SMALLEST))
    stretch = torch.exp((ratio - 0.5) * math.log(STRETCH))
    across = (length * stretch).clamp(max=height)
    down = (length / stretch).clamp(max=height)
    left = across / 2 + x * (width - across)
    top = down / 2 + y * (height - down)
    # Positions of the crop's pixels relative to its centre, turned by up to 90 degrees either way.
    ticks = (torch.arange(side, device=numbers.device) + 0.5) / side - 0.5
    turn = (angle - 0.5) * math.pi
    mirror = torch.where(flip < 0.5, -1.0, 1.0)
    u = (mirror * across)[:, None, None] * ticks[None, None, :]
    v = down[:, None, None] * ticks[None, :, None]
    cos = turn.cos()[:, None, None]
    sin = turn.sin()[:, None, None]
    columns = left[:, None, None] + cos * u - sin * v
    rows = top[:, None, None] + sin * u + cos * v
    grid = torch.stack([2 * columns / width - 1, 2 * rows / height - 1], 3)
    # Large crops are read from small versions of the photograph, so that pixels are not skipped.
    level = (length / side).log2().round().long().clamp(0, len(pyramids[0]) - 1)
    photograph = (pick * len(pyramids)).long()
    crops = numbers.new_empty(len(numbers), 3, side, side)
    for i, levels in enumerate(pyramids):
        for j, image in enumerate(levels):
            chosen = ((photograph == i) & (level == j)).nonzero()[:, 0]
            if len(chosen):
                places = grid[chosen].view(1, -1, side, 2)
                found = F.grid_sample(image, places, padding_mode="reflection", align_corners=False)
                crops[chosen] = found.view(3, -1, side, side).transpose(0, 1)
    crops = crops - crops.mean((1, 2, 3), keepdim=True)
    deviation = crops.square().mean((1, 2, 3), keepdim=True).sqrt()
    crops = crops / deviation.clamp(min=FLAT_DEVIATION)
    low, high = CONTRAST
    sign = torch.where(invert < 0.5, -1.0, 1.0)
    factor = sign * (low + contrast * (high - low))
    shift = TINT * (2 * tints - 1) + BRIGHTNESS * (2 * light - 1)[:, None]
    normalised: Tensor = factor[:, None, None, None] * crops + shift[:, :, None, None]
    return normalised


def _box_mask(numbers: Tensor, side: int) -> Tensor:
    """Return for each row which pixels (1, side, side) are in its box."""
    area, x, y = numbers.T
    half = area.sqrt()[:, None] / 2
    ticks = (torch.arange(side, device=numbers.device) + 0.5) / side
    columns = (ticks - x[:, None]).abs() < half
    rows = (ticks - y[:, None]).abs() < half
    inside: Tensor = rows[:, None, :, None] & columns[:, None, None, :]
    return inside
