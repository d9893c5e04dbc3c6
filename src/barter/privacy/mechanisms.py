"""Mechanisms that protect a part of an answer before it leaves a client.

A mechanism that adds noise first clips, to bound the influence of one image. If each row belongs to
one image (`each=image`) it clips rows. Otherwise (`each=answer`) it clips the answer as a whole,
which is valid however the answer was computed. A sum is not clipped: its method bounds what one
image can change.
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
from barter.core.params import Positive, check_fields
from barter.core.payload import Payload, leaves
from barter.core.resampling import sum_rows
from barter.privacy import account
from barter.privacy.account import Release
from barter.privacy.noise import Source

__all__ = [
    "Additive",
    "ClassMeans",
    "Each",
    "Gaussian",
    "Influence",
    "Laplace",
    "Mechanism",
    "ReleaseContext",
    "Response",
    "Withhold",
    "as_rows",
    "match_tensor",
]

Each = Literal["image", "answer"]
# What one image can change: its own row, the whole answer, or its own term of a sum.
Influence = Literal["image", "answer", "sum"]


@dataclass(frozen=True)
class ReleaseContext:
    """The context in which a mechanism is applied to a client's answer."""

    client: Client
    each: Influence  # what one image can change in the part
    source: Source  # random numbers for the noise
    arguments: Payload = ()  # the arguments of the method

    @property
    def classes(self) -> int:
        return self.client.data.spec.classes


@dataclass(frozen=True)
class Mechanism:
    """Base of mechanisms: frozen dataclasses of options, applied to answers' parts."""

    name: ClassVar[str]  # the name in a configuration

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs_rows(self) -> bool:
        """Return whether each row of the part must belong to one image."""
        return False

    @property
    def second_key(self) -> str | None:
        """Return the key of a second part of the answer that it covers too, or None."""
        return None

    def protects(self, labels: bool, first: bool) -> bool:
        """Return whether the mechanism applies to labels or floats in one of its parts.

        By default it applies to floats in the first part and to labels in the second.

        Args:
            labels: Whether the values are labels, and not floats.
            first: Whether they are in its first part, and not in the second (see `second_key`).
        """
        return labels != first

    @property
    def promises(self) -> bool:
        """Return whether the mechanism gives a privacy guarantee."""
        return True

    @property
    def blanks(self) -> bool:
        """Return whether `apply` zeroes or empties values other than floats."""
        return False

    def release(self) -> Release | None:
        """Return the cost of one protected answer for accounting.

        None if the answer does not depend on the data, or if there is no guarantee (`promises`).

        Raises:
            AssertionError: If the noise multiplier is still to be found.
        """
        return None

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        """Return the protected values that leave the client; subclasses implement it.

        Args:
            values: The values of the part, which are several if the answer is a list, then those of
                the second part (see `second_key`). They are not modified.
            context: The client, the noise source, and what one image can change.

        Returns:
            A value for each of `values`, in their order.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        words = [self.name]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = f"{value:g}" if isinstance(value, float) else f"{value}"
                words.append(f"{field.name}={text}")
        return " ".join(words)


@dataclass(frozen=True)
class Additive(Mechanism):
    """Clip to norm C, then add noise of scale `noise` times C to every number."""

    clip: Positive  # C: clipping norm of one image's row, or of the whole answer
    noise: Positive | None = None  # noise multiplier, in units of C; none: found from epsilon
    # whether C bounds each row or the answer; none: rows if each belongs to one image
    each: Each | None = None
    # what C bounds: the value, or its change since the server sent it
    of: Literal["value", "change"] = "value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == "change" and self.each == "image":
            raise ConfigError("of=change: it applies to answers as a whole, with each=answer")

    @property
    def blanks(self) -> bool:
        return True

    def norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each row (rows, width) as a column (rows, 1)."""
        raise NotImplementedError

    def draw(self, count: int, source: Source) -> Tensor:
        """Draw `count` independent numbers, scale 1 (standard deviation or Laplace's b)."""
        raise NotImplementedError

    def clip_rows(self, rows: Tensor) -> Tensor:
        """Scale down rows with a norm above C; NaN and infinity become zero."""
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        return rows * (self.clip / self.norms(rows).clamp(min=self.clip))

    def add_noise(self, rows: Tensor, source: Source) -> Tensor:
        """Add noise of scale `noise` * `clip` to every number."""
        assert self.noise is not None
        noise = self.noise * self.clip * self.draw(rows.numel(), source)
        return rows + noise.view_as(rows)

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        """Clip and add noise: to each row, or to all values together.

        With each=answer, all floats of all values are one vector with norm at most C, to which it is
        clipped; a sum is not clipped. NaN and infinity become zero, values that are not floats zero
        or empty. Running variances are clamped to be non-negative.

        Raises:
            ConfigError: The values have no rows or floats, or no value sent by the server matches.
        """
        if (self.each or context.each) == "image":
            return [self._by_row(value, context.source) for value in values]
        numbers = _numbers(values)
        if not numbers:
            raise ConfigError(
                f"{self}: there are no decimal numbers in it to add noise to; use withhold instead"
            )
        start = torch.zeros(1, dtype=torch.float64)
        if self.of == "change":
            start = self._start(values, context.arguments)
        change = (torch.cat(numbers) - start).nan_to_num(0.0, 0.0, 0.0)
        if (self.each or context.each) == "answer":
            change = self.clip_rows(change[None])[0]
        released = start + self.add_noise(change, context.source)
        pieces = iter(torch.split(released, [len(leaf) for leaf in numbers]))

        def replace_leaf(name: str, leaf: Payload) -> Payload:
            if not _is_float(leaf):
                return _blank(leaf)
            piece = next(pieces)
            if name.endswith("running_var"):  # Networks take the square root of a variance.
                piece = piece.clamp(min=0)
            return match_tensor(leaf, piece) if isinstance(leaf, Tensor) else float(piece)

        return [_map_leaves(value, replace_leaf) for value in values]

    def _start(self, values: Sequence[Payload], arguments: Payload) -> Tensor:
        """Return the numbers that the server sent in the same structure as the answer.

        Raises:
            ConfigError: If there is more than one value, or none of this structure was sent.
        """
        start = _find_alike(arguments, values[0]) if len(values) == 1 else None
        if start is None:
            raise ConfigError(
                f"{self}: the server sent nothing of the answer's structure, so there is no change "
                "to clip"
            )
        return torch.cat(_numbers([start]))

    def _by_row(self, value: Payload, source: Source) -> Tensor:
        """Clip each row, flattened, and add noise.

        Raises:
            ConfigError: If the value is no float tensor with rows.
        """
        value = as_rows(value, str(self))
        rows = value.double().cpu().reshape(len(value), -1)
        return match_tensor(value, self.add_noise(self.clip_rows(rows), source))


