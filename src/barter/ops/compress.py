"""Fewer numbers for an update: of each matrix, the largest of its singular values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from barter.compute.precision import exact
from barter.core.errors import PayloadError
from barter.core.payload import State

__all__ = ["Compressed", "compressed", "rank", "restored"]

Compressed: TypeAlias = list[
    list[Tensor]
]  # in the order of a network's tensors: each itself, or two factors of it
BLOCK = 128  # rows of a Gram matrix that are computed at a time


def rank(singular: Tensor, energy: float) -> int:
    """How many of the falling singular values have this share of the sum of all squares; at least one."""
    held = singular.double().square().cumsum(0)
    return min(1 + int((held < energy * held[-1]).sum()), len(singular))


def compressed(update: Mapping[str, Tensor], energy: float) -> Compressed:
    """Matrices, and kernels as matrices of outputs by inputs, as factors of low rank where that is less to send."""
    return [_factors(tensor, energy) for tensor in update.values()]


def _factors(tensor: Tensor, energy: float) -> list[Tensor]:
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return [tensor]
    matrix = tensor.flatten(1)
    rows, columns = matrix.shape
    singular, vectors = _spectrum(matrix if rows <= columns else matrix.T)
    kept = rank(singular, energy)
    if kept * (rows + columns) >= matrix.numel():
        return [tensor]
    basis = vectors[:, :kept].to(matrix.dtype)
    with exact():
        factors = [basis, basis.T @ matrix] if rows <= columns else [matrix @ basis, basis.T]
    return [factor.contiguous() for factor in factors]


def _spectrum(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the falling singular values of a matrix, and its left singular vectors as columns.

    They are taken from the Gram matrix, which is as small as the shorter side: for a layer of
    512 x 4608 that takes a quarter of the time of an SVD. Squares of float32 numbers need float64:
    it leaves singular values exact down to about 1e-8 of the largest.
    """
    matrix = wide.double()
    size = len(matrix)
    gram = matrix.new_zeros(size, size)
    with exact():
        for start in range(0, size, BLOCK):  # of a symmetric matrix eigh reads the lower half
            end = min(start + BLOCK, size)
            gram[start:end, :end] = matrix[start:end] @ matrix[:end].T
    values, vectors = torch.linalg.eigh(gram, UPLO="L")
    return values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)


def restored(parts: Compressed, like: Mapping[str, Tensor]) -> State:
    """The update again, for tensors such as these."""
    if len(parts) != len(like):
        raise PayloadError(f"a compressed update has {len(parts)} tensors, the network {len(like)}")
    return {
        name: _whole(part, old, name) for (name, old), part in zip(like.items(), parts, strict=True)
    }


def _whole(part: list[Tensor], old: Tensor, name: str) -> Tensor:
    """A tensor, or the product of its factors; of these the shapes first, for small ones can have a large product."""
    if all(tensor.dtype == old.dtype for tensor in part):
        if len(part) == 1 and part[0].shape == old.shape:
            return part[0]
        if len(part) == 2 and old.ndim > 1:
            rows, columns = old.flatten(1).shape
            kept = part[0].shape[-1] if part[0].ndim else 0
            if kept <= min(rows, columns) and (part[0].shape, part[1].shape) == (
                (rows, kept),
                (kept, columns),
            ):
                return (part[0] @ part[1]).view(old.shape)
    found = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in part)
    raise PayloadError(
        f"a compressed update is of another network: {name} is {found}, its {tuple(old.shape)}"
    )
