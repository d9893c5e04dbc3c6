"""Pictures: of a partition, as papers show it, of methods by round, and of what was made of private images."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from barter.core.errors import ConfigError

__all__ = ["COLOURS", "Curve", "Row", "band", "bubbles", "curves", "sheet"]

# A party; real images, where there are some, and those made, of each of them or of many, in 0..1; their classes.
Row: TypeAlias = tuple[str, Tensor | None, Tensor, Sequence[str]]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        _pyplot().close(figure)


def bubbles(counts: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path) -> None:
    """A circle per client and class; its area is the number of samples."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{path} cannot be written: give it the ending .png, .pdf or .svg")
    plt = _pyplot()
    clients, classes = len(counts), len(names)
    cell = 0.45 if max(clients, classes) <= 25 else 0.22
    figure, axes = plt.subplots(figsize=(max(4.0, cell * clients + 1.6), max(3.0, cell * classes + 1.4)))
    largest = max(max(row) for row in counts)
    across = 0.9 * 72 * cell  # the largest circle almost fills its cell; sizes are areas in square points
    points = [(k, c, n) for k, row in enumerate(counts) for c, n in enumerate(row) if n]
    axes.scatter(
        [k for k, _, _ in points],
        [c for _, c, _ in points],
        s=[across**2 * n / largest for _, _, n in points],
        color="#2a6f97",
        alpha=0.85,
        linewidths=0,
    )
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    axes.set_title(_plain(title), fontsize=9)
    axes.set_xticks(range(clients))
    if classes <= 25:
        axes.set_yticks(range(classes), [_plain(name) for name in names])
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    figure.tight_layout()
    _save(figure, path)


def sheet(rows: Sequence[Row], title: str, path: Path) -> None:
    """For each party, real images, if there are any, and below them those that were made."""
    plt = _pyplot()
    lines: list[tuple[str, Tensor, Sequence[str]]] = []
    for name, real, made, classes in rows:
        if real is not None:
            lines += [(f"{name}\nreal", real, classes), ("made", made, [""] * len(made))]
        else:
            lines.append((f"{name}\nmade", made, classes))
    columns = max(len(images) for _, images, _ in lines)
    size = (max(4.0, 0.75 * columns + 1.2), 0.775 * len(lines) + 0.9)
    figure, axes = plt.subplots(len(lines), columns, figsize=size, squeeze=False)
    for cell in axes.flat:
        cell.axis("off")
    for cells, (label, images, classes) in zip(axes, lines, strict=True):
        for cell, image, name in zip(cells, images, classes, strict=False):
            grey = image.shape[-1] == 1
            cell.imshow((image[..., 0] if grey else image).numpy(), cmap="gray" if grey else None, vmin=0, vmax=1)
            cell.set_title(_plain(name)[:12], fontsize=6, pad=2)
        cells[0].text(-0.15, 0.5, _plain(label), transform=cells[0].transAxes, ha="right", va="center", fontsize=6)
    figure.suptitle(_plain(title), fontsize=8)
    figure.subplots_adjust(left=0.14, right=0.99, bottom=0.01, wspace=0.05, hspace=0.2)
    figure.subplots_adjust(top=1 - 0.55 / figure.get_figheight())
    _save(figure, path)


# Okabe and Ito's colours, which most people can tell apart, then the same dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
Curve: TypeAlias = Sequence[tuple[int, float | None]]  # round and accuracy


def band(curves: Iterable[Curve]) -> tuple[list[int], list[float], list[float]]:
    """Rounds, and over the curves in each of them the mean and the standard deviation."""
    values: dict[int, list[float]] = {}
    for t, value in chain.from_iterable(curves):
        if value is not None:
            values.setdefault(t, []).append(value)
    rounds = sorted(values)
    spread = [statistics.stdev(values[t]) if len(values[t]) > 1 else 0.0 for t in rounds]
    return rounds, [statistics.fmean(values[t]) for t in rounds], spread


def curves(lines: Mapping[str, Mapping[int, Curve]], label: str, path: Path) -> None:
    """A line per method by round: the mean over seeds, and a band of one standard deviation to each side."""
    plt = _pyplot()
    with plt.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        for i, (name, seeds) in enumerate(lines.items()):
            rounds, *shares = band(seeds.values())
            means, spread = ([100 * share for share in column] for column in shares)
            colour, style = COLOURS[i % len(COLOURS)], ("-", "--", ":")[i // len(COLOURS) % 3]
            dots = "o" if len(rounds) <= 20 else None
            shown = _plain(name if not name.startswith("_") else f" {name}")  # matplotlib hides what begins with one
            axes.plot(rounds, means, style, color=colour, marker=dots, markersize=3, linewidth=1.4, label=shown)
            edges = [[m + way * s for m, s in zip(means, spread, strict=True)] for way in (-1, 1)]
            axes.fill_between(rounds, *edges, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="round", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        below = len(lines) > 4
        figure.legend(loc="outside lower center", ncols=2, frameon=False) if below else axes.legend(frameon=False)
        _save(figure, path)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
