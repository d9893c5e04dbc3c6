"""The progress of another process, as it is written down and shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from barter.core.errors import BarterError
from barter.core.record import Round
from barter.runs.journal import Journal, follow
from barter.runs.progress import Watcher
from tests.test_full_disk import no_room


def record(t: int) -> Round:
    metrics = {"local": 0.5, "bytes_up": 1, "bytes_down": 2}
    return Round(t, {0: metrics}, {}, {"round": 1.0}, {"learn": {"up": 1, "down": 2}}, [])


def shown(path: Path) -> tuple[list[Round], str]:
    console = Console(file=io.StringIO(), width=200)
    rounds = list(follow(path, Watcher(console, 2), lambda: None))
    return rounds, console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_written_is_shown(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note("say", "2 of 2 sites are here")
    journal.note("begin", 0)
    for t in (1, 2):
        with journal.phase("learn", 3):
            journal.advance(3)
        journal.note("round", record(t).to_json())
    journal.note("done", 2)
    rounds, text = shown(tmp_path / "journal")
    assert rounds == [record(1), record(2)]
    for line in (
        "2 of 2 sites are here",
        "round 1/2 learn: ",
        "round 2/2 learn: ",
        "accuracy  50.0% local",
    ):
        assert line in text


def test_an_error_there_is_an_error_here(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").note("error", "two sites are called 'a'")
    with pytest.raises(BarterError, match="two sites are called 'a'"):
        shown(tmp_path / "journal")


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the journal's clock ten times as fast: it waits two seconds for a dead writer's last lines."""
    clock = SimpleNamespace(
        monotonic=lambda: 10 * time.monotonic(), sleep=lambda seconds: time.sleep(seconds / 10)
    )
    monkeypatch.setattr("barter.runs.journal.time", clock)


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("buried", [True, False])
def test_a_writer_that_dies_is_noticed(tmp_path: Path, buried: bool) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert gone.stdout is not None
    gone.stdout.read()  # until it has ended
    if buried:
        gone.wait()
    (tmp_path / "journal").write_text(
        json.dumps(["process", gone.pid]) + "\n" + '["begin", 0]\n["pha'
    )
    with pytest.raises(BarterError, match="the server's process died"):
        shown(tmp_path / "journal")
    gone.wait()


def test_a_writer_that_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barter.runs.journal.START", 0.2)
    with pytest.raises(
        BarterError, match="the server did not start: there is nothing in .*journal after 0.2 s"
    ):
        shown(tmp_path / "journal")


def test_without_room_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    with (
        no_room(),
        pytest.raises(
            BarterError, match=f"^{tmp_path / 'journal'} cannot be written: File too large$"
        ),
    ):
        journal.advance(1)


@pytest.mark.usefixtures("fast_clock")
def test_a_writer_that_dies_without_room_could_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr("barter.runs.journal.START", 0.2)
    for text, message in (
        (
            json.dumps(["process", gone.pid]) + "\n",
            "the server's process died: {} cannot be written: File too large; start",
        ),
        ("", "the server did not start: {} cannot be written: File too large"),
    ):
        (tmp_path / "journal").write_text(text)
        with no_room(), pytest.raises(BarterError, match=message.format(tmp_path)):
            shown(tmp_path / "journal")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
