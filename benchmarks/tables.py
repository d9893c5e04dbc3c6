"""Write tables into Markdown pages from stored results, so that no number is typed by hand.

    python -m benchmarks.tables                 write the tables of all pages
    python -m benchmarks.tables --check         write nothing; exit with 1 if a page is out of date
    python -m benchmarks.tables --print NAME    print one table
    python -m benchmarks.tables --rows [TEXT]   list the stored rows whose names contain TEXT

A page is any Markdown file of the repository's root, docs/ or benchmarks/. A table stands between
two comments, and everything between them is replaced:

    <!-- table: dffke-cifar -->
    <!-- end -->

Tables of attacks, costs, speed and single studies are those of `benchmarks.measured`. What other
tables show is said by benchmarks/tables.toml:

    [dffke-cifar]
    first = "setting"                     # heading of the first column
    metric = "global"                     # metric of all rows: global, own, server, trained, ...
    columns = ["paper", 1, 5, "last", "own last", { what = "seeds", heading = "n" }]
    bold = ["last"]                       # the highest value of these columns is bold
    baseline = "local-digits"             # the row that the column "above" subtracts
    rows = [
        { row = "dffke-cifar100-alpha-1.0", label = "CIFAR-100, alpha 1.0" },
        { row = "dffke-cifar100-alpha-1.0", label = "the same, local tests", metric = "own" },
    ]

Columns, which may begin with a metric of their own ("own last", "trained 1", "server by seed"):

    5            mean ± standard deviation over seeds after round 5, in percent; empty if a seed's run is shorter
    last, best   the same after the last round that all seeds have, or after the best one of the
                 mean curve, with its number
    mean         the mean alone after that last round
    by seed      the values after it, seed by seed
    range        lowest to highest value after it
    above        difference to the table's baseline after the last round of both, seed by seed
    paper        the paper's figure, from the recipe of the same name, or the row's own as with text
    source       paper and table of that figure
    seeds, hardware
    rounds       the number of the last round that all seeds have
    seconds      median seconds of a round after the first, over all seeds
    minutes      mean duration of a run
    bytes        mean traffic of a run, both directions
    text         the row's own words: { row = ..., text = "weights" }

Results are stored as JSON lines, one line per run (`barter.recipes.stored` describes them): runs of
recipes beside the recipe, src/barter/recipes/NAME.jsonl, and all others in benchmarks/results/*.jsonl.
A row's name must be unique over all files. To add a result, append the lines of the results.jsonl
that `barter reproduce` or `python -m benchmarks.paper_tables` writes, and run this program.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from barter.core.errors import BarterError, ConfigError
from barter.core.files import replace_text
from barter.recipes.recipe import find_recipe, recipe_names
from barter.recipes.stored import (
    StoredRun,
    common_hardware,
    common_rounds,
    group_by_row,
    read_stored_runs,
    spread_over_seeds,
)
from barter.runs.progress import format_bytes
from benchmarks import measured

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADINGS = {
    "last": "last round",
    "best": "best round",
    "by seed": "by seed",
    "above": "above {baseline}, by seed",
    "seconds": "seconds a round",
    "minutes": "minutes a run",
}
TEXTS = ("paper", "source", "seeds", "rounds", "hardware", "seconds", "minutes", "bytes")


class Cell(NamedTuple):
    """A cell: its text, and the number behind it if there is one."""

    text: str
    number: float | None = None


def pages(root: Path = ROOT) -> Iterator[Path]:
    """Yield all pages that may have tables."""
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md"):
        yield from sorted(root.glob(pattern))


def stored_rows(root: Path = ROOT) -> dict[str, list[StoredRun]]:
    """Return all stored runs by row.

    Raises:
        ConfigError: Two files have runs of the same row.
    """
    rows: dict[str, list[StoredRun]] = {}
    files = [*root.glob("src/barter/recipes/*.jsonl"), *root.glob("benchmarks/results/*.jsonl")]
    for path in sorted(files):
        found = group_by_row(read_stored_runs(path))
        for row in found.keys() & rows.keys():
            raise ConfigError(f"{path}: runs of {row!r} are stored in another file, too")
        rows |= found
    return rows


def specifications(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return what each table shows, by its name."""
    return tomllib.loads((root / "benchmarks" / "tables.toml").read_text("utf-8"))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def accuracy(runs: Sequence[StoredRun], metric: str, at: int, *, number: bool) -> Cell:
    """Return mean and standard deviation of a metric after a round.

    Empty if it was not measured, or if the run of a seed is shorter: a mean over fewer seeds than
    its neighbours' could rise or fall for that reason alone. Seeds whose run has the round but not
    the metric do not count; the text beside such a table says so.
    """
    spread = spread_over_seeds(runs, metric, at)
    if spread is None or at not in common_rounds(runs):
        return Cell("")
    text = percent(spread.mean)
    if spread.deviation is not None:
        text += f" ± {percent(spread.deviation)}"
    if number:
        text += f" ({at})"
    return Cell(text, spread.mean)


