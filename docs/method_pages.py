"""Fill the parts of the method pages that come from the code: python docs/method_pages.py.

Of a page under docs/methods/, this script writes

- "One round": the numbered list, from the docstring of the method's file, and the table of payloads,
  from its class;
- "Results": the table, from the stored measurements of all methods;
- "Fields" and "Differences from the paper": all of both sections, from the class and the docstring.

A method with many fields has the last two on a page of its own, NAME-fields.md. Everything else on
the pages is written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

from barter import ALGORITHMS, Algorithm
from barter.core.params import describe_fields
from barter.recipes.stored import SeedSpread, group_by_row, read_stored_runs, spread_over_seeds
from barter.runs.progress import format_bytes

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "methods"
RESULTS = ROOT / "benchmarks" / "results" / "baselines-fashion-10k.jsonl"
# Rows of defaults that are no longer; the research log has them.
SUPERSEDED = (
    "dffke",
    "dffke, five epochs at first",
    "dffke, balanced=false",
    "dffke, balanced=false, five epochs at first",
)
SECTION = re.compile(r"^(## ([^\n]+)\n\n)(.*?\n)(?=\n## |\Z)", re.M | re.S)


def find_kind(name: str) -> type[Algorithm]:
    """Return the class of a method."""
    kind = ALGORITHMS[name]
    assert issubclass(kind, Algorithm)
    return kind


def read_paragraphs(kind: type[Algorithm]) -> list[list[str]]:
    """Return the paragraphs of the docstring of a method's file; every list item is one line."""
    text = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        items = re.split(r"\n(?=- |\d+\. )", textwrap.dedent(paragraph))
        paragraphs.append([" ".join(item.split()) for item in items])
    return paragraphs


def make_steps(kind: type[Algorithm]) -> Iterator[str]:
    """Yield the steps of a round, from the first numbered list of the docstring."""
    for paragraph in read_paragraphs(kind):
        if paragraph[0].startswith("1. "):
            yield from paragraph
            return


def make_payloads(kind: type[Algorithm]) -> Iterator[str]:
    """Yield a table of what crosses the wire in each call."""
    yield "| call | server to client | client to server |"
    yield "|---|---|---|"
    for method, crossing in kind.crosses.items():
        yield f"| `{method}` | {cell(crossing.down) or '-'} | {cell(crossing.up) or '-'} |"


def make_fields(kind: type[Algorithm]) -> Iterator[str]:
    """Yield a table of the fields, with a row for each heading, and the presets."""
    yield "| field | default | values | meaning |"
    yield "|---|---|---|---|"
    for heading, group in groupby(describe_fields(kind), key=lambda field: field.heading):
        if heading:
            yield f"| **{cell(heading)}** | | | |"
        for field in group:
            values = field.kind.replace(" | ", ", ")
            default = f"`{spell(field.default)}`"
            yield f"| `{field.name}` | {default} | {values} | {cell(field.meaning)} |"
    if kind.presets:
        yield ""
    for preset, chosen in kind.presets.items():
        changes = ", ".join(f"`{key} = {spell(value)}`" for key, value in chosen.items())
        yield f'- `preset = "{preset}"`: {changes or "the defaults"}.'


def make_differences(kind: type[Algorithm]) -> Iterator[str]:
    """Yield the differences from the paper, from the docstring."""
    paragraphs = read_paragraphs(kind)
    found = False
    for lead, items in pairwise(paragraphs):
        if lead[0].startswith("Differences from the paper"):
            if found:
                yield ""
            if lead != ["Differences from the paper:"]:
                yield from (" ".join(lead), "")
            yield from items
            found = True


def link_pages(text: str) -> str:
    """Turn the paths of pages, as docstrings name them, into links from docs/methods/."""
    return re.sub(r"\bdocs/([\w/-]+)\.md\b", r"[\1](../\1.md)", text)


def make_results(kind: type[Algorithm]) -> Iterator[str]:
    """Yield the stored accuracies of a method beside those of local training.

    Methods for clients with one architecture are compared with FedAvg too.
    """
    (name,) = (name for name, known in ALGORITHMS.items() if known is kind)
    beside = ("local", "fedavg") if kind().server_model.one_architecture else ("local",)
    yield "| method | clients: global test | clients: local test | server: global test | bytes |"
    yield "|---|---|---|---|---|"
    rows = group_by_row(read_stored_runs(RESULTS))
    stored = {row.partition(": ")[2]: runs for row, runs in rows.items()}
    for variant in sorted(stored, key=lambda variant: variant not in beside):
        chosen = variant in beside or variant.partition(",")[0] == name
        if variant in SUPERSEDED or not chosen:
            continue
        runs = stored[variant]
        accuracies = [
            summarise(spread_over_seeds(runs, key)) for key in ("global", "own", "server")
        ]
        sent = [run.total("bytes") or 0.0 for run in runs]
        yield f"| {variant} | {' | '.join(accuracies)} | {format_bytes(sum(sent) / len(sent))} |"


def summarise(spread: SeedSpread | None) -> str:
    """Return mean and standard deviation of accuracies in %, or a dash if there are none."""
    if spread is None:
        return "-"
    return f"{100 * spread.mean:.1f} ± {100 * (spread.deviation or 0.0):.1f}"


def spell(value: object) -> str:
    """Return a value as a configuration file spells it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def cell(text: str) -> str:
    """Return a text that stays within its cell of a Markdown table."""
    return text.replace("|", "\\|")


def fill(text: str, kind: type[Algorithm]) -> str:
    """Return a page with its generated parts made anew."""

    def write(section: re.Match[str]) -> str:
        title, body = section[2], section[3]
        if title == "One round":
            steps = list(make_steps(kind))
            if steps:
                body = replace_lines(body, r"\d+\. ", steps)
            body = replace_lines(body, r"\|", make_payloads(kind))
        elif title == "Results" and "<!-- table: " not in body:
            body = replace_lines(body, r"\|", make_results(kind))
        elif title == "Fields" and "-fields.md)" not in body:
            body = "\n".join(make_fields(kind)) + "\n"
        elif title == "Differences from the paper":
            body = link_pages("\n".join(make_differences(kind))) + "\n"
        return section[1] + body

    return SECTION.sub(write, text)


def replace_lines(text: str, start: str, lines: Iterable[str]) -> str:
    """Replace the first group of lines that start with a pattern.

    Raises:
        ValueError: If no line of the text does.
    """
    made = "".join(f"{line}\n" for line in lines)
    after, count = re.subn(rf"(?:^{start}.*\n)+", lambda _: made, text, count=1, flags=re.M)
    if not count:
        raise ValueError(f"no line starts with {start!r} in {text!r}")
    return after


def pages() -> Iterator[tuple[Path, type[Algorithm]]]:
    """Yield every page that describes a method, and the method's class."""
    for name in ALGORITHMS:
        yield PAGES / f"{name}.md", find_kind(name)
        fields = PAGES / f"{name}-fields.md"
        if fields.exists():
            yield fields, find_kind(name)


def main() -> None:
    """Fill all pages; name those that changed."""
    for path, kind in pages():
        before = path.read_text()
        after = fill(before, kind)
        if after != before:
            path.write_text(after)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
