"""Processes that are kept alive: who is silent for too long is ended, whatever it does, and started again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from barter.core.errors import ConfigError
from barter.flower.handshake import Setup
from barter.flower.heartbeat import Pulse, overdue, seconds_since
from barter.flower.supervise import RestartingChild, WatchedChild, _only_one, _rooms
from tests.forked import forked, status, until

WORKER = """
import ctypes, os, pathlib, signal, sys, time
from barter.flower.heartbeat import Pulse

home = pathlib.Path(sys.argv[1])
pulse = Pulse(home / "pulse", silence=1.0)
first = not (home / "started").exists()
(home / "started").touch()
if not first:
    time.sleep(60)
"""
CASES = {
    "stopped with nothing to do": "os.kill(os.getpid(), signal.SIGSTOP)",
    "holds the interpreter": "with pulse.call(0.5): ctypes.PyDLL(None).sleep(60)",
    "hangs in a call": "with pulse.call(0.5): time.sleep(60)",
}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[str], WatchedChild]]:
    made: list[WatchedChild] = []

    def make(body: str) -> WatchedChild:
        (tmp_path / "worker.py").write_text(WORKER + body)
        command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)]
        made.append(
            WatchedChild("worker", command, os.environ, tmp_path / "log", tmp_path / "pulse")
        )
        return made[-1]

    yield make
    for worker in made:
        worker.stop(0.5)


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_who_is_not_heard_of_is_ended_and_started_again(
    body: str, watched: Callable[[str], WatchedChild], caplog: pytest.LogCaptureFixture
) -> None:
    worker = watched(body)
    worker.tend()
    assert worker.process is not None
    before = worker.process

    def tended() -> bool:
        worker.tend()
        return worker.process is not None and worker.process is not before

    until(tended, 20)
    assert before.poll() is not None, "the old one is gone"
    (said,) = caplog.messages
    assert (
        said == "worker: its heartbeat is overdue; it is ended and restarts from its memory on disk"
    )
    settled = time.monotonic() + 1.2
    until(lambda: tended() and time.monotonic() > settled)
    assert len(caplog.messages) == 1, "a new one is not judged by what the old one said"


def test_who_never_begins_is_ended_too(watched: Callable[[str], WatchedChild]) -> None:
    worker = watched("")
    worker.begin, worker.command = 0.5, ["sleep", "60"]
    worker.tend()
    before = worker.process
    until(lambda: (worker.tend(), worker.process is not before)[1])


def test_a_call_may_take_the_time_that_it_has(
    watched: Callable[[str], WatchedChild], tmp_path: Path
) -> None:
    worker = watched(
        "with pulse.call(30): ctypes.PyDLL(None).sleep(2)\n(home / 'done').touch()\ntime.sleep(60)"
    )
    worker.tend()
    before = worker.process
    until(lambda: (worker.tend(), (tmp_path / "done").exists())[1], 20)
    assert worker.process is before


def test_who_cannot_be_started_is_tried_again(
    watched: Callable[[str], WatchedChild],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = watched("time.sleep(60)")
    with monkeypatch.context() as patch:
        patch.setattr("barter.flower.supervise.LONGEST_PAUSE", 0.3)
        patch.setattr("barter.flower.supervise.allow", full)
        worker.tend()
        worker.tend()
    assert caplog.messages == [
        "worker cannot be started: [Errno 28] No space left on device; next attempt in 0.3 s"
    ]
    assert worker.process is None
    until(lambda: (worker.tend(), worker.process is not None)[1])


def test_a_sign_of_life_that_finds_no_room_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse, ran = Pulse(tmp_path / "pulse"), []
    with monkeypatch.context() as patch:
        patch.setattr("barter.flower.heartbeat.allow", full)
        with pulse.call(1.0):
            ran.append("call")
    assert ran == ["call"]
    assert not overdue(tmp_path / "pulse")


def test_a_call_is_as_old_as_its_first_beginning(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    assert seconds_since(begun, "one") == 0
    time.sleep(0.1)
    assert 0.1 <= seconds_since(begun, "one") < 5
    assert seconds_since(begun, "two") == 0
    begun.write_text("two")  # a disk that was full
    assert seconds_since(begun, "two") == 0


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_site_that_was_killed_leaves_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def killed() -> int:
        with _rooms(home) as rooms:
            (rooms / "door").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert status(forked(killed, tmp_path / "said")) == -signal.SIGKILL
    assert len(list(temporary.iterdir())) == 1
    with _rooms(home) as rooms:
        assert list(temporary.iterdir()) == [rooms]
        assert [path.name for path in rooms.iterdir()] == ["token"]
        with pytest.raises(ConfigError, match="is running already"), _rooms(home):
            pass
        assert rooms.is_dir()
    assert not list(temporary.iterdir())


def test_a_note_deletes_no_folder_that_the_site_did_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes are files: a wrong one, an edited one and one of earlier versions must not cost anybody's data."""
    home, precious = tmp_path / "home", tmp_path / "barter-results"
    for folder in (home, precious):
        folder.mkdir()
    (precious / "results.csv").touch()
    (precious / "token").write_text("another")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    named = {"folder": str(precious), "token": "guessed"}
    for note in (str(precious), json.dumps(named), json.dumps([str(precious)]), "null"):
        (home / "rooms").write_text(note)
        with _rooms(home) as rooms:
            assert rooms.is_dir()
        assert (precious / "results.csv").exists(), note


def test_a_copied_site_does_not_take_down_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _rooms(home) as rooms:
        shutil.copytree(home, copy)
        with _rooms(copy) as others:
            assert others != rooms
            assert rooms.is_dir(), "its process lives"
        assert rooms.is_dir()


@pytest.mark.parametrize("insecure", [False, True])
def test_a_copied_site_is_refused_while_the_original_runs(
    insecure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home, copy, other = (tmp_path / name for name in ("home", "copy", "other"))
    for folder, key in ((home, "one"), (copy, "one"), (other, "two")):
        folder.mkdir()
        (folder / "key").write_text(key)
    setup = Setup(name="ward", share=0, insecure=insecure)
    with _only_one(setup, home):
        with pytest.raises(ConfigError) as refused, _only_one(setup, copy):
            pass
        with _only_one(Setup(name="another", share=0, insecure=insecure), other):
            pass
    assert f"process {os.getpid()} on" in str(refused.value)
    assert f"in {home};" in str(refused.value)
    with _only_one(setup, copy):  # the original has ended
        pass
    assert not list((tmp_path / "state" / "barter" / "sites").iterdir())


def test_the_lock_of_a_killed_site_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    setup = Setup(name="ward", share=0, insecure=True)

    def killed() -> int:
        with _only_one(setup, tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert status(forked(killed, tmp_path / "said")) == -signal.SIGKILL
    with _only_one(setup, tmp_path):
        pass


def test_where_no_lock_can_be_written_a_site_says_so_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with _only_one(Setup(name="ward", share=0, insecure=True), tmp_path):
        (said,) = caplog.messages
    assert "with a copy of its folder would not be noticed" in said


def test_why_a_child_ended_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for status_, why in ((77, "the key is unknown"), (3, f"see {tmp_path / 'log'}")):
        reasons = {77: "the key is unknown"}
        child = RestartingChild(
            "node", ["sh", "-c", f"exit {status_}"], os.environ, tmp_path / "log", reasons
        )
        child.tend()
        until(lambda child=child: child.poll() is not None)  # type: ignore[misc]
        child.tend()
        said = f"node ended with status {status_}: {why}; restarting it in 1 s"
        assert caplog.messages[-1] == said
