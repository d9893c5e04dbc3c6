"""Methods compared on one footing: every variant with every seed, each run in a folder of its own under one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from barter.config import RESULT_FREE, Config, first_difference, plain, read, resolve, to_toml, with_settings
from barter.core.errors import CheckpointError, ConfigError
from barter.runs.folder import records
from barter.runs.picture import curves
from barter.runs.progress import duration
from barter.runs.summary import (
    METRICS,
    Comparative,
    Question,
    Results,
    summarise,
    to_csv,
    to_latex,
    to_markdown,
    value,
)

__all__ = ["Comparison", "Job", "View", "named_variants", "run_all", "seeds_of", "variants_of", "varied"]

PLAN = "comparison.toml"
TABLE = "compare"  # of a configuration: what is compared


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int
    config: Config
    folder: Path

    @property
    def done(self) -> int:
        """How many rounds are finished."""
        return len(records(self.folder))

    @property
    def finished(self) -> bool:
        return self.done >= self.config.rounds

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def seeds_of(text: str) -> list[int]:
    """The seeds of a text such as 0-4 or 0,3,7-9."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(f"seeds {text!r}: write numbers and ranges, such as 0-4 or 0,3,7-9")
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    return list(dict.fromkeys(seeds))


def variants_of(text: str) -> dict[str, list[str]]:
    """Variants from a text such as local,dffke:preset=paper:share=0.3; a field without a table is the method's."""
    variants: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        pieces = part.split(":")
        name = ":".join(piece for piece in pieces if "=" not in piece)
        fields = [piece for piece in pieces if "=" in piece]
        settings = [field if "." in field.partition("=")[0] else f"algorithm.{field}" for field in fields]
        label = f"{name}, {', '.join(fields)}" if fields else name
        if label in variants:
            raise ConfigError(f"{label} is asked for twice")
        variants[label] = [f"algorithm.name={name}", *settings]
    return variants


def named_variants(tree: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, Any], dict[str, Any]]:
    """Variants, other options and the rest of a configuration that has a table [compare] with [compare.variants]."""
    rest = {key: item for key, item in tree.items() if key != TABLE}
    table = tree.get(TABLE, {})
    known = {"variants", "seeds", "baseline", "target", "metric", "vary"}
    if not isinstance(table, Mapping) or table.keys() - known:
        odd = ", ".join(sorted(table.keys() - known)) if isinstance(table, Mapping) else repr(table)
        raise ConfigError(f"[{TABLE}] has the unknown {odd}: there are {', '.join(sorted(known))}")
    variants = table.get("variants", {})
    if not isinstance(variants, Mapping) or not all(isinstance(v, list) for v in variants.values()):
        raise ConfigError(f'[{TABLE}.variants] names lists of settings, such as small = ["algorithm.share=0.1"]')
    return {name: [str(s) for s in v] for name, v in variants.items()}, {**table}, rest


def varied(variants: Mapping[str, Sequence[str]], sweeps: Sequence[str]) -> dict[str, list[str]]:
    """Every variant with every value of each sweep, such as algorithm.tau=0.8,0.9."""
    choices = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not all(part.strip() for part in [key, *values.split(",")]):
            raise ConfigError(f"--vary {sweep!r}: write key=value,value such as algorithm.tau=0.8,0.9")
        choices.append([f"{key.strip()}={choice.strip()}" for choice in values.split(",")])
    return {
        ", ".join([name, *(choice.removeprefix("algorithm.") for choice in chosen)]): [*settings, *chosen]
        for name, settings in variants.items()
        for chosen in product(*choices)
    }


