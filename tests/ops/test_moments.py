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
    LARGEST_CHANGE,
    LEAST_VARIANCE,
    UNIT,
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
    unit = math.sqrt(4.5) / 2

    def is_near(value: Tensor, expected: list[float] | list[list[float]]) -> bool:
        return torch.allclose(value * unit, torch.tensor(expected).double(), rtol=1e-6)

    assert is_near(moments["counts"], [0.5, 1.0, 0.0])
    assert is_near(moments["sums"], [[1.0, 0.0], [0.6, 1.8], [0.0, 0.0]])
    assert is_near(moments["squares"], [[1.36, 0.48], [0.48, 1.64]])


@given(
    st.integers(0, 1000),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.5, 1.0, 1e6]),
    st.sampled_from([0.3, 1.0, float("nan"), float("inf"), -1e30]),
)
def test_a_replaced_image_changes_moments_by_two_at_most(
    seed: int, before: int, after: int, length: float, other_length: float
) -> None:
    x = random_rows(8, 3, seed)
    y = torch.randint(5, (8,), generator=torch.Generator().manual_seed(seed))
    x[0] *= length
    y[0] = before
    replaced, replaced_y = x.clone(), y.clone()
    replaced[0] = other_length * random_rows(1, 3, seed + 1)[0]
    replaced_y[0] = after
    # In single precision, as they are released.
    change = flat(sum_moments(x.float(), y, 5)) - flat(sum_moments(replaced.float(), replaced_y, 5))
    assert float(change.double().norm()) <= 2.0


def test_the_bound_is_reached_and_never_exceeded() -> None:
    def change(x: list[float], other: list[float], label: int) -> float:
        one, two = torch.tensor([x]).double(), torch.tensor([other]).double()
        first = sum_moments(one, torch.tensor([0]), 2)
        return float((flat(first) - flat(sum_moments(two, torch.tensor([label]), 2))).norm())

    # Of one class at a cosine of -1/2, of two classes at a right angle.
    assert change([1.0, 0.0], [-0.5, 0.75**0.5], 0) == pytest.approx(2.0, rel=1e-6)
    assert change([1.0, 0.0], [0.0, 1.0], 1) == pytest.approx(2.0, rel=1e-6)
    largest = 0.0
    for cosine in torch.linspace(-1, 1, 41).tolist():
        sine = (1 - cosine**2) ** 0.5
        for length in torch.linspace(0, 1, 11).tolist():
            for label in (0, 1):
                other = [length * cosine, length * sine]
                largest = max(largest, *(change([n, 0.0], other, label) for n in (0.5, 0.9, 1.0)))
    assert largest <= 2.0
    assert pytest.approx(2 * UNIT) == LARGEST_CHANGE


def test_rounding_to_single_precision_stays_within_the_bound() -> None:
    changes = []
    for seed in range(10):
        x = random_rows(2000, 3, seed).float()
        y = torch.zeros(2000, dtype=torch.long)
        replaced = x.clone()
        x[0] = torch.tensor([1.0, 0.0, 0.0])
        replaced[0] = torch.tensor([-0.5, 0.75**0.5, 0.0])
        one, other = sum_moments(x, y, 1), sum_moments(replaced, y, 1)
        changes.append(float((flat(one).double() - flat(other).double()).norm()))
    # Without the margin for rounding, about every other one would exceed the bound.
    assert min(changes) > 1.99
    assert max(changes) <= 2.0


def test_the_division_among_clients_does_not_matter() -> None:
    x = random_rows(60, 5, 0)
    y = torch.arange(60) % 3
    whole = sum_moments(x, y, 3)
    parts = [sum_moments(x[chosen], y[chosen], 3) for chosen in (y == 0, y == 1, y == 2)]
    for name, value in add_moments(parts).items():
        assert torch.allclose(value, whole[name], rtol=1e-4)  # type: ignore[literal-required,arg-type]


