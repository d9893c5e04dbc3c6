from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.conftest import federation, tiny


class Notes:
    """A monitor that writes down what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, float]] = []
        self.done = 0.0

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._phase(name, total)

    @contextmanager
    def _phase(self, name: str, total: float) -> Iterator[None]:
        before, self.done = self.done, 0.0
        yield
        self.phases.append((name, total, self.done))
        self.done = before

    def advance(self, amount: float) -> None:
        assert amount >= 0
        self.done += amount


def test_every_phase_is_shown_from_nothing_to_all() -> None:
    notes = Notes()
    (record,) = federation(tiny("dffke"), monitor=notes).rounds(1)
    assert [name for name, _, _ in notes.phases] == ["learn", "unify", "decoder", "teach", "exchange", "evaluate"]
    for name, total, done in notes.phases:
        assert done == pytest.approx(total), name
    assert record.seconds.keys() == {name for name, _, _ in notes.phases} | {"round"}
    assert sum(record.seconds.values()) - record.seconds["round"] <= record.seconds["round"] + 0.05
