"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import tomli_w

from barter.compare.comparison import Comparison
from barter.core.record import Round
from barter.report import charts
from barter.report.page import Section, Tile, chart, code, folded, page, side_by_side, table, text
from barter.report.run import Split, cited, failures, phases
from barter.runs.folder import ended, rounds_done
from barter.runs.summary import ALWAYS, Comparative, Results, cells, heading, lines
from barter.setup.config import Config, read, resolve, to_toml

__all__ = ["ComparisonReport"]


class ComparisonReport:
    """What the finished runs of a comparison have come to, whenever one asks; more may be planned meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.comparison = Comparison.at(folder)
        self._splits: dict[Path, Split] = {}

    @property
    def done(self) -> int:
        return sum(rounds_done(run) for run in self._runs())

    @property
    def empty(self) -> bool:
        return not any(self._ended())

    @property
    def finished(self) -> bool:
        return all(self._ended())

    @property
    def progress(self) -> str:
        runs = self._ended()
        return f"{sum(runs)} of {len(runs)} runs"

    def _runs(self) -> list[Path]:
        self.comparison = Comparison.at(self.folder)
        planned = product(self.comparison.variants, self.comparison.seeds)
        return [self.comparison.run(name, seed) for name, seed in planned]

    def _ended(self) -> list[bool]:
        return [ended(run, self.comparison.rounds) for run in self._runs()]

    def page(self, *, live: bool, quick: bool = False) -> str:
        """The page of the runs that are finished; a quick one does not wait for data that are not read yet."""
        comparison = self.comparison = Comparison.at(self.folder)
        results, missing = comparison.results()
        finished, planned = (
            sum(map(len, results.values())),
            len(comparison.variants) * len(comparison.seeds),
        )
        title = f"{len(comparison.variants)} methods on {comparison.common['data']['source']}"
        subtitle = (
            f"{comparison.common['clients']} clients, {comparison.rounds} rounds, {len(comparison.seeds)} seeds; "
            f"{finished} of {planned} runs are finished"
        )
        sections = self._results(results, missing, quick=quick) if results else []
        common = Section(
            "Configuration", [text("What all runs share:"), code(tomli_w.dumps(comparison.common))]
        )
        goes_on = (
            "The comparison goes on. This page reads itself again every few seconds."
            if live
            else ""
        )
        tiles = _tiles(comparison.summary(results)) if results else []
        return page(title, subtitle, tiles, [*sections, common], goes_on)

    def _results(self, results: Results, missing: Sequence[str], *, quick: bool) -> list[Section]:
        compared = self.comparison.summary(results)
        metric = compared.question.metric
        configs = {name: self._config(name, next(iter(runs))) for name, runs in results.items()}
        first, seed = next((name, next(iter(runs))) for name, runs in results.items())
        example = self.comparison.run(first, seed)
        if example not in self._splits:
            self._splits[example] = Split(configs[first])
        if not quick:
            self._splits[example].read()
        wanted = dict.fromkeys([*ALWAYS, metric])
        shown = [key for key in wanted if any(row.accuracies[key].values for row in compared.rows)]
        curves = [
            chart(heading(key).capitalize(), charts.methods(lines(results, key))) for key in shown
        ]
        outcomes = [
            chart(
                f"{heading(metric).capitalize()} after the last round, seed by seed",
                charts.by_seed(results, metric),
            ),
            chart("What it took", charts.price(results, metric)),
        ]
        failed = [
            [f"{name}, seed {seed}", failure]
            for name, runs in results.items()
            for seed, rounds in runs.items()
            for r in rounds
            for failure in r.failures
        ]
        remarks = [
            [f"{name}, seed {seed}", remark]
            for name, runs in results.items()
            for seed, rounds in runs.items()
            for remark in configs[name].algorithm.remarks(rounds)
        ]
        return [
            Section(
                "Table",
                [
                    _table(compared),
                    *([text(f"Not finished: {'; '.join(missing)}.")] if missing else []),
                ],
            ),
            Section(
                "Curves",
                [
                    text("Means over seeds, and one standard deviation to each side."),
                    side_by_side(*curves),
                ],
            ),
            Section("Seeds and bytes", [side_by_side(*outcomes)]),
            _costs(results),
            self._splits[example].section(f"Images by client and class: {first}, seed {seed}"),
            *([Section("Remarks", [table(["run", "remark"], remarks)])] if remarks else []),
            failures("run", failed),
            cited([config.algorithm for config in configs.values()]),
            Section(
                "Variants",
                [folded(name, code(to_toml(config))) for name, config in configs.items()],
            ),
        ]

    def _config(self, name: str, seed: int) -> Config:
        return resolve(read(self.comparison.run(name, seed) / "config.toml"))


def _tiles(compared: Comparative) -> list[Tile]:
    """What each method reaches."""
    key = compared.question.metric
    found = []
    for row in compared.rows:
        column = row.accuracies[key]
        spread = (
            ""
            if column.deviation is None
            else f"± {100 * column.deviation:.1f} over {len(row.seeds)} seeds"
        )
        found.append(Tile(row.name, "-" if column.mean is None else f"{column.mean:.1%}", spread))
    return found


def _table(compared: Comparative) -> str:
    headings, rows = cells(compared)
    best = frozenset(
        (i, j) for i, row in enumerate(rows) for j, (_, leads) in enumerate(row) if leads
    )
    return table(headings, [[content for content, _ in row] for row in rows], best=best)


def _costs(results: Results) -> Section:
    """Bytes by direction and seconds by phase of every method, means over seeds; and memory, where it was recorded."""
    names = list(results)
    traffic = {
        way: [
            _mean([sum(r.traffic(way) for r in rounds) for rounds in results[name].values()])
            for name in names
        ]
        for way in ("up", "down")
    }
    spent = {name: [phases(rounds) for rounds in runs.values()] for name, runs in results.items()}
    every = dict.fromkeys(phase for runs in spent.values() for run in runs for phase in run)
    seconds = {
        phase: [_mean([sum(run.get(phase, [])) for run in spent[name]]) for name in names]
        for phase in every
    }
    peaks = [max(_peak(rounds) for rounds in runs.values()) for runs in results.values()]
    parts = [
        chart("Bytes of a run, mean over seeds", charts.bars(names, traffic, "B")),
        chart("Seconds of a run by phase, mean over seeds", charts.bars(names, seconds, " s")),
        *(
            [chart("Peak of the device's memory", charts.bars(names, {"peak": peaks}, "B"))]
            if any(peaks)
            else []
        ),
    ]
    return Section("Costs", [side_by_side(*parts)])


def _peak(rounds: Sequence[Round]) -> float:
    return max(r.server.get("device_memory", 0.0) for r in rounds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
