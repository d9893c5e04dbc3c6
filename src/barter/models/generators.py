"""Generators of images and of features, and a discriminator."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Literal, Self, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.images import Spec, channel_statistics
from barter.core.payload import State
from barter.core.resampling import resize_bilinear

__all__ = [
    "Decoder",
    "LabelGenerator",
    "LatentGenerator",
    "Merge",
    "MergeGenerator",
    "PatchDiscriminator",
    "PixelDecoder",
    "decoder_side",
    "resize_images",
]

Merge: TypeAlias = Literal["mul", "add", "cat", "ncat", "none"]
M = TypeVar("M", bound=nn.Module)


def _restore(name: Hashable, make: Callable[[], M], state: State) -> M:
    """Return a frozen module with this state, in evaluation mode.

    Weights are not initialised first. On a lane the module is shared by name, and valid until the
    next call with the same name. Without a lane it uses the tensors of `state` themselves.
    """

    def make_empty() -> M:
        with torch.device("meta"):
            return make()

    if lanes.current_lane() is None:
        module = make_empty()
        module.load_state_dict(state, assign=True)
    else:
        device = next(iter(state.values())).device
        module = lanes.lane_module(name, lambda: make_empty().to_empty(device=device))
        module.load_state_dict(state)
    return module.eval().requires_grad_(False)


class Decoder(nn.Module):
    """Decoder of codes to images, after CMI (Fang et al. 2021) and DFFKE.

    The generator is CMI's; its ending is that of DFFKE's authors.

    It has three convolutions after one linear layer. Tanh and a normalisation without parameters
    bring the pixels to the range of normalised images. Images have at most 32 x 32 pixels
    (4,426,051 parameters for codes of width 512 and three channels), since at 128 x 128 it would
    have 67 million; larger inputs are resized from there.

    An image has a code for the full image and, row by row, one for each of its `parts` by `parts`
    parts. The codes of parts add to the input of the convolutions at the positions of the parts.
    """

    channels = 128  # of the first convolution; the last one has half as many

    def __init__(self, code_dim: int, spec: Spec, parts: int = 0) -> None:
        super().__init__()
        self.side = -(-decoder_side(spec) // 4)
        self.parts = parts
        full, half = self.channels, self.channels // 2
        self.start = nn.Linear(code_dim, full * self.side**2)
        if parts:
            self.part = nn.Linear(code_dim, full * (-(-self.side // parts)) ** 2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(full),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(full, full, 3, padding=1, bias=False),
            nn.BatchNorm2d(full),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(full, half, 3, padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.LeakyReLU(0.2),
            nn.Conv2d(half, spec.channels, 3, padding=1),
            *self.ending(spec),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def ending(self, spec: Spec) -> list[nn.Module]:
        """Return the layers that bring the last convolution's numbers to the range of pixels."""
        return [nn.Tanh(), nn.BatchNorm2d(spec.channels, affine=False)]

    def forward(self, codes: Tensor) -> Tensor:
        """Decode codes (images, views, width) to images (images, channels, side, side).

        The side is `decoder_side`, rounded up to a multiple of 4. Pixels have mean 0 and deviation
        1 for each channel: over the batch in training mode, by running statistics otherwise.

        Args:
            codes: The code of the full image first, then those of the parts, row by row. Without
                parts, only the first is used.
        """
        start = self.start(codes[:, 0]).view(-1, self.channels, self.side, self.side)
        if self.parts:
            start = start + self.arrange_tiles(self.part(codes[:, 1:]))
        images: Tensor = self.body(start)
        return images

    def arrange_tiles(self, tiles: Tensor) -> Tensor:
        """Arrange the parts' tiles in rows and columns, at the convolutions' input size.

        Args:
            tiles: The tiles (images, parts**2, channels * pixels), row by row.

        Returns:
            A tensor (images, channels, side, side).
        """
        n = self.parts
        side = -(-self.side // n)
        rows = tiles.view(-1, n, n, self.channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return F.adaptive_avg_pool2d(rows.reshape(-1, self.channels, n * side, n * side), self.side)

    @classmethod
    def from_state(cls, state: State, spec: Spec, parts: int = 0) -> Self:
        """Return a frozen decoder with this state, in evaluation mode.

        The width of codes follows from the state. On a lane the decoder is valid until the next
        call for the same format.
        """
        shape = state["start.weight"].shape
        name = ("restored", cls.__name__, shape, spec, parts)
        decoder = _restore(name, lambda: cls(shape[1], spec, parts), state)
        if lanes.current_lane() is None:
            decoder.body.to(memory_format=torch.channels_last)
        return decoder


class PixelDecoder(Decoder):
    """A decoder whose pixels are between black and white.

    `Decoder` gives its images the mean and deviation of the normalised images, which are not known
    where every client withholds those of its pixels. Here a sigmoid ends the network. It has half
    the channels, and takes a quarter of the time.
    """

    channels = 64

    def __init__(self, code_dim: int, spec: Spec, parts: int = 0) -> None:
        super().__init__(code_dim, spec, parts)
        self.spec = spec

    def ending(self, spec: Spec) -> list[nn.Module]:
        return [nn.Sigmoid()]

    def forward(self, codes: Tensor) -> Tensor:
        """Decode codes (images, views, width) to normalised images, as `Decoder` does."""
        mean, std = channel_statistics(self.spec, codes.device)
        images: Tensor = (super().forward(codes) - mean) / std
        return images


def decoder_side(spec: Spec) -> int:
    """Return the side of a decoder's square images: the spec's, at most 32 pixels.

    The shorter of the spec's sides counts. `Decoder` rounds it up to a multiple of 4.
    """
    return min(32, spec.height, spec.width)


def resize_images(images: Tensor, spec: Spec) -> Tensor:
    """Resize images bilinearly to the spec's size, if they have another.

    Differentiable. Images that have it are returned as they are.
    """
    if images.shape[-2:] == spec.shape[1:]:
        return images
    return resize_bilinear(images, (spec.height, spec.width))


class LabelGenerator(nn.Module):
    """Noise and labels to images between -1 and 1: FedZGE's generator.

    It has 2,043,185 parameters at 3x32x32 and 10 classes.
    """

    def __init__(self, spec: Spec, noise: int = 100) -> None:
        super().__init__()
        self.spec = spec
        self.sides = (-(-spec.height // 4), -(-spec.width // 4))
        self.names = nn.Embedding(spec.classes, noise)
        self.start = nn.Linear(2 * noise, 128 * self.sides[0] * self.sides[1])
        self.body = nn.Sequential(
            nn.BatchNorm2d(128),
            nn.ConvTranspose2d(128, 128, 4, 2, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, spec.channels, 3, padding=1),
            nn.BatchNorm2d(spec.channels),
            nn.Tanh(),
        )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        start = self.start(torch.cat([self.names(y), z], 1))
        images: Tensor = self.body(start.view(-1, 128, *self.sides))
        return resize_images(images, self.spec)


class LatentGenerator(nn.Module):
    """Noise and labels to features: FedGen's generator."""

    def __init__(self, classes: int, width: int, noise: int, hidden: int) -> None:
        super().__init__()
        self.classes = classes
        self.noise_width = noise
        self.start = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.end = nn.Linear(hidden, width)

    def noise(self, count: int, device: torch.device) -> Tensor:
        """Sample noise (count, noise) for `forward`, uniform between 0 and 1."""
        return torch.rand(count, self.noise_width, device=device)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        inputs = torch.cat([noise, F.one_hot(y, self.classes).to(noise)], 1)
        features: Tensor = self.end(self.start(inputs))
        return features

    @classmethod
    def from_state(cls, state: State, classes: int) -> LatentGenerator:
        """Return a frozen generator with this state, in evaluation mode.

        Widths follow from the state. On a lane it is valid until the next call for the same widths.
        """
        hidden, inputs = state["start.0.weight"].shape
        width = len(state["end.bias"])
        name = ("restored", classes, width, inputs, hidden)
        return _restore(name, lambda: cls(classes, width, inputs - classes, hidden), state)


class MergeGenerator(nn.Module):
    """Noise merged with labels to images between -1 and 1: DFRD's generator.

    It has 3,153,280 parameters at 3x32x32 and 10 classes. It makes images of 8, 16, 32 or 64 pixels
    a side, with one more layer each time; other sizes are resized from the next.
    """

    def __init__(self, spec: Spec, noise: int = 64, merge: Merge = "mul") -> None:
        super().__init__()
        self.spec = spec
        self.merge = merge
        self.noise = noise
        self.names = nn.Embedding(spec.classes, noise) if merge in ("mul", "add", "cat") else None
        width = noise + {"cat": noise, "ncat": spec.classes}.get(merge, 0)
        layers: list[nn.Module] = [nn.ConvTranspose2d(width, 512, 4, 1, 0, bias=False), nn.ReLU()]
        doublings = min(4, max(1, math.ceil(math.log2(max(spec.height, spec.width) / 4))))
        widths = [512, 256, 128, 64][:doublings]
        for inputs, outputs in pairwise(widths):
            layers += [
                nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        layers += [nn.ConvTranspose2d(widths[-1], spec.channels, 4, 2, 1, bias=False), nn.Tanh()]
        self.body = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.apply(_initialise_as_dcgan)

    def merge_inputs(self, z: Tensor, y: Tensor) -> Tensor:
        """Merge noise and labels to h = o(z, y), the input of the convolutions.

        By `merge`: "none" ignores the labels, "mul" and "add" combine z with a label's embedding
        entry by entry, "cat" appends the embedding to z, and "ncat" the one-hot label.
        """
        if self.names is None:
            if self.merge == "none":
                return z
            return torch.cat([z, F.one_hot(y, self.spec.classes).to(z)], 1)
        embedding: Tensor = self.names(y)
        if self.merge == "mul":
            return z * embedding
        return z + embedding if self.merge == "add" else torch.cat([z, embedding], 1)

    def generate(self, h: Tensor) -> Tensor:
        """Generate images of the spec's size, in -1..1, from merged inputs (N, width)."""
        x = h[:, :, None, None]
        for layer in self.body:
            by_product = isinstance(layer, nn.ConvTranspose2d) and not x.is_cuda
            x = _transposed_convolution(layer, x) if by_product else layer(x)
        return resize_images(x, self.spec)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.generate(self.merge_inputs(z, y))


class PatchDiscriminator(nn.Module):
    """A discriminator with one logit per patch of about 4 x 4 pixels: FedIOD's."""

    def __init__(self, spec: Spec, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(spec.channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 1, bias=False),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def _transposed_convolution(layer: nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """Apply a bias-free transposed convolution as one matrix product.

    It is faster on a CPU.
    """
    kernel = layer.kernel_size[0]
    stride = layer.stride[0]
    padding = int(layer.padding[0])
    columns = layer.weight.flatten(1).T @ x.flatten(2)
    sides = tuple((side - 1) * stride + kernel - 2 * padding for side in x.shape[2:])
    return F.fold(columns, sides, kernel, stride=stride, padding=padding)


def _initialise_as_dcgan(layer: nn.Module) -> None:
    """Initialise a layer's weights as DCGAN does: normal, with deviation 0.02.

    The mean is 0 for transposed convolutions and 1 for batch normalisation. Others stay.
    """
    if isinstance(layer, nn.ConvTranspose2d):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)
