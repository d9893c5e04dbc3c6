"""Convert images of several types, layouts and scales to pixels (N, C, H, W)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Spec

__all__ = ["to_pixels"]

TOLERANCE = 1e-3  # how far floats may be outside of 0..1, because of rounding


def to_pixels(images: Tensor | NDArray[Any], spec: Spec) -> Tensor:
    """Return images as pixels (N, C, H, W) from 0 to 255, bytes or floats.

    Bytes stay bytes; floats from 0 to 1 are scaled.

    Args:
        images: uint8 in 0..255 or floats in 0..1; (N, C, H, W) or (N, H, W, C), a single image
            without N, and for networks with one channel also without C.
        spec: The network's input; its number of channels distinguishes the layouts.

    Raises:
        ConfigError: The images have other types, values or shapes, or an ambiguous shape.
    """
    if isinstance(images, np.ndarray):
        images = _to_tensor(images)
    if not isinstance(images, Tensor):
        raise ConfigError(f"images must be a tensor or an array, not {type(images).__name__}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise _wrong_type(str(images.dtype).removeprefix("torch."))
    pixels = _to_nchw(images, spec)
    return pixels if pixels.dtype == torch.uint8 else _to_full_scale(pixels.float())


def _to_tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype == np.uint8:
        # A copy, since torch does not accept read-only arrays and negative strides.
        return torch.from_numpy(array.copy())
    if array.dtype.kind == "f":  # any width and byte order
        return torch.from_numpy(array.astype(np.float32))
    raise _wrong_type(str(array.dtype))


def _wrong_type(dtype: str) -> ConfigError:
    return ConfigError(f"images of type {dtype}: give uint8 in 0..255 or floats in 0..1")


def _to_full_scale(pixels: Tensor) -> Tensor:
    """Scale floats from 0..1 to 0..255.

    Raises:
        ConfigError: Values are outside of that range by more than `TOLERANCE`, or not finite.
    """
    if not pixels.numel():
        return pixels
    low, high = (bound.item() for bound in pixels.aminmax())
    if not bool(torch.isfinite(pixels).all()):
        raise ConfigError("images hold values that are not finite: give floats in 0..1, or uint8")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ConfigError(
            f"images are floats from {low:.4g} to {high:.4g}: give floats in 0..1, or uint8 in "
            "0..255; "
            "they are normalised here"
        )
    return pixels * 255


def _to_nchw(images: Tensor, spec: Spec) -> Tensor:
    """Permute images to (N, C, H, W) from the layout that their shape implies.

    The axis of C has the network's number of channels. If two layouts are possible, the one with
    the network's input size counts.

    Raises:
        ConfigError: No layout is possible, or still several.
    """
    readings = [
        pixels
        for pixels in _readings(images, spec.channels)
        if pixels.shape[1] == spec.channels and pixels.shape[2] and pixels.shape[3]
    ]
    if len(readings) > 1:  # Such as (N, 3, 32, 3): the network's input size decides.
        fitting = [pixels for pixels in readings if pixels.shape[1:] == spec.shape]
        readings = fitting if len(fitting) == 1 else readings
    if len(readings) == 1:
        return readings[0]
    channels = spec.channels
    wanted = f"(N, {channels}, H, W) or (N, H, W, {channels})"
    problem = "could be either of" if readings else "are none of"
    raise ConfigError(
        f"images of shape {tuple(images.shape)} {problem} {wanted}, which this network takes "
        f"({channels} channel{'s' * (channels > 1)})"
    )


def _readings(images: Tensor, channels: int) -> list[Tensor]:
    """Return all interpretations of images as (N, C, H, W), regardless of channels."""
    if images.ndim == 4:
        return [images, images.permute(0, 3, 1, 2)]
    if images.ndim == 3:
        single = [images[None], images.permute(2, 0, 1)[None]]
        # Several grey images without a channel axis; a first or last axis of size 1 is the channel.
        if channels == 1 and 1 not in (images.shape[0], images.shape[2]):
            return [*single, images[:, None]]
        return single
    return [images[None, None]] if images.ndim == 2 and channels == 1 else []
