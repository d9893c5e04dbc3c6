"""What a finished run looks like: one row per client."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from barter.runs.progress import size
from barter.runs.record import Round

__all__ = ["accuracy_table", "class_table", "closing_table"]


HEADINGS = ("alone\nglobal", "alone\nown", "after\nglobal", "after\nown")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def closing_table(
    records: Sequence[Round], architectures: Sequence[str], samples: Sequence[int], classes: Sequence[Sequence[int]]
) -> Table:
    """Per client: what it brought, what it knew alone, what it knows now, and what that cost; fits 80 columns."""
    last = records[-1]
    title = f"after round {last.round}, accuracy in %: on the global test set and the client's own"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("client", "images", "classes", *HEADINGS, "up", "down"):
        table.add_column(heading, justify="left" if heading in ("client", "classes") else "right")
    rows = []
    for k, now in last.clients.items():
        # What a client knew before its first exchange, in whichever round that was.
        alone = next((r.clients[k] for r in records if "before_global" in r.clients[k]), {})
        values = [alone.get("before_global"), alone.get("before_local"), now.get("global"), now.get("local")]
        traffic = [sum(r.clients[k][f"bytes_{way}"] for r in records) for way in ("up", "down")]
        rows.append((values, traffic))
        held = " ".join(map(str, classes[k])) if len(classes[k]) <= 10 else f"{len(classes[k])} classes"
        cells = (f"{k} {architectures[k]}", f"{samples[k]:,}", held, *map(_percent, values), *map(size, traffic))
        table.add_row(*cells)
    means = []
    for column in zip(*(values for values, _ in rows), strict=True):
        known = [value for value in column if value is not None]
        means.append(sum(known) / len(known) if known else None)
    totals = [sum(column) for column in zip(*(traffic for _, traffic in rows), strict=True)]
    table.add_section()
    table.add_row("mean, or sum", f"{sum(samples):,}", "", *map(_percent, means), *map(size, totals))
    if "global" in last.server:
        table.add_row("server's model", "", "", "", "", _percent(last.server["global"]), "", "", "")
    return table


def accuracy_table(networks: Sequence[tuple[str, str]], values: Sequence[float]) -> Table:
    """How right each of some networks is, in percent; each has an owner and an architecture."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("network", "architecture", "accuracy"):
        table.add_column(heading, justify="right" if heading == "accuracy" else "left")
    for (owner, architecture), value in zip(networks, values, strict=True):
        table.add_row(owner, architecture, _percent(value))
    clients = [value for (owner, _), value in zip(networks, values, strict=True) if owner != "server"]
    if len(clients) > 1:
        table.add_section()
        table.add_row("mean of clients", "", _percent(sum(clients) / len(clients)))
    return table


def class_table(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Table:
    """Samples by client and class."""
    table = Table(title="samples by client and class", box=box.SIMPLE_HEAD)
    table.add_column("client", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("all", justify="right")
    for k, row in enumerate(counts):
        table.add_row(str(k), *(str(n) if n else "." for n in row), str(sum(row)))
    table.add_section()
    table.add_row("all", *(str(sum(column)) for column in zip(*counts, strict=True)), str(sum(map(sum, counts))))
    return table
