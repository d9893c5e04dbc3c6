"""Ensemble predictions for public images, and distillation from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core import robust
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Node
from barter.ops.distill import kl
from barter.ops.fit import Recipe, Trainer, index_batches

__all__ = [
    "class_shares",
    "distil",
    "logit_loss",
    "mean_predictions",
    "merge_logits",
    "public_images",
    "reduce_entropy",
    "require_labels",
    "sample_index",
    "select_teachers",
    "soft_loss",
]


def public_images(party: Node) -> Images:
    """Return the public images of a client or the server; all of them have the same.

    Raises:
        ConfigError: If the run has no public data.
    """
    if party.public is None:
        raise ConfigError("there is no public data: set data.public to a source")
    return party.public


def require_labels(images: Images, method: str, otherwise: str) -> None:
    """Raise if the labels of public images cannot be those of the task.

    Args:
        images: The public images.
        method: The method that learns from the labels, for the message.
        otherwise: The way out, for the message.

    Raises:
        ConfigError: If a label is beyond the task's classes, or all labels are the same.
    """
    labels = images.labels
    classes = images.spec.classes
    if int(labels.max()) >= classes:
        found = f"go up to {int(labels.max())} and the task has {classes} classes"
    elif bool((labels == labels[0]).all()):
        found = "are all the same, as if there were none"
    else:
        return
    raise ConfigError(f"{method} learns from labels of the public data, which {found}: {otherwise}")


def sample_index(images: Images, samples: int | None) -> Tensor:
    """Return the indices of random images, without repetition.

    They are drawn from torch's default generator of the images' device.

    Args:
        images: The images.
        samples: Number of images; all, shuffled, if None or if there are fewer.
    """
    return torch.randperm(len(images), device=images.device)[:samples]


def class_shares(counts: Tensor) -> Tensor:
    """Return each client's weight for each class, its fraction of the class's images.

    Clients have equal weights for classes of which none of them has images.

    Args:
        counts: Numbers of images (clients, classes).

    Returns:
        Weights (clients, classes), which sum to 1 over the clients.
    """
    counts = counts.float()
    total = counts.sum(0)
    return torch.where(total > 0, counts / total.clamp_min(1e-12), 1 / len(counts))


def mean_predictions(answers: Sequence[Tensor], shares: Tensor | None = None) -> Tensor:
    """Return the mean prediction (images, classes) of several networks.

    A run with a defence on logits uses its robust aggregate instead of the mean.

    Args:
        answers: One prediction per network, logits or probabilities.
        shares: Weight of each network for each class (networks, classes), with sums of 1 over the
            networks, as they are not normalised here; equal weights if None.
    """
    predictions = torch.stack(list(answers))
    if robust.active().defends("logits"):
        weights = None if shares is None else shares[:, None]
        return robust.aggregate(predictions, "logits", weights)
    if shares is None:
        return predictions.mean(0)
    return (shares[:, None] * predictions).sum(0)


def select_teachers(predictions: Mapping[int, Tensor]) -> list[int]:
    """Return the clients whose predictions (images, classes) agree with the others'.

    Networks of different architectures can be compared by their predictions, their weights cannot.
    So a server that has both can judge a client by its predictions before it averages weights. All
    clients are returned unless the run's defence on logits is a mean over selected clients
    ("cosine", also by "auto"). See `Defence.agreeing_predictions`.
    """
    clients = list(predictions)
    defence = robust.active()
    if not defence.keeps_weights("logits"):
        return clients
    mask = defence.agreeing_predictions([torch.stack(list(predictions.values()))])
    return [k for k, keep in zip(clients, mask.tolist(), strict=True) if keep]


def merge_logits(logits: Tensor, shares: Tensor) -> Tensor:
    """Merge the logits of networks that know different classes.

    The result is the logarithm of the mean probability, in which clients are weighted by their
    share of each class. Probabilities are averaged because logits of different networks have
    different scales. 1e-6 is added before the logarithm, which bounds it from below. A run with a
    defence on logits uses its robust aggregate instead of the mean.

    Args:
        logits: Logits (..., clients, images, classes).
        shares: Weight of each client for each class (clients, classes), with sums of 1 over the
            clients, as they are not normalised here.

    Returns:
        Merged logits (..., images, classes).
    """
    if robust.active().defends("logits"):
        predictions = logits.softmax(-1).movedim(-3, 0)
        weights = shares.view(len(shares), *[1] * (logits.ndim - 2), -1)
        p = robust.aggregate(predictions, "logits", weights)
    else:
        p = (shares[:, None] * logits.softmax(-1)).sum(-3)
    return (p + 1e-6).log()


def reduce_entropy(p: Tensor, temperature: float) -> Tensor:
    """Return softmax(p / T) of probabilities p (N, classes).

    This is entropy reduction aggregation (ERA). A temperature well below 1 lowers the entropy. With
    1 it rises, unless it is at its maximum, since the softmax is of probabilities and not of
    logits.
    """
    return (p / temperature).softmax(1)


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of logits with target probabilities (N, classes)."""
    return F.cross_entropy(logits, target)


def logit_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return KL(target ‖ student), averaged over the batch.

    Args:
        logits: The student's logits (N, classes).
        target: The teacher's logits (N, classes).
    """
    return kl(target, logits)


def _on_images(
    model: Classifier, spec: Spec, loss: Callable[..., Tensor], pixels: Tensor, *targets: Tensor
) -> Tensor:
    """Return a loss of a model's logits on a batch of bytes, without augmentation."""
    return loss(model(prepare_batch(pixels, spec, Augment())).float(), *targets)


def distil(
    model: Classifier,
    images: Images,
    places: Tensor,
    targets: Sequence[Tensor],
    loss: Callable[..., Tensor],
    *,
    batch_size: int,
    recipe: Recipe,
    steps: int,
    track: Callable[[Sequence[int]], Iterator[int]] = iter,
) -> None:
    """Train a model on some of the images, by a loss of its logits and the targets.

    Images are not augmented. Batches are shuffled anew in each pass over `places`.

    Args:
        model: The model to train in place; it is left in training mode.
        images: All images.
        places: Indices of the images to learn from.
        targets: Tensors whose row i belongs to the image at `places[i]`.
        loss: Called with the logits of a batch, then with its rows of each target.
        batch_size: Images in a step.
        recipe: Optimizer and learning rate, which is annealed over the steps.
        steps: Number of steps.
        track: Wraps the steps to report progress.
    """
    trainer = Trainer.of(model.train(), recipe)
    learn = partial(_on_images, model, images.spec, loss)
    batches = index_batches(len(places), batch_size, images.device)
    for step in track(range(steps)):
        part = next(batches)
        trainer.step(learn, images.pixels[places[part]], *(target[part] for target in targets))
        trainer.anneal((step + 1) / steps)
