"""The progress of a run that goes on in another process: written there as lines of JSON, shown here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from barter.core.errors import BarterError
from barter.core.files import refused, writing
from barter.core.nodes import Monitor
from barter.core.record import Round
from barter.runs.progress import Watcher

__all__ = ["Journal", "follow"]

START = 120.0  # seconds that the other process has to write its first line


class Journal(Monitor):
    """Writes down what a watcher would show."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", buffering=1)
        self.note("process", os.getpid())

    def note(self, kind: str, value: Any) -> None:
        with writing(self._path):
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
    """Show what is written down until the run is over, and hand out its rounds; `check` may end the wait."""
    writer, missed, deadline = 0, 0.0, time.monotonic() + START

    def wait() -> None:
        nonlocal missed
        check()
        if not writer and time.monotonic() > deadline:
            why = refused(path.parent) or f"there is nothing in {path} after {START:g} s"
            raise BarterError(f"the server did not start: {why}")
        missed = 0.0 if not writer or _alive(writer) else missed or time.monotonic()
        if missed and time.monotonic() - missed > 2:  # all that it wrote has been read by then
            why = refused(path.parent)  # what it could not write down either
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
    """Whether a process of this machine goes on; one that nobody has buried yet does not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True


def _lines(path: Path, check: Callable[[], None]) -> Iterator[tuple[str, Any]]:
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
