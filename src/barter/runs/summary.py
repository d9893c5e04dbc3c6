"""Summarise several runs: accuracies over seeds, costs, confidence intervals."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from scipy.special import stdtrit  # all of scipy.stats takes a second to load

from barter.core.record import Round
from barter.runs.picture import Curve
from barter.runs.progress import format_bytes, format_duration
from barter.runs.selection import best_round, validation_accuracy

__all__ = [
    "ALWAYS",
    "METRICS",
    "MIN_SEEDS",
    "SERVER_PREFIX",
    "Column",
    "Comparative",
    "Question",
    "Results",
    "Summary",
    "confidence_interval",
    "cumulative_bytes",
    "cumulative_seconds",
    "final_value",
    "heading",
    "is_better_lower",
    "is_share",
    "known_metrics",
    "mean_positions",
    "metric_curves",
    "metric_value",
    "summarise",
    "summary_cells",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_round_csv",
]

# Method -> seed -> the rounds of a finished run.
Results = Mapping[str, Mapping[int, Sequence[Round]]]

# Metrics by name, and their headings. Accuracies of clients are unweighted means over clients,
# unless the heading says otherwise; "trained" is after a round's local training, before the exchange.
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
    "val": "validation",
    "val-local": "clients: local validation",
}
ALWAYS = ("primary", "global", "own", "server")  # metrics that every table shows
_FIELDS = {
    "global": "global",
    "own": "local",
    "trained": "before_global",
    "trained-own": "before_local",
    "worst": "global",
    "worst-own": "local",
    "spread": "global",
    "val-local": "val_local",
}
_SHARES = ("global", "local", "macro_f1", "auc", "calibration")  # suffixes of metrics in percent
_LOWER = ("loss", "calibration", "spread")  # suffixes of metrics that are better when lower
SERVER_PREFIX = "server:"  # prefix of a metric that the server reports
MIN_SEEDS = 3  # minimum number of seeds for a confidence interval


def metric_value(record: Round, metric: str) -> float | None:
    """Return a metric of a round, or None if it was not measured.

    Args:
        record: The round.
        metric: A name of `METRICS`; any other name is the mean over the clients that report it, and
            server:NAME is what the server reports. Of the clients, names that begin with "worst"
            take the minimum, "spread" the standard deviation of the population, "own-by-images" the
            mean of local accuracies weighted by the number of local test images.
    """
    if metric == "primary":
        return record.headline()
    if metric == "val":
        return validation_accuracy(record)
    if metric == "server":
        return record.server.get("global")
    if metric.startswith(SERVER_PREFIX):
        return record.server.get(metric.removeprefix(SERVER_PREFIX))
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
    """Return a metric's title in tables and figures; its name if it has none."""
    return METRICS.get(metric, metric)


def is_share(metric: str) -> bool:
    """Return whether a metric is a share between 0 and 1, which is shown in percent."""
    name = metric.removeprefix(SERVER_PREFIX)
    return metric in METRICS or name.endswith(_SHARES) or "_class_" in name


def is_better_lower(metric: str) -> bool:
    """Return whether a lower value of a metric is better, as of a loss."""
    return metric.endswith(_LOWER)


def known_metrics(results: Results) -> list[str]:
    """Return the names of all metrics that the runs report, `METRICS` first.

    Those of the server begin with "server:". Fields that one of `METRICS` shows already, and bytes,
    are left out.
    """
    found = dict.fromkeys(METRICS)
    for runs in results.values():
        for rounds in runs.values():
            for record in rounds:
                found |= dict.fromkeys(name for k in record.clients.values() for name in k)
                found |= dict.fromkeys(SERVER_PREFIX + name for name in record.server)
    same = {*_FIELDS.values(), SERVER_PREFIX + "global", "bytes_up", "bytes_down"} - {*METRICS}
    return [name for name in found if name not in same]


def final_value(rounds: Sequence[Round], metric: str) -> float | None:
    """Return a metric after the last round, or None if it was not measured then.

    Also None without rounds. Metrics of local training ("trained...") are taken from the last round
    that had any.
    """
    if not metric.startswith("trained"):
        return metric_value(rounds[-1], metric) if rounds else None
    measured = (metric_value(record, metric) for record in reversed(rounds))
    return next((accuracy for accuracy in measured if accuracy is not None), None)


def metric_curves(results: Results, metric: str) -> dict[str, dict[int, Curve]]:
    """Return a metric of every run by round: method -> seed -> curve.

    A curve is a list of (round, value); the value is None where it was not measured.
    """
    curves: dict[str, dict[int, Curve]] = {}
    for name, runs in results.items():
        curves[name] = {}
        for seed, rounds in runs.items():
            curves[name][seed] = [(r.round, metric_value(r, metric)) for r in rounds]
    return curves


