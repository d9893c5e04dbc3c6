"""Narrow networks: fewer channels in every layer except for inputs and classes."""

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

__all__ = [
    "narrow_network",
    "narrow_width",
    "scale_activations",
    "widen_network",
    "without_running_statistics",
]

SIZES = ("in_channels", "out_channels", "groups", "in_features", "out_features", "num_features")


def narrow_width(width: int, rate: float) -> int:
    """Return the number of channels left at this rate: rate * width, rounded up."""
    return math.ceil(rate * width)


def narrow_network(network: Classifier, rate: float) -> Classifier:
    """Copy a network, keeping the first channels of every layer and their weights.

    Numbers of channels are rounded up. Layers are processed in the order in which they were
    registered: the first keeps all its inputs, the last all its outputs.

    Args:
        network: The full network.
        rate: Fraction of the channels to keep.

    Raises:
        ConfigError: If the rate is not in (0, 1], a layer's inputs do not match an earlier layer,
            or a convolution has groups and is not depthwise.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"rate={rate}: a part of a network's width is > 0 and <= 1")
    model = copy.deepcopy(network)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | _BatchNorm)]
    weighted = [layer for layer in layers if not isinstance(layer, _BatchNorm)]
    previous = 0  # outputs of the layer before
    earlier: set[int] = set()  # outputs of all layers before
    for layer in layers:
        _note_size(layer)
        if isinstance(layer, _BatchNorm):
            _cut_norm(layer, narrow_width(layer.num_features, rate))
            continue
        inputs, outputs = _sizes(layer)
        new_outputs = outputs if layer is weighted[-1] else narrow_width(outputs, rate)
        new_inputs = inputs
        if layer is not weighted[0]:
            # The inputs of a linear layer may be channels times positions.
            flattened = isinstance(layer, nn.Linear) and inputs % previous == 0
            if not flattened and inputs not in earlier:
                name = next(key for key, m in model.named_modules() if m is layer)
                raise ConfigError(
                    f"{type(getattr(network, 'body', network)).__name__} cannot be cut by width: "
                    f"{name} has {inputs} inputs, and no layer before it has as many outputs; "
                    "use a network without concatenations, such as small-cnn or resnet18"
                )
            new_inputs = narrow_width(inputs, rate)
            if flattened:
                new_inputs = inputs // previous * narrow_width(previous, rate)
        _cut(layer, new_inputs, new_outputs)
        previous = outputs
        earlier.add(outputs)
    return model


def widen_network(part: Classifier) -> Classifier:
    """Return a copy of a network that `narrow_network` made, at its original width.

    All tensors of convolutions, linear layers and batch normalisations are zero, with the original
    shapes. A network that was never narrowed is only copied.
    """
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
    """Sizes and tensor shapes of a layer before it was cut."""

    sizes: dict[str, int]
    shapes: dict[str, torch.Size]


def _note_size(layer: nn.Module) -> None:
    """Store a layer's original size in the layer.

    It does not follow from what is left after the cut: a depthwise convolution of which one channel
    is left, for example, cannot be distinguished from one on grey images.
    """
    sizes = {name: getattr(layer, name) for name in SIZES if hasattr(layer, name)}
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    layer.uncut = _Uncut(sizes, {name: tensor.shape for name, tensor in tensors})  # type: ignore[assignment]


def _sizes(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def _cut(layer: nn.Conv2d | nn.Linear, inputs: int, outputs: int) -> None:
    """Cut a layer in place to its first inputs and outputs.

    Raises:
        ConfigError: The layer is a grouped convolution, unless it is depthwise.
    """
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
    """Cut a normalisation in place to its first channels."""
    layer.num_features = left
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.ndim:
            part = tensor[:left].detach().clone()
            setattr(layer, name, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part)


def scale_activations(network: Classifier, rate: float) -> Classifier:
    """Divide hidden outputs by the rate in training, to make up for missing channels.

    These are the outputs of all convolutions and linear layers but the last. The network gets
    forward hooks in place and is returned.
    """
    weighted = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in weighted[:-1]:
        layer.register_forward_hook(partial(_divide_output, rate))
    return network


def _divide_output(
    rate: float, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Divide a layer's output by the rate if the layer is in training mode."""
    return output / rate if layer.training else output


class BatchStatistics(_BatchNorm):
    """Batch normalisation by the batch's statistics, in evaluation mode too.

    A batch of one image works too.
    """

    def __init__(self, like: _BatchNorm) -> None:
        super().__init__(like.num_features, like.eps, affine=like.affine, track_running_stats=False)
        self.weight = like.weight
        self.bias = like.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)


def without_running_statistics(network: Classifier) -> Classifier:
    """Make batch normalisation use the batch's statistics, also in evaluation mode.

    The network is changed in place and returned; its running statistics are dropped from its state.
    """
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, _BatchNorm):
                setattr(parent, name, BatchStatistics(layer))
    return network
