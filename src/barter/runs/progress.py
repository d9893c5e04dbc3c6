"""How far a run has come: a live line on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from barter.core.nodes import Monitor
from barter.core.record import Round
from barter.runs.selection import validation_accuracy

__all__ = ["ManyRuns", "Onlooker", "Watcher", "Work", "duration", "onlooker", "pluralise", "size"]

QUIET = 10.0  # seconds of a long phase between two plain lines
BLINK = 0.2  # seconds between two looks at a notebook's line
BAR = 30  # characters of its bar


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"


def pluralise(number: int, thing: str) -> str:
    """Return a number of things as a person writes it: `1 round`, `5 rounds`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def duration(seconds: float) -> str:
    """Seconds as a person reads them; below ten with a decimal, so that short ones are not zero."""
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )


class Watcher(Monitor):
    """Shows each phase of a round as it runs, and a line for each round that is done; tells another of it too."""

    def __init__(
        self, console: Console, rounds: int, tell: Callable[[Round], None] | None = None
    ) -> None:
        self.console, self.rounds, self.tell = console, rounds, tell
        self.round, self._started, self._begun = 1, time.monotonic(), 0
        self._phase: _Phase | None = None

    def begin(self, done: int) -> None:
        """The run starts behind this many finished rounds."""
        self.round, self._begun, self._started = done + 1, done, time.monotonic()

    def finish(self, record: Round) -> None:
        """A round is done."""
        self.console.print(self.line(record))
        for failure in record.failures:
            self.console.print(f"  {failure}")
        if self.tell is not None:
            self.tell(record)
        self.round = record.round + 1

    def left(self, record: Round) -> str:
        """How long the rounds behind this one will take; nothing if there are none."""
        if record.round >= self.rounds:
            return ""
        each = (time.monotonic() - self._started) / (record.round - self._begun)
        remaining = each * (self.rounds - record.round)
        return f", {'about ' * (remaining >= 0.1)}{duration(remaining)} left"

    def line(self, record: Round) -> str:
        """A round in a line."""
        clients = []
        for test in ("global", "local"):
            values = record.values(test)
            if values:
                some = "" if len(values) == len(record.clients) else f" of {len(values)} clients"
                clients.append(f"{record.mean(test):6.1%} {test}{some}")
        found = record.server.get("global")
        server = [] if found is None else [f"{found:6.1%} server"]
        parts = [*server, *clients] if record.primary == "server" else [*clients, *server]
        validated = validation_accuracy(record)
        if validated is not None:
            parts.append(f"{validated:6.1%} validation")
        numbers = f"accuracy {', '.join(parts)}" if parts else "not evaluated"
        traffic = f"{size(record.traffic('up'))} up, {size(record.traffic('down'))} down"
        spent = f"{duration(record.seconds['round'])}{self.left(record)}"
        return f"round {record.round}/{self.rounds}: {numbers}; {traffic}; {spent}"

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._show(f"round {self.round}/{self.rounds} {name}", total)

    @contextmanager
    def _show(self, title: str, total: float) -> Iterator[None]:
        outer, self._phase = self._phase, self._new_phase(title, total)
        try:
            with self._phase:
                yield
        finally:
            self._phase = outer

    def _new_phase(self, title: str, total: float) -> _Phase:
        return (_Live if self.console.is_terminal else _Lines)(self.console, title, total)

    def advance(self, amount: float) -> None:
        if self._phase is not None:
            self._phase.advance(amount)


class Work(Watcher):
    """Watches what is no run: phases under their own names."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, 0)

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._show(name, total)


class Watched(Protocol):
    """What has a monitor."""

    watched: Monitor


class Onlooker(Watcher):
    """Watches a loop that is the caller's, who says what came of each round: one line that moves, and no others."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(console, rounds)
        self.cell: Any = None  # the line of a notebook
        self.rest = ""  # how long the run will take
        if console.is_jupyter:
            from IPython.display import display

            self.cell = display({"text/plain": ""}, raw=True, display_id=True)

    def over(self, engine: Watched, step: Callable[[], Round]) -> Round:
        """What a step makes that this one watches."""
        before, engine.watched = engine.watched, self
        try:
            record = step()
        finally:
            engine.watched = before
        self.finish(record)
        return record

    def finish(self, record: Round) -> None:
        self.round, self.rest = record.round + 1, self.left(record)
        if self.cell is not None:
            self.cell.update({"text/plain": self.line(record)}, raw=True)

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return super().phase(f"{name}{self.rest} in all" if self.rest else name, total)

    def _new_phase(self, title: str, total: float) -> _Phase:
        if self.cell is not None:
            return _Cell(self.console, title, total, self.cell)
        return _Live(self.console, title, total)


def onlooker(rounds: int, done: int) -> Onlooker | None:
    """Who shows a loop in Python that starts behind some rounds: on a terminal or in a notebook; nobody elsewhere."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_jupyter and not sys.stderr.isatty():
        return None
    made = Onlooker(console, rounds)
    made.begin(done)
    return made


class _Phase:
    def __init__(self, console: Console, title: str, total: float) -> None:
        self.console, self.title, self.total, self.done = console, title, total, 0.0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def advance(self, amount: float) -> None:
        self.done += amount


class _Live(_Phase):
    """One line that moves and vanishes when the phase is over."""

    def __enter__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.progress = Progress(*columns, *times, console=self.console, transient=True)
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=self.total)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, amount: float) -> None:
        self.progress.advance(self.task, amount)


class _Lines(_Phase):
    """A line when the phase is over and, if it takes long, some on the way."""

    def __enter__(self) -> None:
        self.start = self.last = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.console.print(f"{self.title}: {time.monotonic() - self.start:.1f} s")

    def advance(self, amount: float) -> None:
        super().advance(amount)
        now = time.monotonic()
        if now - self.last >= QUIET and 0 < self.done < self.total:
            self.last = now
            left = (now - self.start) * (self.total - self.done) / self.done
            self.console.print(
                f"{self.title}: {self.done / self.total:.0%}, about {duration(left)} left"
            )


class _Cell(_Phase):
    """The line of a notebook: the same one for all phases."""

    def __init__(self, console: Console, title: str, total: float, cell: Any) -> None:
        super().__init__(console, title, total)
        self.cell, self.last = cell, 0.0

    def __enter__(self) -> None:
        self.say()

    def advance(self, amount: float) -> None:
        super().advance(amount)
        if time.monotonic() - self.last >= BLINK:
            self.say()

    def say(self) -> None:
        self.last, share = time.monotonic(), min(1.0, self.done / max(self.total, 1e-9))
        bar = ("\u2588" * round(BAR * share)).ljust(BAR, "\u2591")
        self.cell.update({"text/plain": f"{self.title} {bar} {share:4.0%}"}, raw=True)


class ManyRuns:
    """Several runs at once: a bar for each that runs and one for all, on a terminal; a line when one is done."""

    def __init__(self, console: Console) -> None:
        self.console, self.tasks = console, dict[str, TaskID]()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.progress = Progress(
            *columns, *times, console=console, transient=True, disable=not console.is_terminal
        )

    def __enter__(self) -> ManyRuns:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, running: Mapping[str, tuple[int, int]], finished: int, total: int) -> None:
        """How many rounds of how many each of the running ones has done, and how many runs are finished."""
        for gone in self.tasks.keys() - running.keys() - {"runs"}:
            self.progress.remove_task(self.tasks.pop(gone))
        for name, (done, of) in {"runs": (finished, total), **running}.items():
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(name, total=of)
            self.progress.update(self.tasks[name], completed=done)

    def tell(self, line: str) -> None:
        """A run has ended."""
        self.console.print(line)
