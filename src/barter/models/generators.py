"""Networks that make images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core import lanes
from barter.core.images import Spec
from barter.core.payload import State

__all__ = ["Decoder", "LabelGenerator", "resized"]


class Decoder(nn.Module):
    """Codes to images: the generator of CMI (Fang et al. 2021) with the ending that DFFKE's authors use.

    Three convolutions behind one linear layer; tanh and a normalisation without parameters put the pixels where
    normalised images lie. It draws at most 32 x 32 pixels (4,426,051 parameters for 512 codes and three channels);
    larger inputs are resized from there, for at 128 x 128 it would have 67 million.
    """

    def __init__(self, code_dim: int, spec: Spec) -> None:
        super().__init__()
        self.side = -(-min(32, spec.height, spec.width) // 4)
        self.start = nn.Linear(code_dim, 128 * self.side**2)
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
        drawn: Tensor = self.body(self.start(codes).view(-1, 128, self.side, self.side))
        return drawn

    @classmethod
    def restored(cls, state: State, spec: Spec) -> Decoder:
        """The decoder that has this state, ready to draw, until another is restored; nothing is initialised."""

        def blank() -> Decoder:
            with torch.device("meta"):
                return cls(state["start.weight"].shape[1], spec)

        if lanes.current() is None:
            decoder = blank()
            decoder.load_state_dict(state, assign=True)
            decoder.body.to(memory_format=torch.channels_last)
        else:
            device, shape = state["start.weight"].device, state["start.weight"].shape
            decoder = lanes.kept(("restored", shape, spec), lambda: blank().to_empty(device=device))
            decoder.load_state_dict(state)
        return decoder.eval().requires_grad_(False)


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
