"""Turning embeddings back into images: a decoder that draws what networks map back to the codes it drew from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.trainer import Recipe
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Server
from barter.core.payload import State, isolate
from barter.models.generators import Decoder
from barter.ops.distill import kl
from barter.ops.fit import Trainer, batches, epoch_length
from barter.ops.views import in_turn, of_view, parts_of, seen

__all__ = [
    "Discrepancy",
    "Schedule",
    "Terms",
    "Viewer",
    "discrepancy",
    "drawn_loss",
    "fit_decoder",
    "inversion_loss",
]

Discrepancy: TypeAlias = Literal["none", "kl", "mae", "mse"]


class Viewer(NamedTuple):
    """Who looks at some of the images: a network, and the layer behind its features."""

    model: Classifier
    translate: nn.Module


class Terms(NamedTuple):
    """What an image is asked for beside being mapped back to its code."""

    logits: bool = False  # the same logits as of the embedding
    differ: Discrepancy = "none"  # that the viewer and another network differ about it


class Schedule(NamedTuple):
    """Passes over the largest set of codes, in at least so many steps.

    A step is on codes of all viewers, of each by its share and `batch` of them on average, if `mixed`; otherwise on so
    many of one's.
    """

    epochs: int
    steps: int
    batch: int
    mixed: bool


def fit_decoder(
    server: Server,
    start: State,
    viewers: Mapping[int, Viewer],
    codes: Mapping[int, Tensor],
    embeddings: Mapping[int, Tensor],
    recipe: Recipe,
    schedule: Schedule,
    terms: Terms,
) -> tuple[State, float]:
    """A decoder such that every viewer maps the images of its codes back to them, and its loss in the last pass.

    It goes on from the state `start`; a new one from none. Codes are of an image's views, of which one a time is seen.
    """
    ids, mean = list(codes), sum(map(len, codes.values())) / len(codes)
    _, views, width = codes[ids[0]].shape
    decoder = lanes.keep("decoder", Decoder(width, server.spec, parts_of(views)).to(server.device))
    if start:
        decoder.load_state_dict(start)
    trainer = Trainer.of(decoder, recipe)
    epochs, steps, batch, mixed = schedule
    size = {k: round(batch * len(codes[k]) / mean) if mixed else batch for k in ids}
    source = {k: batches([[codes[k], embeddings[k]]], size[k]) for k in ids}
    longest = max(epoch_length(len(codes[k]), size[k]) for k in ids)
    groups, total = [ids] if mixed else [[k] for k in ids], torch.zeros((), device=server.device)
    passes = range(max(steps, epochs * longest))
    for step in server.track("decoder", passes):
        for group in groups:
            shift = 0 if terms.differ == "none" else int(torch.randint(1, len(ids), ()))
            others = tuple(viewers[ids[(ids.index(k) + shift) % len(ids)]].model for k in group)
            loss = partial(
                drawn_loss, decoder, server.spec, tuple(viewers[k] for k in group), others, terms
            )
            _, bare = trainer.step(loss, *(part for k in group for part in next(source[k])))
            total += bare if step >= len(passes) - longest else 0
        trainer.anneal((step + 1) / len(passes))
    return isolate(dict(decoder.state_dict())), float(total) / (longest * len(groups))


def drawn_loss(
    decoder: Decoder,
    spec: Spec,
    viewers: tuple[Viewer, ...],
    others: tuple[Classifier, ...],
    terms: Terms,
    *batch: Tensor,
) -> tuple[Tensor, Tensor]:
    """The loss on codes and embeddings of some viewers, each of whom sees one view of an image."""
    parts = parts_of(batch[0].shape[1])
    drawn = torch.split(decoder(torch.cat(batch[::2])), [len(code) for code in batch[::2]])
    views = [in_turn(len(x), parts, x.device) for x in drawn]
    images = lanes.abreast(
        [partial(seen, x, view, parts, spec) for x, view in zip(drawn, views, strict=True)]
    )
    codes, embeddings = (list(map(of_view, every, views)) for every in (batch[::2], batch[1::2]))
    return inversion_loss(viewers, others, images, codes, embeddings, terms)


def discrepancy(choice: Discrepancy, teacher: Tensor, student: Tensor) -> Tensor:
    """How much two networks' predictions differ; KL is scaled by 0.1: a decoder that seeks it diverges otherwise."""
    if choice == "kl":
        return 0.1 * kl(teacher, student)
    gap = teacher.softmax(1) - student.softmax(1)
    return gap.abs().mean() if choice == "mae" else gap.square().mean()


def inversion_loss(
    viewers: Sequence[Viewer],
    others: Sequence[Classifier],
    images: Sequence[Tensor],
    codes: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    terms: Terms,
) -> tuple[Tensor, Tensor]:
    """The mean square between each image's code and what its viewer makes of it, with the terms asked for; and bare."""
    total = sum(map(len, codes))

    def judged(
        viewer: Viewer, other: Classifier, x: Tensor, code: Tensor, e: Tensor
    ) -> tuple[Tensor, Tensor]:
        model, features = viewer.model, viewer.model.features(x)
        loss = bare = F.mse_loss(viewer.translate(features), code)
        if terms.logits:
            loss = loss + kl(model.logits(e), model.logits(features))
        if terms.differ != "none":
            loss = loss - discrepancy(terms.differ, model.logits(features), other(x))
        share = len(code) / total
        return loss * share, bare.detach() * share

    jobs = [
        partial(judged, *of_one)
        for of_one in zip(viewers, others, images, codes, embeddings, strict=True)
    ]
    shared = terms.differ != "none"  # networks look at others' images, too
    losses, bare = zip(*([job() for job in jobs] if shared else lanes.abreast(jobs)), strict=True)
    return torch.stack(losses).sum(), torch.stack(bare).sum()
