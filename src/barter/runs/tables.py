"""Tables for the terminal: a run by client, accuracies, numbers of samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from barter.core.record import Round
from barter.runs.progress import format_bytes, format_duration
from barter.runs.selection import best_round

__all__ = [
    "CLIENT_HEADINGS",
    "Gain",
    "accuracy_gain",
    "accuracy_table",
    "closing_cells",
    "closing_table",
    "count_table",
    "last_accuracies",
    "local_only_metrics",
    "participants",
]


# "alone" is the accuracy after local training only, before any exchange.
CLIENT_HEADINGS = (
    "client",
    "images",
    "classes",
    "alone\nglobal",
    "alone\nown",
    "after\nglobal",
    "after\nown",
    "up",
    "down",
)
TESTS = ("global", "local")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _mean(values: Iterable[float | None]) -> float | None:
    known: list[float] = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Gain:
    """Accuracies of the same clients before any exchange and after a round."""

    before: dict[int, float]  # client -> accuracy after local training only
    after: dict[int, float]  # the same clients -> accuracy after the last evaluated round

    @property
    def points(self) -> float | None:
        """Return the mean difference in percentage points; None without a client."""
        if not self.before:
            return None
        return 100 * sum(self.after[k] - self.before[k] for k in self.before) / len(self.before)


def accuracy_gain(records: Sequence[Round], test: str) -> Gain:
    """Return local-only and last test accuracies of the clients that have both.

    Local only is before_TEST in the client's first round with any local-only accuracy; the last may
    be of different rounds for different clients.

    Args:
        records: The rounds.
        test: The test set, "global" or "local".
    """
    after = last_accuracies(records, test)
    before = {k: local_only_metrics(records, k).get(f"before_{test}") for k in after}
    known = {k: value for k, value in before.items() if value is not None}
    return Gain(known, {k: after[k] for k in known})


def last_accuracies(records: Sequence[Round], test: str) -> dict[int, float]:
    """Return each client's last accuracy on a test set ("global", "local").

    Clients that were never evaluated are left out.
    """
    return {k: value for record in records for k, value in record.values(test).items()}


def participants(records: Sequence[Round]) -> set[int]:
    """Return the clients that took part in at least one round."""
    return {k for record in records for k in record.participants}


def closing_cells(
    records: Sequence[Round],
    names: Sequence[str],
    samples: Sequence[int] | None,
    classes: Sequence[Sequence[int]] | None,
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of the clients, and the rows below them for means and sums.

    A row has a cell for each of `CLIENT_HEADINGS`. The mean of local-only accuracies is shown next
    to the mean of the same clients afterwards ("with both"). Clients that took part are "active",
    those that never did are "idle".

    Args:
        records: The rounds, at least one.
        names: The clients' names, by client id.
        samples: The number of images of each client; None if unknown.
        classes: The classes of each client; None if unknown.
    """
    after = {test: last_accuracies(records, test) for test in TESTS}
    rows: list[list[str]] = []
    traffic: dict[int, list[float]] = {}
    for k in records[-1].clients:
        before = local_only_metrics(records, k)
        values = [before.get(f"before_{test}") for test in TESTS]
        values += [after[test].get(k) for test in TESTS]
        traffic[k] = [sum(r.clients[k][f"bytes_{way}"] for r in records) for way in ("up", "down")]
        held = [] if classes is None else classes[k]
        listed = " ".join(map(str, held)) if len(held) <= 10 else f"{len(held)} classes"
        images = "-" if samples is None else f"{samples[k]:,}"
        amounts = map(format_bytes, traffic[k])
        adversarial = " (adversarial)" if "adversarial" in records[-1].clients[k] else ""
        rows.append(
            [names[k] + adversarial, images, listed or "-", *map(_percent, values), *amounts]
        )
    return rows, _together(records, after, samples, list(traffic.values()))


