"""What options of the command line take."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = [
    "Arithmetic",
    "Device",
    "Listing",
    "Patience",
    "Place",
    "RoundOf",
    "Settings",
    "TensorBoard",
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value, such as rounds=10 or algorithm.share=0.5.",
    ),
]


TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write every round for TensorBoard, into the folder.")
]


RoundOf = Annotated[
    str,
    typer.Option(
        "--round",
        metavar="best|last|N",
        help="Of this round; best is the one with the highest validation accuracy.",
    ),
]


Patience = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Stop when validation accuracy has not improved for N rounds; takes data.validation.",
    ),
]


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Arithmetic(StrEnum):
    """How to compute."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class Place(StrEnum):
    """Where clients live."""

    local = "local"
    flower = "flower"


class Listing(StrEnum):
    """What can be listed."""

    algorithms = "algorithms"
    models = "models"
    families = "families"
    datasets = "datasets"
    partitions = "partitions"
