"""Heartbeat and progress files of a site's worker, and the polling interval.

The heartbeat file holds the time until which the worker may be silent before its supervisor
restarts it. Does not load torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

__all__ = [
    "BEGUN",
    "HOLD",
    "LONGEST",
    "NOT_LET_IN",
    "SHORTEST",
    "TURN",
    "ProgressFile",
    "Pulse",
    "allow",
    "overdue",
    "poll_interval",
    "seconds_since",
]

# Files in the folder of a worker's socket.
TURN = "turn"  # progress of the current call, from 0 to 1
BEGUN = "begun"  # the call that was begun and has not ended, and when
SHORTEST = 0.05  # shortest polling interval, in seconds
LONGEST = 1.0  # longest polling interval, in seconds
HOLD = 5.0  # seconds for which the coordinator holds the poll of a site without a message
# Exit status of a node whose key the SuperLink refuses (EX_NOPERM in sysexits.h).
NOT_LET_IN = 77
# Seconds that an idle process may be silent. Its heartbeat is ten times as frequent.
SILENCE = 60.0


def poll_interval(idle: float, shortest: float = SHORTEST) -> float:
    """Return the seconds until the next poll: a tenth of idle time, within limits.

    Args:
        idle: Seconds since the last event.
        shortest: Lower limit of the interval; the upper limit is `LONGEST`.
    """
    return min(LONGEST, max(shortest, idle / 10))


class Pulse:
    """Heartbeat of a process; each call first states how long it may take.

    A heartbeat is written every few seconds. Times are those of the machine's monotonic clock,
    which all of its processes share.

    Args:
        path: The heartbeat file.
        silence: Seconds without a heartbeat after which an idle process counts as hung.
    """

    def __init__(self, path: Path, silence: float = SILENCE) -> None:
        self.path = path
        self.silence = silence
        self._writing = threading.Lock()
        allow(path, silence)
        threading.Thread(target=self._beat, daemon=True).start()

    @contextmanager
    def call(self, seconds: float) -> Iterator[None]:
        """Allow `seconds` of silence for the block's call; pause the heartbeat during it.

        A block that takes longer counts as hung: the supervisor restarts this process.
        """
        with self._writing:
            self._extend(seconds)
            try:
                yield
            finally:
                self._extend(self.silence)

    def _extend(self, seconds: float) -> None:
        # If the disk stays full for long, the supervisor restarts this process.
        with suppress(OSError):
            allow(self.path, seconds)

    def _beat(self) -> None:
        while True:
            with self._writing:
                self._extend(self.silence)
            time.sleep(self.silence / 10)


class ProgressFile:
    """Monitor of a worker's engine that writes a call's progress to a file.

    Progress is a number from 0 to 1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = 0.0
        self._written = 0.0

    def begin(self) -> None:
        """Reset the progress to 0 for a new call."""
        self.done = 0.0
        self._write()

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        """Ignore phases: the progress is of the whole call."""
        return nullcontext()

    def advance(self, amount: float) -> None:
        """Add to the progress, up to 1; the file is written once per second at most."""
        self.done = min(1.0, self.done + amount)
        if time.monotonic() > self._written + 1:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        # On a full disk the progress is not visible, and the call continues.
        with suppress(OSError):
            temporary = self.path.with_suffix(".new")
            temporary.write_text(repr(self.done))
            temporary.rename(self.path)


def allow(path: Path, seconds: float) -> None:
    """Note in a heartbeat file that its process may be silent for `seconds` from now."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(repr(time.monotonic() + seconds))
    temporary.rename(path)


def overdue(path: Path) -> bool:
    """Return whether a process is silent for longer than its heartbeat file allows.

    Raises:
        OSError: If there is no such file; ValueError if it holds no number.
    """
    return time.monotonic() > float(path.read_text())


def seconds_since(path: Path, call: str) -> float:
    """Return the seconds since a call was first begun, over all restarts.

    A call other than the remembered one begins now: it is remembered in its place, and the result
    is 0.

    Args:
        path: The file that remembers the call.
        call: A name of the call, such as a hash of its request.
    """
    now = time.monotonic()
    with suppress(OSError, ValueError):
        earlier_call, begin = path.read_text().split()
        if earlier_call == call:
            return now - float(begin)
    # On a full disk, a call that is asked again has all of its time again.
    with suppress(OSError):
        path.write_text(f"{call} {now!r}")
    return 0.0
