"""Class moments: sums of terms of norm 1, and Gaussians with exact numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from barter.ops.moments import (
    COUNT_WEIGHT,
    LEAST_VARIANCE,
    TERM_NORM,
    Moments,
    add_moments,
    fit_whitening,
    sample_features,
    shared_gaussians,
    sum_moments,
    whiten_features,
)

# Two classes of six images each, and a third one of four.
CORNERS = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(3, 1)
X = torch.cat([CORNERS, -CORNERS])
Y = torch.tensor([0] * 6 + [1] * 6)


def random_rows(n: int, width: int, seed: int) -> Tensor:
    return F.normalize(
        torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).double(), dim=1
    )


def flat(moments: Moments) -> Tensor:
    return torch.cat([moments["counts"], moments["sums"].flatten(), moments["squares"].flatten()])


def test_sums_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    moments = sum_moments(x, torch.tensor([0, 1, 1]), classes=3)
    norm = math.sqrt(0.3**2 + 1 + 1)
    assert torch.allclose(moments["counts"] * norm, torch.tensor([0.3, 0.6, 0.0]).double())
    assert torch.allclose(
        moments["sums"] * norm, torch.tensor([[1.0, 0.0], [0.6, 1.8], [0.0, 0.0]]).double()
    )
    assert torch.allclose(
        moments["squares"] * norm, torch.tensor([[1.36, 0.48], [0.48, 1.64]]).double()
    )


@given(st.integers(0, 1000), st.integers(0, 4), st.integers(0, 4))
def test_an_image_adds_a_term_of_norm_one_and_its_replacement_changes_two_at_most(
    seed: int, before: int, after: int
) -> None:
    x = random_rows(8, 6, seed)
    y = torch.randint(5, (8,), generator=torch.Generator().manual_seed(seed))
    term = flat(sum_moments(x[:1], torch.tensor([before]), 5))
    assert float(term.norm()) == pytest.approx(1.0)
    y[0] = before
    replaced = torch.cat([random_rows(1, 6, seed + 1), x[1:]])
    replaced_y = y.clone()
    replaced_y[0] = after
    change = flat(sum_moments(x, y, 5)) - flat(sum_moments(replaced, replaced_y, 5))
    assert float(change.norm()) <= 2.0 + 1e-12


def test_the_division_among_clients_does_not_matter() -> None:
    x = random_rows(60, 5, 0)
    y = torch.arange(60) % 3
    whole = sum_moments(x, y, 3)
    parts = [sum_moments(x[chosen], y[chosen], 3) for chosen in (y == 0, y == 1, y == 2)]
    for name, value in add_moments(parts).items():
        assert torch.allclose(value, whole[name])  # type: ignore[literal-required,arg-type]


def test_gaussians_by_hand() -> None:
    x = torch.cat([X, torch.tensor([[1.0, 0.0]] * 4)]).double()
    y = torch.cat([Y, torch.tensor([2] * 4)])
    alone = shared_gaussians(sum_moments(X.double(), Y, 3))
    assert alone["known"].tolist() == [True, True, False]
    assert torch.allclose(alone["means"], torch.tensor([[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]))
    # x xᵀ has the mean I / 2, the means contribute a matrix of 1/4: variance 1/2 across the means,
    # and none along them, where the discriminant takes the least variance and nothing is sampled.
    covariance = alone["factor"] @ alone["factor"].T
    across, along = torch.tensor([1.0, -1.0]) / 2**0.5, torch.tensor([1.0, 1.0]) / 2**0.5
    assert float(across @ covariance @ across) == pytest.approx(0.5)
    assert float(along @ covariance @ along) == pytest.approx(0.0, abs=1e-6)
    assert torch.allclose(alone["weights"][0], torch.tensor(0.5 / LEAST_VARIANCE), rtol=1e-3)
    assert float(alone["bias"][0]) == pytest.approx(-0.25 / LEAST_VARIANCE, rel=1e-3)
    # A class of four images is not described, and its mean is not used.
    few = shared_gaussians(sum_moments(x, y, 3))
    assert few["known"].tolist() == [True, True, False]
    assert not few["means"][2].any()
    assert not few["weights"][2].any()


def noisy(moments: Moments, deviation: float, seed: int) -> Moments:
    generator = torch.Generator().manual_seed(seed)

    def add(value: Tensor) -> Tensor:
        return value + deviation * torch.randn(value.shape, generator=generator).double()

    return {
        "counts": add(moments["counts"]),
        "sums": add(moments["sums"]),
        "squares": add(moments["squares"]),
    }


@pytest.mark.parametrize("seed", range(5))
def test_noise_hides_small_classes_and_alone_describes_none(seed: int) -> None:
    nothing = sum_moments(torch.zeros(0, 40).double(), torch.zeros(0, dtype=torch.long), 4)
    assert not shared_gaussians(noisy(nothing, 3.0, seed))["known"].any()
    x = random_rows(3010, 40, seed)
    y = torch.tensor([0] * 1500 + [1] * 1500 + [2] * 10)
    found = shared_gaussians(noisy(sum_moments(x, y, 4), 3.0, seed))
    # Ten images are about half a deviation of the noise in a count.
    assert found["known"].tolist() == [True, True, False, False]
    assert 3.0 * TERM_NORM / COUNT_WEIGHT > 10
    assert all(torch.isfinite(value).all() for value in found.values())  # type: ignore[call-overload]


def test_samples_have_norm_one_and_lie_around_their_means() -> None:
    model = shared_gaussians(sum_moments(X.double(), Y, 2))
    labels = torch.tensor([0, 1]).repeat(500)
    noise = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    samples = sample_features(model, labels, noise)
    assert torch.allclose(samples.norm(dim=1), torch.ones(1000))
    assert float(samples[labels == 0].sum(1).mean()) > 0.5
    logits = F.linear(samples, model["weights"], model["bias"])
    assert float((logits.argmax(1) == labels).float().mean()) > 0.9


def test_whitening() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 3, generator=generator) * torch.tensor([3.0, 1.0, 0.5]) + 7
    whitening = fit_whitening(rows, components=5)
    assert whitening["projection"].shape == (3, 5)
    components = (rows - whitening["center"]) @ whitening["projection"]
    variances = components.var(0)
    # The largest variance is about 9, and 1 % of it is added to all: 9 / 9.09, 1 / 1.09, 0.25 / 0.34.
    assert torch.allclose(variances, torch.tensor([0.990, 0.917, 0.735, 0.0, 0.0]), atol=0.03), (
        variances
    )
    correlations = torch.corrcoef(components[:, :3].T) - torch.eye(3)
    assert float(correlations.abs().max()) < 1e-3
    assert torch.allclose(whiten_features(rows, whitening).norm(dim=1), torch.ones(2000))
