"""Activation functions by name, for the Triton kernels and for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ACTIVATION_NAMES", "NONE", "RELU", "Activation", "apply_activation"]

Activation: TypeAlias = tuple[str, float]  # name, and slope for negative inputs (leaky ReLU)

NONE: Activation = ("none", 0.0)
RELU: Activation = ("relu", 0.0)
ACTIVATION_NAMES: dict[type[nn.Module], str] = {
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


def apply_activation(z: Tensor, act: Activation) -> Tensor:
    """Apply an activation, a pair of its name and its slope, with torch's operations.

    The slope counts for "leaky" only.
    """
    name, slope = act
    return F.leaky_relu(z, slope) if name == "leaky" else FUNCTIONS[name](z)
