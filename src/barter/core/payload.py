"""Payloads that parties exchange: trees of tensors and plain values.

A tree consists of dict (with str or int keys), list and tuple; its leaves are tensors, str, int,
float, bool and None. It is never pickled: `pack` converts it to named tensors and a JSON header,
and `unpack` converts it back.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from barter.core.errors import PayloadError, summarise_error

__all__ = [
    "Payload",
    "State",
    "infinite_leaves",
    "isolate",
    "leaves",
    "map_leaves",
    "mark",
    "nbytes",
    "origin",
    "pack",
    "to_floats",
    "unpack",
]

State: TypeAlias = dict[str, Tensor]
Payload: TypeAlias = Any
T = TypeVar("T")

PLAIN_TYPES = (str, int, float, bool, type(None))
MIN_INT = -(2**63)  # The smallest integer that fits into 64 bits.
# Largest depth of a received tree; the recursion limit itself depends on the version of Python.
DEPTH = 100
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def map_leaves(tree: Payload, leaf: Callable[[str, Any], Any], path: str) -> Payload:
    """Return a new tree with a function applied to every leaf, in order.

    Containers are copied; subclasses of dict become dict.

    Args:
        tree: The payload.
        leaf: Called with the path and the value of each leaf; returns the new value.
        path: The path of the tree itself.

    Raises:
        PayloadError: If the tree is not a payload; the message has the path.
    """
    kind = type(tree)
    if kind is dict:
        for key in tree:
            if type(key) not in (str, int):
                raise PayloadError(
                    f"{path}: key {key!r} is a {type(key).__name__}, "
                    "a payload's keys are str or int"
                )
            if type(key) is str:
                _require_text(key, f"{path}: key")
        return {key: map_leaves(value, leaf, f"{path}.{key}") for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(map_leaves(value, leaf, f"{path}[{i}]") for i, value in enumerate(tree))
    # The OrderedDict that state_dict() returns is sent as a plain dict.
    if isinstance(tree, dict):
        return map_leaves(dict(tree), leaf, path)
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.dtype not in DTYPES.values():
            raise PayloadError(
                f"{path}: a {tree.layout} tensor of {tree.dtype} cannot be sent; "
                "make it dense and real"
            )
        if tree.is_meta:
            raise PayloadError(
                f"{path}: a tensor on the meta device cannot be sent: it has a shape and no values"
            )
        return leaf(path, tree)
    if kind is str:
        _require_text(tree, path)
    if kind is int and not MIN_INT <= tree < -MIN_INT:
        raise PayloadError(f"{path}: an integer of more than 64 bits cannot be sent")
    if kind in PLAIN_TYPES:
        return leaf(path, tree)
    raise PayloadError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be sent; "
        "a payload is dict, list, tuple, tensors, str, int, float, bool and None"
    )


def _require_text(text: str, path: str) -> None:
    """Raise PayloadError if a string is not valid UTF-8, such as a lone surrogate."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PayloadError(f"{path}: {text[:50]!r} cannot be sent: it is no valid text") from None