class Comparison:
    """A folder of runs: which variants there are, and what they came to."""

    def __init__(self, folder: Path, variants: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.folder, self.variants, self.options = folder, dict(variants), dict(options)

    @classmethod
    def at(cls, folder: Path) -> Comparison:
        """The comparison in a folder."""
        if not (folder / PLAN).is_file():
            raise CheckpointError(f"{folder} is not the folder of a comparison: there is no {PLAN} in it")
        plan = read(folder / PLAN)
        return cls(folder, plan["variants"], {key: item for key, item in plan.items() if key != "variants"})

    @classmethod
    def planned(
        cls,
        folder: Path,
        base: Mapping[str, Any],
        variants: Mapping[str, Sequence[str]],
        seeds: Sequence[int],
        options: Mapping[str, Any],
    ) -> tuple[Comparison, list[Job]]:
        """A comparison and its runs; one that is in the folder already goes on, with what is new added."""
        if not variants:
            raise ConfigError("nothing to compare: give --algorithms local,dffke or a file with [compare.variants]")
        old = cls.at(folder) if (folder / PLAN).exists() else cls(folder, {}, {})
        if not old.variants and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} exists and is no comparison: choose another --out")
        slugs = dict(old.variants)
        for name in variants:
            slug = re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-")
            while name not in slugs and slug in slugs.values():
                slug += "x"
            slugs.setdefault(name, slug)
        jobs = []
        for name, settings in variants.items():
            for seed in seeds:
                config = replace(resolve(with_settings(base, settings)), seed=seed)
                jobs.append(Job(name, seed, config, folder / slugs[name] / f"seed-{seed}"))
        kept = {key: item for key, item in {**old.options, **options}.items() if item is not None}
        comparison = cls(folder, slugs, kept)
        comparison.check(jobs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(tomli_w.dumps({**kept, "variants": slugs}))
        return comparison, jobs

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what cannot stand in one table, before anything runs."""
        for job in jobs:
            begun = job.folder / "config.toml"
            if begun.is_file():
                odd = first_difference(plain(resolve(read(begun))), plain(job.config), RESULT_FREE)
                if odd is not None:
                    raise CheckpointError(f"{job.folder} was begun with another {odd}: choose another --out")
        sources = {config.data.source for config in [job.config for job in jobs] + self.configs()}
        if len(sources) > 1:
            raise ConfigError(f"runs on different data do not go into one table: {', '.join(sorted(sources))}")
        baseline = self.options.get("baseline")
        if baseline is not None and baseline not in self.variants:
            raise ConfigError(f"baseline {baseline!r} is not compared: there are {', '.join(self.variants)}")
        if self.options.get("metric", "global") not in METRICS:
            raise ConfigError(f"metric {self.options['metric']!r}: there are {', '.join(METRICS)}")

    def configs(self) -> list[Config]:
        """Of all runs that were begun."""
        found = [path for slug in self.variants.values() for path in (self.folder / slug).glob("seed-*/config.toml")]
        return [resolve(read(path)) for path in sorted(found)]

    def results(self) -> tuple[Results, list[str]]:
        """All finished runs, and the names of those that are not."""
        results: dict[str, dict[int, Any]] = {}
        missing = []
        for name, slug in self.variants.items():
            for path in sorted((self.folder / slug).glob("seed-*/config.toml")):
                rounds, config = records(path.parent), resolve(read(path))
                if len(rounds) >= config.rounds:
                    results.setdefault(name, {})[config.seed] = rounds
                else:
                    missing.append(f"{name}, seed {config.seed}")
        return {name: dict(sorted(runs.items())) for name, runs in results.items()}, missing

    def write(self) -> tuple[Comparative, list[str], list[Path]]:
        """The table as Markdown, CSV and LaTeX and the curves as SVG, PDF and PNG, of what is finished."""
        results, missing = self.results()
        if not results:
            raise CheckpointError(f"{self.folder} has no finished run yet")
        metric, baseline = self.options.get("metric", "global"), self.options.get("baseline")
        question = Question(metric, baseline if baseline in results else None, self.options.get("target"))
        compared = summarise(results, question)
        files = {"md": to_markdown(compared), "tex": to_latex(compared), "csv": to_csv(compared)}
        paths = []
        for ending, text in files.items():
            paths.append(self.folder / f"table.{ending}")
            paths[-1].write_text(text)
        lines = {
            name: {seed: [(r.round, value(r, metric)) for r in rounds] for seed, rounds in runs.items()}
            for name, runs in results.items()
        }
        for ending in ("svg", "pdf", "png"):
            paths.append(self.folder / f"curves.{ending}")
            curves(lines, f"accuracy, {METRICS[metric]} (%)", paths[-1])
        return compared, missing, paths


View = Callable[[Mapping[str, tuple[int, int]], int, int], None]  # running: rounds done, of; runs finished, in all


def run_all(jobs: Sequence[Job], parallel: int, view: View, tell: Callable[[str], None]) -> list[Job]:
    """Run what is not finished, so many at a time, each in a process of its own; those that failed.

    A run that was killed goes on behind its last round. An interrupt stops all; the same call goes on later.
    """
    waiting = [job for job in jobs if not job.finished]
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    failed: list[Job] = []
    total, threads = len(jobs), max(1, (os.cpu_count() or 1) // parallel)
    if len(waiting) < total:
        tell(f"{total - len(waiting)} of {total} runs are finished already")
    with _stopped(running):
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[job] = _start(job, threads), time.monotonic()
            finished = total - len(waiting) - len(running)
            view({str(job): (job.done, job.config.rounds) for job in running}, finished, total)
            time.sleep(0.2)
            for job in [job for job, (process, _) in running.items() if process.poll() is not None]:
                process, began = running.pop(job)
                if process.returncode == 0 and job.finished:
                    tell(f"{job}: {_outcome(job)}; {duration(time.monotonic() - began)}")
                else:
                    failed.append(job)
                    tell(f"{job} failed, {_log(job)} says why: {_last_line(job)}")
    return failed


def _outcome(job: Job) -> str:
    last = records(job.folder)[-1]
    reached = {METRICS[key]: value(last, key) for key in METRICS}
    return ", ".join(f"{item:.1%} {name}" for name, item in reached.items() if item is not None)


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    begun = (job.folder / "config.toml").is_file()
    wanted = job.folder.with_suffix(".toml")
    wanted.write_text(to_toml(job.config))
    again = ["resume", str(job.folder), "--rounds", str(job.config.rounds)]
    command = again if begun else ["run", str(wanted), "--out", str(job.folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    with _log(job).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "barter", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches them through us
        )


def _last_line(job: Job) -> str:
    lines = _log(job).read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@contextlib.contextmanager
def _stopped(running: Mapping[Job, tuple[subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Whatever happens, nothing runs on afterwards."""
    try:
        yield
    finally:
        for process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process, _ in running.values():
            process.wait()
