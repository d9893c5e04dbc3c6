"""Embedding inversion: train a decoder whose images have given embeddings."""

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
from barter.ops.views import choose_views, extract_views, parts_of_views, select_view

__all__ = [
    "CodeBatch",
    "Discrepancy",
    "Schedule",
    "Terms",
    "Viewer",
    "decoded_inversion_loss",
    "discrepancy",
    "fit_decoder",
    "inversion_loss",
]

Discrepancy: TypeAlias = Literal["none", "kl", "mae", "mse"]


class Viewer(NamedTuple):
    """A client's network and the layer that maps its features to codes."""

    model: Classifier
    translate: nn.Module


class CodeBatch(NamedTuple):
    """A batch of one viewer's codes, with the embeddings they were computed from."""

    codes: Tensor
    embeddings: Tensor


class Terms(NamedTuple):
    """Loss terms of the decoder in addition to the reconstruction of the codes."""

    logits: bool = False  # match the logits of the image with those of the embedding
    differ: Discrepancy = "none"  # maximise the discrepancy between the viewer and another network


class Schedule(NamedTuple):
    """Length of the decoder's training, and the composition of its batches."""

    epochs: int  # passes over the largest client's codes
    steps: int  # least number of steps
    batch: int  # codes of one client in a batch, on average if batches are mixed
    mixed: bool  # take codes of all clients in proportion to their number, or of one client a step


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
    """Train a decoder of codes to images.

    A client's network has to recover the client's codes from the images. A viewer is a client's
    network with the layer that maps its features to codes; it sees the images that are decoded from
    this client's codes.

    Args:
        server: The server, whose device and image format are used.
        start: State of a decoder to continue from; if empty, a new one is trained.
        viewers: Each client's network and translation layer.
        codes: Each client's codes (images, views, width). An image is decoded from the codes of all
            its views, and compared by one view in a step (see `choose_views`).
        embeddings: The embeddings that the codes were computed from.
        recipe: Optimizer and learning rate, which is annealed over the steps.
        schedule: Length of the training and composition of batches.
        terms: Further loss terms; `differ` needs at least two clients.

    Returns:
        A copy of the decoder's state, and its mean reconstruction loss in the last pass over the
        largest client's codes, without further terms.
    """
    ids = list(codes)
    _, views, width = codes[ids[0]].shape
    decoder = lanes.keep(
        "decoder", Decoder(width, server.spec, parts_of_views(views)).to(server.device)
    )
    if start:
        decoder.load_state_dict(start)
    trainer = Trainer.of(decoder, recipe)

    mean_count = sum(map(len, codes.values())) / len(codes)
    if schedule.mixed:
        size = {k: round(schedule.batch * len(codes[k]) / mean_count) for k in ids}
        groups = [ids]
    else:
        size = dict.fromkeys(ids, schedule.batch)
        groups = [[k] for k in ids]
    source = {k: batches([[codes[k], embeddings[k]]], size[k]) for k in ids}
    last_pass = max(epoch_length(len(codes[k]), size[k]) for k in ids)
    steps = max(schedule.steps, schedule.epochs * last_pass)

    total = torch.zeros((), device=server.device)
    for step in server.track("decoder", range(steps)):
        for group in groups:
            shift = 0 if terms.differ == "none" else int(torch.randint(1, len(ids), ()))
            rivals = [ids[(ids.index(k) + shift) % len(ids)] for k in group]
            loss = partial(
                decoded_inversion_loss,
                decoder,
                server.spec,
                tuple(viewers[k] for k in group),
                tuple(viewers[k].model for k in rivals),
                terms,
            )
            batch = tuple(CodeBatch(*next(source[k])) for k in group)
            _, reconstruction = trainer.step(loss, batch)
            total += reconstruction if step >= steps - last_pass else 0
        trainer.anneal((step + 1) / steps)
    return isolate(dict(decoder.state_dict())), float(total) / (last_pass * len(groups))


def decoded_inversion_loss(
    decoder: Decoder,
    spec: Spec,
    viewers: tuple[Viewer, ...],
    others: tuple[Classifier, ...],
    terms: Terms,
    batch: tuple[CodeBatch, ...],
) -> tuple[Tensor, Tensor]:
    """Decode a batch; return its `inversion_loss` with further terms, then without.

    Every viewer sees one view of each of its images, see `choose_views`.

    Args:
        decoder: The decoder.
        spec: Format of the viewers' inputs.
        viewers: The viewers whose codes are in the batch.
        others: For each viewer the network from which it has to differ, if `terms` says so.
        terms: Further loss terms.
        batch: Each viewer's codes and embeddings.
    """
    codes = [part.codes for part in batch]
    parts = parts_of_views(codes[0].shape[1])
    decoded = torch.split(decoder(torch.cat(codes)), [len(code) for code in codes])
    views = [choose_views(len(x), parts, x.device) for x in decoded]
    images = lanes.run_branches(
        [
            partial(extract_views, x, view, parts, spec)
            for x, view in zip(decoded, views, strict=True)
        ]
    )
    codes_of_views = [
        select_view(part.codes, view) for part, view in zip(batch, views, strict=True)
    ]
    embeddings_of_views = [
        select_view(part.embeddings, view) for part, view in zip(batch, views, strict=True)
    ]
    return inversion_loss(viewers, others, images, codes_of_views, embeddings_of_views, terms)


def discrepancy(choice: Discrepancy, teacher: Tensor, student: Tensor) -> Tensor:
    """Return how much two networks' predictions (logits) differ.

    "kl" is 0.1 KL(teacher ‖ student), scaled because a decoder that maximises it diverges
    otherwise. "mae" is the mean absolute, any other choice the mean squared difference of
    probabilities, over images and classes.
    """
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
    """Return the inversion loss of all viewers with further terms, then without.

    The loss without further terms, which is detached, is the mean squared error between each code
    and what its viewer recovers from the image. Both are means over all viewers' images.

    Args:
        viewers: The viewers.
        others: For each viewer the network from which it has to differ, if `terms` says so.
        images: Each viewer's decoded images.
        codes: The codes of these images.
        embeddings: The embeddings of these images.
        terms: Further loss terms.
    """
    n_images = sum(map(len, codes))

    def viewer_loss(
        viewer: Viewer, other: Classifier, x: Tensor, code: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor]:
        model = viewer.model
        features = model.features(x)
        loss = reconstruction = F.mse_loss(viewer.translate(features), code)
        if terms.logits:
            loss = loss + kl(model.logits(embedding), model.logits(features))
        if terms.differ != "none":
            loss = loss - discrepancy(terms.differ, model.logits(features), other(x))
        weight = len(code) / n_images
        return loss * weight, reconstruction.detach() * weight

    jobs = [
        partial(viewer_loss, *arguments)
        for arguments in zip(viewers, others, images, codes, embeddings, strict=True)
    ]
    # With a discrepancy, a network also sees other viewers' images, and jobs that run abreast must
    # not share a module.
    independent = terms.differ == "none"
    results = lanes.run_branches(jobs) if independent else [job() for job in jobs]
    losses, reconstructions = zip(*results, strict=True)
    return torch.stack(losses).sum(), torch.stack(reconstructions).sum()
