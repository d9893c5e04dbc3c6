"""What can be done to a part of an answer before it leaves a client.

A mechanism that adds noise first bounds what one image can change. Where each row belongs to one image (`each=image`)
it bounds the rows; anywhere else (`each=answer`) the answer as a whole, which holds whatever it was computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.nodes import Client
from barter.core.params import Positive, check
from barter.core.payload import Payload, leaves
from barter.privacy import account
from barter.privacy.account import Release
from barter.privacy.noise import Source

__all__ = [
    "Additive",
    "ClassMeans",
    "Each",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "Response",
    "Turn",
    "Withhold",
    "alike",
    "as_rows",
]

Each = Literal["image", "answer"]


@dataclass(frozen=True)
class Turn:
    """What there is to know where a client has answered."""

    client: Client
    each: Each  # what one image can change of the part: its own row, or all of it
    source: Source
    came: Payload = ()  # what the method was given

    @property
    def classes(self) -> int:
        return self.client.data.spec.classes


@dataclass(frozen=True)
class Mechanism:
    """Of all that it can be told, frozen; what it does to the values of the parts that it covers."""

    name: ClassVar[str]  # as a configuration calls it

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_rows(self) -> bool:
        """Whether it can only be where each row belongs to one image."""
        return False

    @property
    def beside(self) -> str | None:
        """The key of another part of the same answer that it covers too."""
        return None

    def protects(self, labels: bool, first: bool) -> bool:
        """Whether it can be used on labels, or on decimal numbers: of its first part, or of the one beside."""
        return labels != first

    @property
    def promises(self) -> bool:
        """Whether anything follows from what is done."""
        return True

    def release(self) -> Release | None:
        """What one answer costs; none: it says nothing of the data, or promises nothing."""
        return None

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        """What leaves instead of these values."""
        raise NotImplementedError

    def __str__(self) -> str:
        told = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        options = (
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in told.items()
        )
        return " ".join([self.name, *options])


@dataclass(frozen=True)
class Additive(Mechanism):
    """Clip, then add noise of `noise` times `clip` to every number."""

    clip: Positive  # C: the largest norm of what one image, or the whole answer, may be
    noise: Positive | None = None  # the noise's scale in units of C; none: as epsilon allows
    # whether C bounds each row, or the answer; none: rows where they belong to one image
    each: Each | None = None
    # what C bounds: the answer, or how it differs from what came down
    of: Literal["value", "change"] = "value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == "change" and self.each == "image":
            raise ConfigError("of=change: it is for answers as a whole, with each=answer")

    def norms(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def draw(self, count: int, source: Source) -> Tensor:
        raise NotImplementedError

    def clipped(self, rows: Tensor) -> Tensor:
        """Each row at most as long as C; what is no number counts as zero."""
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        return rows * (self.clip / self.norms(rows).clamp(min=self.clip))

    def noisy(self, rows: Tensor, source: Source) -> Tensor:
        assert self.noise is not None
        return rows + (self.noise * self.clip * self.draw(rows.numel(), source)).view_as(rows)

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        if (self.each or turn.each) == "image":
            return [self._by_row(value, turn.source) for value in values]
        numbers = _numbers(values)
        if not numbers:
            raise ConfigError(
                f"{self}: there are no decimal numbers in it to add noise to; withhold protects others"
            )
        start = (
            torch.zeros(1, dtype=torch.float64)
            if self.of == "value"
            else self._came(values, turn.came)
        )
        change = self.clipped((torch.cat(numbers) - start)[None])[0]
        given = iter(
            torch.split(
                start + self.noisy(change, turn.source), [len(number) for number in numbers]
            )
        )

        def instead(name: str, leaf: Payload) -> Payload:
            if not _is_float(leaf):
                return _blank(leaf)
            told = next(given)
            if name.endswith("running_var"):  # of a network, which takes its root
                told = told.clamp(min=0)
            return alike(leaf, told) if isinstance(leaf, Tensor) else float(told)

        return [_rebuilt(value, instead) for value in values]

    def _came(self, values: Sequence[Payload], came: Payload) -> Tensor:
        """The numbers from which those of an answer started: what came down in the same structure."""
        start = _found(came, values[0]) if len(values) == 1 else None
        if start is None:
            raise ConfigError(
                f"{self}: nothing of the answer's structure came down from which it could have changed"
            )
        return torch.cat(_numbers([start]))

    def _by_row(self, value: Payload, source: Source) -> Tensor:
        value = as_rows(value, str(self))
        rows = value.double().cpu().reshape(len(value), -1)
        return alike(value, self.noisy(self.clipped(rows), source))


@dataclass(frozen=True)
class Gaussian(Additive):
    """Gaussian noise, by Euclidean length."""

    name = "gaussian"

    def release(self) -> Release:
        assert self.noise is not None
        return account.Gaussian(self.noise)

    def norms(self, rows: Tensor) -> Tensor:
        return rows.square().sum(1, keepdim=True).sqrt()

    def draw(self, count: int, source: Source) -> Tensor:
        return source.normal(count)


@dataclass(frozen=True)
class Laplace(Additive):
    """Laplace noise, by the sum of absolute values."""

    name = "laplace"

    def release(self) -> Release:
        assert self.noise is not None
        return account.Pure(2 / self.noise)

    def norms(self, rows: Tensor) -> Tensor:
        return rows.abs().sum(1, keepdim=True)

    def draw(self, count: int, source: Source) -> Tensor:
        centred = source.uniform(count) - 0.5
        return -centred.sign() * torch.log1p(-2 * centred.abs())


@dataclass(frozen=True)
class Response(Mechanism):
    """Randomised response: a label is the true one e^ε times as often as any other."""

    name = "response"

    epsilon: Positive  # ε of each answer

    def protects(self, labels: bool, first: bool) -> bool:
        return labels

    @property
    def needs_rows(self) -> bool:
        return True

    def release(self) -> Release:
        return account.Pure(self.epsilon)

    def keep(self, classes: int) -> float:
        """How often the true label is told."""
        return 1 / (1 + (classes - 1) * math.exp(-self.epsilon))

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        return [self._told(value, turn.classes, turn.source) for value in values]

    def _told(self, value: Payload, classes: int, source: Source) -> Tensor:
        labels = _labels(value, classes, str(self))
        kept = source.uniform(len(labels)) < self.keep(classes)
        others = (labels + 1 + (source.uniform(len(labels)) * (classes - 1)).long()) % classes
        return torch.where(kept, labels, others).to(value.dtype).to(value.device)


@dataclass(frozen=True)
class Withhold(Mechanism):
    """Nothing of the values: zeros, and labels at random."""

    name = "withhold"

    def protects(self, labels: bool, first: bool) -> bool:
        return True

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        def blank(_: str, leaf: Payload) -> Payload:
            if turn.each == "image" and isinstance(leaf, Tensor) and not leaf.is_floating_point():
                drawn = (turn.source.uniform(leaf.numel()) * turn.classes).long()
                return drawn.view(leaf.shape).to(leaf.dtype).to(leaf.device)
            return _blank(leaf)

        return [_rebuilt(value, blank) for value in values]


@dataclass(frozen=True)
class ClassMeans(Mechanism):
    """Instead of each row the noisy mean of its class; labels follow from the noisy sizes of classes.

    An image that is replaced moves the classes' clipped sums and, in units of C, their sizes by no more than 2 C
    together: by 2 C within a class, by C √2 and C √2 from one class to another.
    """

    name = "means"

    clip: Positive  # C: the largest length of a row
    noise: Positive | None = None  # the noise's scale in units of C; none: as epsilon allows
    labels: str = "labels"  # the key of the rows' labels in the same answer

    @property
    def needs_rows(self) -> bool:
        return True

    @property
    def beside(self) -> str:
        return self.labels

    def release(self) -> Release:
        assert self.noise is not None
        return account.Gaussian(self.noise)

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Of each class its clipped rows' sum and, as the last number, C times its size."""
        clipped = Gaussian(self.clip).clipped(rows)
        every = torch.cat([clipped, torch.full_like(clipped[:, :1], self.clip)], 1)
        return every.new_zeros(classes, every.shape[1]).index_add_(0, labels, every)

    def apply(self, values: Sequence[Payload], turn: Turn) -> list[Payload]:
        assert self.noise is not None
        value, given = as_rows(values[0], str(self)), values[1]
        classes = turn.classes
        labels = _labels(given, classes, str(self))
        sums = self.sums(value.double().cpu().reshape(len(value), -1), labels, classes)
        told = Gaussian(self.clip, self.noise).noisy(sums, turn.source)
        sizes = (told[:, -1] / self.clip).clamp(min=0)
        means = told[:, :-1] / sizes.clamp(min=1)[:, None]
        shares = _shared(sizes, len(labels))
        return [alike(value, means[shares]), shares.to(given.dtype).to(given.device)]