def cumulative_bytes(rounds: Sequence[Round]) -> list[float]:
    """Return all clients' cumulative bytes, in both directions, after each round."""
    return list(accumulate(float(r.traffic("up") + r.traffic("down")) for r in rounds))


def cumulative_seconds(rounds: Sequence[Round]) -> list[float] | None:
    """Return the simulated seconds from the start to each round's end.

    None if there is no round, or one without a simulated time.
    """
    seconds = [r.simulated_seconds for r in rounds]
    known = [value for value in seconds if value is not None]
    return list(accumulate(known)) if known and len(known) == len(seconds) else None


def mean_positions(
    runs: Mapping[int, Sequence[Round]], cost: Callable[[Sequence[Round]], list[float] | None]
) -> dict[int, float]:
    """Return a method's cost until the end of each round, as the mean over its seeds.

    Args:
        runs: Seed -> the rounds of a run.
        cost: `cumulative_bytes` or `cumulative_seconds`.

    Returns:
        Round -> mean cost of the seeds that have this round and a known cost; empty without such.
    """
    values: dict[int, list[float]] = {}
    for rounds in runs.values():
        for record, amount in zip(rounds, cost(rounds) or [], strict=False):
            values.setdefault(record.round, []).append(amount)
    return {t: statistics.fmean(amounts) for t, amounts in values.items()}


@dataclass(frozen=True)
class Column:
    """The values of a quantity over the seeds that have it."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Summary:
    """One method: accuracies after the last and the best round, and costs."""

    name: str
    seeds: tuple[int, ...]
    primary: str  # whose accuracy is the primary one: "server" or "clients"
    accuracies: dict[str, Column]  # metric -> values after the last round
    bytes: Column
    seconds: Column
    reached: Column  # rounds until the target, for the seeds that reached it
    difference: Column  # difference to the baseline with the same seed
    best_round: Column = Column(())  # the round with the highest validation accuracy
    best: Column = Column(())  # the test accuracy after that round
    simulated: Column = Column(())  # simulated seconds
    bytes_to_target: Column = Column(())  # bytes until the target, as `reached`
    seconds_to_target: Column = Column(())  # simulated seconds until then


@dataclass(frozen=True)
class Question:
    """The metric to compare, the baseline method, and a target of the metric.

    The table counts the rounds that each method needs to reach the target.
    """

    metric: str = "primary"
    baseline: str | None = None
    target: float | None = None

    @property
    def tested(self) -> str:
        """Return the test metric to report for the best round on validation.

        It is the question's own metric, or "primary" if that is of validation itself.
        """
        return "primary" if self.metric.startswith("val") else self.metric


@dataclass(frozen=True)
class Comparative:
    """The summaries of all methods, and the question they answer."""

    rows: tuple[Summary, ...]
    question: Question


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval (low, high) of the mean, by Student's t.

    None if there are fewer than `MIN_SEEDS` values.
    """
    if len(values) < MIN_SEEDS:
        return None
    quantile = float(stdtrit(len(values) - 1, 0.975))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def summarise(results: Results, question: Question) -> Comparative:
    """Summarise every method over its seeds, in the given order.

    Args:
        results: Method -> seed -> rounds.
        question: Metric, baseline and target. Differences to the baseline are taken seed by seed,
            for seeds that both have. The target is reached in the first round whose metric is as
            good: at least the target, or at most that for a loss. Rounds without the metric do not
            count; seeds that never reach it are left out of the column.
    """
    metric = question.metric
    baseline = question.baseline
    target = question.target

    def column(values: Iterable[float | None]) -> Column:
        return Column(tuple(v for v in values if v is not None))

    def first_at_target(rounds: Sequence[Round]) -> int | None:
        """Return the position of the first round at the target."""
        if target is None:
            return None
        for i, record in enumerate(rounds):
            value = metric_value(record, metric)
            if value is None:
                continue
            if value <= target if is_better_lower(metric) else value >= target:
                return i
        return None

    def at_target(amounts: Sequence[float] | None, rounds: Sequence[Round]) -> float | None:
        """Return a cumulative cost at the end of the first round at the target."""
        position = first_at_target(rounds)
        return None if position is None or not amounts else amounts[position]

    def difference(name: str, seed: int) -> float | None:
        if baseline is None or baseline == name or seed not in results[baseline]:
            return None
        accuracy = final_value(results[name][seed], metric)
        reference = final_value(results[baseline][seed], metric)
        return None if accuracy is None or reference is None else accuracy - reference

    rows = []
    for name, runs in results.items():
        accuracies = {
            key: column(final_value(rounds, key) for rounds in runs.values())
            for key in dict.fromkeys([*METRICS, metric])
        }
        traffic = [
            float(sum(r.traffic("up") + r.traffic("down") for r in rounds))
            for rounds in runs.values()
        ]
        best_rounds = [best for rounds in runs.values() if (best := best_round(rounds)) is not None]
        summary = Summary(
            name=name,
            seeds=tuple(runs),
            primary=next((rounds[-1].primary for rounds in runs.values()), "clients"),
            accuracies=accuracies,
            bytes=column(traffic),
            seconds=column(sum(r.seconds["round"] for r in rounds) for rounds in runs.values()),
            reached=column(
                at_target([r.round for r in rounds], rounds) for rounds in runs.values()
            ),
            difference=column(difference(name, seed) for seed in runs),
            best_round=column(float(best.round) for best in best_rounds),
            best=column(metric_value(best, question.tested) for best in best_rounds),
            simulated=column(
                seconds[-1] for rounds in runs.values() if (seconds := cumulative_seconds(rounds))
            ),
            bytes_to_target=column(
                at_target(cumulative_bytes(rounds), rounds) for rounds in runs.values()
            ),
            seconds_to_target=column(
                at_target(cumulative_seconds(rounds), rounds) for rounds in runs.values()
            ),
        )
        rows.append(summary)
    return Comparative(tuple(rows), question)


