"""The same network, narrower: fewer channels in every layer but the images and the classes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from barter.core.errors import ConfigError
from barter.core.model import Classifier

__all__ = ["narrow", "narrowed", "scaled", "widened", "without_running_statistics"]

SIZES = ("in_channels", "out_channels", "groups", "in_features", "out_features", "num_features")


def narrow(width: int, rate: float) -> int:
    """How many of so many channels are left at this rate, at least one."""
    return math.ceil(rate * width)


def narrowed(network: Classifier, rate: float) -> Classifier:
    """A copy of the network with the first channels of every layer.

    Layers are taken in the order in which they were registered: the first has all its inputs, the last all its outputs.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"rate={rate}: a part of a network's width is > 0 and <= 1")
    model = copy.deepcopy(network)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | _BatchNorm)]
    weighted = [layer for layer in layers if not isinstance(layer, _BatchNorm)]
    before, seen = 0, set[int]()  # outputs of the layer before, and of all until there
    for layer in layers:
        _note_size(layer)
        if isinstance(layer, _BatchNorm):
            _cut_norm(layer, narrow(layer.num_features, rate))
            continue
        inputs, outputs = (int(n) for n in _sizes(layer))
        left = outputs if layer is weighted[-1] else narrow(outputs, rate)
        entering = inputs
        if layer is not weighted[0]:
            flat = isinstance(layer, nn.Linear) and inputs % before == 0  # channels times positions
            if not flat and inputs not in seen:
                name = next(at for at, m in model.named_modules() if m is layer)
                raise ConfigError(
                    f"{type(getattr(network, 'body', network)).__name__} cannot be cut by width: {name} has {inputs} "
                    "inputs, and no layer before it so many outputs; use a network without concatenations, such as "
                    "small-cnn or resnet18"
                )
            entering = inputs // before * narrow(before, rate) if flat else narrow(inputs, rate)
        _cut(layer, entering, left)
        before = outputs
        seen.add(outputs)
    return model


def widened(part: Classifier) -> Classifier:
    """Return a copy of a narrowed network at the width it was cut from; weights that were cut are zero."""
    model = copy.deepcopy(part)
    for layer in model.modules():
        uncut: _Uncut | None = getattr(layer, "uncut", None)
        if uncut is None:
            continue
        for name, size in uncut.sizes.items():
            setattr(layer, name, size)
        for name, shape in uncut.shapes.items():
            old = getattr(layer, name)
            new = torch.zeros(shape, dtype=old.dtype, device=old.device)
            setattr(layer, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
        del layer.uncut
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class _Uncut:
    """Sizes and shapes of a layer before it was cut."""

    sizes: dict[str, int]
    shapes: dict[str, torch.Size]


def _note_size(layer: nn.Module) -> None:
    """Have a layer remember its size, which does not follow from what is left once it is cut.

    A depthwise convolution of which one channel is left, for example, looks like one on grey images.
    """
    sizes = {name: getattr(layer, name) for name in SIZES if hasattr(layer, name)}
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    layer.uncut = _Uncut(sizes, {name: tensor.shape for name, tensor in tensors})  # type: ignore[assignment]


def _sizes(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def _cut(layer: nn.Conv2d | nn.Linear, inputs: int, outputs: int) -> None:
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = inputs, outputs
        weight = layer.weight[:outputs, :inputs]
    else:
        if layer.groups not in (1, layer.in_channels):
            raise ConfigError(
                f"a convolution of {layer.groups} groups cannot be cut by width; use another network"
            )
        layer.groups = 1 if layer.groups == 1 else inputs
        layer.in_channels, layer.out_channels = inputs, outputs
        weight = layer.weight[:outputs, : inputs // layer.groups]
    layer.weight = nn.Parameter(weight.detach().clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[:outputs].detach().clone())


def _cut_norm(layer: _BatchNorm, left: int) -> None:
    layer.num_features = left
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.ndim:
            part = tensor[:left].detach().clone()
            setattr(layer, name, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part)


def scaled(network: Classifier, rate: float) -> Classifier:
    """The network with hidden outputs divided by the rate in training, as large as if no channel were missing."""
    weighted = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in weighted[:-1]:
        layer.register_forward_hook(partial(_divided, rate))
    return network


def _divided(rate: float, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output / rate if layer.training else output


class BatchStatistics(_BatchNorm):
    """Normalisation by the batch's own statistics, in training and in evaluation, of one image as well as of many."""

    def __init__(self, like: _BatchNorm) -> None:
        super().__init__(like.num_features, like.eps, affine=like.affine, track_running_stats=False)
        self.weight, self.bias = like.weight, like.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)


def without_running_statistics(network: Classifier) -> Classifier:
    """The network with normalisation by the batch's own statistics."""
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, _BatchNorm):
                setattr(parent, name, BatchStatistics(layer))
    return network
