"""Run a comparison, every variant with every seed; write table and curves."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from barter.compare.launcher import Launcher, Started
from barter.compare.specification import TABLE, ComparisonSpec
from barter.core.errors import CheckpointError, ConfigError
from barter.core.files import convert_disk_errors, replace_text
from barter.core.record import Round
from barter.core.variant import PAPER_PRESET, differences_from_paper
from barter.data.task import with_absolute_paths
from barter.runs.folder import count_rounds, has_ended, has_stopped_early, read_records
from barter.runs.picture import Curve, draw_curves
from barter.runs.progress import format_duration
from barter.runs.summary import (
    ALWAYS,
    METRICS,
    Comparative,
    Question,
    Results,
    cumulative_bytes,
    cumulative_seconds,
    heading,
    is_share,
    known_metrics,
    mean_positions,
    metric_curves,
    metric_value,
    summarise,
    to_csv,
    to_latex,
    to_markdown,
    to_round_csv,
)
from barter.setup.config import (
    RESULT_FREE,
    Config,
    first_difference,
    read_toml,
    resolve,
    to_plain,
    to_toml,
    with_defaults,
    with_settings,
)
from barter.setup.trust import code_names, read_run

__all__ = ["Comparison", "RunJob", "View", "run_all"]

PLAN = "comparison.toml"
MODELS = {"server": "server's model", "clients": "mean of clients"}
# Configuration keys in which the runs of a table may differ. They must stop by the same rule.
MAY_DIFFER = tuple(key for key in RESULT_FREE if key != "patience")


@dataclass(frozen=True)
class RunJob:
    """One run of a comparison."""

    variant: str
    seed: int
    config: Config = field(hash=False)  # It holds dicts, such as the encodings of fields.
    folder: Path

    @property
    def done(self) -> int:
        """Return the number of finished rounds, without parsing their records."""
        return count_rounds(self.folder)

    @property
    def finished(self) -> bool:
        return has_ended(self.folder, self.config.rounds)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


class Comparison:
    """A folder of runs: its plan, and the results so far."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.folder = folder
        self.variants: dict[str, str] = dict(plan.get("variants", {}))  # variant -> its folder
        self.seeds: list[int] = list(plan.get("seeds", []))
        self.rounds = int(plan.get("rounds", 0))
        self.common: dict[str, Any] = dict(plan.get("common", {}))  # values that all runs share
        self.question: dict[str, Any] = dict(plan.get("question", {}))

    @classmethod
    def at(cls, folder: Path) -> Comparison:
        """Open the comparison in a folder.

        Raises:
            CheckpointError: The folder holds no comparison, or a damaged one.
        """
        if not (folder / PLAN).is_file():
            raise CheckpointError(
                f"{folder} is not the folder of a comparison: there is no {PLAN} in it"
            )
        try:
            comparison = cls(folder, read_toml(folder / PLAN))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / PLAN} is not what barter wrote: {error}") from None
        if not comparison.variants:
            raise CheckpointError(f"{folder / PLAN} names no variants")
        return comparison

    @classmethod
    def plan(cls, folder: Path, request: ComparisonSpec) -> tuple[Comparison, list[RunJob]]:
        """Plan a comparison in a folder; return it and requested runs, finished or not.

        The plan is written to the folder; nothing is run. An existing comparison in the folder is
        continued; new variants and seeds are added.

        Raises:
            ConfigError: The request is empty, or its question has no answer.
            CheckpointError: The folder holds something else, or runs that do not fit the request.
        """
        if not request.variants:
            raise ConfigError(
                "nothing to compare: give --algorithms local,dffke or a file with "
                f"[{TABLE}.variants]"
            )
        comparison = cls.at(folder) if (folder / PLAN).exists() else cls(folder, {})
        occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if not comparison.variants and occupied:
            raise CheckpointError(f"{folder} exists and is no comparison: choose another --out")
        jobs = comparison._add(request)
        comparison.check()
        with convert_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        comparison._save()
        return comparison, jobs

    def _add(self, request: ComparisonSpec) -> list[RunJob]:
        """Add the requested variants and seeds; return their runs.

        Raises if they do not belong into one table with the others.
        """
        general = [setting for setting in request.settings if not setting.startswith("algorithm.")]
        base = {key: item for key, item in request.base.items() if key != "algorithm"}
        configurations = request.configurations()
        if "privacy" in base or any(setting.startswith("privacy.") for setting in general):
            # Which parts of answers can be protected depends on the algorithm.
            base["algorithm"] = to_plain(next(iter(configurations.values())))["algorithm"]
        shared_config = resolve(with_settings(base, general))
        shared = to_plain(_with_absolute_paths(shared_config))
        common = {
            key: item
            for key, item in shared.items()
            if key not in ("algorithm", "seed", *MAY_DIFFER)
        }
        before = {key: item for key, item in with_defaults(self.common).items() if key in common}
        differing = first_difference(before, common, ()) if self.common else None
        if differing is not None:
            difference = _describe_difference(differing, before, common)
            raise CheckpointError(f"{self.folder} has {difference}: choose another --out")
        self.common = common
        self.rounds = shared["rounds"]
        self.seeds = sorted({*self.seeds, *request.seeds})
        self.question |= request.question
        jobs = []
        for name, config in configurations.items():
            if config.data.source != shared_config.data.source:
                raise ConfigError(
                    f"{name!r} has other data than the rest: different data do not go into one "
                    "table"
                )
            self.variants.setdefault(name, self._slug(name))
            self._check_begun(name, config)
            jobs += [
                RunJob(name, seed, replace(config, seed=seed), self.run(name, seed))
                for seed in request.seeds
            ]
        return jobs

    def _slug(self, name: str) -> str:
        """Return a unique folder name for a variant.

        It is the name in lower case, with other characters than letters, digits, "." and "=" as
        "-", at most 60 of them; an x is appended as long as another variant has it.
        """
        slug = re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.")[:60] or "variant"
        while slug in self.variants.values():
            slug += "x"
        return slug

    def _check_begun(self, name: str, config: Config) -> None:
        """Raise CheckpointError if a variant's existing runs were configured otherwise.

        Seeds may differ, and so may the keys of `MAY_DIFFER`.
        """
        for path in sorted((self.folder / self.variants[name]).glob("seed-*/config.toml")):
            requested = to_plain(_with_absolute_paths(config))
            existing = to_plain(_with_absolute_paths(read_run(path.parent, code_names(requested))))
            differing = first_difference(requested, existing, ("seed", *MAY_DIFFER))
            if differing is not None:
                difference = _describe_difference(differing, existing, requested)
                raise CheckpointError(f"{path.parent} has {difference}: choose another --out")

    def _save(self) -> None:
        plan = {
            "rounds": self.rounds,
            "seeds": self.seeds,
            "question": self.question,
            "variants": self.variants,
            "common": self.common,
        }
        replace_text(self.folder / PLAN, tomli_w.dumps(plan))

    def run(self, name: str, seed: int) -> Path:
        """Return the folder of a variant's run with a seed, which need not exist yet.

        Raises:
            KeyError: There is no such variant.
        """
        return self.folder / self.variants[name] / f"seed-{seed}"

    def check(self) -> None:
        """Raise if baseline, metric or target make no sense for this comparison.

        Raises:
            ConfigError: The baseline is not compared, the metric looks like a misspelt one, or the
                target is no value of the metric. Other unknown metrics are refused by `summary`.
        """
        baseline = self.question.get("baseline")
        metric = self.question.get("metric")
        target = self.question.get("target")
        if baseline is not None and baseline not in self.variants:
            raise ConfigError(
                f"baseline {baseline!r} is not compared: there are "
                f"{', '.join(map(repr, self.variants))}"
            )
        near = difflib.get_close_matches(str(metric), METRICS, n=1, cutoff=0.8)
        if metric is not None and metric not in METRICS and near:
            raise ConfigError(f"metric {metric!r}: did you mean {near[0]!r}?")
        if target is None:
            return
        if is_share(metric or "primary") and not 0 <= float(target) <= 1:
            raise ConfigError(f"target={target}: an accuracy is between 0 and 1")
        if not math.isfinite(float(target)):
            raise ConfigError(f"target={target}: must be a finite number")

    def results(self) -> tuple[Results, list[str]]:
        """Return the rounds of all finished runs, and the names of the planned others.

        A run is finished with all rounds, or if it stopped early. Rounds beyond the comparison's
        number are left out, and so are variants without a finished run.
        """
        results: dict[str, dict[int, Sequence[Round]]] = {}
        missing = []
        for name, seed in product(self.variants, self.seeds):
            rounds = read_records(self.run(name, seed))
            if len(rounds) >= self.rounds or (rounds and has_stopped_early(self.run(name, seed))):
                results.setdefault(name, {})[seed] = rounds[: self.rounds]
            else:
                missing.append(f"{name}, seed {seed}")
        return results, missing

    def summary(self, results: Results) -> Comparative:
        """Summarise finished runs as the comparison's question asks.

        The metric is "primary" by default; a baseline without finished runs is ignored.

        Raises:
            ConfigError: No run reports the metric.
        """
        metric = self.question.get("metric", "primary")
        baseline = self.question.get("baseline")
        known = known_metrics(results)
        if metric not in known:
            raise ConfigError(f"metric {metric!r}: the runs report {', '.join(known)}")
        question = Question(
            metric, baseline if baseline in results else None, self.question.get("target")
        )
        return summarise(results, question)

    def variant_notes(self) -> list[str]:
        """Return a line for each variant that is not the published method.

        Variants without a run that has begun are left out.
        """
        notes = []
        for name in self.variants:
            begun = (self.run(name, seed) / "config.toml" for seed in self.seeds)
            path = next((path for path in begun if path.is_file()), None)
            found = [] if path is None else differences_from_paper(read_run(path.parent).algorithm)
            if found:
                fields = ", ".join(difference.field for difference in found)
                notes.append(
                    f"{name}: not as published, other values of {fields} (preset={PAPER_PRESET})"
                )
        return notes

    def write(self) -> tuple[Comparative, list[str], list[Path]]:
        """Write table and curves of the finished runs to the comparison's folder.

        Returns:
            The summary, the names of unfinished runs, and the files: the table as Markdown, LaTeX
            and CSV, all rounds as CSV, and the curves as SVG, PDF and PNG, by round and, if time
            is simulated, by time and by bytes.

        Raises:
            CheckpointError: No run is finished yet, or a table cannot be written.
            ConfigError: No run reports the metric, or a figure cannot be written.
        """
        results, missing = self.results()
        if not results:
            raise CheckpointError(f"{self.folder} has no finished run yet")
        compared = self.summary(results)
        notes = "".join(f"\n{note}\n" for note in self.variant_notes())
        files = {
            "table.md": to_markdown(compared) + notes,
            "table.tex": to_latex(compared),
            "table.csv": to_csv(compared),
            "rounds.csv": to_round_csv(results),
        }
        paths = []
        for name, text in files.items():
            paths.append(self.folder / name)
            replace_text(paths[-1], text)
        metric = compared.question.metric
        curves = _as_drawn(metric_curves(results, metric), metric)
        label = curve_label(results, metric)
        for ending in ("svg", "pdf", "png"):
            paths.append(self.folder / f"curves.{ending}")
            draw_curves(curves, label, paths[-1])
        # By simulated time and by bytes, if the time of every run is simulated.
        if all(row.simulated.values for row in compared.rows):
            for ending in ("svg", "pdf", "png"):
                for name, (positions, axis) in cost_positions(results).items():
                    paths.append(self.folder / f"curves-{name}.{ending}")
                    draw_curves(curves, label, paths[-1], positions, axis)
        return compared, missing, paths