def _number(value: float, metric: str, *, sign: str = "") -> str:
    """Format a value of a metric: shares in percent to 0.1, others with four digits."""
    return f"{100 * value:{sign}.1f}" if is_share(metric) else f"{value:{sign}.4g}"


def _with_spread(column: Column, metric: str) -> str:
    if column.mean is None:
        return "-"
    mean = _number(column.mean, metric)
    return mean if column.deviation is None else f"{mean} ± {_number(column.deviation, metric)}"


def _rounds(column: Column) -> str:
    return "-" if column.mean is None else f"{column.mean:.1f}".removesuffix(".0")


def _duration(column: Column) -> str:
    return "-" if column.mean is None else format_duration(column.mean)


def _difference(summary: Summary, metric: str) -> str:
    """Format the mean difference to the baseline, with its confidence interval.

    It is "-" without a difference, and without interval for fewer than `MIN_SEEDS` seeds.
    """
    column = summary.difference
    if column.mean is None:
        return "-"
    pairs = len(column.values)
    mean = _number(column.mean, metric, sign="+")
    interval = confidence_interval(column.values)
    if interval is None:
        return f"{mean} (too few seeds)"
    fewer = "" if pairs == len(summary.seeds) else f", {pairs} seeds"
    low, high = (_number(bound, metric, sign="+") for bound in interval)
    return f"{mean} [{low}, {high}]{fewer}"


def _reached(summary: Summary) -> str:
    if summary.reached.mean is None:
        return "never"
    successful = len(summary.reached.values)
    total = len(summary.seeds)
    note = "" if successful == total else f" ({successful} of {total})"
    return f"{summary.reached.mean:.1f}{note}"


