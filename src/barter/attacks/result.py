"""Results of attacks, over all clients and for each client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from rich import box
from rich.table import Table

__all__ = ["Result", "mean_result", "result_tables", "results_to_json"]

QUESTIONS = {
    "inversion": "Reconstructed images: PSNR in decibels and SSIM (higher is nearer), and how often "
    "the client's nearest image is the original",
    "copies": "Copies: how often the private image nearest to a synthetic one is among those that "
    "were offered, with its 95 % interval, which allows for synthetic images that share a nearest "
    "one (their effective number); by chance it is as often as images were offered. PSNR of "
    "private images with the synthetic image most like them, for offered images and for others",
    "membership": "Membership inference: training images of clients against images of no client",
    "labels": "Label inference: correct labels, and the L1 error of class frequencies (0 to 2)",
}
VALUE_FORMATS = {
    "psnr": "{:.1f}",
    "psnr_not_offered": "{:.1f}",
    "best_psnr": "{:.1f}",
    "ssim": "{:.2f}",
    "found": "{:.1%}",
    "copies": "{:.1%}",
    "from": "{:.1%}",
    "to": "{:.1%}",
    "chance": "{:.1%}",
    "effective": "{:.0f}",
    "auc": "{:.3f}",
    "error": "{:.3f}",
    "tpr_1.0%": "{:.1%}",
    "tpr_0.1%": "{:.1%}",
    "right": "{:.1%}",
    "distance": "{:.2f}",
}


@dataclass(frozen=True)
class Result:
    """The result of one attack; without values, `note` gives the reason."""

    question: str
    attack: str
    values: dict[str, float] = field(default_factory=dict)  # over all clients
    clients: dict[int, dict[str, float]] = field(default_factory=dict)
    note: str = ""
    guess: bool = False  # whether it is a baseline that uses no upload


def mean_result(
    question: str,
    attack: str,
    clients: Mapping[int, dict[str, float]],
    note: str = "",
    *,
    guess: bool = False,
) -> Result:
    """Return an attack's result: its values by client, and their mean over clients.

    Clients have equal weights; the mean of a value is over the clients that have it.

    Args:
        question: What the attack infers, a key of `QUESTIONS`.
        attack: The name of the attack.
        clients: Its values by client.
        note: A remark on the result.
        guess: Whether it is a baseline that uses no upload.
    """
    keys = {key: None for values in clients.values() for key in values}
    means = {
        key: fmean(values[key] for values in clients.values() if key in values) for key in keys
    }
    return Result(question, attack, means, dict(clients), note, guess)


def results_to_json(about: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return results as JSON: an object with `about`'s keys and a list `results`.

    Args:
        about: Facts on the attacked run, by name.
        results: The results.
    """
    tree = {**about, "results": [asdict(result) for result in results]}
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def result_tables(results: Sequence[Result]) -> Iterator[Table | str]:
    """Yield for each of `QUESTIONS` a title, a table, notes and an empty line.

    Without values there is no table. A question without results has its title too.
    """
    for question, title in QUESTIONS.items():
        rows = [result for result in results if result.question == question]
        keys = list(dict.fromkeys(key for row in rows for key in row.values))
        yield title
        if keys:
            table = Table("attack", *(key.replace("_", " ") for key in keys), box=box.SIMPLE_HEAD)
            for row in rows:
                cells = [
                    VALUE_FORMATS[key].format(row.values[key]) if key in row.values else ""
                    for key in keys
                ]
                table.add_row(row.attack + " (a guess)" * row.guess, *cells)
            yield table
        yield from (f"{row.attack}: {row.note}" for row in rows if row.note)
        yield ""
