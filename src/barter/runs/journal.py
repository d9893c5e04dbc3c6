"""Pass the progress of a run to another process, in a file of JSON lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from barter.core.errors import BarterError
from barter.core.files import convert_disk_errors, write_obstacle
from barter.core.nodes import Monitor
from barter.core.record import Round
from barter.runs.progress import Watcher

__all__ = ["Journal", "follow"]

START = 120.0  # seconds that the other process has to write its first line


class Journal(Monitor):
    """A monitor that writes progress to a file, for `follow` to show."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)
        self.note("process", os.getpid())

    def note(self, kind: str, value: Any) -> None:
        """Write one line, JSON of [kind, value]; `follow` knows the kinds.

        Raises:
            CheckpointError: The file cannot be written.
        """
        with convert_disk_errors(self._path):
            self._file.write(json.dumps([kind, value]) + "\n")

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._phase(name, total)

    @contextmanager
    def _phase(self, name: str, total: float) -> Iterator[None]:
        self.note("phase", [name, total])
        try:
            yield
        finally:
            self.note("end", name)

    def advance(self, amount: float) -> None:
        self.note("advance", amount)


def follow(path: Path, watcher: Watcher, check: Callable[[], None]) -> Iterator[Round]:
    """Show the journal of a run until the run is over, and yield its rounds.

    Args:
        path: The journal's file, which need not exist yet.
        watcher: Shows the progress.
        check: Called while waiting; raises to end the wait.

    Raises:
        BarterError: The run reported an error, did not start, or its process died.
    """
    writer = 0  # process id of the run
    died_at = 0.0  # when its process was first missing; 0 while it is alive
    deadline = time.monotonic() + START

    def wait() -> None:
        nonlocal died_at
        check()
        if not writer and time.monotonic() > deadline:
            why = write_obstacle(path.parent) or f"there is nothing in {path} after {START:g} s"
            raise BarterError(f"the server did not start: {why}")
        died_at = 0.0 if not writer or _alive(writer) else died_at or time.monotonic()
        if died_at and time.monotonic() - died_at > 2:  # By then its last lines have been read.
            why = write_obstacle(
                path.parent
            )  # A full disk also keeps the reason out of the journal.
            raise BarterError(
                f"the server's process died{why and f': {why}'}; start again to continue"
            )

    with ExitStack() as phases:
        for kind, value in _lines(path, wait):
            match kind:
                case "process":
                    writer = value
                case "begin":
                    watcher.begin(value)
                case "say":
                    watcher.console.print(value)
                case "phase":
                    phases.enter_context(watcher.phase(*value))
                case "end":
                    phases.pop_all().close()
                case "advance":
                    watcher.advance(value)
                case "round":
                    record = Round.from_json(value)
                    watcher.finish(record)
                    yield record
                case "error":
                    raise BarterError(value)
                case "done":
                    return


def _alive(process: int) -> bool:
    """Return whether a process of this machine is running; a zombie is not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # Another user's process, or a system without /proc.
        return True


def _lines(path: Path, check: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """Yield the lines of a file that grows, and call `check` while there is none.

    This never ends unless `check` raises. The file need not exist yet. A line is yielded once it is
    complete.
    """
    while not path.exists():
        check()
        time.sleep(0.1)
    with path.open() as file:
        line = ""
        while True:
            line += file.readline()
            if line.endswith("\n"):
                kind, value = json.loads(line)
                yield kind, value
                line = ""
            else:
                check()
                time.sleep(0.1)
