"""Walk a queue of runs within a time limit, and store their curves round by round.

    python -m benchmarks.paper_tables --data DIR --rows fedavg@50 dffke@30 --seconds 550 \\
        --out results.jsonl
    python -m benchmarks.paper_tables --suite benchmarks/suites/paper-dffke.toml --list

A suite is a file for `barter compare` (benchmarks/suites); its variants are the rows, and VARIANT@N
runs N rounds of one. Rows are run in this order, each with every seed and in a process of its own,
--jobs at a time. On one GPU, several at a time need CUDA's MPS, and memory for all of them: DFFKE
needs up to 53 GiB with ten ResNet-18 clients at 64 pixels or ten architectures at 128, and 14 with
five ResNet-18 clients of 4,000 images at 32; `moments` with ResNet-18 needs about 10. The same
command continues where the last one stopped: finished runs are skipped, interrupted ones resume
after their last round. No round is begun that would probably end after --seconds.

Curves are written to --out after every round, one line per run as in `barter.recipes.stored`, and
the row's name is "SUITE: VARIANT". Lines of other runs in that file stay, and a shorter curve never
replaces a longer one. DIR holds the npz files that the suite names. With --copies, the copy test of
`barter attack` follows the last round of a run. With --measure, a function is called with the
experiment and the round's record after every round; what it returns, numbers by name, are further
columns of the curve. A run that was finished without --measure is not measured later.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

from barter.attacks.copies import NEAREST_BY_FEATURES, NEAREST_BY_PIXELS, measure_copies
from barter.attacks.result import Result
from barter.compare.specification import ComparisonSpec, parse_seeds
from barter.core.errors import BarterError, ConfigError
from barter.core.params import import_object
from barter.core.record import Round
from barter.experiment import Experiment
from barter.recipes.reproduction import store_run
from barter.recipes.stored import StoredRun, read_stored_runs, write_stored_runs
from barter.runs.folder import count_rounds, read_records
from barter.setup.config import Config, read_toml

SUITE = Path(__file__).parent / "suites" / "averaging.toml"
# A round may take this many times as long as the one before.
MARGIN = 1.3

Curve: TypeAlias = dict[str, list[float | None]]  # column -> values by round


@dataclass(frozen=True)
class QueuedRun:
    """A run of the queue: a variant of the suite with a seed."""

    row: str
    config: Config
    folder: Path | None  # None: without checkpoints, so the run cannot be resumed

    @property
    def name(self) -> str:
        """Return the row and the seed."""
        return f"{self.row}, seed {self.config.seed}"

    @property
    def state(self) -> str:
        """Return the name, and how many rounds are done."""
        return f"{self.name}: {self.done} of {self.config.rounds} rounds"

    @property
    def done(self) -> int:
        """Return the number of rounds in the run's folder."""
        return 0 if self.folder is None else count_rounds(self.folder)


def queue(
    suite: Path,
    rows: Sequence[str],
    seeds: str | None,
    settings: Sequence[str],
    data: Path,
    runs: Path | None,
) -> list[QueuedRun]:
    """Return the runs of a suite in the order of `rows`.

    Args:
        suite: The suite's file.
        rows: Variants, optionally with a number of rounds: fedavg@50; empty for all variants.
        seeds: Seeds such as 0-2; None for the suite's.
        settings: Settings of all runs.
        data: The folder of the npz files that the suite names.
        runs: The folder for the runs; None for runs without checkpoints.

    Raises:
        ConfigError: There is no such variant, its number of rounds is malformed, or a setting is
            invalid.
    """
    spec = ComparisonSpec.of(read_toml(suite), "", seeds, list(settings), [], {})
    every: list[tuple[str, int | None]] = [(name, None) for name in spec.variants]
    wanted = [split_rounds(row) for row in rows] or every
    for name, _ in wanted:
        if name not in spec.variants:
            raise ConfigError(f"{suite} has no variant {name!r}: {', '.join(spec.variants)}")
    # Settings may be of fields that variants outside the queue do not have.
    queued = replace(spec, variants={name: spec.variants[name] for name, _ in wanted})
    configurations = queued.configurations()
    found = []
    for name, rounds in wanted:
        config = configurations[name]
        config = replace(config, data=replace(config.data, source=find_source(config, data)))
        if rounds is not None:
            config = replace(config, rounds=rounds)
        row = f"{suite.stem}: {name}"
        slug = re.sub(r"[^a-z0-9.=]+", "-", row.lower()).strip("-")
        for seed in parse_seeds(seeds) if seeds else spec.seeds:
            folder = None if runs is None else runs / slug / f"seed-{seed}"
            found.append(QueuedRun(row, replace(config, seed=seed), folder))
    return found


