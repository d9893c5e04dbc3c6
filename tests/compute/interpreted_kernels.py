"""The kernels against torch, interpreted on the CPU: TRITON_INTERPRET=1 pytest tests/compute/interpreted_kernels.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

from barter.compute import launch
from tests.compute.test_fused import far, images, normalised, pooled

ACTS = ["none", "relu", "leaky", "relu6", "silu", "hardswish"]
SHAPES = [(5, 7, 3, 4), (2, 24, 2, 2), (4, 70, 6, 6), (3, 64, 9, 5)]
WINDOWS = [(3, 2, 1, False), (3, 2, 0, True), (3, 1, 1, True), (2, 2, 0, True), (2, 2, 0, False)]


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an integer of an array with one element.

    Triton does so in a way that numpy 2.4 refuses unless the array has no dimension. Triton 3.3 patches
    tensors without a scope, and is not combined with such a numpy.
    """
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scopes: Any) -> None:
        original(tensor, *scopes)
        for scope in scopes:
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_normalisation_is_torchs(act: str, training: bool) -> None:
    for shape in (
        SHAPES if act == "none" else SHAPES[:2]
    ):  # how pixels are cut into tiles does not depend on it
        assert normalised(launch, shape, act, False, training, ("cpu", torch.float32)) < 5e-6


@pytest.mark.parametrize("training", [True, False])
def test_a_residual_sum_is_torchs(training: bool) -> None:
    for shape in SHAPES:
        assert normalised(launch, shape, "relu", True, training, ("cpu", torch.float32)) < 5e-6


def test_what_is_not_a_number_stays_visible() -> None:
    x = images(2, 8, 2, 2)
    x[0, 3, 0, 0] = float("nan")
    arrived = torch.zeros(1, dtype=torch.int32)
    for act in ACTS:
        y = launch.batch_norm(x, None, None, None, None, arrived, (True, 0.0, 1e-5, act, 0.2))
        assert y[:, 3].isnan().all()
        assert not y[:, :3].isnan().any()
    y = launch.max_pool(x, 2, 2, 0, (1, 1))
    assert y.isnan().nonzero()[:, :2].tolist() == [[0, 3]]


def test_an_infinite_gradient_that_does_not_pass_leaves_nothing() -> None:
    x, arrived = images(4, 8, 3, 3).requires_grad_(), torch.zeros(1, dtype=torch.int32)
    for act in ("relu", "relu6"):
        y = launch.batch_norm(x, None, None, None, None, arrived, (True, 0.0, 1e-5, act, 0.0))
        dy = torch.ones_like(y)
        dy[y == 0] = float("inf")
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.isfinite().all()


def test_a_large_mean_does_not_cost_the_variance() -> None:
    x = images(64, 8, 4, 4) + 1000
    y = launch.batch_norm(
        x, None, None, None, None, torch.zeros(1, dtype=torch.int32), (True, 0.0, 1e-5, "none", 0.0)
    )
    assert far(y, F.batch_norm(x.double(), None, None, training=True)) < 1e-4


@pytest.mark.parametrize("window", WINDOWS)
def test_pooling_is_torchs(window: tuple[int, int, int, bool]) -> None:
    pooled(launch, window, ("cpu", torch.float32))


def test_only_what_is_added_may_want_a_gradient_of_a_gradient() -> None:
    x, added = images(4, 8, 3, 3), images(4, 8, 3, 3, seed=1).requires_grad_()
    arrived = torch.zeros(1, dtype=torch.int32)
    y = launch.batch_norm(x, None, None, added, None, arrived, (True, 0.0, 1e-5, "relu", 0.0))
    (g,) = torch.autograd.grad(y.square().sum(), added, create_graph=True)
    assert torch.equal(g, 2 * y)
    assert g.requires_grad


@pytest.mark.parametrize("added", [True, False])
def test_a_gradient_has_a_gradient(added: bool) -> None:
    weight, bias = torch.rand(8) + 0.5, torch.randn(8)
    r = images(4, 8, 3, 3, seed=1)

    def curvature(mine: bool) -> list[Tensor]:
        x, w = images(4, 8, 3, 3).requires_grad_(), weight.clone().requires_grad_()
        if mine:
            arrived = torch.zeros(1, dtype=torch.int32)
            settings = True, 0.0, 1e-5, "relu", 0.0
            y = launch.batch_norm(x, w, bias, r if added else None, None, arrived, settings)
        else:
            z = F.batch_norm(x, None, None, w, bias, training=True)
            y = F.relu(z + r if added else z)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.square().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    for one, other in zip(curvature(True), curvature(False), strict=True):
        assert far(one, other) < 1e-4