def _shared(sizes: Tensor, count: int) -> Tensor:
    """So many labels, of each class in proportion to its size."""
    total = float(sizes.sum())
    ends = sizes.cumsum(0) / total if total else torch.arange(1, len(sizes) + 1) / len(sizes)
    return torch.searchsorted(
        ends.double(), (torch.arange(count).double() + 0.5) / max(1, count)
    ).clamp(max=len(sizes) - 1)


def as_rows(value: Payload, who: str) -> Tensor:
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim):
        raise ConfigError(f"{who}: it needs a tensor of decimal numbers with a row for each image")
    return value.detach()


def _labels(value: Payload, classes: int, who: str) -> Tensor:
    if (
        not isinstance(value, Tensor)
        or value.is_floating_point()
        or value.dtype == torch.bool
        or value.ndim != 1
    ):
        raise ConfigError(f"{who}: it needs a label for each image, whole numbers")
    labels = value.detach().long().cpu()
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ConfigError(
            f"{who}: labels are from 0 to {classes - 1}, these from {labels.min()} to {labels.max()}"
        )
    return labels


def _is_float(leaf: Payload) -> bool:
    return leaf.is_floating_point() if isinstance(leaf, Tensor) else isinstance(leaf, float)


def _numbers(values: Sequence[Payload]) -> list[Tensor]:
    """The decimal numbers in these values, leaf by leaf."""
    found = [leaf for value in values for _, leaf in leaves(value)]
    return [
        torch.as_tensor(leaf).detach().double().cpu().flatten() for leaf in found if _is_float(leaf)
    ]


