"""Draw the figures of the results pages from stored results.

    python -m benchmarks.figures            write all figures
    python -m benchmarks.figures --check    write nothing; exit with 1 if a figure is out of date

A figure has a panel for each setting, with accuracy or another share over rounds: the mean over
seeds of each method, and the paper's figure as a dashed line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from barter.core.files import replace_text
from barter.recipes.recipe import find_recipe, recipe_names
from barter.recipes.stored import StoredRun, common_rounds, spread_over_seeds
from benchmarks.tables import ROOT, stored_rows

IMAGES = ROOT / "docs" / "images"
COLOURS = ("#0b84a5", "#d1603d", "#7a8794", "#8a63b8")
# Methods that train before the first exchange; that accuracy is drawn at round 0.
TRAINED_BEFORE = ("DFFKE", "preset paper", "oracle")
# Methods of which the server's model is drawn; of the others, the mean of the clients.
SERVER_MODEL = ("FedAvg",)
WIDTH, HEIGHT, GAP = 190, 150, 44  # of a panel, and between panels
TOP, LEFT, BOTTOM = 34, 34, 62
ACROSS = 2  # panels in a row, so that a phone shows them large enough
# All colours are readable on light and on dark pages: a picture does not know the page's palette.
STYLE = """<style>
text { font: 11px sans-serif; fill: #6b7785 }
.title { font-weight: bold }
.grid { stroke: #8794a3; stroke-opacity: 0.3 }
.paper { stroke: #8794a3; stroke-dasharray: 5 4 }
</style>
"""


class Panel(NamedTuple):
    """A setting: its title and the stored row of each method.

    Attributes:
        recipe: The recipe with the paper's figure; empty for none.
        metric: What is drawn; empty for the accuracy of the method's model.
    """

    title: str
    rows: Mapping[str, str]
    recipe: str = ""
    metric: str = ""


FIGURES = {
    "dffke-cifar.svg": [
        Panel(
            title,
            {"DFFKE": recipe, "preset paper": preset},
            recipe,
        )
        for title, recipe, preset in (
            (
                "CIFAR-100, alpha 1.0",
                "dffke-cifar100-alpha-1.0",
                "dffke-cifar100-preset-paper",
            ),
            (
                "CIFAR-100, alpha 0.1",
                "dffke-cifar100-alpha-0.1",
                "dffke-cifar-paper-augmented: CIFAR-100, alpha 0.1, preset paper",
            ),
            (
                "CIFAR-10, alpha 1.0",
                "dffke-cifar10-alpha-1.0",
                "dffke-cifar-paper-augmented: CIFAR-10, alpha 1.0, preset paper",
            ),
            (
                "CIFAR-10, alpha 0.1",
                "dffke-cifar10-alpha-0.1",
                "dffke-cifar-paper-augmented: CIFAR-10, alpha 0.1, preset paper",
            ),
        )
    ],
    "averaging.svg": [
        Panel(
            f"CIFAR-100, alpha {alpha}",
            {
                "DFFKE": dffke,
                "FedAvg": f"averaging: fedavg, partition.alpha={alpha}",
                "central": "averaging: central, partition.alpha=1.0",
                "oracle": f"averaging: oracle, partition.alpha={alpha}",
            },
            f"dffke-cifar100-alpha-{alpha}",
        )
        for alpha, dffke in (
            ("1.0", "dffke-cifar100-alpha-1.0"),
            ("0.1", "averaging: dffke, partition.alpha=0.1"),
        )
    ],
    "fedzge-limits.svg": [
        Panel(
            f"{title}: {what}",
            {name: f"fedzge-limits: {data}, {name}" for name in ("default", "private images")},
            metric=metric,
        )
        for metric, what in (("server", "server's model"), ("recognised", "images recognised"))
        for data, title in (("digits", "digits"), ("cifar10-5k", "CIFAR-10"))
    ]
    + [
        Panel(
            f"{title}: cosine x 100",
            {"default": f"fedzge-limits: {data}, default"},
            metric="cosine",
        )
        for data, title in (("digits", "digits"), ("cifar10-5k", "CIFAR-10"))
    ],
    "cifar100-methods.svg": [
        Panel(
            f"CIFAR-100, alpha {alpha}",
            {
                "DFFKE": f"dffke-cifar100-alpha-{alpha}",
                "FedProto": fedproto,
                "local training": f"baselines-cifar100: HtFE-1, alpha {alpha}, local",
            },
            f"dffke-cifar100-alpha-{alpha}",
        )
        for alpha, fedproto in (
            ("1.0", "fedproto-cifar100-alpha-1.0"),
            ("0.1", "baselines-cifar100: HtFE-1, alpha 0.1, fedproto"),
        )
    ],
}


def read_curve(runs: Sequence[StoredRun], before: bool, metric: str) -> dict[int, float]:
    """Return the mean accuracy over seeds in % by round.

    Args:
        runs: The runs of a row.
        before: Whether round 0 is the accuracy after local training, before the first exchange.
        metric: global for the mean of the clients, server for the server's model.
    """
    curve = {}
    trained = spread_over_seeds(runs, "trained", 1) if before else None
    if trained is not None:
        curve[0] = 100 * trained.mean
    for at in common_rounds(runs):
        spread = spread_over_seeds(runs, metric, at)
        if spread is not None:
            curve[at] = 100 * spread.mean
    return curve


def paper_accuracy(recipe: str) -> float | None:
    """Return the paper's accuracy in % for a recipe, if it is a single number."""
    figure = find_recipe(recipe).paper if recipe in recipe_names() else None
    return figure.accuracy if figure is not None and isinstance(figure.accuracy, float) else None


def draw_panel(panel: Panel, rows: Mapping[str, Sequence[StoredRun]], left: int, above: int) -> str:
    """Return the SVG elements of a panel whose plot starts `left` and `above` pixels from the corner."""
    curves = {}
    for name, row in panel.rows.items():
        metric = panel.metric or ("server" if name in SERVER_MODEL else "global")
        curves[name] = read_curve(rows[row], name in TRAINED_BEFORE, metric)
    paper = paper_accuracy(panel.recipe)
    highest = max(value for curve in curves.values() for value in curve.values())
    top = 10 * (int(max(highest, paper or 0.0)) // 10 + 1)
    last = max(max(curve) for curve in curves.values())

    def x(number: float) -> float:
        return left + WIDTH * number / last

    def y(value: float) -> float:
        return above + HEIGHT * (1 - value / top)

    parts = [f'<text class="title" x="{left}" y="{above - 14}">{panel.title}</text>']
    for value in range(0, top + 1, 20):
        line = f'x1="{left}" x2="{left + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        parts.append(f'<line class="grid" {line}/>')
        parts.append(
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>'
        )
    for number in (0, last):
        where = f'x="{x(number):.1f}" y="{above + HEIGHT + 16}" text-anchor="middle"'
        parts.append(f"<text {where}>{number}</text>")
    if paper is not None:
        line = f'x1="{left}" x2="{left + WIDTH}" y1="{y(paper):.1f}" y2="{y(paper):.1f}"'
        parts.append(f'<line class="paper" {line}/>')
    for colour, curve in zip(COLOURS, curves.values(), strict=False):
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in curve.items())
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
    return "".join(f"{part}\n" for part in parts)


def draw(panels: Sequence[Panel], rows: Mapping[str, Sequence[StoredRun]]) -> str:
    """Return a figure as SVG.

    Args:
        panels: Its panels, row by row. The first shows all methods; the others show them in the same
            order, or the first of them.
        rows: All stored runs by row.
    """
    body = ""
    bottom = 0
    for place, panel in enumerate(panels):
        left = LEFT + place % ACROSS * (WIDTH + GAP)
        above = TOP + place // ACROSS * (HEIGHT + 2 * TOP)
        body += draw_panel(panel, rows, left, above)
        bottom = above + HEIGHT
    legend = f'<text x="{LEFT}" y="{bottom + 32}">round</text>\n'
    start = LEFT
    level = bottom + 50
    strokes = [f'stroke="{colour}" stroke-width="2"' for colour in COLOURS]
    entries = [*zip(panels[0].rows, strokes, strict=False)]
    if any(panel.recipe for panel in panels):
        entries.append(("the paper's DFFKE", 'class="paper"'))
    for name, stroke in entries:
        line = f'x1="{start}" x2="{start + 22}" y1="{level - 4}" y2="{level - 4}"'
        legend += f'<line {stroke} {line}/>\n<text x="{start + 28}" y="{level}">{name}</text>\n'
        start += 46 + 6 * len(name)
    width = max(LEFT + min(len(panels), ACROSS) * (WIDTH + GAP) - GAP + 20, start)
    height = bottom + BOTTOM
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}{body}{legend}</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    rows = stored_rows()
    status = 0
    for name, panels in FIGURES.items():
        path: Path = IMAGES / name
        wanted = draw(panels, rows)
        if path.exists() and path.read_text("utf-8") == wanted:
            continue
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
        if check:
            status = 1
        else:
            replace_text(path, wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
