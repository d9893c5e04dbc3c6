"""Read, write and average stored runs, one line of JSON per run.

Tables are computed from stored runs. A line holds what a table needs to know of a run, and nothing
that is computed from it:

    {"row": "dffke-digits", "seed": 0, "curve": {"round": [1, 2], "global": [0.61, 0.78]},
     "settings": {"algorithm.name": "dffke"}, "hardware": "x86_64, 16 cores, torch 2.11.0",
     "date": "2026-11-18", "version": "0.9.0", "note": ""}

`curve` has one value per round for each metric; accuracies are shares between 0 and 1, `seconds` and
`bytes` are those of the round, and null stands for a value that was not measured. `failures` is the
number of failed answers of clients in the round, where there were any in the run. Metrics have the
names of `barter compare --metric`. Date and version are null for runs that did not record them.

This module does not load torch, so that listings are fast.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from barter.core.errors import CheckpointError
from barter.core.files import replace_text

__all__ = [
    "SeedSpread",
    "StoredRun",
    "common_hardware",
    "common_rounds",
    "dotted_settings",
    "group_by_row",
    "read_stored_runs",
    "spread_over_seeds",
    "write_stored_runs",
]


@dataclass(frozen=True)
class StoredRun:
    """One run: its row of a table, its seed, its curves, and where and how it ran.

    >>> run = StoredRun("demo", 0, {"round": [1, 2, 3], "global": [0.5, 0.7, 0.6]})
    >>> run.value("global"), run.value("global", 2), run.best("global")
    (0.6, 0.7, (2, 0.7))
    """

    row: str
    seed: int
    curve: dict[str, list[float | None]]  # metric -> values by round; "round" has the numbers
    settings: dict[str, Any] = field(default_factory=dict)  # dotted key -> value, as far as known
    hardware: str = ""
    date: str | None = None
    version: str | None = None
    note: str = ""

    @property
    def rounds(self) -> list[int]:
        """Return the numbers of the run's rounds, in ascending order."""
        return [int(number) for number in self.curve["round"] if number is not None]

    def value(self, metric: str, at: int | None = None) -> float | None:
        """Return a metric after a round; None if not measured or without such a round.

        Args:
            metric: The metric's name.
            at: The round; None for the last one.
        """
        numbers = self.rounds
        at = numbers[-1] if at is None else at
        values = self.curve.get(metric)
        return values[numbers.index(at)] if values is not None and at in numbers else None

    def best(self, metric: str) -> tuple[int, float] | None:
        """Return the round with the highest value of a metric, and that value.

        Of several rounds it is the first. None if no round measured the metric.
        """
        values = zip(self.rounds, self.curve.get(metric, []), strict=False)
        measured = [(value, -number) for number, value in values if value is not None]
        if not measured:
            return None
        value, number = max(measured)
        return -number, value

    def total(self, metric: str, until: int | None = None) -> float | None:
        """Return the sum of a cost over rounds, or None if a round did not measure it.

        Args:
            metric: The cost: "seconds" or "bytes".
            until: The last round that counts; None for all.
        """
        chosen = [number for number in self.rounds if until is None or number <= until]
        values = [self.value(metric, number) for number in chosen]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    def to_json(self) -> str:
        """Return the run as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> StoredRun:
        """Parse a line that `to_json` returned.

        Raises:
            ValueError: The line is not a stored run.
        """
        try:
            run = cls(**json.loads(line))
            rounds = run.rounds
            lengths = {len(values) for values in run.curve.values()}
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a stored run: {error}") from error
        if not rounds or rounds != sorted(set(rounds)):
            raise ValueError("not a stored run: its rounds are not in order")
        if lengths != {len(rounds)}:
            raise ValueError("not a stored run: its curves differ in length")
        return run


@dataclass(frozen=True)
class SeedSpread:
    """A value over seeds: mean, range and, of two seeds or more, standard deviation."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def common_rounds(runs: Iterable[StoredRun]) -> list[int]:
    """Return the rounds that all of these runs have, in ascending order."""
    rounds = [set(run.rounds) for run in runs]
    return sorted(set.intersection(*rounds)) if rounds else []


def spread_over_seeds(
    runs: Sequence[StoredRun], metric: str, at: int | None = None
) -> SeedSpread | None:
    """Return a metric over the runs that measured it, or None if none did.

    Values that are not finite are left out.

    Args:
        runs: The runs of one row.
        metric: The metric's name.
        at: The round; None for the last one that all runs have.
    """
    if at is None:
        common = common_rounds(runs)
        if not common:
            return None
        at = common[-1]
    values = [run.value(metric, at) for run in runs]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return SeedSpread(known) if known else None


def read_stored_runs(path: Path) -> list[StoredRun]:
    """Read a file of stored runs, in the order of its lines.

    Raises:
        CheckpointError: A line is not a stored run, or two lines are the same row and seed.
    """
    runs: dict[tuple[str, int], StoredRun] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            run = StoredRun.from_json(line)
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: {error}") from None
        if (run.row, run.seed) in runs:
            raise CheckpointError(
                f"{path}, line {number}: a second run of {run.row!r} with seed {run.seed}"
            )
        runs[run.row, run.seed] = run
    return list(runs.values())


def write_stored_runs(path: Path, runs: Iterable[StoredRun]) -> None:
    """Write a file of stored runs atomically, one line per run."""
    replace_text(path, "".join(run.to_json() + "\n" for run in runs))


def group_by_row(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return row -> its runs, sorted by seed; rows are in order of their first run."""
    grouped: dict[str, list[StoredRun]] = {}
    for run in runs:
        grouped.setdefault(run.row, []).append(run)
    return {row: sorted(found, key=lambda run: run.seed) for row, found in grouped.items()}


def dotted_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's values under dotted keys.

    >>> dotted_settings({"clients": 3, "data": {"source": "digits"}})
    {'clients': 3, 'data.source': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= dotted_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def common_hardware(runs: Sequence[StoredRun]) -> str:
    """Return the hardware of runs, joined by "; " if different, without unknown ones."""
    return "; ".join(dict.fromkeys(run.hardware for run in runs if run.hardware))
