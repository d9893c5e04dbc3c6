"""Count floating-point operations as they are computed, forwards and backwards.

Matrix products, convolutions and attention count two operations for each multiplication and
addition. Element-wise work, normalisation, pooling and matrix decompositions do not count.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopCount", "add_flops", "count_flops", "mark_padding", "set_aside"]

aten = torch.ops.aten
# Attribute of a convolution's weight that holds more zeros than the layer has weights.
PADDING = "flop_share"


class FlopCount:
    """A number of floating-point operations."""

    def __init__(self) -> None:
        self.total = 0


def _product_with_vector(matrix: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * matrix.numel()


def _sum_of_product(added: Tensor, matrix: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * matrix.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    """Count attention's two products: queries with keys, and weights with values."""
    *batch, n_queries, width = query.shape
    n_keys = key.shape[-2]
    return 2 * math.prod(batch) * n_queries * n_keys * (width + value.shape[-1])


def _attention_backward(gradient: Tensor, *inputs: Any, **options: Any) -> int:
    # Kernels that compute the weights again would count more on one device than on another.
    return 2 * _attention(*inputs[:3])


def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *rest: Any, **options: Any
) -> int:
    """Count the projections and products of the fast path of `nn.MultiheadAttention`."""
    n, length, _ = query.shape
    n_keys = key.shape[1]
    projections = 4 * width * (length + n_keys) * width
    return n * (projections + 4 * length * n_keys * width)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return the operators that count, with their formulas."""
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for packet in [packet for packet in formulas if "attention" in str(packet)]:
        del formulas[packet]  # Replaced below: torch counts some kernels only.
    formulas |= {aten.mv: _product_with_vector, aten.dot: _product_with_vector}
    formulas[aten.addmv] = _sum_of_product
    for kind in ("flash", "efficient", "cudnn", "fused"):
        name = f"_scaled_dot_product_{kind}_attention"
        for ending in ("", "_for_cpu", "_overrideable"):
            if hasattr(aten, f"{name}{ending}"):
                formulas[getattr(aten, f"{name}{ending}")] = _attention
            if hasattr(aten, f"{name}{ending}_backward"):
                formulas[getattr(aten, f"{name}{ending}_backward")] = _attention_backward
    formulas[aten._native_multi_head_attention] = _multi_head_attention
    return formulas


FORMULAS = _formulas()
# Position of the weight among the arguments of an operator.
WEIGHT_POSITION: Mapping[Any, int] = {aten.convolution: 1, aten.convolution_backward: 2}


class _Counter(TorchDispatchMode):
    """Adds the operations of every operator to the current count."""

    def __init__(self, count: FlopCount) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        formula = FORMULAS.get(packet)
        if formula is not None:
            n = formula(*args, **kwargs, out_val=result)
            position = WEIGHT_POSITION.get(packet)
            share = None if position is None else getattr(args[position], PADDING, None)
            if share is not None:
                n = n * share[0] // share[1]
            self.count.total += n
        return result


_active = threading.local()


@contextmanager
def count_flops() -> Iterator[FlopCount]:
    """Count the floating-point operations of the block, and of backward passes in it.

    Matrix products, convolutions and attention of this thread count, two operations for each
    multiplication and addition; element-wise work, normalisation and pooling do not. A surrounding
    count does not include the operations of an inner one. Results of the block do not change.

    Yields:
        The count, whose `total` grows as the block runs.

    >>> import torch
    >>> from barter.compute.flops import count_flops
    >>> with count_flops() as count:
    ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> count.total
    48
    """
    if getattr(_active, "mode", None) is not None:
        with set_aside() as inner:
            yield inner
        return
    count = FlopCount()
    _active.mode = _Counter(count)
    try:
        with _active.mode:
            yield count
    finally:
        _active.mode = None


@contextmanager
def set_aside() -> Iterator[FlopCount]:
    """Leave the block's operations, such as an evaluation, out of the current count.

    Yields:
        The operations of the block; 0 if this thread counts none.
    """
    aside = FlopCount()
    mode: _Counter | None = getattr(_active, "mode", None)
    if mode is None:
        yield aside
        return
    outer = mode.count
    mode.count = aside
    try:
        yield aside
    finally:
        mode.count = outer


def add_flops(n: int) -> None:
    """Add n operations to this thread's current count; without one do nothing.

    It is for operations that PyTorch does not report, such as those of a replayed CUDA graph.
    """
    mode: _Counter | None = getattr(_active, "mode", None)
    if mode is not None:
        mode.count.total += n


def mark_padding(weight: Tensor, used: int, total: int) -> Tensor:
    """Mark a convolution's weight as padded, and return it.

    `used` in `total` of its values are not padding. Its operations then count used / total of their
    number, so that a layer counts the same, whether or not it is computed with a padded kernel. The
    mark is an attribute of this tensor; copies do not have it.
    """
    setattr(weight, PADDING, (used, total))
    return weight
