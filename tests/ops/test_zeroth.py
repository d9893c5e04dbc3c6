from __future__ import annotations

import pytest
import torch

from barter.ops.zeroth import (
    DirectionKind,
    directional_estimate,
    loss_estimate,
    sample_directions,
    waves,
)


def test_directions_are_on_the_sphere_or_gaussian() -> None:
    x = torch.zeros(5, 3, 4, 4)
    sphere = sample_directions(x, 7, "sphere")
    assert sphere.shape == (7, 5, 3, 4, 4)
    assert torch.allclose(sphere.flatten(2).norm(dim=2), torch.ones(7, 5))
    assert sample_directions(x, 200, "gaussian").std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kind", ["sphere", "gaussian"])
def test_on_a_linear_function_the_expected_estimate_is_the_gradient(kind: DirectionKind) -> None:
    torch.manual_seed(0)
    x, a = torch.randn(2, 6), torch.randn(2, 6)
    u = sample_directions(x, 40_000, kind)
    differences = ((x + 0.5 * u) * a).sum((1, 2)) - (x * a).sum()
    assert torch.allclose(loss_estimate(u, differences, 0.5, kind), a, atol=0.15)


def test_of_few_frequencies_the_expected_estimate_is_the_smooth_part_of_the_gradient() -> None:
    torch.manual_seed(0)
    x, a = torch.zeros(1, 1, 4, 6), torch.randn(1, 1, 4, 6)
    kinds: tuple[DirectionKind, DirectionKind] = ("sphere", "gaussian")
    for kind in kinds:
        u = sample_directions(x, 40_000, kind, 2)
        estimate = loss_estimate(u, (0.5 * u * a).flatten(1).sum(1), 0.5, kind, 2)
        high, wide = waves(4, 2, x.device), waves(6, 2, x.device)
        assert torch.allclose(estimate, high @ (high.T @ a @ wide) @ wide.T, atol=0.05)


def test_waves_are_orthonormal_and_the_lowest_is_even() -> None:
    rows = waves(8, 8, torch.device("cpu"))
    assert torch.allclose(rows.T @ rows, torch.eye(8), atol=1e-6)
    assert torch.allclose(rows[:, 0], torch.full((8,), 8**-0.5))


@pytest.mark.parametrize("kind", ["sphere", "gaussian"])
def test_with_many_directions_the_estimate_is_that_of_autograd(kind: DirectionKind) -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 3)
    x = torch.randn(4, 8, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    y = torch.tensor([0, 1, 2, 0])
    out = f(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    cotangent, exact = torch.autograd.grad(loss, (out, x))
    cosines = []
    for q in (10, 100, 10_000):
        u = sample_directions(x, q, kind)
        outputs = f(x.detach() + 1e-3 * u)
        estimate = directional_estimate(u, outputs, f(x.detach()), cotangent, 1e-3, kind)
        cosines.append(torch.cosine_similarity(estimate.flatten(), exact.flatten(), 0).item())
    assert cosines[0] < cosines[1] < cosines[2]
    assert cosines[2] > 0.99
    assert torch.allclose(estimate, exact, atol=0.05)


def test_logit_differences_are_less_noisy_than_one_for_the_batch() -> None:
    """With B samples the variance of the batch's scalar difference is about B times as large."""
    torch.manual_seed(0)
    w, y = torch.randn(30, 3), torch.arange(64) % 3
    x = torch.randn(64, 30, requires_grad=True)
    out = x @ w
    loss = torch.nn.functional.cross_entropy(out, y)
    cotangent, exact = torch.autograd.grad(loss, (out, x))
    u = sample_directions(x, 10, "sphere")
    points = x.detach() + 1e-2 * u
    losses = torch.stack([torch.nn.functional.cross_entropy(p @ w, y) for p in points])
    scalar = loss_estimate(u, losses - loss.detach(), 1e-2, "sphere")
    sampled = directional_estimate(u, points @ w, out.detach(), cotangent, 1e-2, "sphere")
    similarity = [
        torch.cosine_similarity(e.flatten(), exact.flatten(), 0).item() for e in (scalar, sampled)
    ]
    assert similarity[1] > 3 * abs(similarity[0])