@dataclass(frozen=True)
class Gaussian(Additive):
    """Gaussian noise, with clipping by the L2 norm."""

    name = "gaussian"

    def release(self) -> Release:
        assert self.noise is not None
        return account.GaussianRelease(self.noise)

    def norms(self, rows: Tensor) -> Tensor:
        return rows.square().sum(1, keepdim=True).sqrt()

    def draw(self, count: int, source: Source) -> Tensor:
        return source.normal(count)


@dataclass(frozen=True)
class Laplace(Additive):
    """Laplace noise, with clipping by the L1 norm."""

    name = "laplace"

    def release(self) -> Release:
        assert self.noise is not None
        return account.PureRelease(2 / self.noise)

    def norms(self, rows: Tensor) -> Tensor:
        return rows.abs().sum(1, keepdim=True)

    def draw(self, count: int, source: Source) -> Tensor:
        centred = source.uniform(count) - 0.5
        return -centred.sign() * torch.log1p(-2 * centred.abs())


@dataclass(frozen=True)
class Response(Mechanism):
    """Randomised response: the true label is e^ε times as likely as any other."""

    name = "response"

    epsilon: Positive  # ε of each answer

    def protects(self, labels: bool, first: bool) -> bool:
        return labels

    @property
    def needs_rows(self) -> bool:
        return True

    def release(self) -> Release:
        return account.PureRelease(self.epsilon)

    def keep(self, classes: int) -> float:
        """Return e^ε / (e^ε + classes - 1), the probability to release the true label."""
        return 1 / (1 + (classes - 1) * math.exp(-self.epsilon))

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        return [self._randomise(value, context.classes, context.source) for value in values]

    def _randomise(self, value: Payload, classes: int, source: Source) -> Tensor:
        """Keep each label with probability `keep`, otherwise replace it by another class."""
        labels = _labels(value, classes, str(self))
        kept = source.uniform(len(labels)) < self.keep(classes)
        others = (labels + 1 + (source.uniform(len(labels)) * (classes - 1)).long()) % classes
        return torch.where(kept, labels, others).to(value.dtype).to(value.device)


@dataclass(frozen=True)
class Withhold(Mechanism):
    """Release nothing of the values: zeros, and random labels."""

    name = "withhold"

    @property
    def blanks(self) -> bool:
        return True

    def protects(self, labels: bool, first: bool) -> bool:
        return True

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        def blank(_: str, leaf: Payload) -> Payload:
            if (
                context.each == "image"
                and isinstance(leaf, Tensor)
                and not leaf.is_floating_point()
            ):
                labels = (context.source.uniform(leaf.numel()) * context.classes).long()
                return labels.view(leaf.shape).to(leaf.dtype).to(leaf.device)
            return _blank(leaf)

        return [_map_leaves(value, blank) for value in values]


