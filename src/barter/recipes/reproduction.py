"""Run a recipe and compare the result with the paper and barter's published runs."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit

from barter.compare.comparison import Comparison, RunJob
from barter.compare.specification import ComparisonSpec, parse_seeds
from barter.core.errors import CheckpointError
from barter.core.record import Round
from barter.recipes.recipe import PublishedRecipe
from barter.recipes.stored import (
    SeedSpread,
    StoredRun,
    common_rounds,
    dotted_settings,
    spread_over_seeds,
)
from barter.runs.summary import METRICS, MIN_SEEDS, SERVER_PREFIX, metric_value
from barter.setup.config import RESULT_FREE, Config, resolve, to_plain
from barter.setup.hardware import resolve_devices
from barter.version import __version__

__all__ = [
    "Reproduction",
    "changed_settings",
    "describe_hardware",
    "plan_reproduction",
    "store_run",
]

# Differences up to this share are no finding, however small the spread: other machines round
# differently.
LEAST_WIDTH = 0.005
# Settings that say where a run computes or where its data are, and what it is compared by.
ELSEWHERE = {*RESULT_FREE, "seed", "data.source", "data.root", "data.download", "precision"}


def plan_reproduction(
    recipe: PublishedRecipe,
    folder: Path,
    seeds: str | None = None,
    rounds: int | None = None,
    device: str | None = None,
    data: Sequence[str] = (),
) -> tuple[Comparison, list[RunJob]]:
    """Plan the runs of a recipe in a folder; runs already in it are continued.

    Args:
        recipe: The recipe.
        folder: The folder of the runs.
        seeds: Seeds such as 0-2; None for the recipe's.
        rounds: Number of rounds; None for the recipe's.
        device: The device; None for the recipe's.
        data: Settings that name the data, see `PublishedRecipe.data_setting`.

    Returns:
        The comparison, whose only variant is the recipe, and its runs, one per seed. Nothing is run
        yet; the folder is created and the plan saved in it.

    Raises:
        ConfigError: The recipe's configuration with these settings is invalid.
        CheckpointError: The folder holds something else, or runs that do not fit.
    """
    settings = list(data)
    if rounds is not None:
        settings.append(f"rounds={rounds}")
    if device is not None:
        settings.append(f"device={device}")
    request = ComparisonSpec(
        variants={recipe.name: []},
        seeds=parse_seeds(seeds or recipe.seeds),
        base=recipe.config,
        settings=settings,
        question={"metric": recipe.metric},
    )
    return Comparison.plan(folder, request)


def store_run(row: str, config: Config, rounds: Sequence[Round]) -> StoredRun:
    """Return a finished run in the form that results are stored in; write nothing.

    Hardware, date and version are those of this machine now, not of the run.

    Args:
        row: The row's name.
        config: The run's configuration. Its seed is stored, and its settings without those that
            cannot change results; of the data's paths, only the file names.
        rounds: The records of all rounds.
    """
    # Of the server, everything that it reports; of clients, the metrics of tables.
    reports = {SERVER_PREFIX + name for record in rounds for name in record.server}
    names = [*METRICS, *sorted(reports - {f"{SERVER_PREFIX}global"})]
    curve: dict[str, list[float | None]] = {"round": [record.round for record in rounds]}
    for name in names:
        values = [metric_value(record, name) for record in rounds]
        if any(value is not None for value in values):
            curve[name] = [None if value is None else round(value, 6) for value in values]
    curve["seconds"] = [round(record.seconds["round"], 3) for record in rounds]
    curve["bytes"] = [record.traffic("up") + record.traffic("down") for record in rounds]
    if any(record.failures for record in rounds):
        curve["failures"] = [len(record.failures) for record in rounds]
    settings = dotted_settings(to_plain(config))
    kept = {key: value for key, value in settings.items() if key not in {*RESULT_FREE, "seed"}}
    for key in ("data.source", "data.public"):
        # Of a path, the name is enough: folders are those of one machine.
        kind, _, path = str(kept[key]).rpartition(":")
        kept[key] = f"{kind}:{Path(path).name}" if kind else path
    del kept["data.root"]
    return StoredRun(
        row=row,
        seed=config.seed,
        curve=curve,
        settings=kept,
        hardware=describe_hardware(config),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        version=__version__,
    )


def describe_hardware(config: Config) -> str:
    """Describe the device that a configuration computes on here, and torch's version."""
    devices = resolve_devices(config.device)
    version = torch.__version__.partition("+")[0]
    if devices[0].type == "cuda":
        names = dict.fromkeys(map(torch.cuda.get_device_name, devices))
        return f"{', '.join(names)}, torch {version}"
    cores = os.cpu_count() or 1
    return f"{platform.machine()}, {cores} cores, torch {version}"


