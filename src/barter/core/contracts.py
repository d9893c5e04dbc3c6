"""What an answer must be, said where its type is: `Annotated[Tensor, Floats("n", "features")]`.

A size is a number or a name. Names that a run knows are `classes`; `channels`, `height` and `width` of images; the
`features` of the client's network; its number of `examples`; and whole numbers that the algorithm has under the name,
be it a field, a property, or a method that is given what is `Known` of the client. Any other is as large as where it
is met first, in what was sent or in the answer, and the same from there on; what is first met in a TypedDict holds
inside of it. `core/answers.py` holds answers against all this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, TypeAlias

import torch

__all__ = [
    "Classes",
    "Counts",
    "Entries",
    "Floats",
    "Labels",
    "Named",
    "NonNegatives",
    "Pixels",
    "Places",
    "Room",
    "Weights",
    "When",
    "Within",
]

BOUND = 1e6  # of decimal numbers in tensors: squares and sums of many are numbers still
EXACT = 2.0**53  # of all other numbers: a decimal number can tell them apart up to here
Size: TypeAlias = int | str


class Floats:
    """Decimal numbers in this shape; `...` at its end is any more axes."""

    dtype = torch.float32
    least = -BOUND

    def __init__(self, *shape: Size | EllipsisType, most: float | str = BOUND) -> None:
        self.shape, self.most = shape, most


class NonNegatives(Floats):
    """Decimal numbers in this shape, none below zero: variances, distances."""

    least = 0.0


class Places(Floats):
    """Whole numbers in this shape, from zero."""

    dtype = torch.int64
    least = 0.0

    def __init__(self, *shape: Size, most: float | str = EXACT) -> None:
        super().__init__(*shape, most=most)


class Labels(Places):
    """Classes, by number."""

    def __init__(self, *shape: Size) -> None:
        super().__init__(*shape, most="last_class")


class Classes(Labels):
    """Some of the classes, each once, ascending."""


class Counts(Places):
    """How many there are of each kind: together at most as many as the client has images, if nothing else is said; and
    exactly `total`, if that is said."""

    def __init__(self, *shape: Size, most: float | str = "examples", total: str = "") -> None:
        super().__init__(*shape, most=most)
        self.total = total


class Pixels(Floats):
    """Images as bytes, of the size that networks see if no other is said."""

    dtype = torch.uint8

    def __init__(self, rows: Size, height: Size = "height", width: Size = "width") -> None:
        super().__init__(rows, "channels", height, width)


@dataclass(frozen=True)
class Weights:
    """Of a state: it has the names, shapes and kinds of the client's network's, as far as they may leave it, or of the
    server's. Without a word, a state is the client's.

    With `parameters_only`, it has the parameters and not the buffers, such as the statistics of batch normalisation:
    `Annotated[State, Weights(parameters_only=True)]` is what SCAFFOLD's control variates are.
    """

    of: Literal["client", "server"] = "client"
    parameters_only: bool = False


@dataclass(frozen=True)
class Entries:
    """Of a state: it has these tensors of decimal numbers."""

    shapes: Mapping[str, tuple[Size, ...]]


@dataclass(frozen=True)
class Within:
    """Of a number: it is in this range, ends included; and the size of this name, if one is given."""

    least: float
    most: float | str
    name: str = ""


@dataclass(frozen=True)
class Named:
    """Of anything: inside, `name` is the size that is otherwise called `size`."""

    name: str
    size: Size


@dataclass(frozen=True)
class Room:
    """Of anything: all that is in it has at most so many bytes, where shapes alone do not say how many."""

    most: Size


@dataclass(frozen=True)
class When:
    """Of a key that is not required: it is there if the algorithm's field or property says so, and only then. Of any
    other tensor: otherwise it is empty."""

    says: str
