"""Means and variances: those that batch normalisation keeps, renewed on data; whitening by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from barter.compute import lanes, precision
from barter.core.contracts import Floats, NonNegatives
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.payload import State

__all__ = [
    "Statistics",
    "by_batch",
    "combine_statistics",
    "compared",
    "norm_names",
    "read_statistics",
    "renew",
    "renew_batches",
    "renew_from",
    "replace_statistics",
    "running_means",
    "whiten",
    "whitening",
]

MEAN, VARIANCE = "running_mean", "running_var"


class Statistics(TypedDict):
    """The running statistics of all of a network's normalisation layers, one layer after the other.

    An algorithm whose clients answer with them has `normalised`, the number of normalised channels.
    """

    means: Annotated[Tensor, Floats("normalised")]
    variances: Annotated[Tensor, NonNegatives("normalised")]


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]


def norm_names(model: nn.Module) -> set[str]:
    """The names of all that batch normalisation holds in a network: weights, biases, statistics, counters."""
    layers = [(at, layer) for at, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return {f"{at}.{name}".removeprefix(".") for at, layer in layers for name in layer.state_dict()}


def renew(model: Classifier, data: Images, batch_size: int) -> None:
    """Give normalisation the statistics of these images under the weights as they are now, each batch counting alike.

    HeteroFL's static batch normalisation: training leaves no statistics, one pass afterwards does.
    """
    batches = renew_batches(len(data), batch_size)
    ends = torch.linspace(0, len(data), batches + 1).round().long().tolist()

    def images() -> Iterator[Tensor]:
        for start, end in pairwise(ends):
            index = torch.arange(start, end, device=data.device)
            yield data.batch(index if len(index) > 1 else index.repeat(2))

    renew_from(model, images())


@torch.no_grad()
def renew_from(model: Classifier, batches: Iterable[Tensor]) -> None:
    """Give normalisation the mean statistics of these batches of images as a network sees them."""
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
        lanes.breathe()
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


@contextmanager
def by_batch(model: nn.Module) -> Iterator[None]:
    """Inside, a network in training mode normalises by its batch and leaves its running statistics as they are."""
    norms = _norms(model)
    for layer in norms:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in norms:
            layer.track_running_stats = True


def renew_batches(n_images: int, batch_size: int) -> int:
    """Return the number of batches in which `renew` passes over the images."""
    return max(1, n_images // batch_size)


def running_means(names: Iterable[str]) -> list[str]:
    """Return those names of a network's state under which running means are."""
    return [name for name in names if name.endswith(MEAN)]


def read_statistics(state: Mapping[str, Tensor]) -> Statistics:
    """Return the running statistics of a network's state, which must have some."""
    means = running_means(state)
    variances = [name.removesuffix(MEAN) + VARIANCE for name in means]
    return {
        "means": torch.cat([state[name] for name in means]),
        "variances": torch.cat([state[name] for name in variances]),
    }


def replace_statistics(state: Mapping[str, Tensor], statistics: Statistics) -> State:
    """Return a network's state with these running statistics instead of its own."""
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
    """Return the statistics of one pass over all parties' batches, from those of a pass by each party.

    `renew` gives every batch the same weight, and a batch in training mode is normalised by itself. So what one party's
    batches yield does not depend on the others', and the mean weighted by batches is exact.

    Args:
        parts: The statistics of the same weights at each party.
        batches: The number of batches in each party's pass.
    """
    shares = torch.tensor(batches, dtype=torch.double) / sum(batches)

    def mean(rows: list[Tensor]) -> Tensor:
        stacked = torch.stack(rows)
        return (shares.to(stacked.device) @ stacked.double()).to(stacked.dtype)

    return {
        "means": mean([part["means"] for part in parts]),
        "variances": mean([part["variances"] for part in parts]),
    }


@contextmanager
def compared(model: nn.Module, weights: Tensor | None = None) -> Iterator[list[Tensor]]:
    """What a network sees inside, compared with the statistics that its normalisation keeps: for every such layer the
    distances between means and between variances (DeepInversion). Images count alike, or by their weights."""
    found: list[Tensor] = []

    def compare(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        x = x.reshape(*x.shape[:2], -1)
        counts = (torch.ones_like(x[:, 0, 0]) if weights is None else weights)[
            :, None, None
        ].expand_as(x)
        total = counts.sum((0, 2)).clamp_min(1e-8)
        mean = (counts * x).sum((0, 2)) / total
        var = (counts * (x - mean[:, None]).square()).sum((0, 2)) / total
        found.append((layer.running_var - var).norm() + (layer.running_mean - mean).norm())

    hooks = [layer.register_forward_pre_hook(compare) for layer in _norms(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def whitening(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """The mean of the rows, and the symmetric matrix that makes their directions vary alike once it is taken away.

    A direction that varies less than `floor` times the average is amplified less, for it is mostly noise.
    """
    mean, rows = x.double().mean(0), x.double()
    values, vectors = torch.linalg.eigh(
        torch.cov(rows.T, correction=0).reshape(x.shape[1], x.shape[1])
    )
    # rows may all be equal
    scale = (values.clamp_min(0) + floor * values.mean()).clamp_min(1e-12).rsqrt()
    return mean.to(x), ((vectors * scale) @ vectors.T).to(x)


def whiten(layers: Iterable[nn.Linear], outputs: Tensor, floor: float) -> None:
    """Change linear layers so that what they gave these outputs for varies alike in all directions."""
    mean, matrix = whitening(outputs, floor)
    with torch.no_grad():
        for layer in layers:
            layer.bias.copy_(matrix @ (layer.bias - mean))
            layer.weight.copy_(matrix @ layer.weight)
