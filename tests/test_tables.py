"""Tables of pages come from stored results, and agree with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from barter.core.errors import CheckpointError, ConfigError
from barter.recipes.stored import StoredRun, read_stored_runs, write_stored_runs
from benchmarks import measured, tables

# A number with a decimal point, with a thousands separator, or with a unit, at the start of a cell.
MEASURED = re.compile(r"\**[+-]?(\d+\.\d|\d{1,3},\d{3}|\d+ ?(%|s|ms|x|[kMG]i?B|dB|points?)(\W|$))")
# Tables with such cells that are not measured, or checked elsewhere: page and start of the heading.
NOT_MEASURED = {
    ("benchmarks/README.md", "| suite | compares |"): "rough durations, to plan with",
    ("docs/background/dffke.md", "| field | what it changes |"): "values of settings",
    ("docs/background/dfrd.md", "| | paper | default |"): "values of settings",
    ("docs/time.md", "| preset | up, down"): "values of settings",
    ("docs/wire.md", "| encoding | bytes per value |"): "follows from the encodings' definitions",
}
# docs/method_pages.py writes this one; test_documents.py runs it.
OF_METHOD_PAGES = "| method | clients: global test | clients: local test | server: global test |"

RUNS = {
    "plain": [
        StoredRun("plain", 0, {"round": [1, 2], "global": [0.5, 0.6], "own": [0.9, 0.8]}),
        StoredRun("plain", 1, {"round": [1, 2], "global": [0.6, 0.64], "own": [0.9, None]}),
    ],
    "unequal": [  # the second seed is shorter
        StoredRun("unequal", 0, {"round": [1, 2, 3], "global": [0.5, 0.6, 0.9]}),
        StoredRun("unequal", 1, {"round": [1, 2], "global": [0.5, 0.4]}),
    ],
    "other": [StoredRun("other", 1, {"round": [1, 2, 3], "global": [0.7, 0.9, 0.8]})],
    "costs": [
        StoredRun(
            "costs",
            0,
            {"round": [1, 2, 3], "seconds": [100, 8, 12], "bytes": [1000, 600, 400]},
            hardware="a core",
        )
    ],
}


def test_committed_pages_agree_with_the_stored_results() -> None:
    rows = tables.stored_rows()
    specs = tables.specifications()
    for name, spec in specs.items():
        assert tables.render(spec, rows).count("\n") == len(spec["rows"]) + 2, name
    shown = set()
    for page in tables.pages():
        text = page.read_text("utf-8")
        assert tables.fill(text, specs, rows) == text, f"{page}: run python -m benchmarks.tables"
        shown |= {found[2].strip() for found in tables.MARKER.finditer(text)}
    assert measured.TABLES.keys() <= shown


def typed_tables(text: str) -> Iterator[list[str]]:
    """Yield the lines of each table of a page that is neither generated nor part of a program."""
    text = tables.MARKER.sub("", text)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for found in re.finditer(r"(?:^ *\|.*(?:\n|\Z))+", text, re.M):
        yield [line.strip() for line in found[0].splitlines()]


def holds_measurements(table: list[str]) -> bool:
    """Return whether a cell below the heading begins like a measured number."""
    cells = [cell.strip() for line in table[2:] for cell in line.strip("|").split("|")]
    return any(MEASURED.match(cell) for cell in cells)


def test_no_measured_number_of_a_table_is_typed_by_hand() -> None:
    """The research log is left out: it is history, and its tables are not made again."""
    for page in tables.pages():
        name = page.relative_to(tables.ROOT).as_posix()
        if name.startswith("docs/research-log/"):
            continue
        for table in filter(holds_measurements, typed_tables(page.read_text("utf-8"))):
            if name.startswith("docs/methods/") and table[0].startswith(OF_METHOD_PAGES):
                continue
            starts = [start for where, start in NOT_MEASURED if where == name]
            known = table[0].startswith(tuple(starts))
            assert known, f"{name}: store the numbers of {table[0]!r} and generate it"


@pytest.mark.parametrize(
    ("cell", "measured"),
    [
        ("48.8 ± 0.1", True),
        ("**82.7**", True),
        ("-0.5, +0.0", True),
        ("20,020", True),
        ("119 kB", True),
        ("100 % from embeddings", True),
        ("12 MB/s", True),
        ("234 ms", True),
        ("10", False),
        ("3 seeds", False),
        ("`0.98`", False),
        ("none", False),
    ],
)
def test_measured_numbers_are_recognised(cell: str, measured: bool) -> None:
    page = f"Text.\n\n| a | b |\n|---|---|\n| x | {cell} |\n"
    assert [holds_measurements(table) for table in typed_tables(page)] == [measured]
    assert not list(typed_tables(f"<!-- table: t -->\n{page}<!-- end -->\n"))
    assert not list(typed_tables(f"```\n{page}```\n"))


@pytest.mark.parametrize(
    ("row", "what", "text"),
    [
        ("plain", "1", "55.0 ± 7.1"),
        ("plain", "last", "62.0 ± 2.8 (2)"),
        ("other", "best", "90.0 (2)"),
        ("other", "last", "80.0 (3)"),
        ("other", "4", ""),
        ("unequal", "last", "50.0 ± 14.1 (2)"),
        ("unequal", "best", "50.0 ± 0.0 (1)"),
        ("unequal", "mean", "50.0"),
        ("unequal", "by seed", "60.0 / 40.0"),
        ("unequal", "3", ""),
        ("unequal", "rounds", "2"),
        ("plain", "own last", "80.0 (2)"),
        ("plain", "mean", "62.0"),
        ("plain", "own mean", "80.0"),
        ("plain", "by seed", "60.0 / 64.0"),
        ("plain", "range", "60.0 to 64.0"),
        ("other", "above", "+26.0"),
        ("plain", "seeds", "2"),
        ("costs", "seconds", "10"),
        ("costs", "minutes", "2.0"),
        ("costs", "bytes", "2 kB"),
        ("costs", "hardware", "a core"),
        ("plain", "minutes", ""),
        ("plain", "paper", ""),
    ],
)
def test_cells(row: str, what: str, text: str) -> None:
    assert tables.cell(RUNS, row, what, "global", "plain").text == text


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    specs = {"t": {"columns": ["last"], "bold": ["last"], "rows": [{"row": "plain"}]}}
    before = "a\n<!-- table: t -->\n| old |\n<!-- end -->\nb <!-- end -->\n"
    after = tables.fill(before, specs, RUNS)
    assert after == (
        "a\n<!-- table: t -->\n\n| method | last round |\n| --- | --- |\n"
        "| plain | **62.0 ± 2.8 (2)** |\n\n<!-- end -->\nb <!-- end -->\n"
    )
    assert tables.fill(after, specs, RUNS) == after


def test_a_row_has_words_of_its_own() -> None:
    column = {"what": "text", "heading": "what leaves"}
    spec = {"columns": ["mean", column], "rows": [{"row": "plain", "text": "weights"}]}
    assert tables.render(spec, RUNS).endswith("| plain | 62.0 | weights |\n")


def test_headings() -> None:
    spec = {"columns": ["own last", 3, "above", "trained 1", {"what": "seeds", "heading": "n"}],
            "baseline": "plain", "rows": [{"row": "plain", "label": "fedavg"}]}  # fmt: skip
    first = tables.render(spec, RUNS).splitlines()[0]
    assert first == "| method | own, last round | 3 | above fedavg, by seed | trained 1 | n |"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"columns": ["last"], "rows": [{"row": "absent"}]}, "table t: .*'absent'"),
        ({"columns": ["lst"], "rows": [{"row": "plain"}]}, "table t: there is no column 'lst'"),
        ({"columns": ["above"], "rows": [{"row": "plain"}]}, "no baseline"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(spec: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tables.fill("<!-- table: t -->\n<!-- end -->", {"t": spec}, RUNS)
    with pytest.raises(ConfigError, match="no table 'u'"):
        tables.fill("<!-- table: u -->\n<!-- end -->", {"t": spec}, RUNS)


def test_a_row_is_stored_in_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    write_stored_runs(folder / "a.jsonl", RUNS["plain"])
    assert tables.stored_rows(tmp_path) == {"plain": RUNS["plain"]}
    write_stored_runs(folder / "b.jsonl", RUNS["plain"][1:])
    with pytest.raises(ConfigError, match="b.jsonl: runs of 'plain'"):
        tables.stored_rows(tmp_path)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{"], "line 1: "),
        (['{"row": "a", "seed": 0, "curve": {"round": [1]}, "x": 1}'], "line 1: .*'x'"),
        (['{"row": "a", "seed": 0, "curve": {"round": [2, 1]}}'], "not in order"),
        (['{"row": "a", "seed": 0, "curve": {"round": [1], "own": []}}'], "differ in length"),
        (['{"row": "a", "seed": 0, "curve": {"round": [1]}}'] * 2, "line 2: a second run"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, lines: list[str], why: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=why):
        read_stored_runs(path)
