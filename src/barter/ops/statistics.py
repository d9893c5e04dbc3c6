"""Statistics of activations: renew those of batch norm, compare, whiten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from barter.compute import lanes, precision
from barter.core import robust
from barter.core.contracts import Floats, NonNegatives
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.payload import State

__all__ = [
    "Statistics",
    "combine_statistics",
    "compare_statistics",
    "norm_names",
    "normalise_by_batch",
    "read_statistics",
    "renew_batches",
    "renew_statistics",
    "renew_statistics_from",
    "replace_statistics",
    "running_means",
    "whiten",
    "whitening_transform",
]

MEAN, VARIANCE = "running_mean", "running_var"


class Statistics(TypedDict):
    """Running statistics of all normalisation layers of a network, concatenated.

    An algorithm whose clients answer with them defines `normalised`, the number of normalised
    channels.
    """

    means: Annotated[Tensor, Floats("normalised")]
    variances: Annotated[Tensor, NonNegatives("normalised")]


def _norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalisation layers that track running statistics."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]


def norm_names(model: nn.Module) -> set[str]:
    """Return the names in the model's state of all tensors of batch-norm layers.

    These are weights, biases, running statistics and counters.
    """
    names = set()
    for prefix, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            names |= {f"{prefix}.{name}".removeprefix(".") for name in layer.state_dict()}
    return names


def renew_statistics(model: Classifier, data: Images, batch_size: int) -> None:
    """Recompute the running statistics from these images under the current weights.

    There are `renew_batches` batches of nearly equal sizes, all with the same weight, in the order
    of the images and without augmentation; a single image is repeated. This is HeteroFL's static
    batch normalisation: training keeps no statistics, one pass afterwards computes them. The model
    is left in evaluation mode.
    """
    batches = renew_batches(len(data), batch_size)
    ends = torch.linspace(0, len(data), batches + 1).round().long().tolist()

    def images() -> Iterator[Tensor]:
        for start, end in pairwise(ends):
            index = torch.arange(start, end, device=data.device)
            yield data.batch(index if len(index) > 1 else index.repeat(2))

    renew_statistics_from(model, images())


@torch.no_grad()
def renew_statistics_from(model: Classifier, batches: Iterable[Tensor]) -> None:
    """Replace batch-norm running statistics by the mean of the batches' statistics.

    Every batch has the same weight. Only the normalisation layers are in training mode. The model
    is left in evaluation mode. Without such layers, no batch is read. Without batches, means are 0
    and variances 1.

    Args:
        model: The model.
        batches: Batches of normalised images.
    """
    norms = _norms(model)
    momenta = [layer.momentum for layer in norms]
    model.eval()
    if not norms:
        return
    for layer in norms:
        layer.train()
        layer.reset_running_stats()
        layer.momentum = None
    for x in batches:
        with precision.autocast(x.device):
            model(x)
        lanes.throttle()
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


@contextmanager
def normalise_by_batch(model: nn.Module) -> Iterator[None]:
    """Keep batch-norm running statistics unchanged inside the block.

    In training mode, layers normalise by the batch as usual; in evaluation mode, by the running
    statistics.
    """
    norms = _norms(model)
    for layer in norms:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in norms:
            layer.track_running_stats = True


def renew_batches(n_images: int, batch_size: int) -> int:
    """Return the number of batches of `renew_statistics`.

    It is n_images // batch_size, at least 1.
    """
    return max(1, n_images // batch_size)


def running_means(names: Iterable[str]) -> list[str]:
    """Return the names among a state's that are running means, in order."""
    return [name for name in names if name.endswith(MEAN)]


def read_statistics(state: Mapping[str, Tensor]) -> Statistics:
    """Return the running statistics of a network's state, all layers concatenated.

    There must be at least one layer with such statistics.
    """
    means = running_means(state)
    variances = [name.removesuffix(MEAN) + VARIANCE for name in means]
    return {
        "means": torch.cat([state[name] for name in means]),
        "variances": torch.cat([state[name] for name in variances]),
    }


