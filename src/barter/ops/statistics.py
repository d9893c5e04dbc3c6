"""Means and variances: those that batch normalisation keeps, renewed on data; whitening by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from barter.compute import lanes, precision
from barter.core.images import Images
from barter.core.model import Classifier

__all__ = ["compared", "norm_names", "renew", "whiten", "whitening"]


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


@torch.no_grad()
def renew(model: Classifier, data: Images, batch_size: int) -> None:
    """Give normalisation the statistics of these images under the weights as they are now, each batch counting alike.

    HeteroFL's static batch normalisation: training leaves no statistics, one pass afterwards does.
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
    ends = torch.linspace(0, len(data), max(1, len(data) // batch_size) + 1).round().long().tolist()
    for start, end in pairwise(ends):
        index = torch.arange(start, end, device=data.device)
        with precision.autocast(data.device):
            model(data.batch(index if len(index) > 1 else index.repeat(2)))
        lanes.breathe()
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


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
