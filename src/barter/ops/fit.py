"""Training loops of all algorithms: local training, distillation, decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.batches import Batch
from barter.compute.trainer import Anchor, Optimizer, Recipe, Trainer, adam, recipe_by_name, sgd
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Sealed, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.ops.private import fit_privately

__all__ = [
    "Anchor",
    "Course",
    "FitResult",
    "LabelledBatch",
    "Optimizer",
    "Recipe",
    "Subject",
    "SubjectBatch",
    "Trainer",
    "adam",
    "alternate",
    "batches",
    "call_on_images",
    "classification",
    "cross_entropy",
    "effective_batch_size",
    "epoch_length",
    "fit",
    "fit_by",
    "fit_rows",
    "index_batches",
    "join_subjects",
    "make_anchor",
    "recipe_by_name",
    "sgd",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> loss
Adjust: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (logits, value of each class) -> logits
Course: TypeAlias = tuple[Callable[..., Any], Iterator[Sequence[Batch]]]  # a loss and its batches


class LabelledBatch(NamedTuple):
    """Images as bytes, and their labels."""

    pixels: Tensor
    labels: Tensor


class SubjectBatch(NamedTuple):
    """Some data of a subject, and further arguments of its loss."""

    data: Tensor
    targets: tuple[Tensor, ...]


def index_batches(n: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield shuffled batches of indices without end, ceil(n / size) per epoch.

    A last batch that would be short is filled from the start of the epoch's order, so that every
    sample is seen and all batches have the same shape. Batch normalisation needs two values: a
    single sample is repeated. Every epoch has a new order from torch's default generator of the
    device.

    Args:
        n: Number of samples.
        size: Batch size; more than n counts as n, less than 2 as 2.
        device: Device of the indices.
    """
    size = effective_batch_size(n, size)
    while True:
        order = torch.randperm(n, device=device)
        filled = torch.cat([order, order[: -n % size]])
        yield from torch.split(filled, size)


def batches(rows: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[Tensor]]:
    """Yield shuffled batches of rows without end, in the order of `index_batches`.

    Args:
        rows: Groups of equally long tensors, all groups with the same number of tensors. The first
            tensors of all groups are concatenated, then the second ones, and so on.
        size: Batch size, see `index_batches`.

    Yields:
        The batch's rows of each concatenated tensor.
    """
    tensors = [
        column[0] if len(column) == 1 else torch.cat(column) for column in zip(*rows, strict=True)
    ]
    del rows  # Otherwise all data would be in memory twice.
    for index in index_batches(len(tensors[0]), size, tensors[0].device):
        yield [tensor[index] for tensor in tensors]


