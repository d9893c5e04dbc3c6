"""The training loop behind every algorithm: local training, distillation, decoders, exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.trainer import Anchor, Optimizer, Recipe, Trainer, adam, by_name, sgd
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Sealed, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.ops.private import fit_privately

__all__ = [
    "Anchor",
    "Course",
    "Fitted",
    "Optimizer",
    "Recipe",
    "Subject",
    "Trainer",
    "adam",
    "alternate",
    "anchored",
    "batches",
    "by_name",
    "classification",
    "epoch_length",
    "fit",
    "fit_by",
    "fit_rows",
    "index_batches",
    "joint",
    "sgd",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Adjust: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of logits, by a number for each class
Course: TypeAlias = tuple[Callable[..., Any], Iterator[Sequence[Tensor]]]


def index_batches(n: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Shuffled index batches of one size, for ever; each run of ceil(n / size) of them is an epoch.

    A last batch that would be short is filled from the start of the epoch's order, so that every sample is seen and
    every batch has the same shape. Batch normalisation needs two values: a single sample is taken twice.
    """
    size = _batch_size(n, size)
    while True:
        order = torch.randperm(n, device=device)
        filled = torch.cat([order, order[: -n % size]])
        yield from torch.split(filled, size)


def batches(rows: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[Tensor]]:
    """Shuffled batches, for ever, of these rows of equally long tensors, one below the other."""
    tensors = [
        column[0] if len(column) == 1 else torch.cat(column) for column in zip(*rows, strict=True)
    ]
    del rows  # or everything would be held twice
    for index in index_batches(len(tensors[0]), size, tensors[0].device):
        yield [tensor[index] for tensor in tensors]


