"""Few images that stand for many: condensation by distribution matching (DM, Zhao and Bilen 2023)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypedDict

import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.trainer import Recipe, Trainer
from barter.core.contracts import Classes, Counts, Pixels
from barter.core.images import Augment, Images, Spec, prepared, statistics
from barter.core.model import Classifier
from barter.core.nodes import Client

__all__ = [
    "Collaboration",
    "Lot",
    "averaging",
    "condense",
    "ends",
    "gathered",
    "labels_of",
    "lot",
    "mean_images",
    "portions",
    "quantised",
    "redrawn",
    "sliced_wasserstein",
]


class Lot(TypedDict):
    """Condensed images as bytes, class by class, so many of each."""

    classes: Annotated[Tensor, Classes("n")]
    sizes: Annotated[Tensor, Counts("n", total="images")]
    images: Annotated[Tensor, Pixels("images")]


class Canvas(nn.Module):
    """Images that are trained."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = nn.Parameter(images.clone())


def averaging(labels: Tensor, classes: Tensor) -> Tensor:
    """The matrix that takes rows with these labels to their mean for each of the classes; zeros for one without any."""
    members = (labels[None, :] == classes[:, None]).float()
    return members / members.sum(1, keepdim=True).clamp_min(1)


def portions(data: Images, ipc: int, least: int) -> dict[int, int]:
    """How many images each class is condensed into: at most as many as it has, none if it has fewer than `least`."""
    return {c: min(ipc, n) for c, n in enumerate(data.class_counts().tolist()) if n >= least}


def labels_of(sizes: Mapping[int, int], device: torch.device) -> Tensor:
    """The label of each image, class by class."""
    return torch.tensor(
        [c for c, n in sizes.items() for _ in range(n)], dtype=torch.long, device=device
    )


def lot(data: Images, sizes: Mapping[int, int], images: Tensor | None) -> Lot:
    """What a client gives away of its condensed images."""
    classes, amounts = (
        torch.tensor(list(x), dtype=torch.long, device=data.device) for x in (sizes, sizes.values())
    )
    if images is None:
        images = torch.zeros(0, *data.spec.shape, device=data.device)
    return {"classes": classes, "sizes": amounts, "images": quantised(images, data.spec)}


def gathered(lots: Iterable[Lot]) -> tuple[Tensor, Tensor]:
    """All condensed images of all clients, and their labels."""
    images, labels = zip(
        *((x["images"], x["classes"].repeat_interleave(x["sizes"])) for x in lots), strict=True
    )
    return torch.cat(images), torch.cat(labels)


def mean_images(data: Images, sizes: Mapping[int, int], of: int) -> Tensor:
    """So many images of each class, each the mean of some drawn at random, normalised; no two with the same first."""
    drawn = []
    for label, size in sizes.items():
        members = (data.labels == label).nonzero()[:, 0]
        own = torch.randperm(len(members), device=data.device)[:size, None]
        others = torch.randint(len(members), (size, of - 1), device=data.device)
        batch = data.batch(members[torch.cat([own, others], 1).flatten()])
        drawn.append(batch.view(size, of, *batch.shape[1:]).mean(1))
    return torch.cat(drawn)


def quantised(images: Tensor, spec: Spec) -> Tensor:
    """Normalised images as the bytes that they would be stored as."""
    mean, std = statistics(spec, images.device)
    return ((images * std + mean) * 255).clamp(0, 255).round().to(torch.uint8)


@torch.no_grad()
def redrawn(model: nn.Module) -> None:
    """The parameters of every layer drawn anew, as torch initialises such layers; some networks begin otherwise."""
    for layer in model.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            buffers = [b.clone() for b in layer.buffers(recurse=False)]
            reset()
            for kept, before in zip(layer.buffers(recurse=False), buffers, strict=True):
                kept.copy_(before)  # statistics are not parameters


def sliced_wasserstein(u: Tensor, v: Tensor, projections: int | None) -> Tensor:
    """SWD² (p = 2) between sets of points (..., points, dimensions), one value for each pair of sets.

    The mean over random directions of the squared distance between the sorted projections. For single points it is
    ‖u - v‖² / dimensions, which is what `projections=None` computes.
    """
    if projections is None:
        if u.shape[-2] != 1:
            raise ValueError(f"the closed form is for single points, these sets have {u.shape[-2]}")
        closed: Tensor = (u - v).square().mean((-2, -1))
        return closed
    directions = torch.randn(u.shape[-1], projections, device=u.device)
    directions = directions / directions.norm(dim=0)
    one, other = (torch.sort(points @ directions, dim=-2).values for points in (u, v))
    return (one - other).square().mean((-2, -1))


