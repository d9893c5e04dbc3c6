"""Activations by name, as the kernels know them and as torch does them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NAMES", "NONE", "RELU", "Activation", "activated"]

Activation: TypeAlias = tuple[str, float]  # its name, and the slope on its negative side

NONE: Activation = ("none", 0.0)
RELU: Activation = ("relu", 0.0)
NAMES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.LeakyReLU: "leaky",
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def activated(z: Tensor, act: Activation) -> Tensor:
    """The activation, as torch does it."""
    name, slope = act
    return F.leaky_relu(z, slope) if name == "leaky" else FUNCTIONS[name](z)
