"""A sign of life for whoever looks after a process, a file that says until when it may be silent; and how often to look
for what others send. Needs no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

__all__ = [
    "BEGUN",
    "LONGEST",
    "NOT_LET_IN",
    "SHORTEST",
    "TURN",
    "Pulse",
    "Turn",
    "allow",
    "overdue",
    "pause",
    "since",
]

TURN = "turn"  # the file beside a worker's door that says how far it is
BEGUN = "begun"  # the one that says which call was begun and not ended, and when
SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks
NOT_LET_IN = (
    77  # the exit status of a node whose key the SuperLink refuses, as sysexits.h numbers it
)
# seconds that somebody who has nothing to do may be silent: he speaks much more often
SILENCE = 60.0


def pause(idle: float, shortest: float = SHORTEST) -> float:
    """Seconds until one looks again, if nothing came for so long: little where much happens, and a second at most."""
    return min(LONGEST, max(shortest, idle / 10))


class Pulse:
    """Says every few seconds that this process goes on, and at the start of a call how long that may take.

    Time is that of the machine's monotonic clock, which all of its processes share.
    """

    def __init__(self, path: Path, silence: float = SILENCE) -> None:
        self.path, self.silence, self._speaking = path, silence, threading.Lock()
        allow(path, silence)
        threading.Thread(target=self._beat, daemon=True).start()

    @contextmanager
    def call(self, seconds: float) -> Iterator[None]:
        """Inside, nothing is heard for at most so long."""
        with self._speaking:
            self._say(seconds)
            try:
                yield
            finally:
                self._say(self.silence)

    def _say(self, seconds: float) -> None:
        with suppress(OSError):  # where the disk is full for long, somebody will look
            allow(self.path, seconds)

    def _beat(self) -> None:
        while True:
            with self._speaking:
                self._say(self.silence)
            time.sleep(self.silence / 10)


class Turn:
    """How far a worker is in a call, as the monitor of its engine hears it: a number from 0 to 1, in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.done, self._written = path, 0.0, 0.0

    def begin(self) -> None:
        """Another call."""
        self.done = 0.0
        self._write()

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return nullcontext()

    def advance(self, amount: float) -> None:
        self.done = min(1.0, self.done + amount)
        if time.monotonic() > self._written + 1:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        with suppress(OSError):  # a full disk: nobody sees it, and the turn goes on
            temporary = self.path.with_suffix(".new")
            temporary.write_text(repr(self.done))
            temporary.rename(self.path)


def allow(path: Path, seconds: float) -> None:
    """From now on there may be silence for so long."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(repr(time.monotonic() + seconds))
    temporary.rename(path)


def overdue(path: Path) -> bool:
    """Whether there should have been a sign of life by now."""
    return time.monotonic() > float(path.read_text())


def since(path: Path, call: str) -> float:
    """Seconds since this call was first begun: who was ended over it may be asked again."""
    now = time.monotonic()
    with suppress(OSError, ValueError):
        before, begin = path.read_text().split()
        if before == call:
            return now - float(begin)
    with suppress(OSError):  # a full disk: the call has all its time again
        path.write_text(f"{call} {now!r}")
    return 0.0
