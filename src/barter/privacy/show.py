"""The statement as people read it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from barter.privacy.side_information import BESIDE
from barter.privacy.statement import Row, Statement

__all__ = ["cells", "conclusion", "shown"]

HEADINGS = ("what left the clients", "of", "protected by", "times", "ε")


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def cells(statement: Statement) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings, and a line for each part."""
    return HEADINGS, [
        [row.part, row.about, _protection(row), str(row.releases), _cost(row)]
        for row in statement.rows
    ]


def _protection(row: Row) -> str:
    return row.protection or ("nothing" if math.isinf(row.epsilon) else "tells nothing of an image")


def _cost(row: Row) -> str:
    return f"{_epsilon(row.epsilon)} given {row.given}" if row.given else _epsilon(row.epsilon)


def conclusion(statement: Statement) -> list[str]:
    """What holds for the run as a whole, in sentences."""
    if not statement.rows:
        return ["Nothing left the clients."]
    promise = f"ε = {_epsilon(statement.epsilon)} with δ = {statement.delta:g}"
    lines = [f"The run as a whole: {promise}, for each training image of each client."]
    if statement.why:
        lines[0] = "The run as a whole: ε = ∞, there is no promise."
        lines += [f"Why: {reason}." for reason in statement.why]
    if statement.why and all(
        row.part in BESIDE for row in statement.rows if row.given or math.isinf(row.epsilon)
    ):
        lines.append(
            "Sites with `epsilon` in their site.toml withhold this; they take part where privacy.epsilon is set."
        )
    if math.isinf(statement.of_tests):
        lines.append("Test images: ε = ∞, there is no promise; accuracies tell of them.")
    if statement.protected:
        most, budget = max(statement.clients.values(), default=0.0), statement.budget
        within = "" if budget is None else f", within {budget:g}"
        lines.append(
            f"What is protected costs ε = {_epsilon(most)} with δ = {statement.delta:g} together{within}."
        )
        lines.append(f"Noise came from {statement.noise}.")
    return [*lines, f"Relation: {statement.relation}.", statement.left_out]


def shown(statement: Statement) -> Iterator[Table | str]:
    """A table of the parts, and what follows from it."""
    if statement.rows:
        headings, rows = cells(statement)
        table = Table(*headings, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        yield table
    yield from conclusion(statement)
