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
from barter.runs.selection import best_round, validation_accuracy

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

# Accuracies, and how they are called; "trained" is after a round's local training, before what the round gives back.
METRICS = {
    "global": "global",
    "own": "own",
    "trained": "trained: global",
    "trained-own": "trained: own",
    "server": "server's model",
    "val": "validation",
    "val-local": "validation: own",
}
ALWAYS = ("global", "own", "server")  # of these, what is told without being asked
_FIELDS = {
    "global": "global",
    "own": "local",
    "trained": "before_global",
    "trained-own": "before_local",
    "val-local": "val_local",
}
FEW = 3  # seeds below which no interval is given


def value(record: Round, metric: str) -> float | None:
    """The clients' mean accuracy of this kind, that of the server's model, or that by which rounds are chosen."""
    if metric == "server":
        return record.server.get("global")
    if metric == "val":
        return validation_accuracy(record)
    name = _FIELDS[metric]
    return record.mean(name) if any(name in client for client in record.clients.values()) else None


def final(rounds: Sequence[Round], metric: str) -> float | None:
    """The same after the last round; of local training, after the last round in which there was any."""
    found = (value(record, metric) for record in reversed(rounds))
    return next(
        (v for v in found if v is not None or not _FIELDS.get(metric, "").startswith("before")),
        None,
    )


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
    """One method: accuracies after the last round and after the best on validation, and what they cost."""

    name: str
    seeds: tuple[int, ...]
    accuracies: dict[str, Column]
    bytes: Column
    seconds: Column
    reached: Column  # rounds until the target was reached, of the seeds that did
    difference: Column  # to the baseline, seed by seed
    best_round: Column = Column(())  # the round with the highest validation accuracy
    best: Column = Column(())  # the test accuracy after that round


@dataclass(frozen=True)
class Question:
    """What else is asked of the runs: rounds until an accuracy, and the difference to one of the methods."""

    metric: str = "global"
    baseline: str | None = None
    target: float | None = None

    @property
    def tested(self) -> str:
        """The accuracy on test images to report of a round that validation chose."""
        return "global" if self.metric.startswith("val") else self.metric


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
            key: column(final(rounds, key) for rounds in runs.values()) for key in METRICS
        }
        traffic = column(
            float(sum(r.traffic("up") + r.traffic("down") for r in rounds))
            for rounds in runs.values()
        )
        seconds = column(sum(r.seconds["round"] for r in rounds) for rounds in runs.values())
        arrived, gaps = (
            column(map(reached, runs.values())),
            column(gap(name, seed) for seed in runs),
        )
        chosen = [best for rounds in runs.values() if (best := best_round(rounds)) is not None]
        rows.append(
            Summary(
                name,
                tuple(runs),
                accuracies,
                traffic,
                seconds,
                arrived,
                gaps,
                best_round=column(float(best.round) for best in chosen),
                best=column(value(best, question.tested) for best in chosen),
            )
        )
    return Comparative(tuple(rows), question)


def _percent(column: Column) -> str:
    if column.mean is None:
        return "-"
    spread = "" if column.deviation is None else f" ± {100 * column.deviation:.1f}"
    return f"{100 * column.mean:.1f}{spread}"


def _rounds(column: Column) -> str:
    return "-" if column.mean is None else f"{column.mean:.1f}".removesuffix(".0")


def _difference(summary: Summary) -> str:
    column, pairs = summary.difference, len(summary.difference.values)
    if column.mean is None:
        return "-"
    interval = paired(column.values)
    if interval is None:
        return f"{100 * column.mean:+.1f} (too few seeds)"
    fewer = "" if pairs == len(summary.seeds) else f", {pairs} seeds"
    return f"{100 * column.mean:+.1f} [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]{fewer}"


def _reached(summary: Summary) -> str:
    if summary.reached.mean is None:
        return "never"
    some, all_ = len(summary.reached.values), len(summary.seeds)
    return f"{summary.reached.mean:.1f}" + ("" if some == all_ else f" ({some} of {all_})")


def cells(compared: Comparative) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Headings and rows; a cell says whether it is the best of its column."""
    summaries, asked = compared.rows, compared.question
    wanted = [key for key in METRICS if key in (*ALWAYS, asked.metric)]
    shown = [key for key in wanted if any(s.accuracies[key].values for s in summaries)]
    best = {key: max(s.accuracies[key].mean or 0.0 for s in summaries) for key in shown}
    validated = any(s.best_round.values for s in summaries)
    headings = ["method", "seeds", *(METRICS[key] for key in shown)]
    if validated:
        headings += ["best round on validation", f"{METRICS[asked.tested]} in it"]
    headings += ["bytes", "seconds"]
    if asked.target is not None:
        headings.append(f"rounds to {100 * asked.target:g}% {METRICS[asked.metric]}")
    if asked.baseline is not None:
        headings.append(f"{METRICS[asked.metric]} above {asked.baseline} (95 %)")
    rows = []
    for s in summaries:
        row = [(s.name, False), (str(len(s.seeds)), False)]
        row += [(_percent(s.accuracies[key]), s.accuracies[key].mean == best[key]) for key in shown]
        row += [(_rounds(s.best_round), False), (_percent(s.best), False)] if validated else []
        row += [(size(s.bytes.mean or 0.0), False), (duration(s.seconds.mean or 0.0), False)]
        row += [] if asked.target is None else [(_reached(s), False)]
        row += [] if asked.baseline is None else [(_difference(s), False)]
        rows.append(row)
    return headings, rows


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
    fields = ["method", "seeds"]
    fields += [f"{key.replace('-', '_')}_{part}" for key in METRICS for part in ("mean", "std")]
    fields += ["bytes", "seconds", "rounds_to_target", "reached", "difference", "low", "high"]
    fields += ["best_round_mean", "best_round_std", "best_mean", "best_std"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(fields)
    for s in compared.rows:
        accuracies = [
            part
            for key in METRICS
            for part in (s.accuracies[key].mean, s.accuracies[key].deviation)
        ]
        target = compared.question.target
        reached = [None, None] if target is None else [s.reached.mean, len(s.reached.values)]
        difference = [s.difference.mean, *(paired(s.difference.values) or (None, None))]
        row = [
            s.name,
            len(s.seeds),
            *accuracies,
            s.bytes.mean,
            s.seconds.mean,
            *reached,
            *difference,
            s.best_round.mean,
            s.best_round.deviation,
            s.best.mean,
            s.best.deviation,
        ]
        writer.writerow(["" if field is None else field for field in row])
    return file.getvalue()


def to_rounds(results: Results) -> str:
    """Every run round by round, one line each, to draw or compute anything else from."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["method", "seed", "round", *(key.replace("-", "_") for key in METRICS), "bytes", "seconds"]
    )
    for name, runs in results.items():
        for seed, rounds in runs.items():
            for r in rounds:
                reached = [value(r, key) for key in METRICS]
                costs = [r.traffic("up") + r.traffic("down"), r.seconds["round"]]
                writer.writerow(
                    [name, seed, r.round, *("" if v is None else v for v in reached), *costs]
                )
    return file.getvalue()
