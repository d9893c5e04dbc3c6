"""A network whose features are fixed filters: they depend on no image, private or public."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.images import Spec, channel_statistics
from barter.core.model import Classifier, SplitClassifier
from barter.core.resampling import average_cells, resize_bilinear
from barter.models.generators import decoder_side

__all__ = ["FilterBank", "filters"]

# Standard deviation of the window and wavelength of the waves, in pixels, of each scale.
SCALES = ((1.0, 3.0), (1.7, 5.0), (2.8, 8.0))
ORIENTATIONS = 8
KERNEL = 11  # side of a filter, in pixels
EDGE_CELLS = 4  # magnitudes are averaged over this many cells along each side
COLOUR_CELLS = 7  # pixels are averaged over this many cells along each side
MAGNITUDE_WEIGHT = 10.0  # brings magnitudes to the size of pixels
ROOT_EPSILON = 1e-6  # added under roots, whose slope is infinite at zero


def gabor_filters() -> Tensor:
    """Return Gabor filters (2 * 24, 1, 11, 11), the real parts and then the imaginary ones.

    All sum to zero, so that brightness does not matter.
    """
    ticks = torch.arange(float(KERNEL)) - KERNEL // 2
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    real = []
    imaginary = []
    for deviation, wavelength in SCALES:
        window = torch.exp(-(x**2 + y**2) / (2 * deviation**2))
        window = window / window.sum()
        for turn in range(ORIENTATIONS):
            angle = turn * math.pi / ORIENTATIONS
            phase = 2 * math.pi / wavelength * (x * math.cos(angle) + y * math.sin(angle))
            wave = torch.cos(phase)
            real.append(window * (wave - (window * wave).sum()))
            imaginary.append(window * torch.sin(phase))
    return torch.stack(real + imaginary)[:, None]


class FilterBank(nn.Module):
    """Fixed features of images: edges in 16 cells, and colours in 49.

    Images are resized to `decoder_side`, at most 32 x 32 pixels. Edges are the magnitudes of 24
    Gabor filters on the mean of all channels, averaged over 4 x 4 cells; colours are the pixels of
    each channel, averaged over 7 x 7 cells. The features are the square roots of both, 384 and 49
    for each channel.
    """

    kernels: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.side = decoder_side(spec)
        self.width = len(SCALES) * ORIENTATIONS * EDGE_CELLS**2 + spec.channels * COLOUR_CELLS**2
        # They are constants, and no part of the state.
        self.register_buffer("kernels", gabor_filters(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map normalised images (N, C, H, W) to features (N, width), in full precision."""
        with torch.autocast(x.device.type, enabled=False):
            return self._features(x)

    def _features(self, x: Tensor) -> Tensor:
        mean, std = channel_statistics(self.spec, x.device)
        pixels = (x.float() * std + mean).clamp(0, 1)
        if pixels.shape[-2:] != (self.side, self.side):
            pixels = resize_bilinear(pixels, (self.side, self.side), antialias=True)
        grey = pixels.mean(1, keepdim=True)
        waves = F.conv2d(grey, self.kernels, padding=KERNEL // 2)
        real, imaginary = waves.chunk(2, 1)
        magnitudes = (real.square() + imaginary.square() + ROOT_EPSILON**2).sqrt()
        edges = MAGNITUDE_WEIGHT * average_cells(magnitudes, EDGE_CELLS).flatten(1)
        colours = average_cells(pixels, COLOUR_CELLS).flatten(1)
        return (torch.cat([edges, colours], 1) + ROOT_EPSILON).sqrt()


def filters(spec: Spec) -> Classifier:
    """Return a linear head on the fixed features of a `FilterBank`.

    Only the head is trained.
    """
    body = FilterBank(spec)
    return SplitClassifier(body, nn.Linear(body.width, spec.classes))
