"""Draw partitions as bubble charts, accuracy curves, and sheets of images."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from torch import Tensor

from barter.core.errors import ConfigError

__all__ = [
    "COLOURS",
    "Curve",
    "ImageRow",
    "Kinds",
    "draw_bubbles",
    "draw_curves",
    "draw_sheet",
    "mean_and_deviation",
]

WIDE = 50  # maximum number of clients in one band of a bubble chart
TALL = 30  # maximum number of classes and domains for which several bands fit
SHORT = 16  # maximum length of a name in a legend among the curves

# The palette of Okabe and Ito, which colour-blind readers can tell apart. Further lines are dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", "--", ":", "-.", (0, (5, 3)), (0, (1, 3)))

# Name of a party; its private images or None; the images synthesised from each of them, or from
# none in particular; their classes. Pixels are in 0..1.
ImageRow: TypeAlias = tuple[str, Tensor | None, Tensor, Sequence[str]]


def _pyplot() -> Any:
    """Import pyplot; use a backend without display unless the caller has chosen one.

    In a notebook, another backend would end the display of the caller's own figures.
    """
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:
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


@dataclass(frozen=True)
class Kinds:
    """Numbers of samples by client and class, or by client and domain."""

    title: str  # "class" or "domain"
    names: Sequence[str]
    counts: Sequence[Sequence[int]]  # client -> number of samples of each


def draw_bubbles(kinds: Sequence[Kinds], title: str, path: Path) -> None:
    """Draw circles by client and class, and by client and domain.

    The area of a circle is proportional to the number of samples, among classes and among domains.
    Many clients are divided into several bands. All lengths are in inches, so that circles never
    touch and nothing is cut off.

    Args:
        kinds: The counts, by class and optionally by domain.
        title: The chart's title; may be empty.
        path: A file that ends in .png, .pdf or .svg.

    Raises:
        ConfigError: The file has another ending or cannot be written.
    """
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{path} cannot be written: give it the ending .png, .pdf or .svg")
    clients = len(kinds[0].counts)
    lines = sum(len(kind.names) for kind in kinds)
    bands = -(-clients // WIDE) if lines <= TALL else 1
    per_band = -(-clients // bands)
    cell = min(0.4, max(0.09, 10 / max(per_band, lines)))
    font = min(8.0, 72 * cell * 0.8)
    labels = [
        [_plain(name if len(name) <= 24 else f"{name[:23]}…") for name in kind.names]
        for kind in kinds
    ]
    left = 0.5 + 0.62 * font / 72 * max(len(label) for group in labels for label in group)
    width = max(3.5, left + cell * (per_band + 0.4) + 1.0)
    letters = max(20, int((width - 0.3) / 0.075))
    text = [line for part in title.split("\n") if part for line in wrap(part, letters)]
    gaps = bands * (len(kinds) * 0.12 + 0.25) + 0.08
    above = 0.15 + 0.17 * len(text)
    height = max(above + bands * cell * (lines + 0.4 * len(kinds)) + gaps, above + 1.6)
    figure = _pyplot().figure(figsize=(width, height))
    top = height - above
    across = 0.9 * 72 * cell  # diameter of the largest circle in points; it almost fills its cell
    # Interval between clients' numbers along the axis.
    step = next(step for step in (1, 5, 10, 50) if step * cell >= 0.25 or step == 50)
    for band in range(bands):
        here = range(band * per_band, min(clients, (band + 1) * per_band))
        for kind, names, colour in zip(kinds, labels, (COLOURS[0], COLOURS[1]), strict=False):
            box_width = cell * (len(here) + 0.4)
            box_height = cell * (len(names) + 0.4)
            box = (
                left / width,
                (top - box_height) / height,
                box_width / width,
                box_height / height,
            )
            axes = figure.add_axes(box)
            largest = max(map(max, kind.counts))
            _circles(axes, kind.counts, here, largest, across, colour)
            axes.set(xlim=(here[0] - 0.7, here[-1] + 0.7), ylim=(-0.7, len(names) - 0.3))
            axes.set_yticks(range(len(names)), names, fontsize=font)
            ticks = [k for k in here if k % step == 0]
            tick_labels = ticks if kind is kinds[-1] else [""] * len(ticks)
            axes.set_xticks(ticks, tick_labels, fontsize=8)
            axes.set_ylabel(kind.title, fontsize=8)
            axes.yaxis.set_label_coords(-(left - 0.3) / box_width, 0.5)
            if band == 0:
                legend_x = left + cell * (per_band + 0.4) + 0.15
                _size_legend(figure, kind.title, largest, across, colour, legend_x, top)
            top -= box_height + 0.12
        axes.set_xlabel("client" if band == bands - 1 else "", fontsize=8, labelpad=2)
        top -= 0.25
    figure.text(
        0.15 / width,
        1 - 0.1 / height,
        _plain("\n".join(text)),
        fontsize=9,
        va="top",
        linespacing=1.25,
    )
    _save(figure, path)


def _circles(
    axes: Any,
    counts: Sequence[Sequence[int]],
    clients: Iterable[int],
    largest: int,
    across: float,
    colour: str,
) -> None:
    """Draw the circles of some clients.

    Args:
        axes: Where to draw.
        counts: Client -> number of samples of each class.
        clients: The clients.
        largest: The largest number of samples in the chart.
        across: Diameter of its circle in points; the smallest circles stay visible.
        colour: The circles' colour.
    """
    points = [(k, c, n) for k in clients for c, n in enumerate(counts[k]) if n]
    areas = [max(1.5, across * (n / largest) ** 0.5) ** 2 for _, _, n in points]
    axes.scatter(
        [k for k, _, _ in points],
        [c for _, c, _ in points],
        s=areas,
        color=colour,
        linewidths=0,
        zorder=2,
    )
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _size_legend(
    figure: Any, title: str, largest: int, across: float, colour: str, x: float, top: float
) -> None:
    """Draw up to three circles with their numbers of samples, one below another.

    Args:
        figure: The figure.
        title: What is counted, "class" or "domain".
        largest: Number of samples of the largest circle.
        across: Diameter of the largest circle in points.
        colour: The circles' colour.
        x: Left edge in inches.
        top: Upper edge in inches.
    """
    width, height = figure.get_size_inches()
    figure.text(x / width, (top - 0.02) / height, f"images\nof a {title}", fontsize=7, va="top")
    y = top - 0.32
    for n in dict.fromkeys(_round_number(largest / part) for part in (1, 4, 20)):
        diameter = max(1.5, across * (n / largest) ** 0.5)
        y -= max(diameter / 72, 0.12) / 2 + 0.03
        dot = {
            "marker": "o",
            "markersize": diameter,
            "color": colour,
            "alpha": 0.5,
            "markeredgewidth": 0,
        }
        middle = (x + across / 144) / width
        figure.add_artist(_pyplot().Line2D([middle], [y / height], **dot))
        figure.text((x + across / 72 + 0.08) / width, y / height, f"{n:,}", fontsize=7, va="center")
        y -= max(diameter / 72, 0.12) / 2


def _round_number(value: float) -> int:
    """Round down to one significant digit; at least 1."""
    digits = str(int(value))
    return max(1, int(digits[0] + "0" * (len(digits) - 1)))


def draw_sheet(
    rows: Sequence[ImageRow],
    title: str,
    path: Path,
    made: str = "synthetic",
    only_made: str = "synthetic",
) -> None:
    """Draw each party's private images, if any, and below them synthetic ones.

    Args:
        rows: Name, private images or None, synthetic images, and class names of each party. Images
            are (N, height, width, channels) on the CPU, with values from 0 to 1.
        title: The sheet's title.
        path: The file.
        made: The label of images below private ones.
        only_made: The label of images without private ones, below the party's name.

    Raises:
        ConfigError: The file cannot be written.
    """
    plt = _pyplot()
    lines: list[tuple[str, Tensor, Sequence[str]]] = []
    for name, real, images, classes in rows:
        if real is not None:
            lines += [(f"{name}\nprivate", real, classes), (made, images, [""] * len(images))]
        else:
            lines.append((f"{name}\n{only_made}", images, classes))
    columns = max(len(images) for _, images, _ in lines)
    width = max(4.0, 0.75 * columns + 1.2)
    words = [line for part in _plain(title).split("\n") for line in wrap(part, int(14 * width))]
    head = 0.41 + 0.14 * len(words)  # height of the title in inches
    size = (width, 0.775 * len(lines) + 0.35 + head)
    figure, axes = plt.subplots(len(lines), columns, figsize=size, squeeze=False)
    for cell in axes.flat:
        cell.axis("off")
    for cells, (label, images, classes) in zip(axes, lines, strict=True):
        for cell, image, name in zip(cells, images, classes, strict=False):
            grey = image.shape[-1] == 1
            cell.imshow(
                (image[..., 0] if grey else image).numpy(),
                cmap="gray" if grey else None,
                vmin=0,
                vmax=1,
            )
            cell.set_title(_plain(name)[:12], fontsize=6, pad=2)
        cells[0].text(
            -0.15,
            0.5,
            _plain(label),
            transform=cells[0].transAxes,
            ha="right",
            va="center",
            fontsize=6,
        )
    figure.suptitle("\n".join(words), fontsize=8, va="top", y=1 - 0.08 / size[1])
    figure.subplots_adjust(left=0.14, right=0.99, bottom=0.01, wspace=0.05, hspace=0.2)
    figure.subplots_adjust(top=1 - head / size[1])
    _save(figure, path)


Curve: TypeAlias = Sequence[tuple[int, float | None]]  # (round, accuracy)


def mean_and_deviation(curves: Iterable[Curve]) -> tuple[list[int], list[float], list[float]]:
    """Return the rounds, and mean and standard deviation over curves in each.

    Rounds are in ascending order; those without a value in any curve are left out. In each, curves
    without a value do not count. The deviation is that of a sample (n - 1), and 0 for a single
    value.
    """
    values: dict[int, list[float]] = {}
    for t, value in chain.from_iterable(curves):
        if value is not None:
            values.setdefault(t, []).append(value)
    rounds = sorted(values)
    spread = [statistics.stdev(values[t]) if len(values[t]) > 1 else 0.0 for t in rounds]
    return rounds, [statistics.fmean(values[t]) for t in rounds], spread


def draw_curves(
    lines: Mapping[str, Mapping[int, Curve]],
    label: str,
    path: Path,
    positions: Mapping[str, Mapping[int, float]] | None = None,
    axis: str = "round",
) -> None:
    """Draw a line per method: mean over seeds, with a band of one standard deviation.

    Args:
        lines: Method -> seed -> curve, with values as the axis shows them.
        label: The label of the y axis.
        path: The file, whose ending determines the format.
        positions: Method -> round -> its place along the x axis; None for the round itself.
        axis: The label of the x axis.

    Raises:
        ConfigError: The file cannot be written.
    """
    plt = _pyplot()
    with plt.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 9}):
        longest = max(map(len, lines), default=0)
        # There is room for a legend among the curves only if its names are few and short.
        below = len(lines) > 4 or longest > SHORT
        columns = 2 if longest <= 2 * SHORT else 1
        legend_height = 0.18 * -(-len(lines) // columns) if below else 0.0  # in inches
        size = (5.2, max(3.4, 2.6 + legend_height))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        for i, (name, seeds) in enumerate(lines.items()):
            rounds, means, spread = mean_and_deviation(seeds.values())
            places = rounds if positions is None else [positions[name][t] for t in rounds]
            colour = COLOURS[i % len(COLOURS)]
            style = STYLES[i // len(COLOURS) % len(STYLES)]
            # matplotlib hides labels that begin with an underscore.
            visible_name = f" {name}" if name.startswith("_") else name
            axes.plot(
                places,
                means,
                linestyle=style,
                color=colour,
                marker="o" if len(rounds) <= 20 else None,
                markersize=3,
                linewidth=1.4,
                label=_plain(visible_name),
            )
            lower = [mean - deviation for mean, deviation in zip(means, spread, strict=True)]
            upper = [mean + deviation for mean, deviation in zip(means, spread, strict=True)]
            axes.fill_between(places, lower, upper, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel=axis, ylabel="\n".join(wrap(label, 40)))  # as long as the axis
        if positions is None:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        if below:
            figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        else:
            axes.legend(frameon=False)
        _save(figure, path)


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib reads as formulas."""
    return text.replace("$", r"\$")
