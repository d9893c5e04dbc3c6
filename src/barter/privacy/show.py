"""Format a privacy statement, and the ledger of a site, as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from barter.privacy.ledger import Ledger
from barter.privacy.prices import Description, total_epsilon
from barter.privacy.side_information import SIDE_INFORMATION
from barter.privacy.statement import ReleaseRow, Statement

__all__ = ["conclusion", "ledger_lines", "statement_cells", "statement_tables"]

STATEMENT_HEADINGS = ("what left the clients", "of", "protected by", "times", "ε")


def _epsilon(value: float) -> str:
    """Format ε with three significant digits, or as ∞."""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def statement_cells(statement: Statement) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the headings of a statement's table, and the cells of each row as text.

    There is a row for each released part of an answer and each kind of side information.
    """
    return STATEMENT_HEADINGS, [
        [row.part, row.about, _protection(row), str(row.releases), _cost(row)]
        for row in statement.rows
    ]


def _protection(row: ReleaseRow) -> str:
    """Return how a part is protected, or that it is not or needs no protection."""
    if row.protection:
        return row.protection
    return "nothing" if math.isinf(row.epsilon) else "independent of any image"


def _cost(row: ReleaseRow) -> str:
    """Return ε of a part, with the assumption that it holds under."""
    return f"{_epsilon(row.epsilon)} given {row.given}" if row.given else _epsilon(row.epsilon)


def conclusion(statement: Statement) -> list[str]:
    """Return sentences on what holds for the run as a whole."""
    if not statement.rows:
        return ["Nothing left the clients."]
    promise = f"ε = {_epsilon(statement.epsilon)} with δ = {statement.delta:g}"
    lines = [f"The run as a whole: {promise}, for each training image of each client."]
    if statement.why:
        lines[0] = "The run as a whole: ε = ∞, there is no guarantee."
        lines += [f"Why: {reason}." for reason in statement.why]
        open_rows = [row for row in statement.rows if row.given or math.isinf(row.epsilon)]
        if all(row.part in SIDE_INFORMATION for row in open_rows):
            lines.append(
                "Sites with `epsilon` in their site.toml withhold this; they take part if "
                "privacy.epsilon is set."
            )
    if math.isinf(statement.of_tests):
        lines.append("Test images: ε = ∞, there is no guarantee; accuracies depend on them.")
    if statement.protected:
        largest = max(statement.clients.values(), default=0.0)
        within = "" if statement.budget is None else f", within the budget of {statement.budget:g}"
        lines.append(
            f"Protected parts cost ε = {_epsilon(largest)} with δ = {statement.delta:g} "
            f"together{within}."
        )
        lines.append(f"Noise came from {statement.noise}.")
    lines += [f"Relation: {statement.relation}.", statement.left_out]
    dotted = next((row.part for row in statement.rows if "." in row.part), "")
    if dotted:
        method, _, part = dotted.partition(".")
        lines.append(
            f"For example, {dotted} is the part {part!r} of clients' answers to the call {method!r}. `barter show "
            "algorithm NAME` says what each answer holds."
        )
    return lines


def statement_tables(statement: Statement) -> Iterator[Table | str]:
    """Yield a table of the parts, and the sentences of `conclusion`."""
    if statement.rows:
        headings, rows = statement_cells(statement)
        table = Table(*headings, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        yield table
    yield from conclusion(statement)


def ledger_lines(ledger: Ledger) -> Iterator[Table | str]:
    """Yield a table of what a site's runs released, and sentences on all runs.

    ε of a run, and of all runs, is that of their releases composed, not a sum. δ is the smallest of
    all runs, 1e-5 if no run has one.
    """
    runs = ledger.runs()
    deltas = [account.delta for account in runs.values() if account.delta]
    delta = min(deltas, default=1e-5)
    table = Table("run", "since", "released", "protected by", "times", "ε", box=box.SIMPLE_HEAD)
    for run, account in runs.items():
        title = run or "hello"
        for text, count in account.released.items():
            part, mechanism, given = Description.read(text)
            protection = mechanism or "unknown: counted by an older version"
            cost = _epsilon(total_epsilon({text: count}, delta))
            if given:
                cost = f"{_epsilon(math.inf)} ({given} is not protected)"
            table.add_row(title, account.began, part, protection, str(count), cost)
            title = ""
        whole = _epsilon(total_epsilon(account.released, delta))
        table.add_row(title, "", "the run as a whole", "", "", whole, end_section=True)
    yield table
    total = _epsilon(total_epsilon(ledger.account(), delta))
    data = {fingerprint for account in runs.values() for fingerprint in account.data if fingerprint}
    yield (
        f"All {len(runs)} runs together: ε = {total} with δ = {delta:g}, for each training image, "
        f"as if it had been in all of them. Sets of images by their hash: {len(data)}."
    )
    for path in ledger.former_accounts():
        yield (
            f"{path} was written by an older version, which did not note the noise: releases of "
            "unknown price count as ε = ∞."
        )
