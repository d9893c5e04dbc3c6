"""Helpers that commands share: consoles, configurations, optional imports."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from barter.core.errors import ConfigError, install_command
from barter.runs.folder import Which
from barter.setup.config import read_toml, translate_former_fields, with_settings

__all__ = [
    "EXTRAS",
    "SettingTexts",
    "import_optional",
    "make_console",
    "open_config",
    "parse_round",
    "requested_values",
]

SettingTexts = Sequence[str] | None


def _has_terminal() -> bool:
    """Return whether the output is a terminal, whose lines can be overwritten.

    A notebook gives `!barter ...` a pseudo-terminal and then prints its control characters. Jupyter
    sets JPY_PARENT_PID for kernels and what they start.
    """
    return sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ


def make_console(*, wide: bool = False, columns: int = 140, markup: bool = False) -> Console:
    """Return a console that prints names and paths literally, unless there is markup.

    Args:
        wide: Allow wide tables where the output is not a terminal.
        columns: The width of such tables.
        markup: Interpret markup such as [bold].
    """
    width = columns if wide and not _has_terminal() else None
    return Console(
        highlight=False,
        markup=markup,
        emoji=False,  # Otherwise :b: in data.source=a:b:c would become an emoji.
        width=width,
        soft_wrap=not _has_terminal() and not wide,
        # Otherwise rich decides, by the terminal and by variables such as FORCE_COLOR.
        force_terminal=False if "JPY_PARENT_PID" in os.environ else None,
    )


def requested_values(
    config: Path | None, algorithm: str | None, settings: Sequence[str] | None
) -> dict[str, Any]:
    """Return a configuration file's plain values, changed by --algorithm and --set.

    Without a file they are those options alone. --set wins over --algorithm. Prints how fields of
    the algorithm that were renamed are written today.

    Raises:
        ConfigError: The file cannot be read, or a setting is malformed or unknown.
    """
    first = [] if algorithm is None else [f"algorithm.name={algorithm}"]
    chosen = [*first, *(settings or [])]
    if config is None:
        return with_settings({}, chosen)
    values = with_settings(open_config(config), chosen)
    spelling = translate_former_fields(values)
    if spelling is not None:
        former, present = spelling
        what = f"replace {former} by {present}" if present else f"remove {former}"
        sys.stderr.write(f"{config} is of an older version: {what}\n")
    return values


def open_config(config: Path) -> dict[str, Any]:
    """Return a configuration file's values; add its folder to the import path.

    So module:Class in a configuration is also found next to the file, after everything else.

    Raises:
        ConfigError: The file is missing, cannot be read, or is not TOML.
    """
    values = read_toml(config)
    folder = str(config.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    return values


def parse_round(text: str) -> Which:
    """Parse the value of --round: "best", "last" or a number from 1 on.

    Raises:
        ConfigError: It is anything else.
    """
    if text == "last":
        return "last"
    if text == "best":
        return "best"
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--round {text}: write best, last, or the number of a round from 1 on")
    return int(text)


# Top-level module -> what it belongs to, and the extra that installs it.
EXTRAS = {
    "flwr": ("Flower", "flower"),
    "cryptography": ("Flower", "flower"),
    "ray": ("Ray", "simulation"),
    "plotly": ("Plotly", "report"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}


def import_optional(module: str) -> Any:
    """Import and return a module of barter that needs an extra, or Ray.

    Args:
        module: Its name below `barter`, such as "flower.deploy", or "ray", which Flower's
            simulation needs.

    Raises:
        ConfigError: The extra is not installed; the message has the command that installs it.
        ModuleNotFoundError: A module is missing that belongs to no extra.
    """
    try:
        return importlib.import_module(module if module == "ray" else f"barter.{module}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        title, extra = EXTRAS[missing]
        raise ConfigError(f"{title} is not installed here: {install_command(extra)}") from None
