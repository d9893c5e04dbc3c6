"""What a finished run looks like: one row per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from barter.core.record import Round
from barter.runs.progress import size
from barter.runs.selection import best_round

__all__ = ["HEADINGS", "accuracy_table", "alone", "closing_cells", "closing_table", "count_table"]


HEADINGS = (
    *("client", "images", "classes"),
    *("alone\nglobal", "alone\nown", "after\nglobal", "after\nown"),
    *("up", "down"),
)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def closing_cells(
    records: Sequence[Round],
    names: Sequence[str],
    samples: Sequence[int] | None,
    classes: Sequence[Sequence[int]] | None,
) -> tuple[list[list[str]], list[list[str]]]:
    """A row for each client, then those for all of them; what clients hold may be unknown."""
    last = records[-1]
    rows, numbers = [], []
    for k, now in last.clients.items():
        before = alone(records, k)
        values = [
            before.get("before_global"),
            before.get("before_local"),
            now.get("global"),
            now.get("local"),
        ]
        traffic = [sum(r.clients[k][f"bytes_{way}"] for r in records) for way in ("up", "down")]
        numbers.append((values, traffic))
        held = [] if classes is None else classes[k]
        listed = " ".join(map(str, held)) if len(held) <= 10 else f"{len(held)} classes"
        images = "-" if samples is None else f"{samples[k]:,}"
        rows.append([names[k], images, listed or "-", *map(_percent, values), *map(size, traffic)])
    means = []
    for column in zip(*(values for values, _ in numbers), strict=True):
        known = [value for value in column if value is not None]
        means.append(sum(known) / len(known) if known else None)
    totals = [sum(column) for column in zip(*(traffic for _, traffic in numbers), strict=True)]
    images = "-" if samples is None else f"{sum(samples):,}"
    together = [["mean, or sum", images, "", *map(_percent, means), *map(size, totals)]]
    if "global" in last.server:
        together.append(
            ["server's model", "", "", "", "", _percent(last.server["global"]), "", "", ""]
        )
    best = best_round(records)
    return rows, together if best is None else [*together, *_best_cells(best)]


def _best_cells(best: Round) -> list[list[str]]:
    """The rows of test accuracies after the round that validation chose."""

    def mean(name: str) -> float | None:
        known = any(name in metrics for metrics in best.clients.values())
        return best.mean(name) if known else None

    after = [_percent(mean("global")), _percent(mean("local"))]
    rows = [[f"best on val, round {best.round}", "", "", "", "", *after, "", ""]]
    if "global" in best.server:
        server = _percent(best.server["global"])
        rows.append([f"server, round {best.round}", "", "", "", "", server, "", "", ""])
    return rows


def alone(records: Sequence[Round], client: int) -> Mapping[str, float]:
    """What is said of a client in the first round that says what it knew alone; nothing if none does."""
    told = (r.clients[client] for r in records)
    return next((said for said in told if any(name.startswith("before_") for name in said)), {})


def closing_table(
    records: Sequence[Round],
    architectures: Sequence[str],
    samples: Sequence[int],
    classes: Sequence[Sequence[int]],
) -> Table:
    """Per client: what it brought, what it knew alone, what it knows now, and what that cost; fits 80 columns."""
    title = f"after round {records[-1].round}, accuracy in %: on the global test set and the client's own"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("client", "classes") else "right")
    names = [f"{k} {architecture}" for k, architecture in enumerate(architectures)]
    rows, together = closing_cells(records, names, samples, classes)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for row in together:
        table.add_row(*row)
    return table


def accuracy_table(networks: Sequence[tuple[str, str]], values: Sequence[float]) -> Table:
    """How right each of some networks is, in percent; each has an owner and an architecture."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("network", "architecture", "accuracy"):
        table.add_column(heading, justify="right" if heading == "accuracy" else "left")
    for (owner, architecture), value in zip(networks, values, strict=True):
        table.add_row(owner, architecture, _percent(value))
    clients = [
        value for (owner, _), value in zip(networks, values, strict=True) if owner != "server"
    ]
    if len(clients) > 1:
        table.add_section()
        table.add_row("mean of clients", "", _percent(sum(clients) / len(clients)))
    return table


def count_table(kind: str, counts: Sequence[Sequence[int]], names: Sequence[str]) -> Table:
    """Samples by client and class, or by client and domain."""
    table = Table(title=f"samples by client and {kind}", box=box.SIMPLE_HEAD)
    table.add_column("client", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("all", justify="right")
    for k, row in enumerate(counts):
        table.add_row(str(k), *(str(n) if n else "." for n in row), str(sum(row)))
    table.add_section()
    table.add_row(
        "all",
        *(str(sum(column)) for column in zip(*counts, strict=True)),
        str(sum(map(sum, counts))),
    )
    return table
