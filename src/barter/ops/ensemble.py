"""Public images: what several networks together say of them, and how a network learns from that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Node
from barter.ops.distill import kl
from barter.ops.fit import Recipe, Trainer, index_batches

__all__ = [
    "class_shares",
    "consensus",
    "distil",
    "drawn",
    "logit_loss",
    "mixed",
    "public_images",
    "require_labels",
    "sharpened",
    "soft_loss",
]


def public_images(party: Node) -> Images:
    """The images that every party has."""
    if party.public is None:
        raise ConfigError("there is no public data: set data.public to a source")
    return party.public


def require_labels(images: Images, method: str, otherwise: str) -> None:
    """Refuse public images whose labels cannot be those of the task: too many classes, or no more than one."""
    labels, classes = images.labels, images.spec.classes
    if int(labels.max()) >= classes:
        found = f"go up to {int(labels.max())} and the task has {classes} classes"
    elif bool((labels == labels[0]).all()):
        found = "are all the same, as if there were none"
    else:
        return
    raise ConfigError(f"{method} learns from labels of the public data, which {found}: {otherwise}")


def drawn(images: Images, samples: int | None) -> Tensor:
    """The places of so many images at random, of all if there are no more."""
    return torch.randperm(len(images), device=images.device)[:samples]


def class_shares(counts: Tensor, smoothing: float = 0.0) -> Tensor:
    """How much each client counts for each class, from its images of it; all alike where nobody has any."""
    total = (counts + smoothing).sum(0)
    return torch.where(total > 0, (counts + smoothing) / total.clamp_min(1e-12), 1 / len(counts))


def consensus(answers: Sequence[Tensor], shares: Tensor | None = None) -> Tensor:
    """The mean of what networks say (images, classes), each counting by its share of a class where these are given."""
    said = torch.stack(list(answers))
    return said.mean(0) if shares is None else (shares[:, None] * said).sum(0)


def mixed(said: Tensor, shares: Tensor) -> Tensor:
    """What networks that know different classes say together: logits (..., clients, images, classes) to one for all.

    Of each class the mean probability, everybody counting by its share of the class. Not of logits, for those of
    different networks are not to one scale. Small ones are raised, so that their logarithms stay near the others'.
    """
    p = (shares[:, None] * said.softmax(-1)).sum(-3)
    return (p + 1e-6).log()


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """Entropy reduction aggregation (ERA): softmax(p / T) of probabilities, surer than they are for a low T."""
    return (p / temperature).softmax(1)


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with probabilities as the target."""
    return F.cross_entropy(logits, target)


def logit_loss(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ student) of logits."""
    return kl(target, logits)


def _on_images(
    model: Classifier, spec: Spec, loss: Callable[..., Tensor], pixels: Tensor, *targets: Tensor
) -> Tensor:
    return loss(model(prepared(pixels, spec, Augment())).float(), *targets)


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
    """Train a model, by a loss of its logits and the targets, on the images at these places."""
    trainer = Trainer.of(model.train(), recipe)
    learn = partial(_on_images, model, images.spec, loss)
    batches = index_batches(len(places), batch_size, images.device)
    for step in track(range(steps)):
        part = next(batches)
        trainer.step(learn, images.pixels[places[part]], *(target[part] for target in targets))
        trainer.anneal((step + 1) / steps)
