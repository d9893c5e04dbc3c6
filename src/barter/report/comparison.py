"""The report of a comparison."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path

import tomli_w

from barter.compare.comparison import Comparison
from barter.core.record import Round
from barter.report import charts
from barter.report.page import (
    Section,
    Tile,
    chart,
    code,
    fold,
    page,
    side_by_side,
    table,
    text_block,
)
from barter.report.run import TEST_TITLES, Split, citation_section, failure_section, phase_seconds
from barter.runs.folder import count_rounds, has_ended
from barter.runs.picture import Curve
from barter.runs.progress import pluralise
from barter.runs.summary import (
    ALWAYS,
    Comparative,
    Results,
    cumulative_bytes,
    cumulative_seconds,
    heading,
    is_share,
    mean_positions,
    metric_curves,
    summary_cells,
)
from barter.setup.config import Config, to_toml
from barter.setup.trust import read_run

__all__ = ["ComparisonReport"]

SERVER_TITLE = f"Accuracy of the server's model, {TEST_TITLES['global']}"
CLIENTS_TITLE = f"Accuracy of the clients' models, {TEST_TITLES['global']}"
LOCAL = f"Accuracy of the clients' models, {TEST_TITLES['local']}"


class ComparisonReport:
    """The report of a comparison's finished runs; others may be running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.comparison = Comparison.at(folder)
        self._splits: dict[Path, Split] = {}

    @property
    def done(self) -> int:
        return sum(count_rounds(run) for run in self._runs())

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
        return [has_ended(run, self.comparison.rounds) for run in self._runs()]

    def page(self, *, live: bool, quick: bool = False) -> str:
        """Return the HTML page of the finished runs; read the plan from the folder again.

        Args:
            live: The page reloads itself.
            quick: Do not read the data, which may take long; the split is then omitted, unless it
                is known from an earlier page.
        """
        comparison = self.comparison = Comparison.at(self.folder)
        results, missing = comparison.results()
        finished = sum(map(len, results.values()))
        planned = len(comparison.variants) * len(comparison.seeds)
        subtitle = (
            f"{pluralise(comparison.common['clients'], 'client')}, "
            f"{pluralise(comparison.rounds, 'round')}, {pluralise(len(comparison.seeds), 'seed')}; "
            f"{finished} of {pluralise(planned, 'run')} finished"
        )
        sections = self._results(results, missing, quick=quick) if results else []
        common = Section(
            "Configuration",
            [text_block("What all runs share:"), code(tomli_w.dumps(comparison.common))],
        )
        message = (
            "The comparison is not finished. This page reloads itself every few seconds."
            if live
            else ""
        )
        tiles = _tiles(comparison.summary(results), results) if results else []
        return page(self._title(), subtitle, tiles, [*sections, common], message)

    def _title(self) -> str:
        """Return a title that names or counts the methods and their variants."""
        source = self.comparison.common["data"]["source"]
        variants = len(self.comparison.variants)
        started = []
        for name in self.comparison.variants:
            folders = [self._run(name, seed) for seed in self.comparison.seeds]
            folder = next(filter(_started, folders), None)
            if folder is not None:
                started.append(read_run(folder))
        kinds = list(dict.fromkeys(type(config.algorithm).__name__ for config in started))
        if len(started) < variants:  # The methods of the others are known when they start.
            return f"{pluralise(variants, 'variant')} on {source}"
        if len(kinds) == variants:
            return f"{' and '.join(kinds) if variants < 3 else f'{variants} methods'} on {source}"
        if len(kinds) == 1:
            return f"{kinds[0]} on {source}: {pluralise(variants, 'variant')}"
        return f"{pluralise(variants, 'variant')} of {len(kinds)} methods on {source}"

    def _results(self, results: Results, missing: Sequence[str], *, quick: bool) -> list[Section]:
        """Return the sections about the finished runs: tables, charts, remarks.

        Args:
            results: The finished runs, by method and seed.
            missing: Names of the other runs.
            quick: Leave out the split of the data if it was not computed before.
        """
        compared = self.comparison.summary(results)
        configs = {name: self._config(name, next(iter(runs))) for name, runs in results.items()}
        first, seed = next((name, next(iter(runs))) for name, runs in results.items())
        example = self._run(first, seed)
        if example not in self._splits:
            self._splits[example] = Split(configs[first])
        if not quick:
            self._splits[example].read()
        failed = []
        remarks = []
        for name, runs in results.items():
            for seed, rounds in runs.items():
                run = f"{name}, seed {seed}"
                for r in rounds:
                    failed += [[run, failure] for failure in r.failures]
                    remarks += [[run, f"round {r.round}: {warning}"] for warning in r.warnings]
                remarks += [[run, remark] for remark in configs[name].algorithm.remarks(rounds)]
        unfinished = [text_block(f"Not finished: {'; '.join(missing)}.")] if missing else []
        return [
            Section("Table", [_table(compared), *unfinished]),
            _metric_charts(compared, results),
            _seeds_and_bytes(compared, results),
            _costs(results),
            self._splits[example].section(f"Images by client and class: {first}, seed {seed}"),
            Section("Remarks", [table(["run", "remark"], remarks)] if remarks else []),
            failure_section("run", failed),
            citation_section([config.algorithm for config in configs.values()]),
            Section(
                "Variants",
                [fold(name, code(to_toml(config))) for name, config in configs.items()],
            ),
        ]

    def _run(self, name: str, seed: int) -> Path:
        return self.comparison.run(name, seed)

    def _config(self, name: str, seed: int) -> Config:
        return read_run(self._run(name, seed))


