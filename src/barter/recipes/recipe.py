"""Read recipes: files that each hold one row of a table, with its published runs.

NAME.toml has the configuration and the paper's figure; NAME.jsonl beside it holds the published runs
of barter. Every figure of barter is computed from those runs. This module does not load torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from barter.core.errors import ConfigError
from barter.recipes.stored import StoredRun, read_stored_runs

__all__ = ["PaperFigure", "PublishedRecipe", "find_recipe", "recipe_names"]

RECIPES = Path(__file__).parent
# Data sets that recipes read from npz files: title, training and test images, and their shape.
NPZ_FILES = {
    "cifar10": ("CIFAR-10", 50_000, 10_000, (32, 32, 3)),
    "cifar100": ("CIFAR-100 (fine labels)", 50_000, 10_000, (32, 32, 3)),
    "fashion-mnist": ("Fashion-MNIST", 60_000, 10_000, (28, 28, 1)),
}


@dataclass(frozen=True)
class PaperFigure:
    """A paper's figure: accuracy in percent, or its range over settings, and source."""

    source: str  # paper and table
    accuracy: float | tuple[float, float]
    deviation: float | None = None
    note: str = ""

    def __str__(self) -> str:
        if isinstance(self.accuracy, tuple):
            low, high = self.accuracy
            return f"{low:.2f} to {high:.2f}"
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.accuracy:.2f}{spread}"


@dataclass(frozen=True)
class PublishedRecipe:
    """A table's row: how it is run, the paper's figure, and barter's published runs."""

    name: str
    row: str  # the name under which its runs are stored
    title: str
    metric: str  # the metric that the paper reports, as in `barter compare --metric`
    seeds: str  # the seeds of `barter reproduce`, unless others are given
    tolerance: float  # in points; used if there are too few published seeds for a spread
    config: dict[str, Any]  # plain values of the configuration
    paper: PaperFigure | None
    published: tuple[StoredRun, ...]
    note: str = ""

    @property
    def data(self) -> str:
        """Return the name of the data set; of an npz file, the file's stem."""
        source = str(self.config["data"]["source"])
        return Path(source.removeprefix("npz:")).stem if source.startswith("npz:") else source

    @property
    def device(self) -> str:
        """Return the kind of device that the recipe is made for: "cuda" or "cpu"."""
        return str(self.config.get("device", "cpu"))

    def data_setting(self, path: Path | None, *, download: bool) -> list[str]:
        """Return the settings (KEY=VALUE) that name the recipe's data.

        Empty if the recipe needs no file.

        Args:
            path: An npz file; None for NAME.npz in the working directory.
            download: Have the run fetch the data set by torchvision instead; `path` is ignored.

        Raises:
            ConfigError: There is no such file (the message says how to get it, and its format), or
                a path or a download is given for data that need no file.
        """
        if self.data not in NPZ_FILES:
            if path is not None or download:
                raise ConfigError(
                    f"{self.name} runs on {self.data}, which needs no file: leave out --data and "
                    "--download"
                )
            return []
        if download:
            return [f"data.source={self.data}", "data.download=true"]
        path = Path(f"{self.data}.npz") if path is None else path
        if not path.is_file():
            raise ConfigError(f"{path} is missing. {self.name} needs {self.describe_data()}")
        return [f"data.source=npz:{path}"]

    def describe_data(self) -> str:
        """Describe the data that the recipe needs: format and ways to get them."""
        if self.data not in NPZ_FILES:
            return "no file is needed"
        title, train, test, shape = NPZ_FILES[self.data]
        height, width, channels = shape
        return (
            f"{title}; --data FILE.npz names a file with the arrays "
            f"x_train ({train}, {height}, {width}, {channels}) and "
            f"x_test ({test}, {height}, {width}, {channels}), both uint8, and the labels y_train and "
            "y_test; --download fetches the data set with torchvision instead"
        )


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes, sorted."""
    return tuple(sorted(path.stem for path in RECIPES.glob("*.toml")))


@cache
def find_recipe(name: str) -> PublishedRecipe:
    """Read a recipe and its published runs.

    Raises:
        ConfigError: There is no recipe of this name.
    """
    if name not in recipe_names():
        # Near names first: core.params would load torch.
        near = [known for known in recipe_names() if name in known] or list(recipe_names())
        raise ConfigError(f"there is no recipe {name!r}: there are {', '.join(near)}")
    tree = tomllib.loads((RECIPES / f"{name}.toml").read_text("utf-8"))
    published = tuple(read_stored_runs(RECIPES / f"{name}.jsonl"))
    figure = tree.get("paper")
    return PublishedRecipe(
        name=name,
        row=tree.get("row", name),
        title=tree["title"],
        metric=tree["metric"],
        seeds=tree["seeds"],
        tolerance=float(tree["tolerance"]),
        config=tree["config"],
        paper=None if figure is None else _paper_figure(figure),
        published=published,
        note=tree.get("note", ""),
    )


def _paper_figure(table: Mapping[str, Any]) -> PaperFigure:
    accuracy = table["accuracy"]
    if isinstance(accuracy, list):
        low, high = accuracy
        return PaperFigure(table["source"], (low, high), note=table.get("note", ""))
    return PaperFigure(
        table["source"], accuracy, table.get("deviation"), note=table.get("note", "")
    )
