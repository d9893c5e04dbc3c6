"""Views of an image: itself and its parts, all in the full image's size."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.resampling import sample_boxes
from barter.models.generators import decoder_side, resize_images

__all__ = [
    "choose_views",
    "count_views",
    "embed_all_views",
    "extract_views",
    "parts_of_views",
    "parts_per_side",
    "select_view",
]

MIN_PART_SIDE = 8  # Least side of a part, in pixels of a decoded image.
OVERLAP = 1.25  # Side of a part, as a multiple of what would tile the image.


def parts_per_side(parts: int, spec: Spec) -> int:
    """Return the number of parts along each side of an image.

    Args:
        parts: Wanted number of parts along each side; fewer if a part would be smaller than
            `MIN_PART_SIDE` pixels of a decoded image.
        spec: Format of the images.

    Returns:
        The number of parts, or 0 if images are not cut.
    """
    parts = min(parts, decoder_side(spec) // MIN_PART_SIDE)
    return parts if parts > 1 else 0


def count_views(parts: int) -> int:
    """Return the number of views: the full image and `parts` x `parts` parts."""
    return 1 + parts**2


def parts_of_views(views: int) -> int:
    """Return the number of parts along each side, the inverse of `count_views`.

    One view, the full image, has 0 parts.
    """
    return math.isqrt(views - 1)


def choose_views(images: int, parts: int, device: torch.device) -> Tensor:
    """Return the view by which each of some images is compared, an index from 0.

    Images 0, parts, 2 * parts, ... are seen in full (view 0); the others show the parts 1 to
    parts^2 in turn. With `parts` of 0 all are seen in full. Nothing is random.

    Args:
        images: Number of images.
        parts: Number of parts along each side.
        device: Device of the result.

    Returns:
        The view of each image (images,).
    """
    position = torch.arange(images, device=device)
    if not parts:
        return torch.zeros_like(position)
    parts_before = position - position // parts - 1  # parts chosen for earlier images
    return torch.where(position % parts == 0, 0, 1 + parts_before % parts**2)


def select_view(values: Tensor, views: Tensor) -> Tensor:
    """Select each image's chosen view from values for all views (images, views, ...)."""
    return values[torch.arange(len(values), device=values.device), views]


def extract_views(images: Tensor, views: Tensor, parts: int, spec: Spec) -> Tensor:
    """Return one view of each image, in the networks' input size; differentiable.

    Args:
        images: The images (N, C, H, W), of any size.
        views: The view of each image: 0 is the full image, then parts row by row.
        parts: Number of parts along each side, at least 2; 0 for full images only, whatever `views`
            is. A part's side is 1.25 / parts of the image's, so that neighbours overlap.
        spec: Format of the networks' inputs.
    """
    if not parts:
        return resize_images(images, spec)
    side = torch.where(views == 0, 1.0, OVERLAP / parts)
    row = (views - 1) // parts
    column = (views - 1) % parts
    # Coordinates of each pixel of a view in the image, from -1 to 1, in full precision.
    coordinates = []
    for position, pixels in ((column, spec.width), (row, spec.height)):
        center = (1 - side) * (2 * position / (parts - 1) - 1)
        offsets = (2 * torch.arange(pixels, device=images.device) + 1) / pixels - 1
        coordinates.append(center[:, None] + side[:, None] * offsets)
    sampled = sample_boxes(images.float(), x=coordinates[0], y=coordinates[1])
    return sampled.contiguous(memory_format=torch.channels_last)


def embed_all_views(model: Classifier, data: Images, index: Tensor, parts: int) -> Tensor:
    """Return a network's features of all views (images, views, features).

    The full image is the first view.

    Args:
        model: The network, which is put into evaluation mode.
        data: All images.
        index: Indices of the images to embed.
        parts: Number of parts along each side; 0 for full images only.
    """
    return predict(partial(_embed_views, model.eval(), data.spec, parts), data.batch, index)


def _embed_views(model: Classifier, spec: Spec, parts: int, images: Tensor) -> Tensor:
    """Return the features of all views of an image batch (images, views, features)."""
    views = (
        torch.full((len(images),), view, device=images.device) for view in range(count_views(parts))
    )
    return torch.stack(
        [model.features(extract_views(images, view, parts, spec)) for view in views], 1
    )
