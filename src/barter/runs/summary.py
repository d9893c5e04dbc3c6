"""Several runs in one table: what each method reaches over seeds, what it costs, and how sure a difference is."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # all of scipy.stats takes a second to load

from barter.core.record import Round
from barter.runs.picture import Curve
from barter.runs.progress import duration, size

__all__ = [
    "ALWAYS",
    "FEW",
    "METRICS",
    "Column",
    "Comparative",
    "Question",
    "Results",
    "Summary",
    "cells",
    "final",
    "heading",
    "is_share",
    "known_metrics",
    "lines",
    "paired",
    "summarise",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rounds",
    "value",
]

Results = Mapping[
    str, Mapping[int, Sequence[Round]]
]  # method -> seed -> the rounds of a finished run

# Metrics by name, and their headings. Accuracies of clients are means in which every client counts alike, unless
# the heading says otherwise; "trained" is after a round's local training, before what the round gives back.
METRICS = {
    "primary": "accuracy",
    "global": "clients: global test",
    "own": "clients: local test",
    "server": "server: global test",
    "trained": "trained: global test",
    "trained-own": "trained: local test",
    "own-by-images": "clients: local test, by images",
    "worst": "worst client: global test",
    "worst-own": "worst client: local test",
    "spread": "spread over clients: global test",
}
ALWAYS = ("primary", "global", "own", "server")  # shown without being asked for
_FIELDS = {
    "global": "global",
    "own": "local",
    "trained": "before_global",
    "trained-own": "before_local",
    "worst": "global",
    "worst-own": "local",
    "spread": "global",
}
# Endings of metrics that are shares, shown in percent, and of those that are better when lower.
_SHARES = ("global", "local", "macro_f1", "auc", "calibration")
_LOWER = ("loss", "calibration", "spread")
SERVER = "server:"  # before the name of a metric that the server reports
FEW = 3  # seeds below which no interval is given


def value(record: Round, metric: str) -> float | None:
    """Return a metric of a round, or None if it was not measured.

    Args:
        record: The round.
        metric: A name of `METRICS`; any other name is the mean over the clients that report it, and
            server:NAME is what the server reports.
    """
    if metric == "primary":
        return record.headline()
    if metric == "server":
        return record.server.get("global")
    if metric.startswith(SERVER):
        return record.server.get(metric.removeprefix(SERVER))
    if metric == "own-by-images":
        images = record.values("local_images")
        weighted = {k: n * record.clients[k]["local"] for k, n in images.items()}
        return sum(weighted.values()) / sum(images.values()) if images else None
    values = list(record.values(_FIELDS.get(metric, metric)).values())
    if not values:
        return None
    if metric.startswith("worst"):
        return min(values)
    return statistics.pstdev(values) if metric == "spread" else statistics.fmean(values)


def heading(metric: str) -> str:
    """Return how a metric is called in tables and figures."""
    return METRICS.get(metric, metric)


def is_share(metric: str) -> bool:
    """Whether a metric is a share between 0 and 1, which is shown in percent."""
    name = metric.removeprefix(SERVER)
    return metric in METRICS or name.endswith(_SHARES) or "_class_" in name


def known_metrics(results: Results) -> list[str]:
    """Return the names of all metrics that the runs report, `METRICS` first."""
    found = dict.fromkeys(METRICS)
    for runs in results.values():
        for rounds in runs.values():
            for record in rounds:
                found |= dict.fromkeys(name for k in record.clients.values() for name in k)
                found |= dict.fromkeys(SERVER + name for name in record.server)
    same = {*_FIELDS.values(), SERVER + "global", "bytes_up", "bytes_down"} - {*METRICS}
    return [name for name in found if name not in same]


def final(rounds: Sequence[Round], metric: str) -> float | None:
    """Return a metric after the last round; of local training, after the last round that had any."""
    found = (value(record, metric) for record in reversed(rounds))
    return next((v for v in found if v is not None or not metric.startswith("trained")), None)


def lines(results: Results, metric: str) -> dict[str, dict[int, Curve]]:
    """The accuracy of every run by round."""
    return {
        name: {seed: [(r.round, value(r, metric)) for r in rounds] for seed, rounds in runs.items()}
        for name, runs in results.items()
    }


@dataclass(frozen=True)
class Column:
    """A quantity over seeds: one value for each that has it."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Summary:
    """One method: accuracies after the last round, and what they cost."""

    name: str
    seeds: tuple[int, ...]
    primary: str  # whose accuracy the primary one is: the server's model, or the clients'
    accuracies: dict[str, Column]
    bytes: Column
    seconds: Column
    reached: Column  # rounds until the target was reached, of the seeds that did
    difference: Column  # to the baseline, seed by seed