def cost_positions(results: Results) -> dict[str, tuple[dict[str, dict[int, float]], str]]:
    """Return where each round is along axes of simulated time and of bytes.

    Returns:
        "time" and "bytes" -> (positions, label of the axis). Positions are method -> round -> mean
        over seeds of the hours, or gigabytes of all clients both ways, until the round's end.
    """
    hours = {
        name: {t: s / 3600 for t, s in mean_positions(runs, cumulative_seconds).items()}
        for name, runs in results.items()
    }
    gigabytes = {
        name: {t: n / 1e9 for t, n in mean_positions(runs, cumulative_bytes).items()}
        for name, runs in results.items()
    }
    return {
        "time": (hours, "simulated time (hours)"),
        "bytes": (gigabytes, "bytes of all clients, both ways (GB)"),
    }


def _as_drawn(
    curves: Mapping[str, Mapping[int, Curve]], metric: str
) -> dict[str, dict[int, Curve]]:
    """Return curves in the unit of `curve_label`: percent for shares, else unchanged."""
    factor = 100 if is_share(metric) else 1
    return {
        name: {
            seed: [(at, None if value is None else factor * value) for at, value in curve]
            for seed, curve in seeds.items()
        }
        for name, seeds in curves.items()
    }


def curve_label(results: Results, metric: str) -> str:
    """Return the label of a figure of one metric: which metric, of which model."""
    if metric != "primary":
        return f"{heading(metric)} (%)" if is_share(metric) else heading(metric)
    models = {rounds[-1].primary for runs in results.values() for rounds in runs.values()}
    return f"accuracy on the global test set (%), {' or '.join(sorted(MODELS[m] for m in models))}"


