"""Crops of photographs as transfer images."""

from __future__ import annotations

import pytest
import torch

from barter.core.images import Spec
from barter.ops import photographs
from barter.ops.photographs import photograph_images

GREY = Spec(1, 8, 8, 10, (0.3,), (0.4,))
COLOUR = Spec(3, 64, 48, 10, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


@pytest.mark.parametrize(("spec", "shape"), [(GREY, (1, 8, 8)), (COLOUR, (3, 32, 32))])
def test_a_seed_makes_images_of_the_tasks_format(spec: Spec, shape: tuple[int, ...]) -> None:
    images = photograph_images(spec, torch.arange(200), 200, seed=4)
    assert images.shape == (200, *shape)
    pixels = images * torch.tensor(spec.std).view(-1, 1, 1) + torch.tensor(spec.mean).view(-1, 1, 1)
    assert float(pixels.min()) == pytest.approx(0, abs=1e-5)
    assert float(pixels.max()) == pytest.approx(1, abs=1e-5)
    assert float(images.flatten(1).std(1).median()) > 0.5, "most are not flat"
    assert float(torch.cdist(images.flatten(1), images.flatten(1)).fill_diagonal_(9).min()) > 0.1
    if spec.channels == 3:
        assert float((images[:, 0] - images[:, 1]).abs().mean()) > 0.1, "coloured"
    again = photograph_images(spec, torch.arange(200), 200, seed=4)
    assert torch.equal(images, again)
    assert not torch.allclose(images, photograph_images(spec, torch.arange(200), 200, seed=5))


def test_any_part_can_be_made_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    every = photograph_images(GREY, torch.arange(50), 50, seed=1)
    index = torch.tensor([40, 3, 3, 17])
    assert torch.allclose(photograph_images(GREY, index, 50, seed=1), every[index], atol=1e-5)
    assert photograph_images(GREY, index[:0], 50, seed=1).shape == (0, 1, 8, 8)
    monkeypatch.setattr(photographs, "CROP_CHUNK", 7)
    assert torch.allclose(photograph_images(GREY, torch.arange(50), 50, seed=1), every, atol=1e-5)


def test_images_have_a_box_of_another_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    with_boxes = photograph_images(COLOUR, torch.arange(40), 40, seed=2)
    monkeypatch.setattr(
        photographs,
        "_box_mask",
        lambda numbers, side: torch.zeros(len(numbers), 1, side, side, dtype=torch.bool),
    )
    without = photograph_images(COLOUR, torch.arange(40), 40, seed=2)
    changed = (with_boxes != without).any(1).float().mean((1, 2))
    assert 0.2 < float(changed.mean()) < 0.6
    assert bool(((with_boxes == without).all(1).flatten(1).any(1))[changed < 0.9].all())


def test_large_crops_do_not_skip_pixels() -> None:
    """A checkerboard of single pixels is grey when it is seen from afar."""
    board = ((torch.arange(427)[:, None] + torch.arange(640)) % 2).float().expand(1, 3, -1, -1)
    levels = [board]
    while min(levels[-1].shape[-2:]) >= 16:
        levels.append(torch.nn.functional.avg_pool2d(levels[-1], 2))
    numbers = torch.full((1, photographs.NUMBERS), 0.5)
    numbers[0, 1] = 1.0  # the largest crop
    original = photographs._pyramids
    try:
        photographs._pyramids = lambda device: [levels]  # type: ignore[assignment]
        assert float(photographs._crop(numbers, 8).std()) < 0.1
    finally:
        photographs._pyramids = original
