"""Processes of their own that have everything loaded already: loading torch takes longer than most tests."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forked(work: Callable[[], int], said: Path) -> int:
    """Do this in another process, which ends with the status that comes of it and says what it says into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal
        file = said.open("w", buffering=1)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.stdout = sys.stderr = file
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # nothing of pytest's is ended with it


def status(pid: int, seconds: float = 600) -> int:
    """Return how a process ended: its status, or the signal's number with a minus.

    A process that has not ended after so many seconds is killed.
    """
    deadline = time.monotonic() + seconds
    while True:
        ended, outcome = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(outcome)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def until(holds: Callable[[], Any], seconds: float = 10) -> Any:
    """What holds in the end, and soon."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
