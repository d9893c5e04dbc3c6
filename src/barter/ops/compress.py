"""Low-rank compression of model updates by a truncated SVD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from barter.compute.precision import full_precision
from barter.core.contracts import Content
from barter.core.errors import PayloadError
from barter.core.payload import State

__all__ = ["Compressed", "compress_update", "decompress_update", "rank_for_energy"]

# In the order of a network's tensors; each entry holds the tensor itself or its two factors.
Compressed: TypeAlias = list[list[Annotated[Tensor, Content("weights")]]]
BLOCK = 128  # Rows of a Gram matrix that are computed at a time.


def rank_for_energy(singular: Tensor, energy: float) -> int:
    """Return how many singular values hold this fraction of the energy.

    Args:
        singular: Singular values in descending order.
        energy: Fraction of the sum of all squares.

    Returns:
        The smallest number of values whose squares sum to at least this fraction, at least 1.
    """
    cumulative = singular.double().square().cumsum(0)
    return min(1 + int((cumulative < energy * cumulative[-1]).sum()), len(singular))


def compress_update(update: Mapping[str, Tensor], energy: float) -> Compressed:
    """Compress each tensor of an update into low-rank factors where that is smaller.

    Kernels of convolutions are treated as matrices of outputs by inputs. Vectors and integer
    tensors stay as they are.

    Args:
        update: The tensors by name.
        energy: Fraction of each tensor's sum of squared singular values to keep.

    Returns:
        For each tensor, in order and without names, its two factors or a list of the tensor alone.
    """
    return [_factors(tensor, energy) for tensor in update.values()]


def _factors(tensor: Tensor, energy: float) -> list[Tensor]:
    """Return a tensor's two low-rank factors, or the tensor if they are not smaller.

    Vectors and integer tensors are returned as they are.

    Args:
        tensor: The tensor, whose axes after the first are flattened.
        energy: Fraction of the sum of squared singular values to keep.

    Returns:
        Two factors (rows, rank) and (rank, columns), or a list of the tensor alone.
    """
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return [tensor]
    matrix = tensor.flatten(1)
    rows, columns = matrix.shape
    singular, vectors = _spectrum(matrix if rows <= columns else matrix.T)
    n_values = rank_for_energy(singular, energy)
    if n_values * (rows + columns) >= matrix.numel():
        return [tensor]
    basis = vectors[:, :n_values].to(matrix.dtype)
    with full_precision():
        factors = [basis, basis.T @ matrix] if rows <= columns else [matrix @ basis, basis.T]
    return [factor.contiguous() for factor in factors]


def _spectrum(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular values of a matrix and its left singular vectors.

    The values are in descending order, the vectors are columns. They are computed from the Gram
    matrix, which is as small as the shorter side: for a layer of 512 x 4608 that takes a quarter of
    the time of an SVD. Squares of float32 numbers need float64, which leaves singular values exact
    down to about 1e-8 of the largest.
    """
    matrix = wide.double()
    size = len(matrix)
    gram = matrix.new_zeros(size, size)
    with full_precision():
        # Only the lower triangle is computed, because eigh reads nothing else.
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            gram[start:end, :end] = matrix[start:end] @ matrix[:end].T
    values, vectors = torch.linalg.eigh(gram, UPLO="L")
    return values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)


def decompress_update(parts: Compressed, like: Mapping[str, Tensor]) -> State:
    """Restore an update compressed by `compress_update`, multiplying out its factors.

    Args:
        parts: The compressed update.
        like: The network's tensors, in the order in which the update was compressed. Only names,
            shapes and dtypes are used.

    Returns:
        The update by name.

    Raises:
        PayloadError: If `parts` and `like` differ in the number of tensors, in dtypes or in shapes.
    """
    if len(parts) != len(like):
        raise PayloadError(f"a compressed update has {len(parts)} tensors, the network {len(like)}")
    return {
        name: _restore(part, old, name)
        for (name, old), part in zip(like.items(), parts, strict=True)
    }


def _restore(part: list[Tensor], old: Tensor, name: str) -> Tensor:
    """Return one tensor of an update, multiplying its factors if there are two.

    Shapes are checked before multiplying, because small factors can have a huge product.

    Raises:
        PayloadError: If dtypes or shapes do not fit the tensor `old`, or the rank exceeds its
            smaller side.
    """
    if all(tensor.dtype == old.dtype for tensor in part):
        if len(part) == 1 and part[0].shape == old.shape:
            return part[0]
        if len(part) == 2 and old.ndim > 1:
            rows, columns = old.flatten(1).shape
            left, right = part
            inner = left.shape[-1] if left.ndim else 0
            fits = left.shape == (rows, inner) and right.shape == (inner, columns)
            if fits and inner <= min(rows, columns):
                return (left @ right).view(old.shape)
    found = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in part)
    raise PayloadError(
        f"a compressed update does not fit the network: {name} is {found}, "
        f"the network's is {tuple(old.shape)}"
    )