def test_gaussians_by_hand() -> None:
    x = torch.cat([X, torch.tensor([[1.0, 0.0]] * 4)]).double()
    y = torch.cat([Y, torch.tensor([2] * 4)])
    alone = shared_gaussians(sum_moments(X.double(), Y, 3), 12)
    assert alone["known"].tolist() == [True, True, False]
    assert torch.allclose(alone["means"], torch.tensor([[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]))
    # x xᵀ has the mean I / 2, the means contribute a matrix of 1/4: variance 1/2 across the means,
    # and none along them, where the discriminant takes the least variance and nothing is sampled.
    covariance = alone["factor"] @ alone["factor"].T
    across, along = torch.tensor([1.0, -1.0]) / 2**0.5, torch.tensor([1.0, 1.0]) / 2**0.5
    assert float(across @ covariance @ across) == pytest.approx(0.5, rel=1e-4)
    assert float(along @ covariance @ along) == pytest.approx(0.0, abs=1e-6)
    assert torch.allclose(alone["weights"][0], torch.tensor(0.5 / LEAST_VARIANCE), rtol=1e-3)
    assert float(alone["bias"][0]) == pytest.approx(-0.25 / LEAST_VARIANCE, rel=1e-3)
    # A class of four images is not described, and its mean is not used.
    few = shared_gaussians(sum_moments(x, y, 3), 16)
    assert few["known"].tolist() == [True, True, False]
    assert not few["means"][2].any()
    assert not few["weights"][2].any()


def test_noise_in_means_does_not_make_small_classes_less_likely() -> None:
    """Biases are on average what they are without noise, though classes differ in size."""
    size = 8
    x = random_rows(1200, size, seed=0)
    y = torch.tensor([0] * 1000 + [1] * 200)
    moments = sum_moments(x, y, 2)
    exact = shared_gaussians(moments, 1200)
    repeats = 200
    noisy_biases = torch.stack(
        [shared_gaussians(noisy(moments, 4.0, seed), 1200)["bias"] for seed in range(repeats)]
    ).double()
    standard_error = noisy_biases.std(0) / repeats**0.5
    # Noise of a deviation of 4 adds (4 UNIT / 200)² to each of eight coordinates, whose variance is
    # 1/8: without the correction the bias of the small class would be off by this.
    off = 0.5 * size * (4 * UNIT / 200) ** 2 * size
    assert off > 10 * float(standard_error[1])
    assert torch.all((noisy_biases.mean(0) - exact["bias"]).abs() < 4 * standard_error)


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
    assert not shared_gaussians(noisy(nothing, 3.0, seed), 0)["known"].any()
    x = random_rows(3005, 40, seed)
    y = torch.tensor([0] * 1500 + [1] * 1500 + [2] * 5)
    found = shared_gaussians(noisy(sum_moments(x, y, 4), 3.0, seed), 3005)
    # Five images are less than a deviation of the noise in a count.
    assert found["known"].tolist() == [True, True, False, False]
    assert 3.0 * UNIT / COUNT_WEIGHT > 5
    assert all(torch.isfinite(value).all() for value in found.values())  # type: ignore[call-overload]


def test_samples_have_norm_one_and_lie_around_their_means() -> None:
    model = shared_gaussians(sum_moments(X.double(), Y, 2), 12)
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


def test_five_images_are_enough_however_they_are_divided() -> None:
    x = random_rows(5, 3, 0)
    y = torch.zeros(5, dtype=torch.long)
    for sizes in ([5], [2, 3], [4, 1], [1, 1, 1, 1, 1]):
        rows = zip(torch.split(x.float(), sizes), torch.split(y, sizes), strict=True)
        joint = add_moments(sum_moments(part, labels, 2) for part, labels in rows)
        assert shared_gaussians(joint, 5)["known"].tolist() == [True, False]


def test_classes_that_are_not_described_do_not_spoil_the_covariance() -> None:
    x = random_rows(1000, 6, 0)
    y = torch.cat([torch.zeros(500), torch.ones(300), 2 + torch.arange(200) // 4]).long()
    model = shared_gaussians(sum_moments(x, y, 52), 1000)
    assert int(model["known"].sum()) == 2
    means = torch.stack([x[y == label].mean(0) for label in (0, 1)])
    between = (means.T * torch.tensor([0.5, 0.3]).double()) @ means
    expected = x.T @ x / 1000 - between
    found = (model["factor"] @ model["factor"].T).double()
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("width", [1, 4])
def test_features_without_variance_are_whitened_to_finite_numbers(width: int) -> None:
    whitening = fit_whitening(torch.full((10, width), 3.0), components=2)
    assert torch.isfinite(whitening["projection"]).all()
    assert not whiten_features(torch.full((2, width), 3.0), whitening).any()
