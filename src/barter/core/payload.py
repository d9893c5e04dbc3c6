"""What may cross between parties: a tree of tensors and plain values.

A tree is made of dict (with str or int keys), list and tuple; its leaves are tensors, str, int, float, bool and None.
It is never pickled: `pack` turns it into named tensors and one JSON header, and `unpack` back.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from barter.core.errors import PayloadError, in_short

__all__ = [
    "Payload",
    "State",
    "isolate",
    "leaves",
    "mapped",
    "mark",
    "nbytes",
    "numbers",
    "origin",
    "pack",
    "unpack",
]

State: TypeAlias = dict[str, Tensor]
Payload: TypeAlias = Any
T = TypeVar("T")

PLAIN = (str, int, float, bool, type(None))
LEAST = -(2**63)  # of whole numbers
DEPTH = 100  # of a tree that arrives; Python versions differ in how deep one may be before it cannot be walked
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def mapped(tree: Payload, leaf: Callable[[str, Any], Any], path: str) -> Payload:
    """The tree with every leaf, known by its path, replaced; refuses what is no payload, and says where it stands."""
    kind = type(tree)
    if kind is dict:
        for key in tree:
            if type(key) not in (str, int):
                raise PayloadError(
                    f"{path}: key {key!r} is a {type(key).__name__}, a payload's keys are str or int"
                )
        return {key: mapped(value, leaf, f"{path}.{key}") for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(mapped(value, leaf, f"{path}[{i}]") for i, value in enumerate(tree))
    if isinstance(
        tree, dict
    ):  # an OrderedDict, as state_dict() returns it, travels as what it is: a dict
        return mapped(dict(tree), leaf, path)
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.dtype not in DTYPES.values():
            raise PayloadError(
                f"{path}: a {tree.layout} tensor of {tree.dtype} cannot travel; make it dense and real"
            )
        if tree.is_meta:
            raise PayloadError(
                f"{path}: a tensor on the meta device cannot travel: it has a shape and no values"
            )
        return leaf(path, tree)
    if kind is int and not LEAST <= tree < -LEAST:
        raise PayloadError(f"{path}: a whole number of more than 64 bits cannot travel")
    if kind in PLAIN:
        return leaf(path, tree)
    raise PayloadError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot travel; "
        "a payload is dict, list, tuple, tensors, str, int, float, bool and None"
    )


def leaves(tree: Payload, path: str = "payload") -> Iterator[tuple[str, Any]]:
    """Every leaf with the path that leads to it."""
    found: list[tuple[str, Any]] = []
    mapped(tree, lambda at, value: found.append((at, value)), path)
    yield from found


def nbytes(tree: Payload) -> int:
    """Bytes of the tree's values: tensors exactly, numbers as 8, strings as UTF-8, bool as 1, None as 0."""

    def size(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size()
        if isinstance(value, str):
            return len(value.encode())
        return 0 if value is None else 1 if isinstance(value, bool) else 8

    return sum(size(value) for _, value in leaves(tree))


def numbers(values: Sequence[Tensor]) -> list[float]:
    """Tensors of one number each as these numbers; a GPU is waited for once."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        alike[value.device, value.dtype].append(i)
    found: dict[int, float] = {}
    for device in {device for device, _ in alike}:
        groups = [group for (where, _), group in alike.items() if where == device]
        together = torch.cat([torch.stack([values[i] for i in group]).double() for group in groups])
        found |= zip(chain(*groups), together.tolist(), strict=True)
    return [found[i] for i in range(len(values))]


def _own(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    if tensor.is_cuda or (device is not None and device.type != tensor.device.type):
        # Torch copies on write behind the back of CUDA streams: there, each party gets a copy of its own at once.
        copy = tensor.to(tensor.device if device is None else device, copy=True)
        if not isinstance(value, Parameter):  # which graphs change unseen
            mark(value)
    elif tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        copy = tensor.clone()  # a view must not keep the whole storage behind it alive
    else:
        try:
            # Copy on write: both sides read one storage, and whoever writes first gets a copy of its own.
            copy = torch._lazy_clone(tensor)
        except RuntimeError:
            copy = tensor.clone()  # memory that is not torch's own, such as an array's or a file's
    token = origin(value)
    if token is not None:
        copy.origin = (token, copy._version)  # type: ignore[attr-defined]
    return copy


def mark(tensor: Tensor) -> None:
    """Have copies of this tensor know that they are the same."""
    tensor.origin = (origin(tensor) or object(), tensor._version)  # type: ignore[attr-defined]


def origin(tensor: Tensor) -> object | None:
    """What all copies of one tensor have in common while nobody has written to them."""
    token, version = getattr(tensor, "origin", (None, 0))
    return token if version == tensor._version else None


def isolate(tree: T, device: torch.device | None = None, path: str = "payload") -> T:
    """The same tree in the hands of another party: neither side can change what the other holds."""
    owned: T = mapped(tree, lambda _, value: _own(value, device), path)
    return owned


def _contiguous(tensor: Tensor, order: list[int]) -> Tensor:
    """The tensor with its axes in the order they have in memory, where it is dense, so that it is not copied."""
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
    """Named tensors, contiguous, and a JSON header that together hold the tree, its memory formats included."""
    tensors: dict[str, Tensor] = {}

    def encode(node: Payload) -> Any:
        if isinstance(node, Tensor):
            name = f"t{len(tensors)}"
            order = sorted(range(node.ndim), key=lambda axis: -node.stride()[axis])
            tensors[name] = _contiguous(node, order)
            return {"tensor": name} if node.is_contiguous() else {"tensor": [name, order]}
        if isinstance(node, dict):
            return {"dict": [[key, encode(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [encode(value) for value in node]}
        return node if not isinstance(node, float) else {"float": node.hex()}

    plain = mapped(tree, lambda _, value: value, "payload")
    return tensors, json.dumps(encode(plain))


def unpack(tensors: dict[str, Tensor], header: str) -> Payload:
    """The tree that `pack` took apart."""

    def decode(node: Any, depth: int = 0) -> Payload:
        if not isinstance(node, dict):
            return node
        if depth > DEPTH:
            raise PayloadError(f"a payload is nested more than {DEPTH} deep")
        ((kind, body),) = node.items()
        match kind:
            case "tensor":
                return (
                    tensors[body]
                    if isinstance(body, str)
                    else tensors[body[0]].permute(_inverse(body[1]))
                )
            case "float":
                return float.fromhex(body)
            case "dict":
                return {key: decode(value, depth + 1) for key, value in body}
            case "list":
                return [decode(value, depth + 1) for value in body]
            case "tuple":
                return tuple(decode(value, depth + 1) for value in body)
        raise PayloadError(f"header names an unknown kind {kind!r}")

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
        raise PayloadError(f"a damaged payload: {in_short(error)}") from error
