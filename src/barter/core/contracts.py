"""Annotations that declare the shape, dtype and range of clients' answers.

They stand in the return type of a remote method: `Annotated[Tensor, Floats("n", "features")]`.
`core/schema.py` reads them, `core/answers.py` checks answers against them.

A size is a number or a name. A name has one meaning in a method:

1. Sizes of the run: `classes`; `channels`, `height` and `width` of images; `features`, the feature
   width of the client's network; `examples`, the client's number of images; `last_class`, the
   largest class label.
2. Sizes that the algorithm declares, `sizes = ("code_dim", "views")`: fields or properties that are
   integers, or methods that take what is `Known` of the client and return an integer. Where it is
   None, the size is unknown.
3. Otherwise the name takes the value of its first occurrence, in the arguments or in the answer,
   and must be the same from there on. A name that first occurs in a TypedDict holds inside of it.

An ambiguous name raises TypeError when the algorithm is used: a declared size that has the name of
a run's size or that a contract defines once more, or a name of the third kind that is also an
attribute of the algorithm. A field may have the name of a run's size; contracts mean the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, TypeAlias

import torch

__all__ = [
    "Content",
    "ContentKind",
    "Counts",
    "DistinctClasses",
    "Entries",
    "Floats",
    "Halves",
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

# Largest magnitude of floats in tensors: their squares and sums stay finite in float32.
BOUND = 1e6
# Largest magnitude of all other numbers: integers up to here are exact in float64.
EXACT_LIMIT = 2.0**53
Size: TypeAlias = int | str
# What a field of a payload holds, by which its encoding at the wire is chosen.
ContentKind: TypeAlias = Literal["weights", "images", "logits", "embeddings", "values", "exact"]
# Sizes that every run has.
RUN_SIZES = frozenset(
    {"classes", "channels", "height", "width", "features", "examples", "last_class"}
)


class Floats:
    """A float32 tensor of this shape; a final `...` stands for any further axes.

    Args:
        *shape: The size of each axis.
        most: The largest value, as a number or the name of a size.
        half: The name of the algorithm's field or property that says whether the tensor has half
            precision; empty for never.
        compared: Whether an answer is refused if its values are far larger than the other clients',
            or the name of the algorithm's field or property that says so. False where large values
            do no harm, such as logits that only enter a softmax: those of an honest client for
            images unlike its own can be hundreds of times the usual ones.
        rare_peaks: Whether the largest absolute value may be 1000 instead of 100 times the other
            clients' median largest one; the limit of the root mean square stays 100 times. It is
            for features of many images: a rare image can excite a unit that is nearly always
            silent. Not for what others load or average.
    """

    dtype = torch.float32
    least = -BOUND

    def __init__(
        self,
        *shape: Size | EllipsisType,
        most: float | str = BOUND,
        half: str = "",
        compared: bool | str = True,
        rare_peaks: bool = False,
    ) -> None:
        self.shape = shape
        self.most = most
        self.half = half
        self.compared = compared
        self.rare_peaks = rare_peaks


class Halves(Floats):
    """A float16 tensor: half as many bytes, for what needs no more than three digits."""

    dtype = torch.float16


class NonNegatives(Floats):
    """A float32 tensor without negative values, such as variances or distances."""

    least = 0.0


class Places(Floats):
    """An int64 tensor of non-negative integers, such as indices."""

    dtype = torch.int64
    least = 0.0

    def __init__(self, *shape: Size, most: float | str = EXACT_LIMIT) -> None:
        super().__init__(*shape, most=most)


class Labels(Places):
    """An int64 tensor of class labels, from 0 to the number of classes - 1."""

    def __init__(self, *shape: Size) -> None:
        super().__init__(*shape, most="last_class")


class DistinctClasses(Labels):
    """Distinct class labels in ascending order."""


class Counts(Places):
    """Counts of images, for example by class.

    Args:
        *shape: The size of each axis.
        most: The largest sum of all counts; by default the client's number of images.
        total: The name of the size that the sum must equal; empty for any sum.
    """

    def __init__(self, *shape: Size, most: float | str = "examples", total: str = "") -> None:
        super().__init__(*shape, most=most)
        self.total = total


class Pixels(Floats):
    """A uint8 tensor of images, by default of the networks' input size."""

    dtype = torch.uint8

    def __init__(self, rows: Size, height: Size = "height", width: Size = "width") -> None:
        super().__init__(rows, "channels", height, width)


@dataclass(frozen=True)
class Weights:
    """For a State: the names, shapes and dtypes of a network's weights.

    A State without annotation is taken as the client's weights.

    Attributes:
        of: The client's network, as far as its weights may be uploaded (`Algorithm.outgoing`), or
            the server's.
        parameters_only: Leave out buffers, such as the statistics of batch normalisation.
            SCAFFOLD's control variates are `Annotated[State, Weights(parameters_only=True)]`.
        half: The name of the algorithm's field or property that says whether floats have half
            precision; empty for never.
    """

    of: Literal["client", "server"] = "client"
    parameters_only: bool = False
    half: str = ""


@dataclass(frozen=True)
class Entries:
    """For a State: exactly these float32 tensors, by name."""

    shapes: Mapping[str, tuple[Size, ...]]


@dataclass(frozen=True)
class Within:
    """For a number: a closed range.

    Attributes:
        least: The smallest value.
        most: The largest value, as a number or the name of a size.
        name: The name of a size that the number defines; empty for none.
    """

    least: float
    most: float | str
    name: str = ""


@dataclass(frozen=True)
class Named:
    """For any type: inside of it, `name` is another name for `size`."""

    name: str
    size: Size


@dataclass(frozen=True)
class Room:
    """For any type: an upper bound on its size in bytes.

    It is needed where shapes alone do not imply one.
    """

    most: Size


@dataclass(frozen=True)
class Content:
    """For any type: what its tensors hold, if their annotations do not say it.

    The encoding at the wire depends on it, see `core/wire_settings.py`. It is not checked.

    Attributes:
        kind: What the tensors hold; "exact" for values that the method needs to the last bit.
    """

    kind: ContentKind


@dataclass(frozen=True)
class When:
    """For an optional part of an answer: present if a field of the algorithm is true.

    A NotRequired key is absent otherwise; any other tensor is empty.

    Attributes:
        says: The name of the algorithm's field or property that decides.
    """

    says: str
