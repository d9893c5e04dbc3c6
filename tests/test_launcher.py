"""Runs that are forked off one process: what they say, how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from barter.compare.launcher import Launched, Launcher
from barter.core.errors import BarterError

SERVER = """
import os, sys, time
from barter.cli import job_server

def main(arguments):
    print("said", *arguments, os.environ["OMP_NUM_THREADS"], flush=True)
    what, *rest = arguments
    if what == "sleep":
        time.sleep(60)
    if what == "raise":
        raise ValueError("no such luck")
    return int(rest[0])

job_server.main = main
job_server.serve_jobs()
"""


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(1, (sys.executable, "-c", SERVER))


def alive(run: Launched) -> bool:
    try:
        os.kill(run.pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_runs_have_a_log_a_session_and_an_exit_status_of_their_own(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with launcher:
        slow = launcher.start(["sleep"], tmp_path / "slow.log")
        killed = launcher.start(["sleep"], tmp_path / "killed.log")
        good = launcher.start(["end", "0"], tmp_path / "good.log")
        assert good.wait() == 0
        assert launcher.start(["end", "2"], tmp_path / "good.log").wait() == 2
        assert launcher.start(["raise"], tmp_path / "bad.log").wait() == 1
        os.killpg(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        assert len({os.getsid(run.pid) for run in (slow,)} | {os.getsid(0)}) == 2
        assert slow.poll() is None, "others go on"
    assert not alive(slow), "and nothing runs on afterwards"
    assert (tmp_path / "good.log").read_text() == "said end 0 3\nsaid end 2 3\n"
    assert (tmp_path / "bad.log").read_text().rstrip().endswith("ValueError: no such luck")


def test_runs_end_with_the_process_that_started_them(launcher: Launcher, tmp_path: Path) -> None:
    with launcher:
        run = launcher.start(["sleep"], tmp_path / "log")
        assert launcher._server is not None
        assert launcher._server.stdin is not None
        launcher._server.stdin.close()  # as when this process is killed
        until = time.monotonic() + 20
        while alive(run) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(run)


def test_a_server_that_was_killed_is_started_again(launcher: Launcher, tmp_path: Path) -> None:
    with launcher:
        run = launcher.start(["sleep"], tmp_path / "log")
        assert launcher._server is not None
        launcher._server.kill()
        assert run.wait() == -signal.SIGKILL
        assert launcher.start(["end", "0"], tmp_path / "log").wait() == 0


def test_a_server_that_cannot_start_is_said_to_be(tmp_path: Path) -> None:
    with (
        Launcher(1, (sys.executable, "-c", "")) as launcher,
        pytest.raises(BarterError, match="the process that starts runs ended before the first"),
    ):
        launcher.start(["end", "0"], tmp_path / "log")
