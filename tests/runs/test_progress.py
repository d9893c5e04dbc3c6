"""A loop in Python shows how far it has come where somebody can see it."""

from __future__ import annotations

import builtins
import io
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import federation, tiny
from tests.engines.test_local import Notes


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What stderr shows from here on; no fixture, for pytest takes stderr for itself when a test begins."""
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    return made


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    experiment = federation(tiny("local"))
    for r in experiment.rounds(2):
        assert f"round {r.round}/2 learn" in screen.getvalue()
    assert "left in all" in screen.getvalue()
    assert "accuracy" not in screen.getvalue(), "what came of a round is the loop's to say"


def test_not_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert len(list(federation(tiny("local")).rounds(1, progress=False))) == 1
    notes = Notes()
    assert len(list(federation(tiny("local"), monitor=notes).rounds(1))) == 1
    assert [name for name, _, _ in notes.phases] == ["learn", "evaluate"]
    assert screen.getvalue() == ""


def test_not_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich believe in a terminal
    assert len(list(federation(tiny("local")).rounds(1))) == 1
    assert capfd.readouterr() == ("", "")


def test_in_a_notebook_one_line_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class ZMQInteractiveShell:
        pass

    class Handle:
        shown: list[str] = []

        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            self.shown.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        return Handle()

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    shell: Any = ZMQInteractiveShell
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    list(federation(tiny("local")).rounds(2))
    assert Handle.shown[0] == f"round 1/2 learn {'░' * 30}   0%"
    assert sum(line.startswith("round 1/2: accuracy") for line in Handle.shown) == 1
    assert Handle.shown[-1].startswith("round 2/2: accuracy")
    assert capfd.readouterr() == ("", "")