def replace_statistics(state: Mapping[str, Tensor], statistics: Statistics) -> State:
    """Return a network's state with these running statistics instead of its own.

    Counters of batches keep their values.

    Raises:
        RuntimeError: If the statistics do not have the total width of the state's layers.
    """
    replaced = dict(state)
    names = running_means(state)
    widths = [len(state[name]) for name in names]
    means = torch.split(statistics["means"], widths)
    variances = torch.split(statistics["variances"], widths)
    for name, mean, variance in zip(names, means, variances, strict=True):
        replaced[name] = mean.clone()
        replaced[name.removesuffix(MEAN) + VARIANCE] = variance.clone()
    return replaced


def combine_statistics(parts: Sequence[Statistics], batches: Sequence[int]) -> Statistics:
    """Combine several parties' statistics into those of one pass over all batches.

    `renew_statistics` gives every batch the same weight, and a batch in training mode is normalised
    by itself. A party's statistics therefore do not depend on the others' batches, and the mean
    weighted by the numbers of batches is exact. A run with a defence on states uses its robust
    aggregate instead.

    Args:
        parts: The statistics of the same weights at each party.
        batches: The number of batches in each party's pass, which a defence ignores unless it is a
            mean over selected clients.
    """
    weights = torch.tensor(batches, dtype=torch.double) / sum(batches)

    def mean(rows: list[Tensor]) -> Tensor:
        stacked = torch.stack(rows)
        if robust.active().defends("states"):
            kept = weights if robust.active().keeps_weights("states") else torch.ones(len(rows))
            return robust.aggregate(stacked, "states", kept.to(stacked.device)[:, None])
        return (weights.to(stacked.device) @ stacked.double()).to(stacked.dtype)

    return {
        "means": mean([part["means"] for part in parts]),
        "variances": mean([part["variances"] for part in parts]),
    }


@contextmanager
def compare_statistics(model: nn.Module, weights: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Compare the activations of forward passes inside with the running statistics.

    Args:
        model: The network, whose normalisation layers are compared.
        weights: Weight of each image (images,); equal weights if None.

    Yields:
        A list to which each forward pass appends one scalar per normalisation layer, with gradient
        and in the order of execution: the Euclidean distance of the channels' means of the layer's
        input from the running means, plus that of the variances (DeepInversion).
    """
    distances: list[Tensor] = []

    def compare(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        x = x.reshape(*x.shape[:2], -1)
        image_weights = torch.ones_like(x[:, 0, 0]) if weights is None else weights
        counts = image_weights[:, None, None].expand_as(x)
        total = counts.sum((0, 2)).clamp_min(1e-8)
        mean = (counts * x).sum((0, 2)) / total
        var = (counts * (x - mean[:, None]).square()).sum((0, 2)) / total
        distances.append((layer.running_var - var).norm() + (layer.running_mean - mean).norm())

    hooks = [layer.register_forward_pre_hook(compare) for layer in _norms(model)]
    try:
        yield distances
    finally:
        for hook in hooks:
            hook.remove()


def whitening_transform(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the mean of the rows, and the symmetric matrix that whitens them.

    The whitened rows are `(x - mean) @ matrix`.

    Args:
        x: The rows (rows, width).
        floor: A direction of variance v is scaled by 1 / sqrt(v + floor * mean variance), so that
            those of little variance, mostly noise, are amplified less; 0 whitens exactly.
    """
    rows = x.double()
    mean = rows.mean(0)
    # A single column has a covariance without dimensions.
    covariance = torch.cov(rows.T, correction=0).reshape(x.shape[1], x.shape[1])
    values, vectors = torch.linalg.eigh(covariance)
    # The variance is zero in all directions if the rows are equal.
    scale = (values.clamp_min(0) + floor * values.mean()).clamp_min(1e-12).rsqrt()
    return mean.to(x), ((vectors * scale) @ vectors.T).to(x)


def whiten(layers: Iterable[nn.Linear], outputs: Tensor, floor: float) -> None:
    """Change linear layers in place so that their outputs are whitened.

    Args:
        layers: The layers, which share one output space.
        outputs: Their outputs (rows, width) before the change, by which the matrix is computed.
        floor: See `whitening_transform`.
    """
    mean, matrix = whitening_transform(outputs, floor)
    with torch.no_grad():
        for layer in layers:
            layer.bias.copy_(matrix @ (layer.bias - mean))
            layer.weight.copy_(matrix @ layer.weight)
