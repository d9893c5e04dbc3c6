"""Fixed filters: what they respond to, and that nothing about them is random."""

from __future__ import annotations

import math

import pytest
import torch

from barter.core.images import Spec
from barter.models.filters import (
    COLOUR_CELLS,
    EDGE_CELLS,
    ORIENTATIONS,
    ROOT_EPSILON,
    SCALES,
    FilterBank,
)
from barter.models.generators import PixelDecoder
from barter.models.zoo import build_network

EDGES = len(SCALES) * ORIENTATIONS * EDGE_CELLS**2


def grey(side: int) -> Spec:
    return Spec(1, side, side, 10, (0.25,), (0.5,))


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels - 0.25) / 0.5


@pytest.mark.parametrize("scale", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 2, 5])
def test_a_grating_excites_the_filter_of_its_wavelength_and_direction(
    scale: int, turn: int
) -> None:
    wavelength = SCALES[scale][1]
    angle = turn * math.pi / ORIENTATIONS
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    phase = 2 * math.pi / wavelength * (x * math.cos(angle) + y * math.sin(angle))
    image = 0.5 + 0.4 * torch.cos(phase)
    found = FilterBank(grey(32))(normalise(image)[None, None])[0, :EDGES]
    inner = found.view(len(SCALES), ORIENTATIONS, EDGE_CELLS, EDGE_CELLS)[:, :, 1:3, 1:3].mean(
        (2, 3)
    )
    assert int(inner.argmax()) == scale * ORIENTATIONS + turn


def test_colours_are_roots_of_means_of_cells() -> None:
    spec = Spec(3, 14, 14, 10, (0.0,) * 3, (1.0,) * 3)
    image = torch.zeros(1, 3, 14, 14)
    image[0, 1, :2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    colours = FilterBank(spec)(image)[0, EDGES:].view(3, COLOUR_CELLS, COLOUR_CELLS)
    assert float(colours[1, 0, 0]) == pytest.approx(math.sqrt(0.5 + ROOT_EPSILON))
    rest = colours.clone()
    rest[1, 0, 0] = 0.0
    assert float(rest.max()) == pytest.approx(math.sqrt(ROOT_EPSILON))


def test_features_are_constants_of_the_format_and_only_the_head_is_trained() -> None:
    one, other = build_network("filters", grey(28)), build_network("filters", grey(28))
    x = torch.randn(3, 1, 28, 28)
    assert torch.equal(one.features(x), other.features(x))
    assert [name for name, _ in one.named_parameters()] == ["head.weight", "head.bias"]
    assert set(one.state_dict()) == {"head.weight", "head.bias"}
    assert not torch.equal(one(x), other(x))


def test_large_images_are_reduced() -> None:
    image = torch.rand(1, 1, 16, 16)
    large = image.repeat_interleave(4, 2).repeat_interleave(4, 3)
    small = torch.nn.functional.interpolate(large, (32, 32), mode="bilinear", antialias=True)
    bank = FilterBank(grey(64))
    assert torch.allclose(bank(normalise(large)), FilterBank(grey(32))(normalise(small)), atol=1e-5)


def test_decoded_pixels_are_between_black_and_white() -> None:
    torch.manual_seed(0)
    decoder = PixelDecoder(6, grey(12))
    with torch.no_grad():
        pixels = decoder(100 * torch.randn(20, 1, 6)) * 0.5 + 0.25
    assert pixels.shape == (20, 1, 12, 12)
    assert 0 <= float(pixels.min()) < 0.3
    assert 0.7 < float(pixels.max()) <= 1
    restored = PixelDecoder.from_state(decoder.state_dict(), grey(12))
    codes = torch.randn(2, 1, 6)
    assert torch.equal(restored(codes), decoder.eval()(codes))