def _found(tree: Payload, like: Payload) -> Payload | None:
    """A part of the tree with the same names and shapes as another; none if there is no such part."""

    def outline(value: Payload) -> list[tuple[str, object]]:
        return [
            (at, leaf.shape if isinstance(leaf, Tensor) else type(leaf))
            for at, leaf in leaves(value)
        ]

    if outline(tree) == outline(like):
        return tree
    inner = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return next((part for value in inner if (part := _found(value, like)) is not None), None)


def _blank(leaf: Payload) -> Payload:
    """The same kind of value, which tells nothing."""
    return (
        torch.zeros_like(leaf)
        if isinstance(leaf, Tensor)
        else None
        if leaf is None
        else type(leaf)()
    )


def alike(leaf: Tensor, numbers: Tensor) -> Tensor:
    """The numbers in the shape, the kind and the place of a tensor."""
    return torch.empty_like(leaf).copy_(numbers.view(leaf.shape))


def _rebuilt(tree: Payload, leaf: Callable[[str, Any], Any], name: str = "") -> Payload:
    """The tree with other leaves, each made of the nearest key and of what stands there."""
    if isinstance(tree, dict):
        return {key: _rebuilt(value, leaf, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_rebuilt(value, leaf, name) for value in tree)
    return leaf(name, tree)
