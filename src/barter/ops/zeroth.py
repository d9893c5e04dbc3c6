"""Gradients through functions that can only be asked for values: zeroth-order estimates."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Direction", "directional", "directions", "loss_estimate"]

Direction: TypeAlias = Literal["sphere", "gaussian"]


def directions(x: Tensor, q: int, kind: Direction) -> Tensor:
    """q random directions for every sample of a batch: on the unit sphere, or Gaussian."""
    u = torch.randn(q, *x.shape, device=x.device)
    if kind == "gaussian":
        return u
    lengths = u.flatten(2).norm(dim=2)
    unit: Tensor = u / lengths.view(q, len(x), *[1] * (x.ndim - 1))
    return unit


def _factor(u: Tensor, kind: Direction) -> float:
    """E[u uᵀ] is 1/d times the identity on the sphere and the identity for Gaussian directions."""
    return float(u[0, 0].numel()) if kind == "sphere" else 1.0


def loss_estimate(u: Tensor, differences: Tensor, eps: float, kind: Direction) -> Tensor:
    """The gradient of a scalar loss of the whole batch, from one difference L(x + ε u) - L(x) for each direction."""
    slopes = differences.view(len(u), *[1] * (u.ndim - 1)) / eps
    return _factor(u, kind) * (slopes * u).mean(0)


def directional(u: Tensor, outputs: Tensor, base: Tensor, cotangent: Tensor, eps: float, kind: Direction) -> Tensor:
    """The gradient with respect to x of ⟨cotangent, f(x)⟩, from f at x and at x + ε u, sample by sample.

    f is (B, C) for every direction; its differences are contracted with the exact derivative of the loss with respect
    to f, so that no sample sees the noise of another.
    """
    slopes = ((outputs.double() - base.double()) * cotangent.double()).sum(-1) / eps  # (q, B)
    weights = slopes.to(u.dtype).view(*slopes.shape, *[1] * (u.ndim - 2))
    return _factor(u, kind) * (weights * u).mean(0)