def last_round(runs: Sequence[StoredRun]) -> int:
    """Return the last round that all runs of a row have.

    Raises:
        ConfigError: They have no round in common.
    """
    common = common_rounds(runs)
    if not common:
        raise ConfigError(f"runs of {runs[0].row!r} have no round in common")
    return common[-1]


def best_round(runs: Sequence[StoredRun], metric: str) -> int | None:
    """Return the round in which the mean over seeds is highest, of those that all seeds have."""
    means = {}
    for at in common_rounds(runs):
        spread = spread_over_seeds(runs, metric, at)
        if spread is not None:
            means[at] = spread.mean
    return max(means, key=lambda at: means[at]) if means else None


def differences(
    runs: Sequence[StoredRun], baseline: Sequence[StoredRun], metric: str
) -> list[float]:
    """Return the differences to a baseline after the last common round, for each common seed."""
    others = {run.seed: run for run in baseline}
    found = []
    for run in runs:
        if run.seed not in others:
            continue
        common = set(run.rounds) & set(others[run.seed].rounds)
        if not common:
            continue
        value = run.value(metric, max(common))
        reference = others[run.seed].value(metric, max(common))
        if value is not None and reference is not None:
            found.append(value - reference)
    return found


def fact(row: str, runs: Sequence[StoredRun], what: str, metric: str) -> Cell:
    """Return a cell that is no accuracy of the runs; a paper's figure is of one metric only."""
    if what in ("paper", "source"):
        recipe = find_recipe(row) if row in recipe_names() else None
        if recipe is None or recipe.paper is None or recipe.metric != metric:
            return Cell("")
        return Cell(str(recipe.paper) if what == "paper" else recipe.paper.source)
    if what == "seeds":
        return Cell(str(len(runs)))
    if what == "rounds":
        return Cell(str(last_round(runs)))
    if what == "hardware":
        return Cell(common_hardware(runs))
    if what == "seconds":
        values = [
            value
            for run in runs
            for at in run.rounds[1:]
            if (value := run.value("seconds", at)) is not None
        ]
        return Cell(f"{statistics.median(values):.0f}") if values else Cell("")
    totals = [run.total("bytes" if what == "bytes" else "seconds") for run in runs]
    known = [total for total in totals if total is not None]
    if not known:
        return Cell("")
    mean = statistics.fmean(known)
    return Cell(format_bytes(mean) if what == "bytes" else f"{mean / 60:.1f}")


def cell(
    rows: Mapping[str, Sequence[StoredRun]], row: str, what: str, metric: str, baseline: str | None
) -> Cell:
    """Return one cell of a table.

    Raises:
        ConfigError: There is no such row or column.
    """
    if row not in rows:
        raise ConfigError(f"there is no stored run of {row!r}")
    runs = rows[row]
    if what in TEXTS:
        return fact(row, runs, what, metric)
    for kind in ("by seed", "range", "above", "last", "best", "mean"):
        if what == kind or what.endswith(f" {kind}"):
            metric = what.removesuffix(kind).strip() or metric
            what = kind
    last = last_round(runs)
    words = what.split()
    if words and words[-1].isdecimal():
        metric = words[0] if len(words) == 2 else metric
        return accuracy(runs, metric, int(words[-1]), number=False)
    if what == "last":
        return accuracy(runs, metric, last, number=True)
    if what == "best":
        at = best_round(runs, metric)
        return Cell("") if at is None else accuracy(runs, metric, at, number=True)
    if what == "mean":
        spread = spread_over_seeds(runs, metric, last)
        return Cell("") if spread is None else Cell(percent(spread.mean), spread.mean)
    if what == "by seed":
        values = [run.value(metric, last) for run in runs]
        return Cell(" / ".join("-" if value is None else percent(value) for value in values))
    if what == "range":
        spread = spread_over_seeds(runs, metric, last)
        if spread is None:
            return Cell("")
        return Cell(f"{percent(spread.low)} to {percent(spread.high)}")
    if what == "above":
        if baseline is None or baseline not in rows:
            raise ConfigError(f"column above: there is no baseline {baseline!r}")
        found = differences(runs, rows[baseline], metric)
        return Cell("" if row == baseline else " ".join(f"{100 * d:+.1f}" for d in found))
    raise ConfigError(f"there is no column {what!r}; python -m benchmarks.tables --help lists them")


