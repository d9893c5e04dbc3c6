"""Dataset condensation by distribution matching (DM, Zhao and Bilen 2023)."""

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
from barter.core.contracts import Counts, DistinctClasses, Pixels
from barter.core.images import Augment, Images, Spec, channel_statistics, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client

__all__ = [
    "Collaboration",
    "Lot",
    "averaging_matrix",
    "concatenate_lots",
    "condense",
    "condensed_labels",
    "first_and_last_terms",
    "images_per_class",
    "mean_images",
    "pack_lot",
    "quantise_images",
    "reinitialise",
    "sliced_wasserstein",
]


class Lot(TypedDict):
    """Condensed images of one client as bytes, sorted by class."""

    classes: Annotated[Tensor, DistinctClasses("n")]
    sizes: Annotated[Tensor, Counts("n", total="images")]  # number of images of each class
    images: Annotated[Tensor, Pixels("images")]


class Canvas(nn.Module):
    """Trainable images."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = nn.Parameter(images.clone())


def averaging_matrix(labels: Tensor, classes: Tensor) -> Tensor:
    """Return the matrix (classes, rows) that maps rows to the mean of each class.

    Args:
        labels: Label of each row to average.
        classes: The classes, one for each row of the matrix. A class without labels gets zeros.
    """
    members = (labels[None, :] == classes[:, None]).float()
    return members / members.sum(1, keepdim=True).clamp_min(1)


def images_per_class(data: Images, ipc: int, least: int) -> dict[int, int]:
    """Return the number of images that a client condenses each of its classes to.

    Args:
        data: The client's images.
        ipc: Images per class; a class with fewer images gets as many as it has.
        least: Classes with fewer images than this are left out; must be at least 1.

    Returns:
        Class -> number of images, in ascending order of the classes.
    """
    return {c: min(ipc, n) for c, n in enumerate(data.class_counts().tolist()) if n >= least}


def condensed_labels(sizes: Mapping[int, int], device: torch.device) -> Tensor:
    """Return the label of each condensed image, in the order of `sizes`.

    Args:
        sizes: Class -> number of condensed images.
        device: Device of the result.
    """
    labels = [label for label, size in sizes.items() for _ in range(size)]
    return torch.tensor(labels, dtype=torch.long, device=device)


def pack_lot(data: Images, sizes: Mapping[int, int], images: Tensor | None) -> Lot:
    """Pack condensed images for upload, with pixels as uint8.

    Args:
        data: The client's images, for format and device.
        sizes: Class -> number of condensed images; empty without images.
        images: The condensed images, normalised, by class in the order of `sizes`; None for no
            images.
    """
    classes = torch.tensor(list(sizes), dtype=torch.long, device=data.device)
    amounts = torch.tensor(list(sizes.values()), dtype=torch.long, device=data.device)
    if images is None:
        images = torch.zeros(0, *data.spec.shape, device=data.device)
    return {"classes": classes, "sizes": amounts, "images": quantise_images(images, data.spec)}


def concatenate_lots(lots: Iterable[Lot]) -> tuple[Tensor, Tensor]:
    """Return the condensed images of all lots (bytes), and the label of each image.

    Images are in the order of the lots, of which there must be at least one.
    """
    images = []
    labels = []
    for lot in lots:
        images.append(lot["images"])
        labels.append(lot["classes"].repeat_interleave(lot["sizes"]))
    return torch.cat(images), torch.cat(labels)


def mean_images(data: Images, sizes: Mapping[int, int], of: int) -> Tensor:
    """Return normalised images, each the mean of `of` random images of one class.

    No two means of a class have their first image in common; the others are drawn with repetition,
    all by torch's default generator of the device. The means are sorted by class, in the order of
    `sizes`.

    Args:
        data: The client's images.
        sizes: Number of means for each class, at least one class; at most the number of its images.
        of: Number of images in each mean.
    """
    means = []
    for label, size in sizes.items():
        members = (data.labels == label).nonzero()[:, 0]
        first = torch.randperm(len(members), device=data.device)[:size, None]
        others = torch.randint(len(members), (size, of - 1), device=data.device)
        batch = data.batch(members[torch.cat([first, others], 1).flatten()])
        means.append(batch.view(size, of, *batch.shape[1:]).mean(1))
    return torch.cat(means)


def quantise_images(images: Tensor, spec: Spec) -> Tensor:
    """Convert normalised images to bytes; clamp to 0 and 255, then round."""
    mean, std = channel_statistics(spec, images.device)
    return ((images * std + mean) * 255).clamp(0, 255).round().to(torch.uint8)


@torch.no_grad()
def reinitialise(model: nn.Module) -> None:
    """Randomly reset in place the parameters of layers that have `reset_parameters`.

    Torch's own layers have it. Parameters of other modules stay as they are, and a network's own
    initialisation is not repeated. Running statistics keep their values.
    """
    for layer in model.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            buffers = [b.clone() for b in layer.buffers(recurse=False)]
            reset()
            # Running statistics are not parameters and keep their values.
            for buffer, before in zip(layer.buffers(recurse=False), buffers, strict=True):
                buffer.copy_(before)


def sliced_wasserstein(u: Tensor, v: Tensor, projections: int | None) -> Tensor:
    """Return SWD² (p = 2) between pairs of point sets (..., points, dimensions).

    It is the mean over random directions of the squared distance between the sorted projections.

    Args:
        u: The first set of each pair.
        v: The second set of each pair, with the same number of points.
        projections: Number of random directions, which all pairs share. None is for single points
            and computes the expectation in closed form, ‖u - v‖² / dimensions.

    Returns:
        One value per pair (...).

    Raises:
        ValueError: If `projections` is None and a set has more than one point.
    """
    if projections is None:
        if u.shape[-2] != 1:
            raise ValueError(f"the closed form is for single points, these sets have {u.shape[-2]}")
        expected: Tensor = (u - v).square().mean((-2, -1))
        return expected
    directions = torch.randn(u.shape[-1], projections, device=u.device)
    directions = directions / directions.norm(dim=0)
    u_sorted = torch.sort(u @ directions, dim=-2).values
    v_sorted = torch.sort(v @ directions, dim=-2).values
    return (u_sorted - v_sorted).square().mean((-2, -1))


@dataclass(frozen=True)
class Collaboration:
    """The collaborative term: mean logits of each class over clients (FedAF, Eq. 10)."""

    logits: Tensor  # one row for each class of the client
    known: Tensor  # 1 for classes that have such logits, otherwise 0
    weight: float  # weight of the term in the loss
    projections: int | None  # directions of the sliced Wasserstein distance


def first_and_last_terms(names: Sequence[str], values: Sequence[Tensor]) -> dict[str, float]:
    """Return a loss's terms at the first and last step, for the round's record.

    Args:
        names: Name of each term, in the order of the vectors; surplus names are left out.
        values: One vector of terms per step, at least one.

    Returns:
        Values by NAME_start and NAME_end.
    """
    rows = {"start": values[0].tolist(), "end": values[-1].tolist()}
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
    """Return the distribution matching loss and its terms (Eq. 4 of FedAF).

    The matching term is the squared distance between the mean features of real and condensed
    images, summed over classes. The collaborative term is the `sliced_wasserstein` distance between
    the mean logits of condensed images and `v`, summed over the known classes. Its logits are those
    of the client's model, not of the network that computes the features.

    Args:
        canvas: The condensed images.
        backbone: The network that computes the features; it is not trained.
        model: The client's model, for the collaborative term.
        spec: Format of the images.
        match_logits: Match mean logits as well as mean features.
        weight: Weight of the collaborative term; 0 leaves it out.
        projections: See `sliced_wasserstein`.
        pixels: Real images as bytes, not augmented.
        real: Matrix that averages real images by class, see `averaging_matrix`.
        synthetic: The same for the condensed images.
        v: The shared mean logits of each class.
        known: 1 for each class that has shared logits, otherwise 0.

    Returns:
        The total loss, the matching term, and the collaborative term if it has a weight.
    """
    with torch.no_grad():
        real_features = backbone.features(prepare_batch(pixels, spec, Augment()))
        target = real @ real_features.float()
        target_logits = real @ backbone.logits(real_features).float()
    features = backbone.features(canvas.images)
    matching = (synthetic @ features.float() - target).square().sum()
    if match_logits:
        logits = synthetic @ backbone.logits(features).float()
        matching = matching + (logits - target_logits).square().sum()
    if not weight:
        return matching, matching
    u = synthetic @ model(canvas.images).float()
    distance = (known * sliced_wasserstein(u[:, None], v[:, None], projections)).sum()
    return matching + weight * distance, matching, distance


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
    """Train images to have the mean features of the client's images, class by class.

    Features are computed by a different network in each step. Pixels are clamped to the valid
    range, because only that can be sent. Normalisation uses running statistics: those of a batch of
    one class would remove the very mean that is matched. The client's model is not changed.

    Args:
        client: The client whose images are condensed.
        start: Initial condensed images, normalised, by class in the order of `sizes`.
        sizes: Class -> number of condensed images.
        steps: Number of training steps, at least 1.
        batch_size: Real images of each class in a step; all images of a class that has fewer.
        recipe: Optimizer of the condensed images; its learning rate stays constant.
        sampled: Called before each step with a new copy of the client's network, in evaluation
            mode, which it changes in place.
        match_logits: Match mean logits as well as mean features.
        collaboration: The collaborative term, with classes in the order of `sizes`; None leaves it
            out.

    Returns:
        The condensed images, normalised, in the order of `start`, and the loss terms `matching` and
        `collaboration` at the first and the last step (see `first_and_last_terms`).
    """
    data = client.data
    labels = condensed_labels(sizes, client.device)
    classes = torch.tensor(list(sizes), device=client.device)
    canvas = lanes.keep(("canvas", start.shape), Canvas(start))
    backbone = _frozen_copy(client, "backbone")
    model = _frozen_copy(client, "classifier")
    members = [(data.labels == label).nonzero()[:, 0] for label in classes.tolist()]
    real_labels = torch.cat([data.labels[index[:batch_size]] for index in members])
    if collaboration is None:
        zeros = torch.zeros(len(classes), data.spec.classes, device=data.device)
        collaboration = Collaboration(zeros, zeros[:, 0], 0.0, None)
    fixed = [
        averaging_matrix(real_labels, classes),
        averaging_matrix(labels, classes),
        collaboration.logits,
        collaboration.known,
    ]
    loss = partial(
        matching_loss,
        canvas,
        backbone,
        model,
        data.spec,
        match_logits,
        collaboration.weight,
        collaboration.projections,
    )
    trainer = Trainer.of(canvas, recipe)
    reported: list[Tensor] = []
    mean, std = channel_statistics(data.spec, data.device)
    black = -mean / std
    white = (1 - mean) / std
    for step in client.track(range(steps)):
        backbone.load_state_dict(client.model.state_dict())
        sampled(backbone)
        chosen = [
            index[torch.randperm(len(index), device=index.device)[:batch_size]] for index in members
        ]
        _, *terms = trainer.step(loss, data.pixels[torch.cat(chosen)], *fixed)
        canvas.images.data.clamp_(black, white)
        if step in (0, steps - 1):
            reported.append(torch.stack(terms))
    return canvas.images.detach().clone(), first_and_last_terms(
        ("matching", "collaboration"), reported
    )


def _frozen_copy(client: Client, name: str) -> Classifier:
    """Return a frozen copy of the client's network in evaluation mode.

    On a lane the module of this name and architecture is used again.
    """
    copied = lanes.lane_module((name, client.architecture), lambda: copy.deepcopy(client.model))
    copied.load_state_dict(client.model.state_dict())
    return copied.eval().requires_grad_(False)