def leaves(tree: Payload, path: str = "payload") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf.

    The value of a dict's key k is at PATH.k, the i-th item of a list or tuple at PATH[i]. An empty
    dict, list or tuple has no leaf; None is a leaf.

    Raises:
        PayloadError: If the tree is not a payload, before anything is yielded.
    """
    found: list[tuple[str, Any]] = []
    map_leaves(tree, lambda at, value: found.append((at, value)), path)
    yield from found


def nbytes(tree: Payload) -> int:
    """Return the size of a payload's values in bytes.

    Tensors count exactly, numbers as 8 bytes, strings as UTF-8, bool as 1 and None as 0. Keys and
    structure do not count.
    """

    def size(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size()
        if isinstance(value, str):
            return len(value.encode())
        if value is None:
            return 0
        return 1 if isinstance(value, bool) else 8

    return sum(size(value) for _, value in leaves(tree))


def to_floats(values: Sequence[Tensor]) -> list[float]:
    """Convert tensors without axes to floats, in order; wait once for each device."""
    # Tensors are stacked by device and dtype, then read together.
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        groups[value.device, value.dtype].append(i)
    floats: dict[int, float] = {}
    for device in {device for device, _ in groups}:
        on_device = [group for (where, _), group in groups.items() if where == device]
        stacks = [torch.stack([values[i] for i in group]).double() for group in on_device]
        floats |= zip(chain(*on_device), torch.cat(stacks).tolist(), strict=True)
    return [floats[i] for i in range(len(values))]


def infinite_leaves(tree: Payload, path: str = "") -> list[str]:
    """Return the paths of floats and float tensors that hold NaN or infinity.

    Each path occurs once: those of floats first, then those of tensors. Empty tensors hold none.
    """
    found: list[str] = []
    paths: list[str] = []
    extremes: list[Tensor] = []
    for at, value in leaves(tree, path):
        if isinstance(value, float) and not math.isfinite(value):
            found.append(at)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            # Minimum or maximum is not finite if any value is not.
            paths += [at, at]
            extremes += torch.aminmax(value.detach())
    for at, number in zip(paths, to_floats(extremes), strict=True):
        if not math.isfinite(number):
            found.append(at)
    return list(dict.fromkeys(at.removeprefix(".") for at in found))


def _isolate_leaf(value: Any, device: torch.device | None) -> Any:
    """Return a leaf for the receiving party; tensors are detached and not shared.

    On the CPU, memory is shared copy on write where torch allows it. A tensor that is copied from
    or to a GPU is marked (`mark`), unless it is a Parameter; copies keep the origin of a tensor.
    """
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    if tensor.is_cuda or (device is not None and device.type != tensor.device.type):
        # Torch's copy on write ignores the order of CUDA streams, so tensors are copied at once.
        copy = tensor.to(tensor.device if device is None else device, copy=True)
        # CUDA graphs modify parameters without increasing their version, so they are not marked.
        if not isinstance(value, Parameter):
            mark(value)
    elif tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        copy = tensor.clone()  # A view must not keep its complete storage alive.
    else:
        try:
            # Copy on write: both sides share one storage until one of them writes.
            copy = torch._lazy_clone(tensor)
        except RuntimeError:
            copy = tensor.clone()  # Memory that torch does not own, such as a NumPy array's.
    token = origin(value)
    if token is not None:
        copy.origin = (token, copy._version)  # type: ignore[attr-defined]
    return copy


def mark(tensor: Tensor) -> None:
    """Give a tensor an origin, by which its unmodified copies are recognised.

    A tensor that has one and was not modified since keeps it.
    """
    tensor.origin = (origin(tensor) or object(), tensor._version)  # type: ignore[attr-defined]


def origin(tensor: Tensor) -> object | None:
    """Return a token that all unmodified copies of a tensor share.

    It is None if the tensor is not marked, or was modified in place since.
    """
    token, version = getattr(tensor, "origin", (None, 0))
    return token if version == tensor._version else None


def isolate(tree: T, device: torch.device | None = None, path: str = "payload") -> T:
    """Copy a payload for another party; changes by one do not affect the other.

    Tensors are detached. On the CPU they are shared copy on write. Subclasses of dict become dict.

    Args:
        tree: The payload.
        device: The device of the copied tensors; None keeps theirs.
        path: The path of the tree, for messages.

    Raises:
        PayloadError: If the tree is not a payload; the message has the path.
    """
    copy: T = map_leaves(tree, lambda _, value: _isolate_leaf(value, device), path)
    return copy


def _contiguous(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the tensor with its axes in memory order, copied only if not dense.

    Args:
        tensor: The tensor; a contiguous one is returned as it is.
        order: Its axes by descending stride.
    """
    if tensor.is_contiguous():
        return tensor
    permuted = tensor.permute(order)
    if not permuted.is_contiguous():
        return permuted.contiguous()
    if hasattr(tensor, "origin"):
        permuted.origin = tensor.origin  # type: ignore[attr-defined]
    return permuted


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def pack(tree: Payload) -> tuple[dict[str, Tensor], str]:
    """Convert a payload to named contiguous tensors and a JSON header.

    The header describes the structure, the plain values and the memory formats; floats are stored
    exactly. Tensors are named t0, t1 and so on, stay on their devices, and are copied only if they
    are not dense in memory.

    Raises:
        PayloadError: If the tree is not a payload.
    """
    tensors: dict[str, Tensor] = {}

    def encode(node: Payload) -> Any:
        if isinstance(node, Tensor):
            name = f"t{len(tensors)}"
            order = sorted(range(node.ndim), key=lambda axis: -node.stride()[axis])
            tensors[name] = _contiguous(node, order)
            if node.is_contiguous():
                return {"tensor": name}
            return {"tensor": [name, order]}
        if isinstance(node, dict):
            return {"dict": [[key, encode(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [encode(value) for value in node]}
        if isinstance(node, float):
            return {"float": node.hex()}
        return node

    plain = map_leaves(tree, lambda _, value: value, "payload")
    return tensors, json.dumps(encode(plain))


def unpack(tensors: dict[str, Tensor], header: str) -> Payload:
    """Convert the tensors and the header that `pack` returned back to the payload.

    Tensors are not copied.

    Raises:
        PayloadError: If the header is damaged, nested too deep, or does not fit the tensors.
    """

    def decode(node: Any, depth: int = 0) -> Payload:
        if isinstance(node, int) and not MIN_INT <= node < -MIN_INT:
            raise PayloadError("an integer has more than 64 bits")
        if not isinstance(node, dict):
            return node
        if depth > DEPTH:
            raise PayloadError(f"a payload is nested more than {DEPTH} deep")
        ((kind, body),) = node.items()
        match kind:
            case "tensor":
                if isinstance(body, str):
                    return tensors[body]
                name = body[0]
                order = body[1]
                return tensors[name].permute(_inverse(order))
            case "float":
                return float.fromhex(body)
            case "dict":
                return {key: decode(value, depth + 1) for key, value in body}
            case "list":
                return [decode(value, depth + 1) for value in body]
            case "tuple":
                return tuple(decode(value, depth + 1) for value in body)
        raise PayloadError(f"a header has the unknown node type {kind!r}")

    try:
        return decode(json.loads(header))
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise PayloadError(f"damaged payload: {summarise_error(error)}") from error
