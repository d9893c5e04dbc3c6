from __future__ import annotations

import numpy as np
import pytest
import torch

from barter.core.clients import Replies
from barter.ops.average import average
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
    assert torch.equal(average(Replies({0: state, 1: state, 2: state}, {0: 1, 1: 2, 2: 5}, {}))["w"], state["w"])