def epoch_length(n: int, size: int) -> int:
    """Return the number of batches in an epoch of `index_batches`; 0 without samples."""
    return -(-n // effective_batch_size(n, size))


def effective_batch_size(n: int, size: int) -> int:
    """Return the batch size that is used for n samples: at most n, then at least 2."""
    return max(2, min(size, n))


def classification(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
    by_class: Tensor | None = None,
    *,
    loss: Loss = F.cross_entropy,
    adjust: Adjust = torch.add,
) -> tuple[Tensor, Tensor]:
    """Return the loss on a labelled batch, and the number of correct predictions.

    The prediction is the largest of the adjusted logits.

    Args:
        model: The model.
        spec: Format of the images, by which they are normalised.
        augment: Augmentation of the images.
        pixels: Images as bytes.
        labels: Their labels.
        by_class: One value per class, by which the logits are adjusted; None for no adjustment.
        loss: Called with the adjusted logits and the labels.
        adjust: Called with the logits and `by_class`.
    """
    logits = model(prepare_batch(pixels, spec, augment))
    if by_class is not None:
        logits = adjust(logits, by_class)
    return loss(logits, labels), (logits.detach().argmax(1) == labels).sum()


@dataclass(frozen=True)
class FitResult:
    """Result of local training: epochs run; last epoch's loss and accuracy."""

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
) -> FitResult:
    """Train the client's model on its images.

    Sealed images are trained on with DP-SGD (see `fit_privately`), and always for all epochs, since
    the moment of stopping would reveal something about them.

    Args:
        client: The client, whose model is trained in place.
        epochs: Number of epochs at most.
        batch_size: Images in a step.
        recipe: Optimizer and learning rate.
        goal: Stop after an epoch whose training accuracy is at least this value; None never stops.
        data: Images to train on; None stands for the client's own.
        steps: Steps in an epoch; by default an epoch is one pass over the data.
        by_class: One value per class, by which logits are adjusted before the loss; None adjusts
            nothing.
        adjust: Called with the logits and `by_class`; by default the values are added.
        seen: Counts per class, changed in place: the number of images used is added, an image once
            for each time that it was in a batch.
        loss: Called with logits and labels.
        anchor: Pulls the parameters towards given values.

    Returns:
        Epochs run, and mean loss and accuracy of the last epoch, both as measured while training;
        NaN after private training. Without epochs, the loss is NaN and the accuracy 0.

    Raises:
        ConfigError: If the images are sealed and `seen` or `by_class` is given.
        ValueError: If there are no images.
    """
    data = client.data if data is None else data
    if not len(data):
        raise ValueError("there are no images to train on")
    trainer = Trainer.of(client.model.train(), recipe, anchor)
    batch_loss = partial(
        classification, client.model, data.spec, data.augment, loss=loss, adjust=adjust
    )
    batches = index_batches(len(data), batch_size, data.device)
    per_epoch = steps or epoch_length(len(data), batch_size)
    if isinstance(data, Sealed):
        if seen is not None or by_class is not None:
            raise ConfigError(
                "privacy.training: private training does not reveal which classes a client has"
            )
        fit_privately(
            client, data, trainer, loss, epochs=epochs, per_epoch=per_epoch, batch_size=batch_size
        )
        return FitResult(epochs, float("nan"), float("nan"))
    fitted = FitResult(0, float("nan"), 0.0)
    for epoch in client.track(range(1, epochs + 1)):
        total = torch.zeros((), device=data.device)
        n_correct = torch.zeros((), device=data.device, dtype=torch.long)
        count = 0
        for index in islice(batches, per_epoch):
            labels = data.labels[index]
            value, correct = trainer.step(batch_loss, data.pixels[index], labels, by_class)
            total += value
            n_correct += correct
            count += len(index)
            if seen is not None:
                seen.index_add_(0, labels, torch.ones_like(labels, dtype=seen.dtype))
        trainer.anneal(epoch / epochs)
        lanes.wait_for_device()
        fitted = FitResult(epoch, float(total) / per_epoch, float(n_correct) / count)
        if goal is not None and fitted.accuracy >= goal:
            break
    return fitted


def make_anchor(client: Client, places: Mapping[str, Tensor], strength: float) -> Anchor:
    """Return an anchor that pulls a client's trainable parameters towards values.

    On a lane, the values of the last anchor for this architecture are overwritten.

    Args:
        client: The client.
        places: The values by name of the parameter, at least for all trainable ones.
        strength: Weight of the squared distance, see `Anchor`.
    """
    targets = [
        places[name]
        for name, parameter in client.model.named_parameters()
        if parameter.requires_grad
    ]
    return lanes.keep(("anchor", client.architecture), Anchor(targets, strength))


def fit_by(
    client: Client,
    loss: Callable[..., Any],
    *,
    epochs: int,
    batch_size: int,
    recipe: Recipe,
    extras: Sequence[Tensor] | Iterator[Sequence[Tensor]] = (),
    also: Sequence[nn.Module] = (),
) -> None:
    """Train the client's model, and further modules, by a loss of images and labels.

    Args:
        client: The client, whose model is trained in place.
        loss: Called with images as model input, augmented and normalised, with their labels, and
            with the tensors of `extras`.
        epochs: Passes over the client's images.
        batch_size: Images in a step.
        recipe: Optimizer and learning rate, which is annealed over all steps.
        extras: Further arguments of the loss: tensors that are the same in every step, or an
            iterator with one sequence of tensors for each step, which must not end earlier.
        also: Further modules to train in place, with the same optimizer.
    """
    data = client.data
    index = index_batches(len(data), batch_size, data.device)
    extra = extras if isinstance(extras, Iterator) else repeat(extras)
    batches = (
        [data.pixels[chosen], data.labels[chosen], *more]
        for chosen, more in zip(index, extra, strict=False)
    )
    on_bytes = partial(call_on_images, loss, data.spec, data.augment)
    steps = epochs * epoch_length(len(data), batch_size)
    alternate(client, [(on_bytes, batches)], steps, recipe, also)


def call_on_images(
    loss: Callable[..., Any],
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
    *extras: Tensor,
) -> Any:
    """Prepare images given as bytes, then call a loss with them.

    Args:
        loss: Called with augmented, normalised images, their labels and `extras`.
        spec: Format of the images.
        augment: Augmentation of the images.
        pixels: Images as bytes.
        labels: Their labels.
        extras: Further arguments of the loss.
    """
    return loss(prepare_batch(pixels, spec, augment), labels, *extras)