def heading(column: str) -> str:
    """Return the heading of a column: "own last" is "own, last round"."""
    for kind, text in HEADINGS.items():
        if column == kind:
            return text
        if column.endswith(f" {kind}"):
            return f"{column.removesuffix(kind).strip()}, {text}"
    return column


def render(spec: Mapping[str, Any], rows: Mapping[str, Sequence[StoredRun]]) -> str:
    """Return a table as Markdown.

    Args:
        spec: What the table shows, from tables.toml.
        rows: All stored runs by row.

    Raises:
        ConfigError: The table names a row or a column that does not exist.
    """
    labels = {entry["row"]: entry.get("label", entry["row"]) for entry in reversed(spec["rows"])}
    baseline = labels.get(spec.get("baseline"), spec.get("baseline"))
    columns: list[tuple[str, str]] = []
    for given in spec["columns"]:
        if isinstance(given, Mapping):
            columns.append((str(given["what"]), str(given["heading"])))
        else:
            columns.append((str(given), heading(str(given)).format(baseline=baseline)))
    table = []
    for entry in spec["rows"]:
        metric = entry.get("metric", spec.get("metric", "global"))
        cells = [
            Cell(entry[what])
            if what == "text" or what in entry
            else cell(rows, entry["row"], what, metric, spec.get("baseline"))
            for what, _ in columns
        ]
        table.append((entry.get("label", entry["row"]), cells))
    best: dict[int, float] = {}
    for place, (what, _) in enumerate(columns):
        numbers = [cells[place].number for _, cells in table]
        known = [number for number in numbers if number is not None]
        if what in map(str, spec.get("bold", [])) and known:
            best[place] = max(known)
    lines = [[spec.get("first", "method"), *(text for _, text in columns)]]
    for label, cells in table:
        texts = [
            f"**{text}**" if number is not None and number == best.get(place) else text
            for place, (text, number) in enumerate(cells)
        ]
        lines.append([label, *texts])
    return to_markdown(lines)


def to_markdown(table: Sequence[Sequence[str]]) -> str:
    """Return the cells of a table, the heading first, as Markdown."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill(
    text: str, specs: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Sequence[StoredRun]]
) -> str:
    """Return a page with all of its tables written anew.

    Raises:
        ConfigError: A table is not in tables.toml, or cannot be made.
    """

    def table(found: re.Match[str]) -> str:
        name = found[2].strip()
        if name in measured.TABLES:
            return f"{found[1]}\n{to_markdown(measured.TABLES[name]())}\n{found[3]}"
        if name not in specs:
            raise ConfigError(f"benchmarks/tables.toml has no table {name!r}")
        try:
            return f"{found[1]}\n{render(specs[name], rows)}\n{found[3]}"
        except ConfigError as error:
            raise ConfigError(f"table {name}: {error}") from None

    return MARKER.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--print", metavar="NAME", help="print one table")
    parser.add_argument("--rows", nargs="?", const="", metavar="TEXT", help="list stored rows")
    args = parser.parse_args()
    try:
        rows = stored_rows()
        if args.rows is not None:
            for row, runs in rows.items():
                if args.rows in row:
                    last = max(run.rounds[-1] for run in runs)
                    metrics = " ".join(key for key in runs[0].curve if key != "round")
                    sys.stdout.write(f"{row}  [{len(runs)} seeds, {last} rounds: {metrics}]\n")
            return 0
        specs = specifications()
        if args.print in measured.TABLES:
            sys.stdout.write(to_markdown(measured.TABLES[args.print]()))
            return 0
        if args.print is not None:
            if args.print not in specs:
                names = ", ".join([*specs, *measured.TABLES])
                raise ConfigError(f"there is no table {args.print!r}: {names}")
            sys.stdout.write(render(specs[args.print], rows))
            return 0
        status = 0
        for page in pages():
            text = page.read_text("utf-8")
            wanted = fill(text, specs, rows)
            if wanted == text:
                continue
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")
            if args.check:
                status = 1
            else:
                replace_text(page, wanted)
    except BarterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