@dataclass(frozen=True)
class Collaboration:
    """What else condensed images are held to: the mean logits that all clients have for a class (Eq. 10 of FedAF)."""

    logits: Tensor  # one row for every class of the client
    known: Tensor  # 1 for those that have such logits
    weight: float
    projections: int | None


def ends(names: Sequence[str], told: Sequence[Tensor]) -> dict[str, float]:
    """The terms of a loss at the first and at the last step of a training, as the round's record has them."""
    rows = {"start": told[0].tolist(), "end": told[-1].tolist()}
    return {
        f"{name}_{when}": value
        for when, row in rows.items()
        for name, value in zip(names, row, strict=False)
    }


def matching_loss(
    canvas: Canvas,
    backbone: Classifier,
    model: Classifier,
    spec: Spec,
    match_logits: bool,
    weight: float,
    projections: int | None,
    pixels: Tensor,
    real: Tensor,
    synthetic: Tensor,
    v: Tensor,
    known: Tensor,
) -> tuple[Tensor, ...]:
    """The squared distance between mean features of real and condensed images, summed over classes (Eq. 4 of FedAF).

    The whole loss, this distance, and that of the collaborative term where there is one: it is asked of the model, not
    of the network that features are seen through.
    """
    with torch.no_grad():
        seen = backbone.features(prepared(pixels, spec, Augment()))
        target, target_logits = real @ seen.float(), real @ backbone.logits(seen).float()
    features = backbone.features(canvas.images)
    matching = (synthetic @ features.float() - target).square().sum()
    if match_logits:
        matching = (
            matching
            + (synthetic @ backbone.logits(features).float() - target_logits).square().sum()
        )
    if not weight:
        return matching, matching
    u = synthetic @ model(canvas.images).float()
    apart = (known * sliced_wasserstein(u[:, None], v[:, None], projections)).sum()
    return matching + weight * apart, matching, apart


def condense(
    client: Client,
    start: Tensor,
    sizes: Mapping[int, int],
    *,
    steps: int,
    batch_size: int,
    recipe: Recipe,
    sampled: Callable[[Classifier], None],
    match_logits: bool = False,
    collaboration: Collaboration | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Images that, seen through ever new networks, have the mean features of the client's own, class by class.

    `sampled` changes the network, a copy of the client's, before each step. Pixels stay between black and white: what
    is matched is what can be sent. Normalisation uses running statistics: those of a class's own batch would remove the
    very mean that is matched. Beside them, what `ends` says of the loss.
    """
    data, labels = client.data, labels_of(sizes, client.device)
    classes = torch.tensor(list(sizes), device=client.device)
    canvas = lanes.keep(("canvas", start.shape), Canvas(start))
    backbone, model = (_copy(client, name) for name in ("backbone", "judge"))
    members = [(data.labels == label).nonzero()[:, 0] for label in classes.tolist()]
    real_labels = torch.cat([data.labels[at[:batch_size]] for at in members])
    fixed = [averaging(real_labels, classes), averaging(labels, classes)]
    if collaboration is None:
        nothing = torch.zeros(len(classes), data.spec.classes, device=data.device)
        collaboration = Collaboration(nothing, nothing[:, 0], 0.0, None)
    fixed += [collaboration.logits, collaboration.known]
    extra = match_logits, collaboration.weight, collaboration.projections
    loss = partial(matching_loss, canvas, backbone, model, data.spec, *extra)
    trainer, told = Trainer.of(canvas, recipe), list[Tensor]()
    mean, std = statistics(data.spec, data.device)
    black, white = -mean / std, (1 - mean) / std
    for step in client.track(range(steps)):
        backbone.load_state_dict(client.model.state_dict())
        sampled(backbone)
        index = torch.cat(
            [at[torch.randperm(len(at), device=at.device)[:batch_size]] for at in members]
        )
        _, *terms = trainer.step(loss, data.pixels[index], *fixed)
        canvas.images.data.clamp_(black, white)
        if step in (0, steps - 1):
            told.append(torch.stack(terms))
    return canvas.images.detach().clone(), ends(("matching", "collaboration"), told)


def _copy(client: Client, name: str) -> Classifier:
    """The client's network as it is, to look through."""
    copied = lanes.kept((name, client.architecture), lambda: copy.deepcopy(client.model))
    copied.load_state_dict(client.model.state_dict())
    return copied.eval().requires_grad_(False)