def changed_settings(recipe: PublishedRecipe) -> dict[str, tuple[Any, Any]]:
    """Return settings that differ between today's configuration and published runs.

    Returns:
        Dotted key -> published value and today's. Settings that the published runs did not record,
        and those of seed, data's location, device and precision, are not compared.
    """
    today = dotted_settings(to_plain(resolve(recipe.config)))
    found = {}
    for run in recipe.published:
        for key, value in run.settings.items():
            if key in today and key not in ELSEWHERE and today[key] != value:
                found[key] = (value, today[key])
    return found


@dataclass(frozen=True)
class Reproduction:
    """A recipe's result beside its published runs, after the last round both have."""

    recipe: PublishedRecipe
    runs: Sequence[StoredRun]

    @property
    def last(self) -> int:
        """Return the last round that all runs have, published and new.

        Raises:
            CheckpointError: They have no round in common.
        """
        common = common_rounds([*self.runs, *self.recipe.published])
        if not common:
            raise CheckpointError(f"{self.recipe.name}: published and new runs share no round")
        return common[-1]

    @property
    def published(self) -> SeedSpread:
        return self._spread(self.recipe.published, self.last)

    @property
    def obtained(self) -> SeedSpread:
        return self._spread(self.runs, self.last)

    def _spread(self, runs: Sequence[StoredRun], at: int) -> SeedSpread:
        spread = spread_over_seeds(runs, self.recipe.metric, at)
        if spread is None:
            raise CheckpointError(
                f"{self.recipe.name}: no run measured {self.recipe.metric!r} after round {at}"
            )
        return spread

    @property
    def width(self) -> float:
        """Return the largest difference in means of published and new runs that agrees.

        It is half of the 95 % prediction interval for the mean of the new seeds, by Student's t over
        the published ones, and at least half a point. Fewer than three published seeds have no
        spread: then it is the recipe's tolerance. The unit is that of metrics: 0.01 is one point.
        """
        deviation = self.published.deviation
        n = len(self.published.values)
        if n < MIN_SEEDS or deviation is None:
            return self.recipe.tolerance / 100
        quantile = float(stdtrit(n - 1, 0.975))
        half = quantile * deviation * math.sqrt(1 / n + 1 / len(self.obtained.values))
        return max(half, LEAST_WIDTH)

    @property
    def agrees(self) -> bool:
        return abs(self.obtained.mean - self.published.mean) <= self.width

    @property
    def verdict(self) -> str:
        """Say whether the result agrees with the published one, and by which rule."""
        mean = 100 * self.published.mean
        width = 100 * self.width
        n = len(self.published.values)
        side = "below" if self.obtained.mean < self.published.mean else "above"
        if n < MIN_SEEDS:
            seeds = "1 published seed is" if n == 1 else f"{n} published seeds are"
            within = "within" if self.agrees else side
            return (
                f"{within} the tolerance of {width:g} points: {100 * self.obtained.mean:.1f} and "
                f"published {mean:.1f}; {seeds} too few for a spread"
            )
        within = "within" if self.agrees else side
        return (
            f"{within} the spread: {100 * self.obtained.mean:.1f}, and {mean - width:.1f} to "
            f"{mean + width:.1f} is expected (95 % prediction interval of {n} published seeds)"
        )

    def columns(self) -> dict[str, dict[int, float]]:
        """Return the recipe's metric: group -> round -> mean over the group's runs.

        The groups are "published" and "this run". A group has the rounds that all its runs have and
        in which one of them measured the metric.
        """
        found = {}
        for name, runs in {"published": self.recipe.published, "this run": self.runs}.items():
            spreads = {
                at: spread_over_seeds(runs, self.recipe.metric, at) for at in common_rounds(runs)
            }
            found[name] = {at: s.mean for at, s in spreads.items() if s is not None}
        return found
