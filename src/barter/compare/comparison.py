"""Methods compared on one footing: every variant with every seed, each run in a folder of its own under one."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from barter.compare.launcher import Launcher, Started
from barter.compare.specification import TABLE, Request
from barter.core.errors import CheckpointError, ConfigError
from barter.core.files import replace_text, writing
from barter.core.record import Round
from barter.core.variant import PAPER, differences_from_paper
from barter.data.task import anchored
from barter.runs.folder import ended, records, rounds_done, stopped_early
from barter.runs.picture import curves
from barter.runs.progress import duration
from barter.runs.summary import (
    ALWAYS,
    METRICS,
    Comparative,
    Question,
    Results,
    heading,
    is_share,
    known_metrics,
    lines,
    summarise,
    to_csv,
    to_latex,
    to_markdown,
    to_rounds,
    value,
)
from barter.setup.config import (
    RESULT_FREE,
    Config,
    first_difference,
    plain,
    read,
    resolve,
    to_toml,
    with_defaults,
    with_settings,
)

__all__ = ["Comparison", "Job", "View", "run_all"]

PLAN = "comparison.toml"
MODELS = {"server": "server's model", "clients": "mean of clients"}
# Runs of one table stop by one rule.
MAY_DIFFER = tuple(key for key in RESULT_FREE if key != "patience")


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int
    config: Config
    folder: Path

    @property
    def done(self) -> int:
        """How many rounds are finished; asked for often, so nothing is parsed."""
        return rounds_done(self.folder)

    @property
    def finished(self) -> bool:
        return ended(self.folder, self.config.rounds)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


class Comparison:
    """A folder of runs: which there are to be, and what they came to."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.folder = folder
        self.variants: dict[str, str] = dict(plan.get("variants", {}))  # and the folder of each
        self.seeds: list[int] = list(plan.get("seeds", []))
        self.rounds = int(plan.get("rounds", 0))
        self.common: dict[str, Any] = dict(plan.get("common", {}))  # what all configurations share
        self.question: dict[str, Any] = dict(plan.get("question", {}))

    @classmethod
    def at(cls, folder: Path) -> Comparison:
        """The comparison in a folder."""
        if not (folder / PLAN).is_file():
            raise CheckpointError(
                f"{folder} is not the folder of a comparison: there is no {PLAN} in it"
            )
        try:
            comparison = cls(folder, read(folder / PLAN))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / PLAN} is not what barter wrote: {error}") from None
        if not comparison.variants:
            raise CheckpointError(f"{folder / PLAN} names no variants")
        return comparison

    @classmethod
    def planned(cls, folder: Path, request: Request) -> tuple[Comparison, list[Job]]:
        """A comparison and its runs; one that is in the folder already goes on, with what is new added."""
        if not request.variants:
            raise ConfigError(
                f"nothing to compare: give --algorithms local,dffke or a file with [{TABLE}.variants]"
            )
        comparison = cls.at(folder) if (folder / PLAN).exists() else cls(folder, {})
        if (
            not comparison.variants
            and folder.exists()
            and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise CheckpointError(f"{folder} exists and is no comparison: choose another --out")
        jobs = comparison._take(request)
        comparison.check()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        comparison._save()
        return comparison, jobs

    def _take(self, request: Request) -> list[Job]:
        """Add what is asked for; its runs. What cannot stand in one table with the rest is refused."""
        general = [setting for setting in request.settings if not setting.startswith("algorithm.")]
        base = {key: item for key, item in request.base.items() if key != "algorithm"}
        plainly = resolve(with_settings(base, general))
        shared = plain(_anchored(plainly))
        common = {
            key: item
            for key, item in shared.items()
            if key not in ("algorithm", "seed", *MAY_DIFFER)
        }
        before = {key: item for key, item in with_defaults(self.common).items() if key in common}
        odd = first_difference(before, common, ()) if self.common else None
        if odd is not None:
            raise CheckpointError(
                f"{self.folder} compares runs with another {odd}: choose another --out"
            )
        self.common, self.rounds = common, shared["rounds"]
        self.seeds = sorted({*self.seeds, *request.seeds})
        self.question |= request.question
        jobs = []
        for name, config in request.configurations().items():
            if config.data.source != plainly.data.source:
                raise ConfigError(
                    f"{name!r} has other data than the rest: different data do not go into one table"
                )
            self.variants.setdefault(name, self._slug(name))
            self._check_begun(name, config)
            jobs += [
                Job(name, seed, replace(config, seed=seed), self.run(name, seed))
                for seed in request.seeds
            ]
        return jobs

    def _slug(self, name: str) -> str:
        """A folder's name for a variant, which no other has."""
        slug = re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.")[:60] or "variant"
        while slug in self.variants.values():
            slug += "x"
        return slug

    def _check_begun(self, name: str, config: Config) -> None:
        """Runs of a variant that are there already must be of this configuration, but for their seed."""
        for path in sorted((self.folder / self.variants[name]).glob("seed-*/config.toml")):
            mine, theirs = plain(_anchored(config)), plain(_anchored(resolve(read(path))))
            odd = first_difference(mine, theirs, ("seed", *MAY_DIFFER))
            if odd is not None:
                raise CheckpointError(
                    f"{path.parent} was begun with another {odd}: choose another --out"
                )

    def _save(self) -> None:
        plan = {"rounds": self.rounds, "seeds": self.seeds, "question": self.question}
        replace_text(
            self.folder / PLAN,
            tomli_w.dumps({**plan, "variants": self.variants, "common": self.common}),
        )

    def run(self, name: str, seed: int) -> Path:
        """The folder of a run."""
        return self.folder / self.variants[name] / f"seed-{seed}"

    def check(self) -> None:
        """Refuse a question that has no answer here."""
        baseline, metric, target = (
            self.question.get(key) for key in ("baseline", "metric", "target")
        )
        if baseline is not None and baseline not in self.variants:
            raise ConfigError(
                f"baseline {baseline!r} is not compared: there are {', '.join(map(repr, self.variants))}"
            )
        near = difflib.get_close_matches(str(metric), METRICS, n=1, cutoff=0.8)
        if metric is not None and metric not in METRICS and near:
            raise ConfigError(f"metric {metric!r}: did you mean {near[0]!r}?")
        if target is not None and not 0 <= float(target) <= 1:
            raise ConfigError(f"target={target}: an accuracy is between 0 and 1")

    def results(self) -> tuple[Results, list[str]]:
        """All finished runs, and the names of those that are not."""
        results: dict[str, dict[int, Sequence[Round]]] = {}
        missing = []
        for name, seed in product(self.variants, self.seeds):
            rounds = records(self.run(name, seed))
            if len(rounds) >= self.rounds or (rounds and stopped_early(self.run(name, seed))):
                results.setdefault(name, {})[seed] = rounds[: self.rounds]
            else:
                missing.append(f"{name}, seed {seed}")
        return results, missing

    def summary(self, results: Results) -> Comparative:
        """What the finished runs say to the question."""
        metric, baseline = self.question.get("metric", "primary"), self.question.get("baseline")
        known = known_metrics(results)
        if metric not in known:
            raise ConfigError(f"metric {metric!r}: the runs report {', '.join(known)}")
        question = Question(
            metric, baseline if baseline in results else None, self.question.get("target")
        )
        return summarise(results, question)

    def variant_notes(self) -> list[str]:
        """Return a line for each variant that is not the published method, as far as runs were begun."""
        notes = []
        for name in self.variants:
            begun = (self.run(name, seed) / "config.toml" for seed in self.seeds)
            path = next((path for path in begun if path.is_file()), None)
            found = [] if path is None else differences_from_paper(resolve(read(path)).algorithm)
            if found:
                fields = ", ".join(difference.field for difference in found)
                notes.append(f"{name}: not as published, other values of {fields} (preset={PAPER})")
        return notes

    def write(self) -> tuple[Comparative, list[str], list[Path]]:
        """The table as Markdown, CSV and LaTeX, the curves as SVG, PDF, PNG and numbers, of what is finished."""
        results, missing = self.results()
        if not results:
            raise CheckpointError(f"{self.folder} has no finished run yet")
        compared = self.summary(results)
        notes = "".join(f"\n{note}\n" for note in self.variant_notes())
        files = {
            "table.md": to_markdown(compared) + notes,
            "table.tex": to_latex(compared),
            "table.csv": to_csv(compared),
        }
        paths = []
        for name, text in (files | {"rounds.csv": to_rounds(results)}).items():
            paths.append(self.folder / name)
            replace_text(paths[-1], text)
        metric = compared.question.metric
        for ending in ("svg", "pdf", "png"):
            paths.append(self.folder / f"curves.{ending}")
            curves(lines(results, metric), curve_label(results, metric), paths[-1])
        return compared, missing, paths


def curve_label(results: Results, metric: str) -> str:
    """Return the label of a figure of one metric: which metric, of which model."""
    if metric != "primary":
        return f"{heading(metric)} (%)" if is_share(metric) else heading(metric)
    models = {rounds[-1].primary for runs in results.values() for rounds in runs.values()}
    return f"accuracy on the global test set (%), {' or '.join(sorted(MODELS[m] for m in models))}"


def _anchored(config: Config) -> Config:
    """The same configuration wherever it is read."""
    return replace(config, data=anchored(config.data))


View = Callable[
    [Mapping[str, tuple[int, int]], int, int], None
]  # running: rounds done, of; runs finished, in all


def run_all(
    jobs: Sequence[Job], parallel: int, view: View, tell: Callable[[str], None]
) -> list[Job]:
    """Run what is not finished, so many at a time, each in a process of its own; those that failed.

    A run that was killed goes on behind its last round. An interrupt stops all; the same call goes on later.
    """
    waiting = [job for job in jobs if not job.finished]
    running: dict[Job, tuple[Started, float]] = {}
    failed: list[Job] = []
    total, threads = len(jobs), max(1, (os.cpu_count() or 1) // parallel)
    if len(waiting) < total:
        tell(f"{total - len(waiting)} of {total} runs are finished already")
    with _terminated_as_interrupted(), Launcher(threads) as launcher, _stopped(running):
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[job] = _start(job, launcher), time.monotonic()
            finished = total - len(waiting) - len(running)
            view({str(job): (job.done, job.config.rounds) for job in running}, finished, total)
            time.sleep(0.1)
            for job in [job for job, (process, _) in running.items() if process.poll() is not None]:
                process, began = running.pop(job)
                if process.returncode == 0 and job.finished:
                    tell(f"{job}: {_outcome(job)}; {duration(time.monotonic() - began)}")
                else:
                    failed.append(job)
                    tell(f"{job} {_why(job, process.returncode or 0)}")
    return [job for job in failed if not job.finished]  # by whoever had it in use


def _outcome(job: Job) -> str:
    last = records(job.folder)[-1]
    reached = {heading(key): value(last, key) for key in ALWAYS if key != "primary"}
    return ", ".join(f"{item:.1%} {name}" for name, item in reached.items() if item is not None)


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _start(job: Job, launcher: Launcher) -> Started:
    with writing(job.folder.parent):
        job.folder.parent.mkdir(parents=True, exist_ok=True)
    begun = (job.folder / "config.toml").is_file()
    wanted = job.folder.with_suffix(".toml")
    replace_text(wanted, to_toml(job.config))
    command = ["run", str(wanted), "--out", str(job.folder)]
    if begun:
        longer = resolve(read(job.folder / "config.toml")).rounds < job.config.rounds
        command = [
            "resume",
            str(job.folder),
            *(["--rounds", str(job.config.rounds)] if longer else []),
        ]
    return launcher.start(command, _log(job))


def _why(job: Job, status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status}"
    # progress may be that of who has it in use
    lines = reversed(_log(job).read_text(errors="replace").split("\n"))
    last = next(
        (line for line in lines if line.strip() and not line.startswith("round ")),
        "it said nothing",
    )
    return f"failed, {_log(job)} says why: {last}"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Who ends this process or closes its terminal presses Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    before = {
        sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP) if ours
    }
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


@contextlib.contextmanager
def _stopped(running: Mapping[Job, tuple[Started, float]]) -> Iterator[None]:
    """However this ends, nothing runs on afterwards, unless it is killed outright."""
    try:
        yield
    finally:
        for process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process, _ in running.values():
            process.wait()