def split_rounds(row: str) -> tuple[str, int | None]:
    """Return the variant of VARIANT[@ROUNDS], and its number of rounds or None.

    Raises:
        ConfigError: What follows the last @ is not a positive number.
    """
    name, at, rounds = row.rpartition("@")
    if not at:
        return row, None
    if not rounds.isdecimal() or int(rounds) < 1:
        raise ConfigError(f"{row!r}: write VARIANT@ROUNDS such as {name}@10")
    return name, int(rounds)


def find_source(config: Config, data: Path) -> str:
    """Return the source of a configuration's images; a file is looked for in the folder `data`."""
    kind, _, path = config.data.source.partition(":")
    return f"npz:{data / path}" if kind == "npz" else config.data.source


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock beside a file, so that two queues can write to it in turn."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def store(out: Path, run: StoredRun) -> None:
    """Write a run to a file, in place of the one of its row and seed unless that has more rounds.

    Values that only the replaced one has, such as copies and measurements, are kept if the new run
    `continues` it.
    """
    with exclusive(out):
        stored = {(r.row, r.seed): r for r in (read_stored_runs(out) if out.exists() else [])}
        before = stored.get((run.row, run.seed))
        if before is not None and continues(run, before):
            run = replace(run, curve=merge_curves(before.curve, run.curve, len(run.rounds)))
        if before is None or len(before.rounds) <= len(run.rounds):
            stored[run.row, run.seed] = run
            write_stored_runs(out, stored.values())


def continues(after: StoredRun, before: StoredRun) -> bool:
    """Return whether a run can be the continuation of an earlier one.

    It has at least as many rounds, and equal values where both curves have one.
    """
    return len(before.rounds) <= len(after.rounds) and all(
        earlier == later
        for name in before.curve.keys() & after.curve.keys()
        for earlier, later in zip(before.curve[name], after.curve[name], strict=False)
        if earlier is not None and later is not None
    )


def merge_curves(before: Curve, after: Curve, n_rounds: int) -> Curve:
    """Return `after`, with values that it lacks taken from `before`.

    Args:
        before: The curve of the first rounds of the same run.
        after: The curve of all rounds.
        n_rounds: The number of rounds of `after`.
    """
    empty: list[float | None] = [None] * n_rounds
    merged = dict(after)
    for name, values in before.items():
        padded = [*values, *empty[len(values) :]]
        merged[name] = [
            earlier if later is None else later
            for earlier, later in zip(padded, after.get(name, empty), strict=True)
        ]
    return merged


def work(
    run: QueuedRun, out: Path, deadline: float, copies: bool = False, measure: str = ""
) -> None:
    """Run rounds until all are done or the next would end after the deadline (Unix time).

    Args:
        run: The run.
        out: The file of stored runs.
        deadline: The deadline.
        copies: Whether to run the copy test after the last round.
        measure: MODULE:FUNCTION, called with the experiment and the record after every round; ""
            for none. Values of rounds before the run was resumed are those stored in `out`.
    """
    measurement = import_measurement(measure) if measure else None
    measured: list[dict[str, float]] = []
    begun = run.done > 0
    experiment = Experiment.from_config(run.config, run.folder, resume=begun)
    records = read_records(run.folder) if run.folder is not None and begun else []
    began = time.time()
    for record in experiment.rounds(run.config.rounds, progress=False):
        records.append(record)
        stored = store_run(run.row, run.config, records)
        if measurement is not None:
            measured.append(measurement(experiment, record))
            columns = measured_columns(measured, len(records))
            stored = replace(stored, curve={**stored.curve, **columns})
        store(out, stored)
        took = time.time() - began
        began = time.time()
        accuracy = record.headline()
        text = "-" if accuracy is None else f"{100 * accuracy:.2f}"
        failed = f", {len(record.failures)} answers failed" if record.failures else ""
        sys.stdout.write(f"{run.name}, round {record.round}: {text} %, {took:.1f} s{failed}\n")
        sys.stdout.flush()
        # The first round of a process compiles, so the next one is shorter than that.
        if began + MARGIN * took > deadline and record.round < run.config.rounds:
            return
    if copies:
        stored = store_run(run.row, run.config, records)
        rates = copy_columns(measure_copies(experiment), len(records))
        store(out, replace(stored, curve={**stored.curve, **rates}))


def import_measurement(name: str) -> Callable[[Experiment, Round], dict[str, float]]:
    """Import the function of MODULE:FUNCTION.

    Raises:
        ConfigError: It cannot be imported or is no function.
    """
    if ":" not in name:
        raise ConfigError(f"--measure {name!r}: write MODULE:FUNCTION")
    found = import_object(name, "--measure")
    if not callable(found):
        raise ConfigError(f"--measure {name!r}: it is {type(found).__name__}, not a function")
    measurement: Callable[[Experiment, Round], dict[str, float]] = found
    return measurement


