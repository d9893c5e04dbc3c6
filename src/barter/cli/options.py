"""Types, parsers and help of options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from barter.core.params import DEVICE_LIST

__all__ = [
    "AlgorithmName",
    "Arithmetic",
    "ConfigFile",
    "Device",
    "Listing",
    "Patience",
    "Place",
    "RoundOf",
    "RunArgument",
    "SettingsOption",
    "TensorBoardOption",
    "Trust",
    "real_number",
    "whole_number",
]

SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value, such as rounds=10 or algorithm.share=0.5.",
    ),
]


AlgorithmName = Annotated[
    str | None, typer.Option(help="A name from `barter list algorithms`, or module:Class.")
]

RunArgument = Annotated[Path, typer.Argument(metavar="RUN")]

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]")]

TensorBoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also log every round for TensorBoard, in the folder.")
]


RoundOf = Annotated[
    str,
    typer.Option(
        "--round",
        metavar="best|last|N",
        help="Use the networks of this round; best means the highest validation accuracy.",
    ),
]


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`, both included.

    It raises typer.BadParameter with a one-line message: those of typer's own parsers differ from
    version to version.
    """
    bounds = f"of at least {least}" if math.isinf(most) else f"between {least} and {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(f"{str(text)!r} is not a whole number {bounds}.")
        return number

    return parse


def real_number(text: str) -> float:
    """Parse a number, which may be infinite.

    Raises:
        typer.BadParameter: The text is no number, or NaN.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise typer.BadParameter(f"{str(text)!r} is not a number.")
    return number


def _device_name(name: str | None) -> str | None:
    """Return the name of a device or of several; raise if it is none."""
    if name is not None and name not in DEVICE_LIST:
        raise typer.BadParameter(f"{name!r} is not {DEVICE_LIST}.")
    return name


Device = Annotated[
    str | None,
    typer.Option(
        callback=_device_name, metavar="auto|cpu|cuda|cuda:N[,cuda:N]", help="Where to compute."
    ),
]


Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that the folder names, though it was not started here."),
]


Patience = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(1),
        metavar="N",
        help="Stop when validation accuracy has not improved for N rounds; needs data.validation.",
    ),
]


class Arithmetic(StrEnum):
    """Numerical precisions."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class Place(StrEnum):
    """The engine: the place where clients run."""

    local = "local"
    flower = "flower"


class Listing(StrEnum):
    """The listings of `barter list`."""

    algorithms = "algorithms"
    models = "models"
    families = "families"
    datasets = "datasets"
    partitions = "partitions"