def summary_cells(compared: Comparative) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return headings and rows of a table; a cell is (text, whether it is the best).

    Only accuracies, and the metric of the question, can be the best of their column.

    Where methods have different primary models, the first accuracy is that of each method's primary
    model, which the column before names. Otherwise the column of that model comes first.
    """
    summaries = compared.rows
    question = compared.question
    primary = {s.primary for s in summaries}
    mixed = len(primary) > 1
    first = []
    if mixed:
        first = ["primary"]
    elif primary == {"server"}:
        first = ["server"]
    wanted = dict.fromkeys([*first, *ALWAYS, question.metric])
    shown = [key for key in wanted if any(s.accuracies[key].values for s in summaries)]
    shown = [key for key in shown if key != "primary" or mixed]
    best = {key: _best(key, [s.accuracies[key].mean for s in summaries]) for key in shown}
    validated = any(s.best_round.values for s in summaries)
    headings = ["method", "seeds", *(["model"] if mixed else []), *map(heading, shown)]
    if validated:
        headings += ["best round on validation", f"{heading(question.tested)} in it"]
    headings += ["bytes", "seconds"]
    simulated = any(s.simulated.values for s in summaries)
    if simulated:
        headings.append("simulated time")
    if question.target is not None:
        percent = is_share(question.metric)
        target = f"{100 * question.target:g}%" if percent else f"{question.target:g}"
        headings += [f"rounds to {target} {heading(question.metric)}", "bytes to it"]
        if simulated:
            headings.append("simulated time to it")
    if question.baseline is not None:
        headings.append(f"{heading(question.metric)} above {question.baseline} (95 %)")
    rows = []
    for s in summaries:
        row = [(s.name, False), (str(len(s.seeds)), False)]
        if mixed:
            row.append((s.primary, False))
        for key in shown:
            column = s.accuracies[key]
            is_best = column.mean is not None and column.mean == best[key]
            row.append((_with_spread(column, key), is_best))
        if validated:
            row += [(_rounds(s.best_round), False), (_with_spread(s.best, question.tested), False)]
        row += [
            (format_bytes(s.bytes.mean or 0.0), False),
            (format_duration(s.seconds.mean or 0.0), False),
        ]
        if simulated:
            row.append((_duration(s.simulated), False))
        if question.target is not None:
            amount = s.bytes_to_target.mean
            row += [(_reached(s), False), ("-" if amount is None else format_bytes(amount), False)]
            if simulated:
                row.append((_duration(s.seconds_to_target), False))
        if question.baseline is not None:
            row.append((_difference(s, question.metric), False))
        rows.append(row)
    return headings, rows


def _best(metric: str, means: Iterable[float | None]) -> float:
    """Return the best mean: the lowest of a loss, the highest of an accuracy.

    At least one mean must be known.
    """
    known = [mean for mean in means if mean is not None]
    return min(known) if is_better_lower(metric) else max(known)


def to_markdown(compared: Comparative) -> str:
    """Return the table as Markdown; the best value of each accuracy is bold."""
    headings, rows = summary_cells(compared)
    lines = [headings, ["---"] * len(headings)]
    lines += [[f"**{text}**" if best else text for text, best in row] for row in rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines
    )


def to_latex(compared: Comparative) -> str:
    """Return the table as LaTeX with booktabs, with the best accuracies in bold."""
    headings, rows = summary_cells(compared)
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    special |= {character: "\\" + character for character in "&%$#_{}"}

    def escaped(text: str) -> str:
        plain = "".join(special.get(character, character) for character in text)
        return re.sub(r"(?<!\w)-(?=\d)", "$-$", plain)  # minus signs

    body = [
        [rf"\textbf{{{escaped(text)}}}" if best else escaped(text) for text, best in row]
        for row in rows
    ]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(escaped, headings)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(compared: Comparative) -> str:
    """Return a line per method as CSV, with plain numbers.

    Accuracies are from 0 to 1, times in seconds, traffic in bytes. The CSV has all of `METRICS`.
    Unknown values are empty.
    """
    metrics = list(dict.fromkeys([*METRICS, compared.question.metric]))
    fields = ["method", "seeds", "primary_model"]
    fields += [f"{key.replace('-', '_')}_{part}" for key in metrics for part in ("mean", "std")]
    fields += ["bytes", "seconds", "rounds_to_target", "reached", "difference", "low", "high"]
    fields += ["best_round_mean", "best_round_std", "best_mean", "best_std"]
    fields += ["simulated_seconds", "bytes_to_target", "simulated_seconds_to_target"]
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
        difference = [
            s.difference.mean,
            *(confidence_interval(s.difference.values) or (None, None)),
        ]
        row = [
            s.name,
            len(s.seeds),
            s.primary,
            *accuracies,
            s.bytes.mean,
            s.seconds.mean,
            *reached,
            *difference,
            s.best_round.mean,
            s.best_round.deviation,
            s.best.mean,
            s.best.deviation,
            s.simulated.mean,
            s.bytes_to_target.mean,
            s.seconds_to_target.mean,
        ]
        writer.writerow(["" if field is None else field for field in row])
    return file.getvalue()


def to_round_csv(results: Results) -> str:
    """Return all metrics of every run as CSV, one line per round.

    Metrics that were not measured are empty; shares are from 0 to 1.
    """
    metrics = known_metrics(results)
    columns = [key.replace("-", "_") for key in metrics]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    start = ["method", "seed", "round", "primary_model", "participants", "evaluated_clients"]
    writer.writerow([*start, *columns, "bytes", "seconds", "simulated_seconds"])
    for name, runs in results.items():
        for seed, rounds in runs.items():
            for r in rounds:
                evaluated = {*r.values("global"), *r.values("local")}
                facts = [name, seed, r.round, r.primary, len(r.participants), len(evaluated)]
                values = [metric_value(r, key) for key in metrics]
                traffic = r.traffic("up") + r.traffic("down")
                values += [traffic, r.seconds["round"], r.simulated_seconds]
                writer.writerow([*facts, *("" if v is None else v for v in values)])
    return file.getvalue()
