"""The bubble picture of a partition, as papers show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from barter.core.errors import ConfigError

__all__ = ["bubbles"]


def bubbles(counts: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path) -> None:
    """A circle per client and class; its area is the number of samples."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{path} cannot be written: give it the ending .png, .pdf or .svg")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

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
    axes.set_title(title.replace("$", r"\$"), fontsize=9)
    axes.set_xticks(range(clients))
    if classes <= 25:
        axes.set_yticks(range(classes), [name.replace("$", r"\$") for name in names])
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        plt.close(figure)
