"""What attacks came to: a line for each, of all clients together and of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from rich import box
from rich.table import Table

__all__ = ["Result", "averaged", "shown", "to_json"]

QUESTIONS = {
    "inversion": "Images from what was told: decibels and similarity (higher is nearer), and how often the nearest of "
    "the client's images is the one",
    "membership": "Whose image was it: members told from images that are nobody's",
    "labels": "Which classes a client has: labels that are right, and how far class shares are off (0 none, 2 all)",
}
FORMATS = {"psnr": "{:.1f}", "best_psnr": "{:.1f}", "ssim": "{:.2f}", "found": "{:.1%}"}
FORMATS |= {"auc": "{:.3f}", "error": "{:.3f}", "tpr_1.0%": "{:.1%}", "tpr_0.1%": "{:.1%}"}
FORMATS |= {"right": "{:.1%}", "distance": "{:.2f}"}


@dataclass(frozen=True)
class Result:
    """One way to answer one question; without values, `note` says why."""

    question: str
    attack: str
    values: dict[str, float] = field(default_factory=dict)  # of all clients
    clients: dict[int, dict[str, float]] = field(default_factory=dict)
    note: str = ""
    guess: bool = False  # whether it needs nothing that a client told


def averaged(
    question: str,
    attack: str,
    clients: Mapping[int, dict[str, float]],
    note: str = "",
    *,
    guess: bool = False,
) -> Result:
    """The mean over clients of what an attack came to."""
    keys = {key: None for values in clients.values() for key in values}
    means = {
        key: fmean(values[key] for values in clients.values() if key in values) for key in keys
    }
    return Result(question, attack, means, dict(clients), note, guess)


def to_json(about: Mapping[str, object], results: Sequence[Result]) -> str:
    """As a file."""
    return (
        json.dumps(
            {**about, "results": [asdict(result) for result in results]},
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )


def shown(results: Sequence[Result]) -> Iterator[Table | str]:
    """A table for each question."""
    for question, title in QUESTIONS.items():
        rows = [result for result in results if result.question == question]
        keys = list(dict.fromkeys(key for row in rows for key in row.values))
        yield title
        if keys:
            table = Table("attack", *(key.replace("_", " ") for key in keys), box=box.SIMPLE_HEAD)
            for row in rows:
                cells = [
                    FORMATS[key].format(row.values[key]) if key in row.values else ""
                    for key in keys
                ]
                table.add_row(row.attack + " (a guess)" * row.guess, *cells)
            yield table
        yield from (f"{row.attack}: {row.note}" for row in rows if row.note)
        yield ""