def measured_columns(
    measured: Sequence[dict[str, float]], n_rounds: int
) -> dict[str, list[float | None]]:
    """Return the values of --measure as columns of a curve; the first rounds may lack them."""
    before: list[float | None] = [None] * (n_rounds - len(measured))
    names = list(dict.fromkeys(name for row in measured for name in row))
    return {
        name: [*before, *(round(row[name], 4) if name in row else None for row in measured)]
        for name in names
    }


def is_finished(run: QueuedRun, out: Path, copies: bool) -> bool:
    """Return whether a run has all rounds and, if they are wanted, its rates of copies."""
    if run.done < run.config.rounds:
        return False
    if not copies:
        return True
    stored = {(r.row, r.seed): r for r in (read_stored_runs(out) if out.exists() else [])}
    found = stored.get((run.row, run.config.seed))
    return found is not None and "copies" in found.curve


def copy_columns(results: Sequence[Result], n_rounds: int) -> dict[str, list[float | None]]:
    """Return the rates of copies as columns of a curve, which are empty before the last round.

    They are empty in the last round, too, where no client made images from a part of its own. The
    limits of the 95 % interval have columns of their own, such as "copies-from".
    """
    before: list[float | None] = [None] * (n_rounds - 1)
    found = {result.attack: result.values for result in results}
    columns = {}
    for name, attack in (("copies", NEAREST_BY_PIXELS), ("copies-features", NEAREST_BY_FEATURES)):
        values = found.get(attack, {})
        for column, key in ((name, "copies"), (f"{name}-from", "from"), (f"{name}-to", "to")):
            last = round(values[key], 4) if key in values else None
            columns[column] = [*before, last]
    return columns


def run_queue(
    runs: Sequence[QueuedRun],
    out: Path,
    deadline: float,
    least: float,
    jobs: int,
    copies: bool,
    measure: str = "",
) -> list[str]:
    """Run a queue, each run in a process of its own; return the names of those that failed.

    Args:
        runs: The runs; those that are finished are skipped, see `is_finished`.
        out: The file of stored runs.
        deadline: No round is begun that would probably end later (Unix time).
        least: Seconds that must be left to begin another run.
        jobs: Number of runs at a time.
        copies: Whether to run the copy test after the last round of a run.
        measure: MODULE:FUNCTION as in `work`; "" for none.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used in forked processes.
    waiting = deque(run for run in runs if not is_finished(run, out, copies))
    active: dict[int, tuple[BaseProcess, QueuedRun]] = {}
    failed = []
    while waiting or active:
        while waiting and len(active) < jobs:
            run = waiting.popleft()
            if time.time() + least > deadline:
                sys.stdout.write(f"out of time; left from here: {run.state}\n")
                waiting.clear()
                break
            process: BaseProcess = spawn.Process(
                target=work, args=(run, out, deadline, copies, measure)
            )
            process.start()
            active[process.sentinel] = (process, run)
        # Without any process, waiting would never end.
        for sentinel in wait(list(active)) if active else []:
            assert isinstance(sentinel, int)
            process, run = active.pop(sentinel)
            process.join()
            if process.exitcode:
                failed.append(run.name)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", type=Path, default=SUITE, help="by default %(default)s")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder of the npz files")
    parser.add_argument("--rows", nargs="*", default=[], metavar="VARIANT[@ROUNDS]")
    parser.add_argument("--seeds", help="such as 0-2; by default those of the suite")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=550, help="the time limit")
    parser.add_argument(
        "--least", type=float, default=45, help="seconds that must be left to begin another run"
    )
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--runs", type=Path, default=Path("runs/paper-tables"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, by default 1")
    parser.add_argument(
        "--ephemeral", action="store_true", help="write no checkpoints: faster, but not resumable"
    )
    parser.add_argument(
        "--copies", action="store_true", help="run the copy test after the last round of a run"
    )
    parser.add_argument(
        "--measure",
        default="",
        metavar="MODULE:FUNCTION",
        help="call a function with the experiment and the record after every round",
    )
    parser.add_argument("--list", action="store_true", help="print the queue and run nothing")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least one run at a time")
    deadline = time.time() + args.seconds
    try:
        if args.measure:
            import_measurement(args.measure)  # A mistake is found before any run begins.
        runs = queue(
            args.suite,
            args.rows,
            args.seeds,
            args.set,
            args.data,
            None if args.ephemeral else args.runs,
        )
    except BarterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.list:
        for run in runs:
            sys.stdout.write(f"{run.state}\n")
        return 0
    failed = run_queue(runs, args.out, deadline, args.least, args.jobs, args.copies, args.measure)
    for name in failed:
        sys.stdout.write(f"failed: {name}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
