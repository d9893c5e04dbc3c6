"""Turning embeddings back into images: how far what a network sees in an image is from what it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.model import Classifier
from barter.ops.distill import kl
from barter.ops.statistics import gaps

__all__ = ["Discrepancy", "Viewer", "discrepancy", "inversion_loss"]

Discrepancy: TypeAlias = Literal["none", "kl", "mae", "mse"]


class Viewer(NamedTuple):
    """Who looks at some of the images: the network they are for, the layer behind its features, another network."""

    model: Classifier
    translate: nn.Module
    other: Classifier


def discrepancy(choice: Discrepancy, teacher: Tensor, student: Tensor) -> Tensor:
    """How much two networks' predictions differ; KL is scaled by 0.1: a decoder that seeks it diverges otherwise."""
    if choice == "kl":
        return 0.1 * kl(teacher, student)
    gap = teacher.softmax(1) - student.softmax(1)
    return gap.abs().mean() if choice == "mae" else gap.square().mean()


def inversion_loss(
    viewers: Sequence[Viewer],
    images: Sequence[Tensor],
    codes: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    statistics: float = 0.0,
    logits: bool = False,
    differ: Discrepancy = "none",
) -> tuple[Tensor, Tensor]:
    """The mean square between each image's code and what its viewer makes of it, with what else is asked for; and bare.

    Asked for can be natural `statistics` in the viewer's normalisations, by this weight; the same `logits` as of the
    embedding; images on which viewer and other `differ`.
    """
    total = sum(map(len, codes))
    losses, bare = torch.zeros((), device=codes[0].device), torch.zeros((), device=codes[0].device)
    for (model, translate, other), x, code, e in zip(viewers, images, codes, embeddings, strict=True):
        with gaps(model if statistics else None) as found:
            features = model.features(x)
        loss = F.mse_loss(translate(features), code)
        bare = bare + loss.detach() * len(code) / total
        if found:
            loss = loss + statistics * torch.stack(found).mean()
        if logits:
            loss = loss + kl(model.logits(e), model.logits(features))
        if differ != "none":
            loss = loss - discrepancy(differ, model.logits(features), other(x))
        losses = losses + loss * len(code) / total
    return losses, bare
