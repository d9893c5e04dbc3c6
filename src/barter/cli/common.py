"""What commands have in common: where they print, the configuration they are given, what an extra installs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from barter.core.errors import ConfigError, install_command
from barter.runs.folder import Which
from barter.setup.config import read, with_settings

__all__ = ["EXTRAS", "Settings", "asked", "chosen_round", "opened", "optional", "screen"]

Settings = Sequence[str] | None


def screen(*, wide: bool = False) -> Console:
    """Names and paths are printed as they are; outside of a terminal tables may be wide."""
    width = 140 if wide and not sys.stdout.isatty() else None
    return Console(
        highlight=False,
        markup=False,
        emoji=False,  # data.source=a:b:c holds no picture
        width=width,
        soft_wrap=not sys.stdout.isatty() and not wide,
    )


def asked(
    config: Path | None, algorithm: str | None, settings: Sequence[str] | None
) -> dict[str, Any]:
    first = [] if algorithm is None else [f"algorithm.name={algorithm}"]
    return with_settings({} if config is None else opened(config), [*first, *(settings or [])])


def opened(config: Path) -> dict[str, Any]:
    """Return the plain values of a file; from now on, module:name is also looked for in the file's folder."""
    values, folder = read(config), str(config.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    return values


def chosen_round(text: str) -> Which:
    """Read the value of --round."""
    if text == "last":
        return "last"
    if text == "best":
        return "best"
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--round {text}: write best, last, or the number of a round from 1 on")
    return int(text)


EXTRAS = {
    "flwr": ("Flower", "flower"),
    "cryptography": ("Flower", "flower"),
    "ray": ("Ray", "simulation"),
    "plotly": ("Plotly", "report"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}


def optional(module: str) -> Any:
    """A module of ours that needs what an extra installs, or Ray, on which Flower simulates."""
    try:
        return importlib.import_module(module if module == "ray" else f"barter.{module}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        what, extra = EXTRAS[missing]
        raise ConfigError(f"{what} is not installed here: {install_command(extra)}") from None
