"""What can be done to a part of an answer before it leaves a client.

A mechanism that adds noise first bounds what one image can change. Where each row belongs to one image (`each=image`)
it bounds the rows; anywhere else (`each=answer`) the answer as a whole, which holds whatever it was computed from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.nodes import Client
from barter.core.params import Positive, build, check, did_you_mean
from barter.core.payload import Payload, leaves
from barter.privacy import account
from barter.privacy.account import Release

__all__ = [
    "MECHANISMS",
    "Additive",
    "ClassMeans",
    "Each",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "Response",
    "Seeded",
    "Source",
    "System",
    "Withhold",
    "mechanism_of",
]

Each = Literal["image", "answer"]


class Source(Protocol):
    """Where noise comes from: so many numbers, on the CPU, in double precision."""

    def normal(self, count: int) -> Tensor: ...

    def uniform(self, count: int) -> Tensor: ...


class Seeded:
    """Noise that comes again: whoever knows the run's seed can take it away."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self.generator, dtype=torch.float64)

    def uniform(self, count: int) -> Tensor:
        return (torch.rand(count, generator=self.generator, dtype=torch.float64) + 2.0**-54).clamp(max=1 - 2.0**-53)


class System:
    """Noise that nobody else knows: from the operating system's entropy."""

    def normal(self, count: int) -> Tensor:
        return torch.from_numpy(ndtri(self.uniform(count).numpy()))

    def uniform(self, count: int) -> Tensor:
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        return torch.from_numpy(((bits.astype(np.float64) + 0.5) * 2.0**-53).clip(max=1 - 2.0**-53))


@dataclass(frozen=True)
class Mechanism:
    """Of all that it can be told, frozen; what it does to the values of the parts that it covers."""

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

    def release(self) -> Release | None:
        """What one answer costs; none: it says nothing of the data."""
        return None

    def apply(self, values: Sequence[Payload], each: Each, client: Client, source: Source) -> list[Payload]:
        """What leaves instead of these values."""
        raise NotImplementedError

    def __str__(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        name = next(name for name, kind in MECHANISMS.items() if kind is type(self))
        options = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in told.items())
        return " ".join([name, *(text for text in options if not text.endswith("=None"))])


@dataclass(frozen=True)
class Additive(Mechanism):
    """Clip, then add noise of `noise` times `clip` to every number."""

    clip: Positive  # C: the largest norm of what one image, or the whole answer, may be
    noise: Positive | None = None  # the noise's scale in units of C; none: as epsilon allows
    each: Each | None = None  # whether C bounds each row, or the answer; none: rows where they belong to one image

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

    def apply(self, values: Sequence[Payload], each: Each, client: Client, source: Source) -> list[Payload]:
        if (self.each or each) == "image":
            return [self._by_row(value, source) for value in values]
        found = [leaf for value in values for _, leaf in leaves(value)]
        numbers = [torch.as_tensor(leaf).detach().double().cpu().flatten() for leaf in found if _is_float(leaf)]
        if not numbers:
            raise ConfigError(f"{self}: there are no decimal numbers in it to add noise to; withhold protects others")
        told = self.noisy(self.clipped(torch.cat(numbers)[None])[0], source)
        given = iter(torch.split(told, [len(number) for number in numbers]))

        def instead(name: str, leaf: Payload) -> Payload:
            if not _is_float(leaf):
                return _blank(leaf)
            told = next(given)
            if name.endswith("running_var"):  # of a network, which takes its root
                told = told.clamp(min=0)
            return _like(leaf, told) if isinstance(leaf, Tensor) else float(told)

        return [_rebuilt(value, instead) for value in values]

    def _by_row(self, value: Payload, source: Source) -> Tensor:
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim):
            raise ConfigError(f"{self}: it needs a tensor of decimal numbers with a row for each image")
        rows = value.detach().double().cpu().flatten(1) if value.ndim > 1 else value.detach().double().cpu()[:, None]
        return _like(value, self.noisy(self.clipped(rows), source))


@dataclass(frozen=True)
class Gaussian(Additive):
    """Gaussian noise, by Euclidean length."""

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

    epsilon: Positive  # ε of each answer

    @property
    def needs_rows(self) -> bool:
        return True

    def release(self) -> Release:
        return account.Pure(self.epsilon)

    def keep(self, classes: int) -> float:
        """How often the true label is told."""
        return 1 / (1 + (classes - 1) * math.exp(-self.epsilon))

    def apply(self, values: Sequence[Payload], each: Each, client: Client, source: Source) -> list[Payload]:
        return [self._told(value, client.data.spec.classes, source) for value in values]

    def _told(self, value: Payload, classes: int, source: Source) -> Tensor:
        labels = _labels(value, classes, str(self))
        kept = source.uniform(len(labels)) < self.keep(classes)
        others = (labels + 1 + (source.uniform(len(labels)) * (classes - 1)).long()) % classes
        return torch.where(kept, labels, others).to(value.dtype).to(value.device)


