"""Resizing, boxes and cells by matrices are what torch computes, and so are their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core import resampling
from barter.core.resampling import average_cells, resize_bilinear, sample_boxes, sum_rows

Operation = Callable[[Tensor], Tensor]
X = torch.tensor([[-0.9, -0.2, 0.1, 0.3], [-1.3, 0.0, 0.5, 1.2]])  # two images, four columns
Y = torch.tensor([[-0.5, 0.0, 0.6], [0.9, 1.0, 1.1]])  # three rows


def boxes_by_grid(images: Tensor) -> Tensor:
    x, y = torch.broadcast_tensors(X[:, None, :], Y[:, :, None])
    grid = torch.stack([x, y], 3)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


CASES: dict[str, tuple[Operation, Operation]] = {
    "larger": (
        partial(resize_bilinear, size=(16, 9)),
        lambda x: F.interpolate(x, (16, 9), mode="bilinear"),
    ),
    "smaller": (
        partial(resize_bilinear, size=(3, 5), antialias=True),
        lambda x: F.interpolate(x, (3, 5), mode="bilinear", antialias=True),
    ),
    "boxes": (partial(sample_boxes, x=X, y=Y), boxes_by_grid),
    "cells": (partial(average_cells, cells=3), lambda x: F.adaptive_avg_pool2d(x, 3)),
    "cells that overlap": (
        partial(average_cells, cells=5),
        lambda x: F.adaptive_avg_pool2d(x, 5),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by_matrices", [False, True])
def test_values_and_gradients_are_those_of_torch(
    case: str, by_matrices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resampling, "gradient_order_varies", lambda images: by_matrices)
    ours, theirs = CASES[case]
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 7, requires_grad=True)
    expected, found = theirs(images), ours(images)
    assert torch.allclose(found, expected, atol=1e-5)
    weights = torch.randn_like(expected)
    (one,) = torch.autograd.grad((expected * weights).sum(), images)
    (other,) = torch.autograd.grad((found * weights).sum(), images)
    assert torch.allclose(one, other, atol=1e-5)
    if not by_matrices:
        assert torch.equal(found, expected), "a CPU computes what it always did"


def test_products_keep_precision_and_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "gradient_order_varies", lambda images: True)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        full = resize_bilinear(images, (16, 16))
        half = resize_bilinear(images.bfloat16(), (16, 16))
    assert full.dtype == torch.float32, "images are not rounded to the precision of networks"
    assert torch.allclose(full, F.interpolate(images, (16, 16), mode="bilinear"), atol=1e-5)
    assert half.dtype == torch.bfloat16
    assert full.is_contiguous(memory_format=torch.channels_last)


def test_sums_of_classes() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    labels = torch.tensor([2, 0, 2])
    assert sum_rows(rows, labels, 4).tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]
    assert sum_rows(rows[:, None], labels, 3).shape == (3, 1, 2)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_gradients_on_a_gpu_are_the_same_in_every_run(case: str) -> None:
    ours, theirs = CASES[case]
    if case == "boxes":
        ours = partial(sample_boxes, x=X.cuda().repeat(32, 1), y=Y.cuda().repeat(32, 1))
    torch.manual_seed(0)
    images = torch.randn(64 if case == "boxes" else 256, 3, 8, 7, device="cuda", requires_grad=True)
    found = ours(images)
    if case != "boxes":
        assert torch.allclose(found, theirs(images), atol=2e-3), "TF32 may round products"
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((ours(images) * weights).sum(), images)[0] for _ in range(20)]
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


@pytest.mark.cuda
def test_sums_of_classes_on_a_gpu_are_the_same_in_every_run() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5000, 64, device="cuda")
    labels = torch.randint(10, (5000,), device="cuda")
    sums = [sum_rows(rows, labels, 10) for _ in range(20)]
    assert all(torch.equal(sums[0], other) for other in sums[1:])
    on_cpu = sum_rows(rows.double().cpu(), labels.cpu(), 10)
    assert torch.allclose(sums[0].double().cpu(), on_cpu, atol=1e-4)
