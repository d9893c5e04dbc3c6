"""Gradients through functions that can only be asked for values: zeroth-order estimates."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Direction", "directional", "directions", "loss_estimate", "waves"]

Direction: TypeAlias = Literal["sphere", "gaussian"]


def waves(size: int, count: int, device: torch.device) -> Tensor:
    """The lowest frequencies of the cosine transform (size, count), orthonormal."""
    places = (torch.arange(size, device=device) + 0.5) / size
    rows: Tensor = torch.cos(math.pi * places[:, None] * torch.arange(count, device=device))
    unit: Tensor = rows / rows.norm(dim=0)
    return unit


def directions(x: Tensor, q: int, kind: Direction, frequencies: int | None = None) -> Tensor:
    """q random directions for every sample of a batch: on the unit sphere, or Gaussian.

    Of so many of the lowest frequencies a side, or of all: few directions tell more of a space with few dimensions, and
    fine patterns that only fool a network are left alone (low-frequency perturbations, Guo et al. 2019).
    """
    if frequencies is None:
        u = torch.randn(q, *x.shape, device=x.device)
    else:
        high, wide = (waves(size, min(frequencies, size), x.device) for size in x.shape[-2:])
        u = (
            high
            @ torch.randn(q, *x.shape[:-2], high.shape[1], wide.shape[1], device=x.device)
            @ wide.T
        )
    if kind == "gaussian":
        return u
    lengths = u.flatten(2).norm(dim=2)
    unit: Tensor = u / lengths.view(q, len(x), *[1] * (x.ndim - 1))
    return unit


def _factor(u: Tensor, kind: Direction, frequencies: int | None) -> float:
    """E[u uᵀ] is 1/d times the identity on the sphere and the identity for Gaussian directions; of d frequencies, the
    projection on them in its place."""
    if kind == "gaussian":
        return 1.0
    if frequencies is None:
        return float(u[0, 0].numel())
    return float(math.prod([*u.shape[2:-2], *(min(frequencies, size) for size in u.shape[-2:])]))


def loss_estimate(
    u: Tensor, differences: Tensor, eps: float, kind: Direction, frequencies: int | None = None
) -> Tensor:
    """The gradient of a scalar loss of the whole batch, from one difference L(x + ε u) - L(x) for each direction."""
    slopes = differences.view(len(u), *[1] * (u.ndim - 1)) / eps
    return _factor(u, kind, frequencies) * (slopes * u).mean(0)


def directional(
    u: Tensor,
    outputs: Tensor,
    base: Tensor,
    cotangent: Tensor,
    eps: float,
    kind: Direction,
    frequencies: int | None = None,
) -> Tensor:
    """The gradient with respect to x of ⟨cotangent, f(x)⟩, from f at x and at x + ε u, sample by sample.

    f is (B, C) for every direction; its differences are contracted with the exact derivative of the loss with respect
    to f, so that no sample sees the noise of another.
    """
    slopes = ((outputs.double() - base.double()) * cotangent.double()).sum(-1) / eps  # (q, B)
    weights = slopes.to(u.dtype).view(*slopes.shape, *[1] * (u.ndim - 2))
    return _factor(u, kind, frequencies) * (weights * u).mean(0)
