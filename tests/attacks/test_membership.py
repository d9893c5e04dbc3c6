"""Membership inference: who is compared with whom, and the scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from barter.attacks.membership import make_pool, rmia_scores, shadow_indices
from barter.core.images import Images, Spec

SPEC = Spec(1, 2, 2, 3, (0.5,), (0.5,))


def images(labels: list[int], first: int) -> Images:
    """Each with a number of its own as its pixels."""
    pixels = (
        torch.arange(first, first + len(labels), dtype=torch.uint8)
        .view(-1, 1, 1, 1)
        .expand(-1, 1, 2, 2)
    )
    return Images(pixels, torch.tensor(labels), SPEC)


def test_a_pool_has_of_each_class_as_many_of_others() -> None:
    own, others = images([0, 0, 0, 1, 1, 1], 0), images([0, 0, 1, 1, 1, 1, 1, 2], 100)
    made = make_pool(own, others, seed=3)
    inside = made.candidates < made.members
    assert made.members == 6
    assert made.images.pixels[:6].equal(own.pixels)
    for side in (made.candidates[inside], made.candidates[~inside]):
        assert made.images.labels[side].bincount(minlength=3).tolist() == [2, 3, 0]
        assert len(side.unique()) == 5
    assert bool((made.images.pixels[made.candidates[~inside]] >= 100).all())


@given(st.integers(2, 40), st.integers(1, 4), st.integers(0, 99))
def test_every_image_is_in_half_of_the_shadows(count: int, pairs: int, seed: int) -> None:
    found = shadow_indices(count, 2 * pairs, seed)
    assert len(found) == 2 * pairs
    assert torch.cat(found).bincount(minlength=count).tolist() == [pairs] * count


def test_a_score_is_the_share_of_public_images_that_an_image_is_above() -> None:
    own = torch.tensor([0.8, 0.2]).log()
    shadows = torch.tensor([[0.4, 0.4], [0.4, 0.8]]).log()  # means 0.4 and 0.6: ratios 2 and 1/3
    public, theirs = (
        torch.tensor([0.5, 0.3, 0.9, 0.2]).log(),
        torch.full((2, 4), math.log(0.5)),
    )  # 1, 0.6, 1.8, 0.4
    assert rmia_scores(own, shadows, public, theirs).tolist() == [1.0, 0.0]
    assert rmia_scores(own[1:] + math.log(2), shadows[:, 1:], public, theirs).tolist() == [
        0.5
    ]  # 2/3: above 0.6 and 0.4


def test_equal_counts_as_above() -> None:
    half = torch.full((3,), 0.5).log()
    assert rmia_scores(half, half[None], half, half[None]).tolist() == [1.0, 1.0, 1.0]


def test_how_likely_an_image_is_by_itself_does_not_count() -> None:
    hard, easy = torch.tensor([0.1, 0.9]).log(), torch.tensor([[0.05, 0.45]]).log()
    public, theirs = torch.linspace(-1, 1, 11), torch.zeros(1, 11)
    scores = rmia_scores(hard, easy, public, theirs)
    assert (
        scores[0] == scores[1] == pytest.approx(9 / 11)
    )  # log 2 = 0.69 is above -1, -0.8, ..., 0.6
