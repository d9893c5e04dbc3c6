"""Labelled images that stay on the run's device as bytes, normalised and augmented there."""

from __future__ import annotations

import hashlib
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
    "Spec",
    "augmented",
    "fingerprint",
    "prepared",
    "statistics",
]


@dataclass(frozen=True)
class Spec:
    """What all parties agree on: the shape of an input, the number of classes, how pixels are normalised."""

    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def plain(self) -> dict[str, Any]:
        """As it travels and is kept."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        """From what `plain` made of it."""
        fields: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in tree.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Augment:
    """Random changes to a training image: a crop after padding by so many pixels, a mirror image."""

    crop: int = 0
    flip: bool = False

    def resized(self, before: int, after: int) -> Augment:
        """The same changes for images of another width."""
        return Augment(self.crop * after // before, self.flip)


class Images:
    """Images (uint8, NCHW) with labels, resident on one device."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, spec: Spec, augment: Augment | None = None
    ) -> None:
        self.pixels, self.labels, self.spec = pixels, labels, spec
        self.augment = augment or Augment()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def side(self) -> int:
        """How wide the images are before they are brought to the agreed size."""
        return self.pixels.shape[-1]

    def fingerprint(self) -> str:
        """A short name for exactly these images and labels."""
        return fingerprint(self.pixels, self.labels)

    def class_counts(self) -> Tensor:
        """How many images there are of each class."""
        return torch.bincount(self.labels, minlength=self.spec.classes)

    def batch(self, index: Tensor, *, augmented: bool = False) -> Tensor:
        """The images at these indices as the models want them."""
        return prepared(self.pixels[index], self.spec, self.augment if augmented else Augment())


@dataclass(frozen=True)
class PrivateTraining:
    """How a network may learn from sealed images."""

    clip: float  # C: the largest length of one image's gradient
    normal: Callable[[int], Tensor]  # where noise comes from
    uniform: Callable[[int], Tensor]  # and the choice of images
    count: Callable[
        [float, int], float
    ]  # told the share of images in a step and the number of steps: the standard
    # deviation of the noise on a step's sum, in units of C; may refuse


class Sealed(Images):
    """Images at which nothing may look but private training."""

    def __init__(self, images: Images, training: PrivateTraining) -> None:
        self._images, self.training = images, training
        self.spec, self.augment = images.spec, images.augment

    def __len__(self) -> int:
        return len(self._images)

    @property
    def device(self) -> torch.device:
        return self._images.device

    @property
    def side(self) -> int:
        return self._images.side

    def opened(self) -> Images:
        """For private training alone."""
        return self._images

    def __getattr__(self, name: str) -> Any:
        if name in ("pixels", "labels"):
            raise ConfigError(
                f"privacy.training: this method as configured looks at private images ({name}) other than by `fit`, "
                "which alone is private; set what does so otherwise, or protect its answers with privacy.parts"
            )
        raise AttributeError(name)


def fingerprint(*tensors: Tensor) -> str:
    """A short name for exactly these numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def prepared(pixels: Tensor, spec: Spec, augment: Augment) -> Tensor:
    """A batch of bytes as the models want it: augmented, float, normalised, of the agreed size, channels last."""
    mean, std = statistics(spec, pixels.device, 255.0)
    x = (augmented(pixels, augment).float() - mean) / std
    if x.shape[-2:] != spec.shape[1:]:
        shrunk = x.shape[-2] > spec.height or x.shape[-1] > spec.width
        x = F.interpolate(x, spec.shape[1:], mode="bilinear", antialias=shrunk)
    return x.contiguous(memory_format=torch.channels_last)


@cache
def statistics(spec: Spec, device: torch.device, white: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by channel, for pixels between 0 and `white`."""
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1) * white
        for values in (spec.mean, spec.std)
    )
    return mean, std


def augmented(pixels: Tensor, augment: Augment) -> Tensor:
    """Each image shifted and mirrored at random; what comes in at the edges is zero."""
    if not augment.flip and not augment.crop:
        return pixels
    n, _, height, width = pixels.shape
    device = pixels.device
    rows = torch.arange(height, device=device).expand(n, -1)
    columns = torch.arange(width, device=device).expand(n, -1)
    if augment.flip:
        mirrored = torch.rand(n, 1, device=device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    if augment.crop:
        pixels = F.pad(pixels, [augment.crop] * 4)
        rows = rows + torch.randint(2 * augment.crop + 1, (n, 1), device=device)
        columns = columns + torch.randint(2 * augment.crop + 1, (n, 1), device=device)
    each = torch.arange(n, device=device)[:, None, None]
    # Advanced indices around a slice put the channels last; they go back to their place.
    return pixels[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