def cross_entropy(model: Classifier, x: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a model's logits for x with the labels.

    With the model bound by `partial`, it is a loss for `fit_by`.
    """
    return F.cross_entropy(model(x), labels)


def alternate(
    client: Client,
    courses: Sequence[Course],
    steps: int,
    recipe: Recipe,
    also: Sequence[nn.Module] = (),
) -> None:
    """Train the client's model, and further modules, on several courses in turn.

    Every step takes one batch of each course, one after the other, and makes an optimizer step by
    that course's loss. All share one optimizer, annealed to the end of `steps`. The modules are
    left in training mode.

    Args:
        client: The client, whose model is trained in place.
        courses: For each course its loss, and an iterator over the arguments of the loss, which
            must not end before the last step.
        steps: Number of steps; each has one optimizer step per course.
        recipe: Optimizer and learning rate.
        also: Further modules to train in place.
    """
    trainer = Trainer.of([module.train() for module in (client.model, *also)], recipe)
    for step in client.track(range(steps)):
        for loss, batches in courses:
            trainer.step(loss, *next(batches))
        trainer.anneal((step + 1) / steps)


@dataclass(frozen=True)
class Subject:
    """A training objective: data, their conversion to inputs, and a feature loss."""

    rows: Sequence[Tensor]  # the data, and the targets that the loss needs for them
    show: Callable[[Tensor], Tensor]  # makes inputs of the network from the data
    loss: Callable[..., Tensor]  # the loss: (features, *targets, *extras) -> value
    extras: tuple[Tensor, ...] = ()  # further arguments of the loss, the same in every step
    by_inputs: bool = False  # whether the loss is (inputs, features, *targets, *extras) -> value

    def batches(self, size: int) -> Iterator[SubjectBatch]:
        """Yield shuffled batches of `rows` without end, of the sizes of `index_batches`.

        The constant tensors `extras` follow the targets of each batch.
        """
        for data, *targets in batches([self.rows], size):
            yield SubjectBatch(data, (*targets, *self.extras))


def join_subjects(model: Classifier, subjects: Sequence[Subject], size: int) -> Course:
    """Combine several subjects into one course; batches hold equal parts of each.

    A part has size // number of subjects rows, fewer (but two) if the subject has fewer. The
    course's loss is `joint_loss`.

    Batch normalisation then uses statistics of all subjects together. Subjects that alternate would
    each be normalised by their own statistics in training, and by those of none in evaluation.

    Args:
        model: The model to train.
        subjects: The objectives.
        size: Size of the whole batch.
    """
    sources = [subject.batches(size // len(subjects)) for subject in subjects]
    ways = tuple((subject.show, subject.loss, subject.by_inputs) for subject in subjects)
    loss = partial(joint_loss, model, ways)
    return loss, ((parts,) for parts in zip(*sources, strict=True))


def joint_loss(
    model: Classifier,
    ways: Sequence[tuple[Callable[[Tensor], Tensor], Callable[..., Tensor], bool]],
    parts: Sequence[SubjectBatch],
) -> Tensor:
    """Return the sum of several subjects' losses; features need one forward pass.

    Args:
        model: The model.
        ways: Each subject's `show`, `loss` and `by_inputs`.
        parts: Each subject's part of the batch.
    """
    inputs = [show(part.data) for (show, _, _), part in zip(ways, parts, strict=True)]
    features = torch.split(model.features(torch.cat(inputs)), [len(x) for x in inputs])
    losses = []
    for (_, loss, by_inputs), x, own_features, part in zip(
        ways, inputs, features, parts, strict=True
    ):
        known = (x, own_features) if by_inputs else (own_features,)
        losses.append(loss(*known, *part.targets))
    return torch.stack(losses).sum()


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
    extras: Iterator[Sequence[Tensor]] | None = None,
) -> None:
    """Train a module of the server on rows of some tensors.

    Args:
        server: The server, which reports the progress.
        phase: Name of the progress bar.
        module: The module to train in place.
        loss: Called with the rows of a batch and the tensors of `extras`.
        rows: Equally long tensors.
        epochs: Passes over the rows.
        batch_size: Rows in a step.
        recipe: Optimizer and learning rate, which stays constant.
        extras: Further arguments of the loss, one sequence of tensors for each step. Training ends
            with them if they are fewer than steps.
    """
    trainer = Trainer.of(module.train(), recipe)
    n = len(rows[0])
    steps = server.track(phase, range(epochs * epoch_length(n, batch_size)))
    batches = index_batches(n, batch_size, rows[0].device)
    for _, chosen, more in zip(steps, batches, extras or repeat(()), strict=False):
        trainer.step(loss, *(tensor[chosen] for tensor in rows), *more)
