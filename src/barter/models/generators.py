"""Networks that make images, or features."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.images import Spec
from barter.core.payload import State

__all__ = [
    "Decoder",
    "LabelGenerator",
    "LatentGenerator",
    "Merge",
    "MergeGenerator",
    "PatchDiscriminator",
    "drawn_side",
    "resized",
]

Merge: TypeAlias = Literal["mul", "add", "cat", "ncat", "none"]
M = TypeVar("M", bound=nn.Module)


def _restored(name: Hashable, make: Callable[[], M], state: State) -> M:
    """A module that has this state, ready to draw, until another is restored; nothing is initialised."""

    def blank() -> M:
        with torch.device("meta"):
            return make()

    if lanes.current() is None:
        module = blank()
        module.load_state_dict(state, assign=True)
    else:
        device = next(iter(state.values())).device
        module = lanes.kept(name, lambda: blank().to_empty(device=device))
        module.load_state_dict(state)
    return module.eval().requires_grad_(False)


class Decoder(nn.Module):
    """Codes to images: the generator of CMI (Fang et al. 2021) with the ending that DFFKE's authors use.

    Three convolutions behind one linear layer; tanh and a normalisation without parameters put the pixels where
    normalised images lie. It draws at most 32 x 32 pixels (4,426,051 parameters for 512 codes and three channels);
    larger inputs are resized from there, for at 128 x 128 it would have 67 million.

    An image has a code for the whole and, row by row, one for each of its `parts` by `parts`, which add to what the
    convolutions start from where they lie.
    """

    def __init__(self, code_dim: int, spec: Spec, parts: int = 0) -> None:
        super().__init__()
        self.side, self.parts = -(-drawn_side(spec) // 4), parts
        self.start = nn.Linear(code_dim, 128 * self.side**2)
        if parts:
            self.part = nn.Linear(code_dim, 128 * (-(-self.side // parts)) ** 2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(128),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, spec.channels, 3, padding=1),
            nn.Tanh(),
            nn.BatchNorm2d(spec.channels, affine=False),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, codes: Tensor) -> Tensor:
        start = self.start(codes[:, 0]).view(-1, 128, self.side, self.side)
        if self.parts:
            start = start + self.placed(self.part(codes[:, 1:]))
        drawn: Tensor = self.body(start)
        return drawn

    def placed(self, tiles: Tensor) -> Tensor:
        """Tiles side by side in rows and columns, in the size of what the convolutions start from."""
        n, side = self.parts, -(-self.side // self.parts)
        rows = tiles.view(-1, n, n, 128, side, side).permute(0, 3, 1, 4, 2, 5)
        return F.adaptive_avg_pool2d(rows.reshape(-1, 128, n * side, n * side), self.side)

    @classmethod
    def restored(cls, state: State, spec: Spec, parts: int = 0) -> Decoder:
        """The decoder that has this state, ready to draw, until another is restored; nothing is initialised."""
        shape = state["start.weight"].shape
        decoder = _restored(
            ("restored", shape, spec, parts), lambda: cls(shape[1], spec, parts), state
        )
        if lanes.current() is None:
            decoder.body.to(memory_format=torch.channels_last)
        return decoder


def drawn_side(spec: Spec) -> int:
    """The side in pixels of what a decoder draws for inputs like these."""
    return min(32, spec.height, spec.width)


def resized(images: Tensor, spec: Spec) -> Tensor:
    """Images in the size of the clients' inputs; gradients flow through."""
    if images.shape[-2:] == spec.shape[1:]:
        return images
    return F.interpolate(images, spec.shape[1:], mode="bilinear")


class LabelGenerator(nn.Module):
    """Noise and labels to images between -1 and 1: FedZGE's, with 2,043,185 parameters at 3x32x32 and 10 classes."""

    def __init__(self, spec: Spec, noise: int = 100) -> None:
        super().__init__()
        self.spec, self.sides = spec, (-(-spec.height // 4), -(-spec.width // 4))
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
        drawn: Tensor = self.body(start.view(-1, 128, *self.sides))
        return resized(drawn, self.spec)


class LatentGenerator(nn.Module):
    """Noise and labels to features: FedGen's."""

    def __init__(self, classes: int, width: int, noise: int, hidden: int) -> None:
        super().__init__()
        self.classes, self.noise_width = classes, noise
        self.start = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.end = nn.Linear(hidden, width)

    def noise(self, count: int, device: torch.device) -> Tensor:
        """What so many features can be made of."""
        return torch.rand(count, self.noise_width, device=device)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        drawn: Tensor = self.end(
            self.start(torch.cat([noise, F.one_hot(y, self.classes).to(noise)], 1))
        )
        return drawn

    @classmethod
    def restored(cls, state: State, classes: int) -> LatentGenerator:
        """The generator that has this state, ready to draw, until another is restored; nothing is initialised."""
        (hidden, inputs), width = state["start.0.weight"].shape, len(state["end.bias"])
        name = ("restored", classes, width, inputs, hidden)
        return _restored(name, lambda: cls(classes, width, inputs - classes, hidden), state)


class MergeGenerator(nn.Module):
    """Noise merged with labels to images between -1 and 1: DFRD's, with 3,153,280 parameters at 3x32x32 and 10 classes.

    It draws 8, 16, 32 or 64 pixels a side, with one layer more each time; other sizes are resized from the next.
    """

    def __init__(self, spec: Spec, noise: int = 64, merge: Merge = "mul") -> None:
        super().__init__()
        self.spec, self.merge, self.noise = spec, merge, noise
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
        self.apply(_as_dcgan)

    def merged(self, z: Tensor, y: Tensor) -> Tensor:
        """h = o(z, y): what the convolutions start from."""
        if self.names is None:
            return (
                z
                if self.merge == "none"
                else torch.cat([z, F.one_hot(y, self.spec.classes).to(z)], 1)
            )
        name: Tensor = self.names(y)
        if self.merge == "mul":
            return z * name
        return z + name if self.merge == "add" else torch.cat([z, name], 1)

    def drawn(self, h: Tensor) -> Tensor:
        """The images that these merged inputs stand for."""
        x = h[:, :, None, None]
        for layer in self.body:
            x = (
                _transposed(layer, x)
                if isinstance(layer, nn.ConvTranspose2d) and not x.is_cuda
                else layer(x)
            )
        return resized(x, self.spec)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.drawn(self.merged(z, y))


class PatchDiscriminator(nn.Module):
    """Whether each part of an image is a real image's: a logit for every four by four pixels or so. FedIOD's."""

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
        judged: Tensor = self.body(x)
        return judged


def _transposed(layer: nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """What a transposed convolution without bias makes of x, as one matrix product: on a CPU that is faster."""
    kernel, stride, padding = layer.kernel_size[0], layer.stride[0], int(layer.padding[0])
    columns = layer.weight.flatten(1).T @ x.flatten(2)
    sides = tuple((side - 1) * stride + kernel - 2 * padding for side in x.shape[2:])
    return F.fold(columns, sides, kernel, stride=stride, padding=padding)


def _as_dcgan(layer: nn.Module) -> None:
    if isinstance(layer, nn.ConvTranspose2d):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)
