"""Batches of a training step: tensors, and tuples of tensors with named parts.

A captured graph reads its inputs from fixed places, which are single tensors. A loss is easier to
read if its arguments have names. So a loss may take NamedTuples and tuples of tensors, nested as
it likes, and they are flattened here, once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

__all__ = ["Batch", "flatten", "refill", "shape_key"]

# A tensor, None for an argument that is left out, or a tuple or NamedTuple of such.
Batch: TypeAlias = "Tensor | tuple[Batch, ...] | None"


def flatten(batch: Sequence[Batch]) -> list[Tensor]:
    """Return a batch's tensors in order, those of nested tuples too, without None.

    Raises:
        TypeError: If it holds anything but tensors, None and tuples of them.
    """
    tensors: list[Tensor] = []
    for item in batch:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, tuple):
            tensors += flatten(item)
        elif item is not None:
            raise TypeError(
                f"a batch holds a {type(item).__name__}; "
                "a loss takes tensors, None, and tuples or NamedTuples of them"
            )
    return tensors


def shape_key(batch: Sequence[Batch]) -> Hashable:
    """Return a key equal for batches of the same structure, shapes and dtypes."""
    parts: list[Hashable] = []
    for item in batch:
        if isinstance(item, Tensor):
            parts.append((item.shape, item.dtype))
        elif item is None:
            parts.append(None)
        else:
            parts.append((type(item), shape_key(item)))
    return tuple(parts)


def refill(batch: Sequence[Batch], tensors: Iterable[Tensor]) -> list[Batch]:
    """Return a batch of the same structure with other tensors.

    Args:
        batch: The batch whose structure is used; it is not changed.
        tensors: The new tensors, in the order of `flatten`; None stays None.
    """
    remaining = iter(tensors)
    return [_refill_item(item, remaining) for item in batch]


def _refill_item(item: Batch, remaining: Iterator[Tensor]) -> Batch:
    """Return one item of a batch with the next tensors in place of its own."""
    if item is None:
        return None
    if isinstance(item, Tensor):
        return next(remaining)
    parts = tuple(_refill_item(part, remaining) for part in item)
    # A NamedTuple's class takes its fields one by one.
    return item._make(parts) if hasattr(item, "_make") else parts