def _with_absolute_paths(config: Config) -> Config:
    """Return a configuration with absolute paths of data.

    It then means the same in any working directory.
    """
    return replace(config, data=with_absolute_paths(config.data))


# Called with: running run -> (rounds done, rounds in all); number of finished runs; number of runs.
View = Callable[[Mapping[str, tuple[int, int]], int, int], None]


def run_all(
    jobs: Sequence[RunJob], parallel: int, view: View, show_line: Callable[[str], None]
) -> list[RunJob]:
    """Run all unfinished jobs, each in its own process; return those that failed.

    Interrupted runs resume after their last round. Ctrl-C, SIGTERM and SIGHUP stop all runs and
    raise KeyboardInterrupt; the same call continues them later.

    Args:
        jobs: The runs.
        parallel: The largest number of runs at once; each gets 1 / `parallel` of the cores.
        view: Called regularly with the progress.
        show_line: Called with a line for each run that ends.
    """
    waiting = [job for job in jobs if not job.finished]
    running: dict[RunJob, tuple[Started, float]] = {}
    failed: list[RunJob] = []
    total = len(jobs)
    threads = max(1, (os.cpu_count() or 1) // parallel)
    if len(waiting) < total:
        show_line(f"{total - len(waiting)} of {total} runs are finished already")
    with _terminated_as_interrupted(), Launcher(threads) as launcher, _stop_at_exit(running):
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[job] = _start(job, launcher), time.monotonic()
            finished = total - len(waiting) - len(running)
            view({str(job): (job.done, job.config.rounds) for job in running}, finished, total)
            time.sleep(0.1)
            ended = [job for job, (process, _) in running.items() if process.poll() is not None]
            for job in ended:
                process, began = running.pop(job)
                if process.returncode == 0 and job.finished:
                    show_line(
                        f"{job}: {_outcome(job)}; {format_duration(time.monotonic() - began)}"
                    )
                else:
                    failed.append(job)
                    show_line(f"{job} {_why(job, process.returncode or 0)}")
    # Another process may have been running a job, and have finished it meanwhile.
    return [job for job in failed if not job.finished]


def _outcome(job: RunJob) -> str:
    """Describe the accuracies of a finished run."""
    last = read_records(job.folder)[-1]
    reached = {heading(key): metric_value(last, key) for key in ALWAYS if key != "primary"}
    return ", ".join(f"{item:.1%} {name}" for name, item in reached.items() if item is not None)


def _log(job: RunJob) -> Path:
    return job.folder.with_suffix(".log")


def _start(job: RunJob, launcher: Launcher) -> Started:
    """Start or resume a run."""
    with convert_disk_errors(job.folder.parent):
        job.folder.parent.mkdir(parents=True, exist_ok=True)
    begun = (job.folder / "config.toml").is_file()
    config_file = job.folder.with_suffix(".toml")
    replace_text(config_file, to_toml(job.config))
    command = ["run", str(config_file), "--out", str(job.folder)]
    if begun:
        command = ["resume", str(job.folder)]
        # The user has named this code, and the folder has been checked to name no other.
        code = code_names(to_plain(job.config))
        if code:
            command.append("--trust")
        if read_run(job.folder, code).rounds < job.config.rounds:
            command += ["--rounds", str(job.config.rounds)]
    return launcher.start(command, _log(job))


def _why(job: RunJob, status: int) -> str:
    """Describe why a run failed, from its exit status and its log."""
    if status < 0:
        return f"was killed by signal {-status}"
    # Progress lines may come from another process that runs the same job.
    lines = reversed(_log(job).read_text(errors="replace").split("\n"))
    last = next(
        (line for line in lines if line.strip() and not line.startswith("round ")),
        "it is empty",
    )
    return f"failed, {_log(job)} says why: {last}"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat termination and a closed terminal like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Others cannot set handlers.
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _stop_at_exit(running: Mapping[RunJob, tuple[Started, float]]) -> Iterator[None]:
    """Terminate all running processes at the end of the block, also after errors."""
    try:
        yield
    finally:
        for process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process, _ in running.values():
            process.wait()


def _describe_difference(
    key: str, existing: Mapping[str, Any], requested: Mapping[str, Any]
) -> str:
    """Return both values of a dotted key that differs, as settings are written."""
    values = []
    for tree in (existing, requested):
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        shown = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        values.append(shown)
    return f"{key}={values[0]}, and {key}={values[1]} is asked for"