@dataclass(frozen=True)
class Withhold(Mechanism):
    """Nothing of the values: zeros, and labels at random."""

    def apply(self, values: Sequence[Payload], each: Each, client: Client, source: Source) -> list[Payload]:
        classes = client.data.spec.classes

        def blank(_: str, leaf: Payload) -> Payload:
            if each == "image" and isinstance(leaf, Tensor) and not leaf.is_floating_point():
                drawn = (source.uniform(leaf.numel()) * classes).long()
                return drawn.view(leaf.shape).to(leaf.dtype).to(leaf.device)
            return _blank(leaf)

        return [_rebuilt(value, blank) for value in values]


@dataclass(frozen=True)
class ClassMeans(Mechanism):
    """Instead of each row the noisy mean of its class; labels follow from the noisy sizes of classes.

    An image that is replaced moves the classes' clipped sums and, in units of C, their sizes by no more than 2 C
    together: by 2 C within a class, by C √2 and C √2 from one class to another.
    """

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

    def apply(self, values: Sequence[Payload], each: Each, client: Client, source: Source) -> list[Payload]:
        assert self.noise is not None
        value, given = values
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1):
            raise ConfigError(f"{self}: it needs a tensor of decimal numbers with a row for each image")
        classes = client.data.spec.classes
        labels = _labels(given, classes, str(self))
        sums = self.sums(value.detach().double().cpu().flatten(1), labels, classes)
        told = Gaussian(self.clip, self.noise).noisy(sums, source)
        sizes = (told[:, -1] / self.clip).clamp(min=0)
        means = told[:, :-1] / sizes.clamp(min=1)[:, None]
        shares = _shared(sizes, len(labels))
        return [_like(value, means[shares]), shares.to(given.dtype).to(given.device)]


MECHANISMS: dict[str, type[Mechanism]] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "response": Response,
    "withhold": Withhold,
    "means": ClassMeans,
}


def mechanism_of(text: str, part: str) -> Mechanism:
    """The mechanism that a text such as "gaussian clip=4" names, for a part."""
    name, *options = text.split() or [""]
    if name not in MECHANISMS:
        raise ConfigError(f"privacy.parts: {part}={text!r}: unknown mechanism: {did_you_mean(name, MECHANISMS)}")
    values: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"privacy.parts: {part}={text!r}: write key=value, such as clip=4")
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = value
    kind = MECHANISMS[name]
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise ConfigError(f"privacy.parts: {part}={text!r}: {name} needs {field.name}=...")
    return build(kind, values, f"privacy.parts: {part}: ")


def _shared(sizes: Tensor, count: int) -> Tensor:
    """So many labels, of each class in proportion to its size."""
    total = float(sizes.sum())
    ends = sizes.cumsum(0) / total if total else torch.arange(1, len(sizes) + 1) / len(sizes)
    return torch.searchsorted(ends.double(), (torch.arange(count).double() + 0.5) / max(1, count)).clamp(
        max=len(sizes) - 1
    )


def _labels(value: Payload, classes: int, who: str) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool or value.ndim != 1:
        raise ConfigError(f"{who}: it needs a label for each image, whole numbers")
    labels = value.detach().long().cpu()
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ConfigError(f"{who}: labels are from 0 to {classes - 1}, these from {labels.min()} to {labels.max()}")
    return labels


def _is_float(leaf: Payload) -> bool:
    return leaf.is_floating_point() if isinstance(leaf, Tensor) else isinstance(leaf, float)


def _blank(leaf: Payload) -> Payload:
    """The same kind of value, which tells nothing."""
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else None if leaf is None else type(leaf)()


def _like(leaf: Tensor, numbers: Tensor) -> Tensor:
    """The numbers in the shape, the kind and the place of a tensor."""
    return torch.empty_like(leaf).copy_(numbers.view(leaf.shape))


def _rebuilt(tree: Payload, leaf: Callable[[str, Any], Any], name: str = "") -> Payload:
    """The tree with other leaves, each made of the nearest key and of what stands there."""
    if isinstance(tree, dict):
        return {key: _rebuilt(value, leaf, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_rebuilt(value, leaf, name) for value in tree)
    return leaf(name, tree)
