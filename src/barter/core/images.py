"""Labelled images, stored as bytes and augmented on the run's device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.errors import ConfigError

__all__ = [
    "Augment",
    "Images",
    "PrivateTraining",
    "Sealed",
    "SharedImages",
    "Spec",
    "augment_images",
    "channel_statistics",
    "fingerprint",
    "prepare_batch",
]


# Largest sizes of a spec that comes from a file or another party.
LIMITS = {"channels": 4096, "height": 4096, "width": 4096, "classes": 2**20}


@dataclass(frozen=True)
class Spec:
    """The task shared by all parties: input shape, classes, pixel normalisation."""

    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]  # Mean of each channel, for pixels from 0 to 1.
    std: tuple[float, ...]  # Standard deviation of each channel.

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width)."""
        return self.channels, self.height, self.width

    def plain(self) -> dict[str, Any]:
        """Return the fields as a dict that can be sent and stored as JSON."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        """Build a spec from the dict that `plain` returned.

        Raises:
            ValueError: A size is not an integer from 1 to its limit (`LIMITS`), or `mean` or `std`
                is not one finite number per channel.
            TypeError: A field is missing or unknown.
        """
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()
        }
        spec = cls(**fields)
        for name, most in LIMITS.items():
            value = getattr(spec, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {str(value)[:40]}, expected a number from 1 to {most}")
        for name in ("mean", "std"):
            value = getattr(spec, name)
            if (
                not isinstance(value, tuple)
                or len(value) != spec.channels
                or not all(type(item) in (int, float) and math.isfinite(item) for item in value)
            ):
                raise ValueError(f"{name} is not a finite number for each of the channels")
        return spec


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images: crop after zero padding, and flip."""

    crop: int = 0  # Padding in pixels before the crop; 0 turns cropping off.
    flip: bool = False

    def rescale(self, before: int, after: int) -> Augment:
        """Return the augmentation scaled from images of one width to images of another.

        `crop` is multiplied by after / before and rounded down; `flip` stays.
        """
        return Augment(self.crop * after // before, self.flip)


class Images:
    """Images (uint8, NCHW) with labels, stored on one device."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, spec: Spec, augment: Augment | None = None
    ) -> None:
        self.pixels = pixels
        self.labels = labels
        self.spec = spec
        self.augment = augment or Augment()
        self._copies: dict[torch.device, Images] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def side(self) -> int:
        """Return the width of the stored images, before they are resized to the spec."""
        return self.pixels.shape[-1]

    def to(self, device: torch.device) -> Images:
        """Return the images on a device.

        These are the images themselves if they are there already, otherwise a copy, which later
        calls return too.
        """
        if device == self.device:
            return self
        if device not in self._copies:
            pixels = self.pixels.to(device)
            labels = self.labels.to(device)
            self._copies[device] = Images(pixels, labels, self.spec, self.augment)
        return self._copies[device]

    def fingerprint(self) -> str:
        """Return a hash of the images and labels, 16 hexadecimal digits."""
        return fingerprint(self.pixels, self.labels)

    def class_counts(self) -> Tensor:
        """Return the number of images of each class (classes,); 0 for absent classes."""
        return torch.bincount(self.labels, minlength=self.spec.classes)

    def batch(self, index: Tensor, *, augmented: bool = False) -> Tensor:
        """Return the images at these indices as model input, see `prepare_batch`.

        They are augmented by `augment` if `augmented`, otherwise not at all.
        """
        return prepare_batch(
            self.pixels[index], self.spec, self.augment if augmented else Augment()
        )


class SharedImages(Images):
    """Some images of a larger set, by index; they are gathered when they are used.

    Args:
        source: The larger set, whose storage is shared.
        index: The indices of the images, or a function that computes them.
        augment: Random augmentation; None for none.
    """

    def __init__(
        self, source: Images, index: Tensor | Callable[[], Tensor], augment: Augment | None = None
    ) -> None:
        self._source = source
        self._find = index
        self.spec = source.spec
        self.augment = augment or Augment()

    @property
    def index(self) -> Tensor:
        """Return the indices of the images in the larger set; computed when first read."""
        if isinstance(self._find, Tensor):
            return self._find
        if "_index" not in self.__dict__:
            self._index = self._find().to(self.device)
        return self._index

    def __len__(self) -> int:
        return len(self.index)

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def side(self) -> int:
        return self._source.side

    def to(self, device: torch.device) -> Images:
        if device == self.device:
            return self
        index = self._find.to(device) if isinstance(self._find, Tensor) else self._find
        return SharedImages(self._source.to(device), index, self.augment)

    def __getattr__(self, name: str) -> Any:
        """Gather pixels or labels when they are first read; keep them until `release`."""
        if name not in ("pixels", "labels"):
            raise AttributeError(name)
        gathered = getattr(self._source, name)[self.index]
        setattr(self, name, gathered)
        return gathered

    def release(self) -> None:
        """Drop gathered pixels, labels and computed indices; the next use remakes them."""
        for name in ("pixels", "labels", "_index"):
            self.__dict__.pop(name, None)

    def fingerprint(self) -> str:
        index = self.index
        return fingerprint(self._source.pixels[index], self._source.labels[index])

    def batch(self, index: Tensor, *, augmented: bool = False) -> Tensor:
        if "pixels" in self.__dict__:
            return super().batch(index, augmented=augmented)
        pixels = self._source.pixels[self.index[index]]
        return prepare_batch(pixels, self.spec, self.augment if augmented else Augment())


@dataclass(frozen=True)
class PrivateTraining:
    """Settings and random sources for training with differential privacy."""

    clip: float  # C: bound on the norm of one image's gradient
    normal: Callable[[int], Tensor]  # n -> n standard normal numbers, for the noise
    uniform: Callable[[int], Tensor]  # n -> n uniform numbers, for sampling the images of a step
    # (sampling rate, steps) -> noise multiplier: the standard deviation of the noise on a step's
    # sum of gradients, in units of C. Charges the privacy budget; raises if it is exhausted.
    count: Callable[[float, int], float]


class Sealed(Images):
    """Images that only private training may read; other access raises."""

    def __init__(self, images: Images, training: PrivateTraining) -> None:
        self._images = images
        self.training = training
        self.spec = images.spec
        self.augment = images.augment

    def __len__(self) -> int:
        return len(self._images)

    @property
    def device(self) -> torch.device:
        return self._images.device

    @property
    def side(self) -> int:
        return self._images.side

    def open(self) -> Images:
        """Return the images themselves; to be used by private training only."""
        return self._images

    def __getattr__(self, name: str) -> Any:
        if name in ("pixels", "labels"):
            raise ConfigError(
                f"privacy.training: this method as configured reads private images ({name}) "
                "other than by `fit`, and only `fit` trains privately; turn off the option that "
                "does so, or protect the method's answers with privacy.parts"
            )
        raise AttributeError(name)


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of the tensors' values, 16 hexadecimal digits.

    The bytes of all tensors are hashed one after the other, each in row-major order. Shapes and
    devices do not count.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def prepare_batch(pixels: Tensor, spec: Spec, augment: Augment) -> Tensor:
    """Turn a batch of byte images into model input.

    The images are augmented, converted to float, normalised by the spec's statistics and, if they
    have another size, resized to the spec's. The result is float32 (N, C, H, W) in channels_last
    memory format. Only augmentation draws random numbers, see `augment_images`.
    """
    mean, std = channel_statistics(spec, pixels.device, 255.0)
    x = (augment_images(pixels, augment).float() - mean) / std
    if x.shape[-2:] != spec.shape[1:]:
        shrinks = x.shape[-2] > spec.height or x.shape[-1] > spec.width
        x = F.interpolate(x, spec.shape[1:], mode="bilinear", antialias=shrinks)
    return x.contiguous(memory_format=torch.channels_last)


@cache
def channel_statistics(
    spec: Spec, device: torch.device, white: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, as 1 x channels x 1 x 1.

    The tensors are cached and must not be modified.

    Args:
        spec: The task, whose statistics are for pixels from 0 to 1.
        device: The device of the returned tensors.
        white: The largest pixel value, by which the statistics are scaled.
    """
    mean = torch.tensor(spec.mean, device=device).view(1, -1, 1, 1) * white
    std = torch.tensor(spec.std, device=device).view(1, -1, 1, 1) * white
    return mean, std


def augment_images(pixels: Tensor, augment: Augment) -> Tensor:
    """Shift and flip each image at random; pixels shifted in at the edges are zero.

    Each image has its own shift and flip, drawn from torch's default generator of the device.

    Args:
        pixels: Images (N, C, H, W).
        augment: Shifts are up to `crop` pixels in each direction, flips left to right with
            probability 1/2 if `flip`. With neither, the images are returned as they are and
            nothing is drawn.
    """
    if not augment.flip and not augment.crop:
        return pixels
    n, _, height, width = pixels.shape
    device = pixels.device
    rows = torch.arange(height, device=device).expand(n, -1)
    columns = torch.arange(width, device=device).expand(n, -1)
    if augment.flip:
        flipped = torch.rand(n, 1, device=device) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
    if augment.crop:
        pixels = F.pad(pixels, [augment.crop] * 4)
        rows = rows + torch.randint(2 * augment.crop + 1, (n, 1), device=device)
        columns = columns + torch.randint(2 * augment.crop + 1, (n, 1), device=device)
    image = torch.arange(n, device=device)[:, None, None]
    # Indexing with tensors on both sides of a slice moves the channels to the last axis.
    channels_last = pixels[image, :, rows[:, :, None], columns[:, None, :]]
    return channels_last.permute(0, 3, 1, 2)