def _started(run: Path) -> bool:
    return (run / "config.toml").is_file()


def _describe(metric: str, primary: Collection[str]) -> str:
    """Describe a metric: of which model, on which test set.

    Args:
        metric: The metric.
        primary: The primary models of the methods, "server" or "clients".
    """
    if metric == "primary" and len(set(primary)) == 1:
        metric = {"server": "server", "clients": "global"}[next(iter(primary))]
    known = {
        "primary": f"Accuracy of each method's primary model, {TEST_TITLES['global']}",
        "server": SERVER_TITLE,
        "global": CLIENTS_TITLE,
        "own": LOCAL,
    }
    return known.get(metric) or heading(metric).capitalize()


def _tiles(compared: Comparative, results: Results) -> list[Tile]:
    """Return a card per method: accuracy and its model, round and number of seeds.

    Seeds that stopped early count with their last round, so the card may name a range of rounds.
    """
    key = compared.question.metric
    cards = []
    for row in compared.rows:
        column = row.accuracies[key]
        last = sorted({rounds[-1].round for rounds in results[row.name].values()})
        at = f"round {last[0]}" if len(last) == 1 else f"rounds {last[0]} to {last[-1]}"
        when = f"{at}, {pluralise(len(row.seeds), 'seed')}"
        if column.deviation is not None:
            deviation = column.deviation
            spread = f"{100 * deviation:.1f}" if is_share(key) else f"{deviation:.2g}"
            when = f"{at}, mean ± {spread} over {len(row.seeds)} seeds"
        value = "-"
        if column.mean is not None:
            value = f"{column.mean:.1%}" if is_share(key) else f"{column.mean:.4g}"
        cards.append(Tile(row.name, value, [_describe(key, [row.primary]), when]))
    return cards


def _metric_charts(compared: Comparative, results: Results) -> Section:
    """Return charts of the comparison's metric and of the metrics in `ALWAYS`.

    They are curves by round. If no run has more than one round, they are bars, of metrics between
    0 and 1 only. Metrics without values, or equal to one already shown, are left out.
    """
    primary = {row.primary for row in compared.rows}
    shown: dict[str, dict[str, dict[int, Curve]]] = {}
    for key in dict.fromkeys([compared.question.metric, *ALWAYS]):
        by_method = metric_curves(results, key)
        curves = [curve for seeds in by_method.values() for curve in seeds.values()]
        known = any(value is not None for curve in curves for _, value in curve)
        # The primary metric may be the same as one of the others.
        if known and by_method not in shown.values():
            shown[key] = by_method
    if max(len(rounds) for runs in results.values() for rounds in runs.values()) == 1:
        columns: dict[str, dict[str, list[float]]] = {}
        for key, by_method in shown.items():
            if is_share(key):
                columns[_describe(key, primary)] = {
                    name: [v for curve in seeds.values() for _, v in curve if v is not None]
                    for name, seeds in by_method.items()
                }
        title = "Accuracy after the round, mean over seeds and one standard deviation to each side"
        return Section("Accuracy", [chart(title, charts.outcome_chart(columns))] if columns else [])
    figures = [
        chart(f"{_describe(key, primary)}, by round", charts.method_chart(by_method, key))
        for key, by_method in shown.items()
    ]
    note = text_block("Means over seeds, and one standard deviation to each side.")
    return Section("Curves", [note, side_by_side(*figures)] if figures else [])