def _together(
    records: Sequence[Round],
    after: Mapping[str, Mapping[int, float]],
    samples: Sequence[int] | None,
    traffic: Sequence[Sequence[float]],
) -> list[list[str]]:
    """Return the rows below the clients: means and sums, and the server's model.

    Args:
        records: The rounds.
        after: Test -> client -> last accuracy.
        samples: The number of images of each client; None if unknown.
        traffic: Bytes up and down of each client.
    """
    everyone = set(records[-1].clients)
    active = participants(records) or everyone
    gains = {test: accuracy_gain(records, test) for test in TESTS}
    compared = {k for test in TESTS for k in gains[test].before}
    totals = [format_bytes(sum(column)) for column in zip(*traffic, strict=True)]
    images = "-" if samples is None else f"{sum(samples):,}"

    def means(clients: Collection[int]) -> list[str]:
        return [_percent(_mean(after[test].get(k) for k in clients)) for test in TESTS]

    before = [_percent(_mean(gains[test].before.values())) for test in TESTS]
    unknown = ["-", "-"]
    together = []
    if compared and compared < everyone:
        count = f"mean of {len(compared)} with both"
        together.append([count, "", "", *before, *means(compared), "", ""])
        before = unknown
    if compared < active < everyone:
        count = f"mean of {len(active)} active"
        together.append([count, "", "", *unknown, *means(active), "", ""])
    idle = len(everyone) - len(active)
    count = f"mean of {len(everyone)} ({idle} idle)" if idle else f"mean of {len(everyone)}, or sum"
    adversarial = sum("adversarial" in metrics for metrics in records[-1].clients.values())
    if adversarial:
        # Adversarial clients are not evaluated.
        count = f"mean of {len(everyone) - adversarial} honest ({adversarial} adversarial)"
    evaluated = {k for test in TESTS for k in after[test]}
    if evaluated and len(evaluated) + adversarial < len(everyone):
        # Each client's accuracy is that of the last round in which it was evaluated.
        count = f"mean of {len(evaluated)} evaluated of {len(everyone)}"
    together.append([count, images, "", *before, *means(everyone), *totals])
    server = next((r.server["global"] for r in reversed(records) if "global" in r.server), None)
    if server is not None:
        together.append(["server's model", "", "", "", "", _percent(server), "", "", ""])
    best = best_round(records)
    return together if best is None else [*together, *_best_cells(best)]


def _best_cells(best: Round) -> list[list[str]]:
    """Return the rows of test accuracies after the best round on validation.

    There is a row of the clients' means, and one of the server's model if it was evaluated then.
    """

    def mean(name: str) -> float | None:
        known = any(name in metrics for metrics in best.clients.values())
        return best.mean(name) if known else None

    after = [_percent(mean("global")), _percent(mean("local"))]
    rows = [[f"best on val, round {best.round}", "", "", "", "", *after, "", ""]]
    if "global" in best.server:
        server = _percent(best.server["global"])
        rows.append([f"server, round {best.round}", "", "", "", "", server, "", "", ""])
    return rows


def local_only_metrics(records: Sequence[Round], client: int) -> Mapping[str, float]:
    """Return a client's metrics in its first round with local-only accuracies, or {}.

    Local-only accuracies are metrics whose names begin with "before_"; all metrics of that round
    are returned. Each record must contain the client.
    """
    for record in records:
        metrics = record.clients[client]
        if any(name.startswith("before_") for name in metrics):
            return metrics
    return {}


def closing_table(
    records: Sequence[Round],
    architectures: Sequence[str],
    samples: Sequence[int],
    classes: Sequence[Sequence[int]],
) -> Table:
    """Return a table by client: data, accuracies and traffic; fits 80 columns.

    The accuracies are those before any exchange (local only) and those after the last round that
    evaluated a client.

    Args:
        records: The rounds, at least one.
        architectures: The architecture of each client, by client id.
        samples: The number of images of each client.
        classes: The classes of each client.
    """
    last = records[-1].round
    title = f"after round {last}, accuracy in %: on the global test set and the client's own"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in CLIENT_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("client", "classes") else "right")
    names = [f"{k} {architecture}" for k, architecture in enumerate(architectures)]
    rows, together = closing_cells(records, names, samples, classes)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for row in together:
        table.add_row(*row)
    simulated = [r.simulated_seconds for r in records if r.simulated_seconds is not None]
    if simulated:
        total = sum(simulated)
        mean = format_duration(total / len(simulated))
        table.caption = f"simulated time {format_duration(total)}, {mean} a round"
    return table


def accuracy_table(networks: Sequence[tuple[str, str]], values: Sequence[float]) -> Table:
    """Return a table of accuracies in percent, with their mean for several clients.

    Args:
        networks: Owner and architecture of each network. That of the owner "server" is not in the
            mean.
        values: Accuracy of each network, from 0 to 1.
    """
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
    """Return a table of numbers of samples by client and class or domain.

    Args:
        kind: "class" or "domain".
        counts: Client -> number of samples of each.
        names: Names of the classes or domains.
    """
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