@dataclass(frozen=True)
class Question:
    """What else is asked of the runs: rounds until an accuracy, and the difference to one of the methods."""

    metric: str = "primary"
    baseline: str | None = None
    target: float | None = None


@dataclass(frozen=True)
class Comparative:
    """All methods, and what was asked."""

    rows: tuple[Summary, ...]
    question: Question


def paired(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a mean of differences (Student's t); none for too few."""
    if len(values) < FEW:
        return None
    half = (
        float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    )
    mean = statistics.fmean(values)
    return mean - half, mean + half


def summarise(results: Results, question: Question) -> Comparative:
    """A summary of every method, in their order."""
    metric, baseline, target = question.metric, question.baseline, question.target

    def column(values: Iterable[float | None]) -> Column:
        return Column(tuple(v for v in values if v is not None))

    def reached(rounds: Sequence[Round]) -> float | None:
        return next(
            (r.round for r in rounds if target is not None and (value(r, metric) or 0.0) >= target),
            None,
        )

    def gap(name: str, seed: int) -> float | None:
        if baseline in (None, name) or seed not in results[str(baseline)]:
            return None
        mine, theirs = (final(results[one][seed], metric) for one in (name, str(baseline)))
        return None if mine is None or theirs is None else mine - theirs

    rows = []
    for name, runs in results.items():
        accuracies = {
            key: column(final(rounds, key) for rounds in runs.values())
            for key in dict.fromkeys([*METRICS, metric])
        }
        primary = next((rounds[-1].primary for rounds in runs.values()), "clients")
        traffic = column(
            float(sum(r.traffic("up") + r.traffic("down") for r in rounds))
            for rounds in runs.values()
        )
        seconds = column(sum(r.seconds["round"] for r in rounds) for rounds in runs.values())
        arrived, gaps = (
            column(map(reached, runs.values())),
            column(gap(name, seed) for seed in runs),
        )
        rows.append(
            Summary(name, tuple(runs), primary, accuracies, traffic, seconds, arrived, gaps)
        )
    return Comparative(tuple(rows), question)


def _number(value: float, metric: str, *, sign: str = "") -> str:
    """Return a value of a metric as text: shares in percent, other numbers as they are."""
    return f"{100 * value:{sign}.1f}" if is_share(metric) else f"{value:{sign}.4g}"


def _with_spread(column: Column, metric: str) -> str:
    if column.mean is None:
        return "-"
    mean = _number(column.mean, metric)
    return mean if column.deviation is None else f"{mean} ± {_number(column.deviation, metric)}"


def _difference(summary: Summary, metric: str) -> str:
    column, pairs = summary.difference, len(summary.difference.values)
    if column.mean is None:
        return "-"
    mean, interval = _number(column.mean, metric, sign="+"), paired(column.values)
    if interval is None:
        return f"{mean} (too few seeds)"
    fewer = "" if pairs == len(summary.seeds) else f", {pairs} seeds"
    low, high = (_number(bound, metric, sign="+") for bound in interval)
    return f"{mean} [{low}, {high}]{fewer}"


def _reached(summary: Summary) -> str:
    if summary.reached.mean is None:
        return "never"
    some, all_ = len(summary.reached.values), len(summary.seeds)
    return f"{summary.reached.mean:.1f}" + ("" if some == all_ else f" ({some} of {all_})")


def cells(compared: Comparative) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return headings and rows; a cell says whether it is the best of its column.

    The first accuracy is that of each method's primary model, named in the column before it.
    """
    summaries, asked = compared.rows, compared.question
    wanted = dict.fromkeys([*ALWAYS, asked.metric])
    shown = [key for key in wanted if any(s.accuracies[key].values for s in summaries)]
    best = {key: _best(key, [s.accuracies[key].mean for s in summaries]) for key in shown}
    headings = ["method", "seeds", "model", *map(heading, shown), "bytes", "seconds"]
    if asked.target is not None:
        target = f"{100 * asked.target:g}%" if is_share(asked.metric) else f"{asked.target:g}"
        headings.append(f"rounds to {target} {heading(asked.metric)}")
    if asked.baseline is not None:
        headings.append(f"{heading(asked.metric)} above {asked.baseline} (95 %)")
    rows = []
    for s in summaries:
        row = [(s.name, False), (str(len(s.seeds)), False), (s.primary, False)]
        for key in shown:
            mean = s.accuracies[key].mean
            row.append(
                (_with_spread(s.accuracies[key], key), mean is not None and mean == best[key])
            )
        row += [(size(s.bytes.mean or 0.0), False), (duration(s.seconds.mean or 0.0), False)]
        row += [] if asked.target is None else [(_reached(s), False)]
        row += [] if asked.baseline is None else [(_difference(s, asked.metric), False)]
        rows.append(row)
    return headings, rows


def _best(metric: str, means: Iterable[float | None]) -> float:
    known = [mean for mean in means if mean is not None]
    return min(known) if metric.endswith(_LOWER) else max(known)


def to_markdown(compared: Comparative) -> str:
    """The table for a README; the best of each accuracy is bold."""
    headings, rows = cells(compared)
    lines = [headings, ["---"] * len(headings)]
    lines += [[f"**{text}**" if best else text for text, best in row] for row in rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines
    )


def to_latex(compared: Comparative) -> str:
    """The table for a paper, with booktabs; the best of each accuracy is bold."""
    headings, rows = cells(compared)
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    special |= {character: "\\" + character for character in "&%$#_{}"}

    def escaped(text: str) -> str:
        return re.sub(
            r"(?<!\w)-(?=\d)",
            "$-$",
            "".join(special.get(character, character) for character in text),
        )

    body = [
        [rf"\textbf{{{escaped(text)}}}" if best else escaped(text) for text, best in row]
        for row in rows
    ]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(escaped, headings)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(compared: Comparative) -> str:
    """All numbers as they are: accuracies between 0 and 1, bytes, seconds."""
    metrics = list(dict.fromkeys([*METRICS, compared.question.metric]))
    fields = ["method", "seeds", "primary_model"]
    fields += [f"{key.replace('-', '_')}_{part}" for key in metrics for part in ("mean", "std")]
    fields += ["bytes", "seconds", "rounds_to_target", "reached", "difference", "low", "high"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(fields)
    for s in compared.rows:
        accuracies = [
            part
            for key in metrics
            for part in (s.accuracies[key].mean, s.accuracies[key].deviation)
        ]
        target = compared.question.target
        reached = [None, None] if target is None else [s.reached.mean, len(s.reached.values)]
        difference = [s.difference.mean, *(paired(s.difference.values) or (None, None))]
        row = [
            s.name,
            len(s.seeds),
            s.primary,
            *accuracies,
            s.bytes.mean,
            s.seconds.mean,
            *reached,
            *difference,
        ]
        writer.writerow(["" if field is None else field for field in row])
    return file.getvalue()


def to_rounds(results: Results) -> str:
    """Write every run round by round, one line each, with all metrics that the runs report."""
    metrics = known_metrics(results)
    columns = [key.replace("-", "_") for key in metrics]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    start = ["method", "seed", "round", "primary_model", "participants", "evaluated_clients"]
    writer.writerow([*start, *columns, "bytes", "seconds"])
    for name, runs in results.items():
        for seed, rounds in runs.items():
            for r in rounds:
                evaluated = {*r.values("global"), *r.values("local")}
                facts = [name, seed, r.round, r.primary, len(r.participants), len(evaluated)]
                reached = ["" if (v := value(r, key)) is None else v for key in metrics]
                costs = [r.traffic("up") + r.traffic("down"), r.seconds["round"]]
                writer.writerow([*facts, *reached, *costs])
    return file.getvalue()
