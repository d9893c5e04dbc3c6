from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from barter.core.errors import PayloadError
from barter.core.wire import Wire


def test_counts_by_method_client_and_direction() -> None:
    wire = Wire()
    wire.carry({"x": torch.zeros(10)}, "learn", 3, "up")
    wire.carry((torch.zeros(2, dtype=torch.uint8),), "learn", 3, "down")
    wire.carry(torch.zeros(10), "learn", 3, "up")
    wire.carry(1.5, "teach", 4, "up")
    taken = wire.take_bytes()
    assert taken == {("learn", 3, "up"): 80, ("learn", 3, "down"): 2, ("teach", 4, "up"): 8}
    assert not wire.take_bytes()


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), torch.tensor([1.0, math.nan]), torch.tensor(-math.inf)]
)
def test_nonsense_is_refused_and_located(bad: Any) -> None:
    with pytest.raises(PayloadError, match=r"learn\.w\[1\] holds NaN or infinity"):
        Wire().carry({"v": torch.ones(2), "w": [torch.ones(1), bad]}, "learn", 0, "down")


def test_unless_the_algorithm_declares_it() -> None:
    wire = Wire(frozenset({"learn"}))
    assert math.isnan(wire.carry(float("nan"), "learn", 0, "down"))
    with pytest.raises(PayloadError):
        wire.carry(float("nan"), "teach", 0, "down")


def test_large_numbers_are_no_infinities() -> None:
    assert Wire().carry({"x": 1e300, "y": torch.tensor(3e38)}, "learn", 0, "down")["x"] == 1e300


def test_a_refused_payload_is_not_counted() -> None:
    wire = Wire()
    with pytest.raises(PayloadError):
        wire.carry(float("nan"), "learn", 0, "down")
    assert not wire.take_bytes()
