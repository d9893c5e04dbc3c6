"""Measures of attacks, on numbers small enough to check on paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from barter.attacks import membership
from barter.attacks.measures import (
    auc_with_error,
    is_nearest_original,
    psnr,
    psnr_of_best_match,
    share_error,
    ssim,
    true_positive_rate,
)


def flat(*values: float) -> torch.Tensor:
    return torch.stack([torch.full((1, 8, 8), value) for value in values])


def test_psnr_is_that_of_the_mean_square() -> None:
    assert psnr(flat(0.5, 0.5), flat(0.6, 0.5)).tolist() == pytest.approx([20.0, 100.0], abs=1e-4)


def test_the_best_match_is_the_nearest_image() -> None:
    found = psnr_of_best_match(flat(0.5, 0.0), flat(0.9, 0.6, 0.1))
    assert found.tolist() == pytest.approx([20.0, 20.0], abs=1e-3)


def test_ssim_of_flat_images_is_that_of_their_means() -> None:
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert float(ssim(flat(0.2), flat(0.6))) == pytest.approx(expected, abs=1e-6)


def test_ssim_of_one_window_by_its_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(1, 1, 7, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    x, y = a.flatten(), b.flatten()
    both = ((x - x.mean()) * (y - y.mean())).sum() / 48
    top = (2 * x.mean() * y.mean() + 1e-4) * (2 * both + 9e-4)
    expected = top / ((x.mean() ** 2 + y.mean() ** 2 + 1e-4) * (x.var() + y.var() + 9e-4))
    assert float(ssim(a, b)) == pytest.approx(float(expected), abs=1e-12)
    assert float(ssim(a, a)) == pytest.approx(1.0, abs=1e-12)


def test_an_image_is_found_where_no_other_is_nearer() -> None:
    every = flat(0.0, 0.4, 1.0)
    assert is_nearest_original(every, torch.tensor([1, 2]), flat(0.5, 0.6)).tolist() == [
        True,
        False,
    ]


def test_auc_counts_ties_half() -> None:
    members, others = torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0])
    assert auc_with_error(members, others)[0] == 3.5 / 4
    assert auc_with_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]))[0] == 0.5


def test_the_error_of_an_auc_is_hanley_and_mcneils() -> None:
    members, others = torch.arange(100.0), torch.arange(100.0)
    area, error = auc_with_error(members, others)
    assert (area, error) == (0.5, pytest.approx(0.0409, abs=1e-4))


def test_true_positives_are_those_above_all_but_a_few_others() -> None:
    others = torch.arange(100.0)
    members = torch.tensor([98.0, 98.5, 99.5, 0.0])
    assert true_positive_rate(members, others, 0.01) == 0.5  # one of the others may be above
    assert true_positive_rate(members, others, 0.001) == 0.25  # none
    assert (
        true_positive_rate(torch.zeros(4), torch.zeros(100), 0.01) == 0.0
    )  # equal scores tell nothing
    assert true_positive_rate(members, others, 1.0) == 1.0


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_auc_changes_sides(members: list[int], others: list[int]) -> None:
    one, other = torch.tensor(members), torch.tensor(others)
    assert auc_with_error(one, other)[0] == pytest.approx(1 - auc_with_error(other, one)[0])
    assert true_positive_rate(one, other, 0.001) <= true_positive_rate(one, other, 0.5)


def test_shares_are_compared_not_counts() -> None:
    assert share_error(torch.tensor([2, 2, 0]), torch.tensor([50, 50, 0])) == 0
    assert share_error(torch.tensor([1, 0, 0]), torch.tensor([0, 3, 1])) == 2
    assert share_error(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1])) == 1


@pytest.mark.parametrize(
    ("others", "rates"), [(99, []), (100, ["1.0%"]), (999, ["1.0%"]), (1000, ["1.0%", "0.1%"])]
)
def test_rates_below_one_image_are_left_out(others: int, rates: list[str]) -> None:
    values = membership._values(torch.ones(10), torch.zeros(others))
    assert values.keys() == {"auc", "error", *(f"tpr_{rate}" for rate in rates)}
