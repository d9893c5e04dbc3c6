"""Show a run's progress: a live line on a terminal or notebook, else plain lines."""

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

__all__ = [
    "ManyRuns",
    "Onlooker",
    "Watcher",
    "Work",
    "format_bytes",
    "format_duration",
    "make_onlooker",
    "pluralise",
]

QUIET = 10.0  # seconds between two plain lines of a long phase
BLINK = 0.2  # seconds between two updates of a notebook's line
BAR = 30  # width of a notebook's bar in characters


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit: `12 B`, `3 kB`, `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"


def pluralise(number: int, thing: str) -> str:
    """Format a number of things: `1 round`, `5 rounds`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def format_duration(seconds: float) -> str:
    """Format a time, such as `3 min 05 s` or `1 h 02 min`.

    Below ten seconds there is one decimal (none for `3 s`), and below 0.1 s it is "under 0.1 s".
    """
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


class Watcher(Monitor):
    """Display of a run: each phase while it runs, a line for each finished round.

    Args:
        console: Where to print.
        rounds: The run's last round.
        on_round: Called with the record of each finished round.
    """

    def __init__(
        self, console: Console, rounds: int, on_round: Callable[[Round], None] | None = None
    ) -> None:
        self.console = console
        self.rounds = rounds
        self.on_round = on_round
        self.round = 1
        self._started = time.monotonic()
        self._begun = 0  # rounds that were done before
        self._phase: _Phase | None = None

    def begin(self, done: int) -> None:
        """Start the clock of a run that has this number of finished rounds."""
        self.round = done + 1
        self._begun = done
        self._started = time.monotonic()

    def finish(self, record: Round) -> None:
        """Print a finished round, its failures and its warnings; call `on_round`."""
        self.console.print(self.line(record))
        for failure in record.failures:
            self.console.print(f"  {failure}")
        for warning in record.warnings:
            self.console.print(f"  {warning}", style="yellow")
        if self.on_round is not None:
            self.on_round(record)
        self.round = record.round + 1

    def remaining_time(self, record: Round) -> str:
        """Estimate the time left after a round, as text like ", about 3 min 05 s left".

        Rounds are assumed to take as long as those since `begin` did on average. The text is empty
        after the last round.
        """
        if record.round >= self.rounds:
            return ""
        each = (time.monotonic() - self._started) / (record.round - self._begun)
        remaining = each * (self.rounds - record.round)
        return f", {'about ' * (remaining >= 0.1)}{format_duration(remaining)} left"

    def line(self, record: Round) -> str:
        """Summarise a round in one line: accuracies, traffic, time and time left.

        The primary model's accuracy comes first. Where not all clients were evaluated, the line
        says how many; a round without any accuracy is "not evaluated".
        """
        clients = []
        for test in ("global", "local"):
            values = record.values(test)
            if values:
                which = record.describe_clients(test)
                some = f" of {which}" if which else ""
                clients.append(f"{record.mean(test):6.1%} {test}{some}")
        found = record.server.get("global")
        server = [] if found is None else [f"{found:6.1%} server"]
        parts = [*server, *clients] if record.primary == "server" else [*clients, *server]
        validated = validation_accuracy(record)
        if validated is not None:
            parts.append(f"{validated:6.1%} validation")
        numbers = f"accuracy {', '.join(parts)}" if parts else "not evaluated"
        traffic = (
            f"{format_bytes(record.traffic('up'))} up, {format_bytes(record.traffic('down'))} down"
        )
        spent = f"{format_duration(record.seconds['round'])}{self.remaining_time(record)}"
        return f"round {record.round}/{self.rounds}: {numbers}; {traffic}; {spent}"

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._show(f"round {self.round}/{self.rounds} {name}", total)

    @contextmanager
    def _show(self, title: str, total: float) -> Iterator[None]:
        """Display a phase inside the block; phases can be nested."""
        outer = self._phase
        self._phase = self._new_phase(title, total)
        try:
            with self._phase:
                yield
        finally:
            self._phase = outer

    def _new_phase(self, title: str, total: float) -> _Phase:
        kind = _Live if self.console.is_terminal else _Lines
        return kind(self.console, title, total)

    def advance(self, amount: float) -> None:
        if self._phase is not None:
            self._phase.advance(amount)


class Work(Watcher):
    """Display of the phases of work that is not a run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, 0)

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._show(name, total)


class HasMonitor(Protocol):
    """An object with a monitor, such as an engine."""

    watched: Monitor


class Onlooker(Watcher):
    """Display of one live line for a loop in Python, which prints results itself."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(console, rounds)
        self.cell: Any = None  # a notebook's display
        self.rest = ""  # estimate of the remaining time
        if console.is_jupyter:
            from IPython.display import display

            self.cell = display({"text/plain": ""}, raw=True, display_id=True)

    def over(self, engine: HasMonitor, step: Callable[[], Round]) -> Round:
        """Run a step of an engine while watching it; show and return the step's record.

        The engine's former monitor is set again, also if the step raises.
        """
        before = engine.watched
        engine.watched = self
        try:
            record = step()
        finally:
            engine.watched = before
        self.finish(record)
        return record

    def finish(self, record: Round) -> None:
        self.round = record.round + 1
        self.rest = self.remaining_time(record)
        if self.cell is not None:
            self.cell.update({"text/plain": self.line(record)}, raw=True)

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return super().phase(f"{name}{self.rest} in all" if self.rest else name, total)

    def _new_phase(self, title: str, total: float) -> _Phase:
        if self.cell is not None:
            return _Cell(self.console, title, total, self.cell)
        return _Live(self.console, title, total)


def make_onlooker(rounds: int, done: int) -> Onlooker | None:
    """Return a progress display for a loop in Python.

    Args:
        rounds: The loop's last round.
        done: The number of rounds that are finished already.

    Returns:
        The display, or None where there is neither terminal nor notebook.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_jupyter and not sys.stderr.isatty():
        return None
    watcher = Onlooker(console, rounds)
    watcher.begin(done)
    return watcher


class _Phase:
    """A phase that is not shown; base class of those that are."""

    def __init__(self, console: Console, title: str, total: float) -> None:
        self.console = console
        self.title = title
        self.total = total
        self.done = 0.0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def advance(self, amount: float) -> None:
        self.done += amount


class _Live(_Phase):
    """A progress bar that vanishes when the phase is over."""

    def __enter__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=self.total)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, amount: float) -> None:
        self.progress.advance(self.task, amount)


class _Lines(_Phase):
    """A line when the phase is over and, if it takes long, some before."""

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
                f"{self.title}: {self.done / self.total:.0%}, about {format_duration(left)} left"
            )


class _Cell(_Phase):
    """A progress bar in a notebook's line, which all phases share."""

    def __init__(self, console: Console, title: str, total: float, cell: Any) -> None:
        super().__init__(console, title, total)
        self.cell = cell
        self.last = 0.0

    def __enter__(self) -> None:
        self.update()

    def advance(self, amount: float) -> None:
        super().advance(amount)
        if time.monotonic() - self.last >= BLINK:
            self.update()

    def update(self) -> None:
        """Draw the bar again."""
        self.last = time.monotonic()
        share = min(1.0, self.done / max(self.total, 1e-9))
        bar = ("\u2588" * round(BAR * share)).ljust(BAR, "\u2591")
        self.cell.update({"text/plain": f"{self.title} {bar} {share:4.0%}"}, raw=True)


class ManyRuns:
    """Progress of several runs: a line for each that ends; bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> ManyRuns:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, running: Mapping[str, tuple[int, int]], finished: int, total: int) -> None:
        """Update the progress bars.

        Args:
            running: Running run -> (rounds done, rounds in all).
            finished: The number of finished runs.
            total: The number of runs.
        """
        for ended in self.tasks.keys() - running.keys() - {"runs"}:
            self.progress.remove_task(self.tasks.pop(ended))
        for name, (done, of) in {"runs": (finished, total), **running}.items():
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(name, total=of)
            self.progress.update(self.tasks[name], completed=done)

    def show_line(self, line: str) -> None:
        """Print a line, such as the result of a run that has ended."""
        self.console.print(line)