def epoch_length(n: int, size: int) -> int:
    """How many of these batches make an epoch."""
    return -(-n // _batch_size(n, size))


def _batch_size(n: int, size: int) -> int:
    return max(2, min(size, n))


def classification(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
    *by_class: Tensor,
    loss: Loss = F.cross_entropy,
    adjust: Adjust = torch.add,
) -> tuple[Tensor, Tensor]:
    """The loss on a batch of labelled bytes, and how many of them the model names rightly.

    Logits are adjusted before, where there is a number for each class to do so by.
    """
    logits = model(prepared(pixels, spec, augment))
    for numbers in by_class:
        logits = adjust(logits, numbers)
    return loss(logits, labels), (logits.detach().argmax(1) == labels).sum()


@dataclass(frozen=True)
class Fitted:
    """How a training ended."""

    epochs: int
    loss: float
    accuracy: float


def fit(
    client: Client,
    *,
    epochs: int,
    batch_size: int,
    recipe: Recipe,
    goal: float | None = None,
    data: Images | None = None,
    steps: int | None = None,
    by_class: Tensor | None = None,
    adjust: Adjust = torch.add,
    seen: Tensor | None = None,
    loss: Loss = F.cross_entropy,
    anchor: Anchor | None = None,
) -> Fitted:
    """Train the client's model for so many epochs, or until an epoch's accuracy reaches the goal.

    An epoch is a pass over the data, or so many `steps`. How often each class came up is added to `seen`. The `loss` is
    one of logits and labels; logits are adjusted before it by numbers `by_class`, if there are any. An `anchor` holds
    the parameters near a place. Images that are sealed are learnt from in private: for all epochs, since when to stop
    would tell of them.
    """
    data = data or client.data
    trainer = Trainer.of(client.model.train(), recipe, anchor)
    judge = partial(classification, client.model, data.spec, data.augment, loss=loss, adjust=adjust)
    batches = index_batches(len(data), batch_size, data.device)
    per_epoch = steps or epoch_length(len(data), batch_size)
    if isinstance(data, Sealed):
        if seen is not None or by_class is not None:
            raise ConfigError(
                "privacy.training: which classes a client has is not told in private training"
            )
        fit_privately(
            client, data, trainer, loss, epochs=epochs, per_epoch=per_epoch, batch_size=batch_size
        )
        return Fitted(epochs, float("nan"), float("nan"))
    adjusting = () if by_class is None else (by_class,)
    fitted = Fitted(0, float("nan"), 0.0)
    for epoch in client.track(range(1, epochs + 1)):
        total = torch.zeros((), device=data.device)
        hits = torch.zeros((), device=data.device, dtype=torch.long)
        count = 0
        for index in islice(batches, per_epoch):
            labels = data.labels[index]
            value, right = trainer.step(judge, data.pixels[index], labels, *adjusting)
            total += value
            hits += right
            count += len(index)
            if seen is not None:
                seen.index_add_(0, labels, torch.ones_like(labels, dtype=seen.dtype))
        trainer.anneal(epoch / epochs)
        lanes.rest()
        fitted = Fitted(epoch, float(total) / per_epoch, float(hits) / count)
        if goal is not None and fitted.accuracy >= goal:
            break
    return fitted


def anchored(client: Client, places: Mapping[str, Tensor], strength: float) -> Anchor:
    """An anchor for the client's network, by the names of its weights."""
    trained = [
        places[name]
        for name, parameter in client.model.named_parameters()
        if parameter.requires_grad
    ]
    return lanes.keep(("anchor", client.architecture), Anchor(trained, strength))


def fit_by(
    client: Client,
    loss: Callable[..., Any],
    *,
    epochs: int,
    batch_size: int,
    recipe: Recipe,
    beside: Sequence[Tensor] | Iterator[Sequence[Tensor]] = (),
    also: Sequence[nn.Module] = (),
) -> None:
    """Train the client's model, and what else is to learn, by a loss of bytes and labels.

    What is `beside` them is given to every step: the same each time, or what an iterator gives for one after the other.
    """
    data = client.data
    index = index_batches(len(data), batch_size, data.device)
    given = beside if isinstance(beside, Iterator) else repeat(beside)
    batches = (
        [data.pixels[chosen], data.labels[chosen], *more]
        for chosen, more in zip(index, given, strict=False)
    )
    alternate(client, [(loss, batches)], epochs * epoch_length(len(data), batch_size), recipe, also)


def alternate(
    client: Client,
    courses: Sequence[Course],
    steps: int,
    recipe: Recipe,
    also: Sequence[nn.Module] = (),
) -> None:
    """Train the client's model, and what else is to learn, on several things at once: in every step on a batch of each,
    by its loss."""
    trainer = Trainer.of([module.train() for module in (client.model, *also)], recipe)
    for step in client.track(range(steps)):
        for loss, batches in courses:
            trainer.step(loss, *next(batches))
        trainer.anneal((step + 1) / steps)


@dataclass(frozen=True)
class Subject:
    """Something to learn: what a network is shown, how, and how what it makes of that is judged."""

    rows: Sequence[Tensor]  # what is shown, and what its judge must know of it
    show: Callable[[Tensor], Tensor]  # what is shown as the network sees it
    judge: Callable[..., Tensor]  # a loss of features, of the other rows, and of what is
    beside: tuple[Tensor, ...] = ()  # them, the same in every step

    def batches(self, size: int) -> Iterator[list[Tensor]]:
        """Shuffled batches of rows, for ever, each with what is beside them."""
        for batch in batches([self.rows], size):
            yield [*batch, *self.beside]


def joint(model: Classifier, subjects: Sequence[Subject], size: int) -> Course:
    """One course of several subjects, with as much of each in a batch of this size.

    Normalisation sees such a batch as one. Subjects that take turns are each seen by statistics of their own, and later
    by those of none.
    """
    sources = [subject.batches(size // len(subjects)) for subject in subjects]
    counts = tuple(len(subject.rows) + len(subject.beside) for subject in subjects)
    loss = partial(
        joint_loss, model, tuple((subject.show, subject.judge) for subject in subjects), counts
    )
    return loss, (
        [tensor for batch in parts for tensor in batch] for parts in zip(*sources, strict=True)
    )


def joint_loss(
    model: Classifier,
    ways: Sequence[tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]],
    counts: Sequence[int],
    *tensors: Tensor,
) -> Tensor:
    """The sum of what judges say of the features of what is shown, all in one pass; so many tensors are of each."""
    given = iter(tensors)
    parts = [list(islice(given, count)) for count in counts]
    shown = [show(part[0]) for (show, _), part in zip(ways, parts, strict=True)]
    features = torch.split(model.features(torch.cat(shown)), [len(inputs) for inputs in shown])
    said = [judge(x, *part[1:]) for (_, judge), x, part in zip(ways, features, parts, strict=True)]
    return torch.stack(said).sum()


def fit_rows(
    server: Server,
    phase: str,
    module: nn.Module,
    loss: Callable[..., Any],
    rows: Sequence[Tensor],
    *,
    epochs: int,
    batch_size: int,
    recipe: Recipe,
    beside: Iterator[Sequence[Tensor]] | None = None,
) -> None:
    """Train a module of the server's on rows of some tensors, and on what else is given to each step beside them."""
    trainer, n = Trainer.of(module.train(), recipe), len(rows[0])
    steps = server.track(phase, range(epochs * epoch_length(n, batch_size)))
    batches = index_batches(n, batch_size, rows[0].device)
    for _, chosen, more in zip(steps, batches, beside or repeat(()), strict=False):
        trainer.step(loss, *(tensor[chosen] for tensor in rows), *more)
