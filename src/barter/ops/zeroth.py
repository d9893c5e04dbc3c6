"""Zeroth-order gradient estimates, for functions that can only be evaluated."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["DirectionKind", "directional_estimate", "loss_estimate", "sample_directions", "waves"]

DirectionKind: TypeAlias = Literal["sphere", "gaussian"]


def waves(size: int, count: int, device: torch.device) -> Tensor:
    """Return the lowest frequencies of the cosine transform, as orthonormal columns.

    Args:
        size: Length of each column.
        count: Number of frequencies, from 0.
        device: Device of the result.

    Returns:
        A matrix (size, count).
    """
    positions = (torch.arange(size, device=device) + 0.5) / size
    rows: Tensor = torch.cos(math.pi * positions[:, None] * torch.arange(count, device=device))
    unit: Tensor = rows / rows.norm(dim=0)
    return unit


def sample_directions(
    x: Tensor, q: int, kind: DirectionKind, frequencies: int | None = None
) -> Tensor:
    """Return q random directions for every sample of a batch.

    Args:
        x: The batch; only its shape and device are used.
        q: Number of directions.
        kind: "sphere" gives every sample directions of length 1, "gaussian" standard normal ones.
        frequencies: Number of lowest frequencies to use along each of the last two axes; None uses
            all. In a space of few dimensions, few directions give a better estimate, and fine
            patterns that only fool a network are left out (low-frequency perturbations, Guo et al.
            2019).

    Returns:
        Directions (q, *x.shape).
    """
    if frequencies is None:
        u = torch.randn(q, *x.shape, device=x.device)
    else:
        height, width = x.shape[-2:]
        vertical = waves(height, min(frequencies, height), x.device)
        horizontal = waves(width, min(frequencies, width), x.device)
        n_frequencies = (vertical.shape[1], horizontal.shape[1])
        coefficients = torch.randn(q, *x.shape[:-2], *n_frequencies, device=x.device)
        u = vertical @ coefficients @ horizontal.T
    if kind == "gaussian":
        return u
    lengths = u.flatten(2).norm(dim=2)
    unit: Tensor = u / lengths.view(q, len(x), *[1] * (x.ndim - 1))
    return unit


def _factor(u: Tensor, kind: DirectionKind, frequencies: int | None) -> float:
    """Return the factor that makes an estimate unbiased.

    E[u uᵀ] is the identity for Gaussian directions and 1/d times the identity on the sphere; with d
    frequencies, the projection on them takes the place of the identity.
    """
    if kind == "gaussian":
        return 1.0
    if frequencies is None:
        return float(u[0, 0].numel())
    n_frequencies = [min(frequencies, size) for size in u.shape[-2:]]
    return float(math.prod([*u.shape[2:-2], *n_frequencies]))


def loss_estimate(
    u: Tensor, differences: Tensor, eps: float, kind: DirectionKind, frequencies: int | None = None
) -> Tensor:
    """Estimate the gradient of a scalar loss of a whole batch, in the batch's shape.

    Args:
        u: The directions (q, *batch) of `sample_directions`.
        differences: L(x + ε u) - L(x) for each direction (q,).
        eps: ε, the length of the difference step.
        kind: Kind of the directions.
        frequencies: The `frequencies` of the directions.
    """
    slopes = differences.view(len(u), *[1] * (u.ndim - 1)) / eps
    return _factor(u, kind, frequencies) * (slopes * u).mean(0)


def directional_estimate(
    u: Tensor,
    outputs: Tensor,
    base: Tensor,
    cotangent: Tensor,
    eps: float,
    kind: DirectionKind,
    frequencies: int | None = None,
) -> Tensor:
    """Estimate the gradient of ⟨cotangent, f(x)⟩ with respect to x, sample by sample.

    The differences of f are contracted with the exact derivative of the loss with respect to f, so
    that no sample gets the noise of another.

    Args:
        u: The directions (q, *batch) of `sample_directions`.
        outputs: f(x + ε u) for each direction (q, B, C).
        base: f(x), (B, C).
        cotangent: Derivative of the loss with respect to f (B, C).
        eps: ε, the length of the difference step.
        kind: Kind of the directions.
        frequencies: The `frequencies` of the directions.
    """
    slopes = ((outputs.double() - base.double()) * cotangent.double()).sum(-1) / eps  # (q, B)
    weights = slopes.to(u.dtype).view(*slopes.shape, *[1] * (u.ndim - 2))
    return _factor(u, kind, frequencies) * (weights * u).mean(0)