def _seeds_and_bytes(compared: Comparative, results: Results) -> Section:
    """Draw the metric by seed, by traffic and by simulated time, where there are any."""
    metric = compared.question.metric
    what = _describe(metric, {row.primary for row in compared.rows})
    parts = []
    if any(len(runs) > 1 for runs in results.values()):
        parts.append(chart(f"{what}, seed by seed", charts.seed_chart(results, metric)))
    if len({amount for row in compared.rows for amount in row.bytes.values}) > 1:
        parts.append(chart(f"{what}, and the bytes it took", charts.price_chart(results, metric)))
    several = any(len(rounds) > 1 for runs in results.values() for rounds in runs.values())
    if several and any(amount for row in compared.rows for amount in row.bytes.values):
        by_bytes = {name: mean_positions(runs, cumulative_bytes) for name, runs in results.items()}
        figure = charts.method_chart(metric_curves(results, metric), metric, by_bytes, "bytes")
        parts.append(chart(f"{what}, by bytes, both ways", figure))
    if several and all(row.simulated.values for row in compared.rows):
        by_time = {name: mean_positions(runs, cumulative_seconds) for name, runs in results.items()}
        figure = charts.method_chart(metric_curves(results, metric), metric, by_time, "seconds")
        parts.append(chart(f"{what}, by simulated time", figure))
    return Section("Seeds, bytes and time", [side_by_side(*parts)] if parts else [])


def _table(compared: Comparative) -> str:
    headings, rows = summary_cells(compared)
    best = frozenset(
        (i, j) for i, row in enumerate(rows) for j, (_, leads) in enumerate(row) if leads
    )
    return table(headings, [[content for content, _ in row] for row in rows], best=best)


def _costs(results: Results) -> Section:
    """Draw traffic and time by phase, means over seeds, and peak memory where known."""
    names = list(results)
    traffic: dict[str, list[float]] = {"up": [], "down": []}
    for way, means in traffic.items():
        for runs in results.values():
            totals = [sum(r.traffic(way) for r in rounds) for rounds in runs.values()]
            means.append(_mean(totals))
    # Method -> of each seed, the seconds of every phase by round.
    spent = {
        name: [phase_seconds(rounds) for rounds in runs.values()] for name, runs in results.items()
    }
    seconds: dict[str, list[float]] = {}
    for phases_by_seed in spent.values():
        for phases in phases_by_seed:
            seconds |= {phase: [] for phase in phases}
    for phase, means in seconds.items():
        for name in names:
            by_seed = [sum(phases.get(phase, [])) for phases in spent[name]]
            means.append(_mean(by_seed))
    peaks = [max(_peak(rounds) for rounds in runs.values()) for runs in results.values()]
    parts = [
        chart(
            "Time of a run by phase, mean over seeds", charts.bar_chart(names, seconds, "seconds")
        )
    ]
    if any(map(any, traffic.values())):
        figure = charts.bar_chart(names, traffic, "bytes")
        parts.insert(0, chart("Bytes of a run, mean over seeds", figure))
    if any(peaks):
        figure = charts.bar_chart(names, {"peak": peaks}, "bytes")
        parts.append(chart("Peak of the device's memory", figure))
    return Section("Costs", [side_by_side(*parts)])


def _peak(rounds: Sequence[Round]) -> float:
    return max(r.server.get("device_memory", 0.0) for r in rounds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