@dataclass(frozen=True)
class ClassMeans(Mechanism):
    """Noisy class means instead of rows; labels follow the noisy class sizes.

    Replacing an image changes the clipped sums of classes and their sizes, in units of C, by at most
    2 C together: by 2 C within a class, by C √2 and C √2 from one class to another.
    """

    name = "means"

    clip: Positive  # C: clipping norm of a row
    noise: Positive | None = None  # noise multiplier, in units of C; none: found from epsilon
    labels: str = "labels"  # key of the rows' labels in the same answer

    @property
    def needs_rows(self) -> bool:
        return True

    @property
    def second_key(self) -> str:
        return self.labels

    def release(self) -> Release:
        assert self.noise is not None
        return account.GaussianRelease(self.noise)

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Return each class's sum of clipped rows and, as last column, C times its size.

        Args:
            rows: Rows (images, width).
            labels: Label of each row.
            classes: Number of classes.

        Returns:
            A tensor (classes, width + 1).
        """
        clipped = Gaussian(self.clip).clip_rows(rows)
        with_size = torch.cat([clipped, torch.full_like(clipped[:, :1], self.clip)], 1)
        return sum_rows(with_size, labels, classes)

    def apply(self, values: Sequence[Payload], context: ReleaseContext) -> list[Payload]:
        assert self.noise is not None
        rows = as_rows(values[0], str(self))
        true_labels = values[1]
        labels = _labels(true_labels, context.classes, str(self))
        sums = self.sums(rows.double().cpu().reshape(len(rows), -1), labels, context.classes)
        released = Gaussian(self.clip, self.noise).add_noise(sums, context.source)
        sizes = (released[:, -1] / self.clip).clamp(min=0)
        means = released[:, :-1] / sizes.clamp(min=1)[:, None]
        new_labels = _labels_by_size(sizes, len(labels))
        return [
            match_tensor(rows, means[new_labels]),
            new_labels.to(true_labels.dtype).to(true_labels.device),
        ]


def _labels_by_size(sizes: Tensor, count: int) -> Tensor:
    """Return `count` sorted labels, each class in proportion to its size.

    If all sizes are 0, all classes are equally frequent.
    """
    total = float(sizes.sum())
    ends = sizes.cumsum(0) / total if total else torch.arange(1, len(sizes) + 1) / len(sizes)
    positions = (torch.arange(count).double() + 0.5) / max(1, count)
    return torch.searchsorted(ends.double(), positions).clamp(max=len(sizes) - 1)


def as_rows(value: Payload, mechanism: str) -> Tensor:
    """Return a value, detached, that must be a float tensor with at least one axis.

    Args:
        value: The value.
        mechanism: The mechanism that needs rows, for messages.

    Raises:
        ConfigError: If it is anything else.
    """
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim):
        raise ConfigError(
            f"{mechanism}: it needs a tensor of decimal numbers with a row for each image"
        )
    return value.detach()


def _labels(value: Payload, classes: int, mechanism: str) -> Tensor:
    """Return a value that is a vector of valid labels; raise ConfigError otherwise."""
    if (
        not isinstance(value, Tensor)
        or value.is_floating_point()
        or value.dtype == torch.bool
        or value.ndim != 1
    ):
        raise ConfigError(f"{mechanism}: it needs a label for each image, whole numbers")
    labels = value.detach().long().cpu()
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ConfigError(
            f"{mechanism}: labels are from 0 to {classes - 1}, these from {labels.min()} to {labels.max()}"
        )
    return labels


def _is_float(leaf: Payload) -> bool:
    """Return whether a leaf is a float tensor or a float."""
    return leaf.is_floating_point() if isinstance(leaf, Tensor) else isinstance(leaf, float)


def _numbers(values: Sequence[Payload]) -> list[Tensor]:
    """Return all floats in these values, one flat tensor per leaf."""
    floats = [leaf for value in values for _, leaf in leaves(value) if _is_float(leaf)]
    return [torch.as_tensor(leaf).detach().double().cpu().flatten() for leaf in floats]


def _find_alike(tree: Payload, like: Payload) -> Payload | None:
    """Return the first subtree with the names and shapes of another tree, or None."""

    def outline(value: Payload) -> list[tuple[str, object]]:
        return [
            (at, leaf.shape if isinstance(leaf, Tensor) else type(leaf))
            for at, leaf in leaves(value)
        ]

    if outline(tree) == outline(like):
        return tree
    if isinstance(tree, dict):
        children = list(tree.values())
    elif isinstance(tree, list | tuple):
        children = list(tree)
    else:
        return None
    for child in children:
        found = _find_alike(child, like)
        if found is not None:
            return found
    return None


def _blank(leaf: Payload) -> Payload:
    """Return zeros of the same shape, zero, or an empty value of the same type."""
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf)
    return None if leaf is None else type(leaf)()


def match_tensor(leaf: Tensor, numbers: Tensor) -> Tensor:
    """Return the numbers with the shape, dtype and device of a tensor."""
    return torch.empty_like(leaf).copy_(numbers.view(leaf.shape))


def _map_leaves(tree: Payload, function: Callable[[str, Any], Any], name: str = "") -> Payload:
    """Replace every leaf of a tree by a function of the nearest key and the leaf."""
    if isinstance(tree, dict):
        return {key: _map_leaves(value, function, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_leaves(value, function, name) for value in tree)
    return function(name, tree)
