from __future__ import annotations

import numpy as np
import pytest
import torch

from barter.core.clients import Replies
from barter.ops.average import average, entrywise_median, entrywise_trimmed_mean
from barter.ops.distill import kl

P, Q = np.array([0.9, 0.06, 0.04]), np.array([0.3, 0.3, 0.4])


def test_kl_by_hand_and_its_direction() -> None:
    p, q = (torch.tensor(np.log(x))[None].float() for x in (P, Q))
    forward, reverse = float((P * np.log(P / Q)).sum()), float((Q * np.log(Q / P)).sum())
    assert abs(forward - reverse) > 0.05, "an asymmetric pair, or a reversed KL would pass"
    assert kl(p, q).item() == pytest.approx(forward, abs=1e-6)
    assert kl(q, p).item() == pytest.approx(reverse, abs=1e-6)
    assert kl(torch.cat([p, q]), torch.cat([q, q])).item() == pytest.approx(forward / 2, abs=1e-6)
    assert kl(p + 5, p - 3).item() == pytest.approx(0, abs=1e-6)


def test_average_is_weighted_by_examples_and_keeps_types() -> None:
    states = Replies(
        {
            0: {"w": torch.tensor([1.0, 4.0]), "n": torch.tensor(10)},
            1: {"w": torch.tensor([3.0, 0.0]), "n": torch.tensor(21)},
        },
        {0: 30, 1: 10},
        {},
    )
    mean = average(states)
    assert mean["w"].tolist() == [1.5, 3.0]
    assert mean["w"].dtype == torch.float32
    assert (mean["n"].item(), mean["n"].dtype) == (13, torch.int64)  # 12.75 rounded


def test_average_of_equals_is_the_same() -> None:
    state = {"w": torch.randn(5)}
    assert torch.equal(
        average(Replies({0: state, 1: state, 2: state}, {0: 1, 1: 2, 2: 5}, {}))["w"], state["w"]
    )


def test_a_median_is_the_middle_of_each_entry_by_itself() -> None:
    three = torch.tensor([[1.0, 9.0], [2.0, -7.0], [1e6, 0.0]])
    assert entrywise_median(three).tolist() == [2.0, 0.0]
    assert entrywise_median(torch.cat([three, torch.tensor([[4.0, 1.0]])])).tolist() == [
        3.0,
        0.5,
    ], "the mean of two"
    assert entrywise_median(three[:1]).tolist() == [1.0, 9.0]


def test_a_trimmed_mean_leaves_out_both_ends_of_each_entry() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [6.0], [1e6]])
    assert entrywise_trimmed_mean(rows).tolist() == [pytest.approx(11 / 3)], (
        "one of five at each end"
    )
    assert entrywise_trimmed_mean(rows[1:4]).tolist() == [3.0], "one of three"
    assert entrywise_trimmed_mean(rows[:2]).tolist() == [1.5], "none of two"
    assert entrywise_trimmed_mean(rows[:1]).tolist() == [1.0]
    ten = torch.arange(10.0)[:, None] ** 2  # 4 + 9 + 16 + 25 + 36 + 49 without two at each end
    assert entrywise_trimmed_mean(ten).tolist() == [pytest.approx(139 / 6)]


def test_robust_averages_count_all_alike_and_keep_types() -> None:
    states = Replies(
        {
            k: {"w": torch.tensor([w]), "n": torch.tensor(n)}
            for k, w, n in ((0, 1.0, 3), (1, 2.0, 4), (2, -1e6, 900))
        },
        {0: 1, 1: 1, 2: 10**6},
        {},
    )
    for by, wanted in (("median", 1.0), ("trimmed", 1.0)):
        found = average(states, by=by)  # type: ignore[arg-type]
        assert (found["w"].tolist(), found["w"].dtype) == ([wanted], torch.float32)
        assert (found["n"].item(), found["n"].dtype) == (4, torch.int64)
    assert average(states)["w"].item() < -9e5, "which the mean does not"
