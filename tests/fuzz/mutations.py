"""Answers that an adversarial client could send: a correct one, changed at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from barter.core.contracts import BOUND

__all__ = ["Mutation", "mutate"]

Path = tuple[Any, ...]  # keys and indices that lead from the answer to a part of it


class Mutation(NamedTuple):
    """An answer with one kind of change, and where the change is."""

    kind: str
    at: str
    answer: Any


class Foreign:
    """An object that no payload may hold."""


def mutate(rng: random.Random, answer: Any, others: Sequence[Any] = ()) -> Mutation:
    """Change a correct answer at random.

    Args:
        rng: Decides what is changed.
        answer: The correct answer; it is not modified.
        others: Other correct answers of the same method: of earlier rounds and other clients.
    """
    mutation = _mutation(rng, answer, others)
    if mutation.kind != "nested" and _has_negative_variance(mutation.answer):
        return mutation._replace(kind="variance below zero")
    return mutation


def _has_negative_variance(answer: Any) -> bool:
    return any(
        _is_real(leaf)
        and not leaf.is_meta
        and leaf.layout is torch.strided
        and bool((leaf.reshape(-1)[:1000] < 0).any())
        for path, leaf in _leaves(answer)
        if path and str(path[-1]).rpartition(".")[2] == "running_var"
    )


def _mutation(rng: random.Random, answer: Any, others: Sequence[Any]) -> Mutation:
    chance = rng.random()
    if chance < 0.08:
        kind, changed = _whole(rng, answer, others)
        return Mutation(kind, "answer", changed)
    if chance < 0.3 and sum(_is_real(leaf) for _, leaf in _leaves(answer)) > 1:
        return _every_tensor(rng, answer)
    if chance < 0.45:
        containers = [
            path for path, part in _parts(answer) if isinstance(part, dict | list | tuple)
        ]
        if containers:
            path = rng.choice(containers)
            kind, part = _container(rng, _get(answer, path))
            return Mutation(kind, _name(path), _put(answer, path, part))
    path, leaf = rng.choice(_interesting(rng, answer))
    if isinstance(leaf, Tensor):
        kind, changed = _tensor(rng, leaf, str(path[-1]) if path else "", answer)
    else:
        kind, changed = _plain(rng, leaf)
    return Mutation(kind, _name(path), _put(answer, path, changed))


def _interesting(rng: random.Random, answer: Any) -> list[tuple[Path, Any]]:
    """Return the leaves to choose from: often only those of batch normalisation."""
    found = list(_leaves(answer))
    statistics = [
        (path, leaf)
        for path, leaf in found
        if path and str(path[-1]).rpartition(".")[2] in ("running_var", "num_batches_tracked")
    ]
    return statistics if statistics and rng.random() < 0.15 else found


def _parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every part of a tree with its path, the tree itself first."""
    yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _parts(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _parts(value, (*path, i))


def _leaves(tree: Any) -> Iterator[tuple[Path, Any]]:
    for path, part in _parts(tree):
        if not (isinstance(part, dict | list | tuple) and part):
            yield path, part


def _name(path: Path) -> str:
    return ".".join(["answer", *map(str, path)])


def _get(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree with one part replaced."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    changed = _put(tree[first], rest, value)
    if isinstance(tree, dict):
        return {**tree, first: changed}
    return type(tree)(changed if i == first else old for i, old in enumerate(tree))


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _circular() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def _whole(rng: random.Random, answer: Any, others: Sequence[Any]) -> tuple[str, Any]:
    """Send something else altogether."""
    if others and rng.random() < 0.6:
        return "replayed or copied", rng.choice(others)
    return rng.choice(
        [
            ("another type", None),
            ("another type", "nonsense"),
            ("another type", {}),
            ("another type", []),
            ("another type", Foreign()),
            ("another type", [answer]),
            ("another type", {"answer": answer}),
            ("nested", _nested(answer, rng.choice((50, 99, 101, 900, 50_000)))),
            ("nested", _circular()),
        ]
    )


def _every_tensor(rng: random.Random, answer: Any) -> Mutation:
    """Change all real tensors alike, as a client would that sends another model."""
    kind, change = rng.choice(_numeric(rng))
    changed = answer
    for path, leaf in _leaves(answer):
        if _is_real(leaf):
            changed = _put(changed, path, change(leaf))
    return Mutation(kind, "answer, all tensors", changed)


def _numeric(rng: random.Random) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return changes to the values of a real tensor."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    sign = rng.choice((-1.0, 1.0))
    scale = 10.0 ** rng.uniform(1, 5)
    beyond = rng.choice((BOUND * 1.01, 1e30, 3e38))
    edge = rng.choice((BOUND, BOUND * 0.999))
    nothing = rng.choice((math.nan, math.inf, -math.inf))
    small = rng.choice((1e-45, 1e-38, 1e-8))

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).to(x.dtype)

    def order(x: Tensor) -> Tensor:
        shuffled = torch.randperm(x.numel(), generator=generator)
        return x.reshape(-1)[shuffled].reshape(x.shape)

    def at_one_place(x: Tensor, value: float) -> Tensor:
        flat = x.clone().reshape(-1)
        flat[rng.randrange(len(flat))] = value
        return flat.reshape(x.shape)

    return [
        ("not finite", lambda x: torch.full_like(x, nothing)),
        ("not finite", lambda x: at_one_place(x, nothing)),
        ("beyond the bound", lambda x: torch.full_like(x, sign * beyond)),
        ("beyond the bound", lambda x: at_one_place(x, sign * beyond)),
        ("at the bound", lambda x: torch.full_like(x, sign * edge)),
        ("at the bound", lambda x: at_one_place(x, sign * edge)),
        ("at the bound", lambda x: noise(x).sign() * edge),
        ("scaled up", lambda x: (x * (sign * scale)).clamp(-BOUND, BOUND)),
        ("scaled up", lambda x: (noise(x) * scale).clamp(-BOUND, BOUND)),
        ("scaled down", lambda x: x * sign * small),
        ("negated", lambda x: -x),
        ("zeros", lambda x: torch.zeros_like(x)),
        ("constant", lambda x: torch.full_like(x, sign)),
        ("noise", lambda x: x + noise(x)),
        ("shuffled", lambda x: order(x)),
        ("shuffled", lambda x: x.flip(0) if x.ndim else x),
    ]


def _integral(rng: random.Random) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return changes to the values of a tensor of whole numbers."""
    value = rng.choice((-1, -(2**63), 2**62, 2**31, 999_999, 10, 9, 1, 0, 255))

    def at_one_place(x: Tensor) -> Tensor:
        flat = x.clone().reshape(-1)
        if len(flat):
            flat[rng.randrange(len(flat))] = _fit(value, x.dtype)
        return flat.reshape(x.shape)

    return [
        ("whole numbers", lambda x: torch.full_like(x, _fit(value, x.dtype))),
        ("whole numbers", at_one_place),
        ("shuffled", lambda x: x.flip(0) if x.ndim else x),
    ]


def _fit(value: int, dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return value % 2
    limits = torch.iinfo(dtype)
    return min(max(value, limits.min), limits.max)


def _tensor(rng: random.Random, value: Tensor, name: str, answer: Any) -> tuple[str, Any]:
    """Change a tensor."""
    last = name.rpartition(".")[2]
    if last == "running_var" and rng.random() < 0.5:
        variance = rng.choice((-10.0, -1e-3, -BOUND, 0.0, 1e-30, BOUND))
        kind = "variance below zero" if variance < 0 else "variance at the edge"
        return kind, torch.full_like(value, variance)
    chance = rng.random()
    if chance < 0.5 and value.numel():
        changes = _numeric(rng) if value.is_floating_point() else _integral(rng)
        kind, change = rng.choice(changes)
        return kind, change(value)
    if chance < 0.65:
        return "another shape", _other_shape(rng, value)
    if chance < 0.8:
        return "another dtype", _other_dtype(rng, value)
    if chance < 0.88:
        same = [leaf for _, leaf in _leaves(answer) if _alike(leaf, value)]
        return ("swapped", rng.choice(same)) if same else ("zeros", torch.zeros_like(value))
    return _plain(rng, value)


def _alike(one: Any, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one is not other
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def _other_shape(rng: random.Random, value: Tensor) -> Tensor:
    changes: list[Callable[[], Tensor]] = [
        lambda: value.reshape(-1)[:0],
        lambda: value.reshape(-1),
        lambda: value.unsqueeze(0),
        lambda: value.new_zeros(()),
        lambda: value.new_zeros(0),
        lambda: value.new_zeros((0, 2**40)),
        lambda: value.new_zeros(()).expand(2**40),  # a terabyte in four bytes
        lambda: value.new_zeros(()).expand(*[2] * 60),
    ]
    if value.ndim:
        changes += [
            lambda: torch.cat([value, value[-1:]]),
            lambda: value[:-1],
            lambda: value[:0],
            lambda: value[:1],
            lambda: torch.cat([value] * 40),
            lambda: value.transpose(0, -1),
        ]
    return rng.choice(changes)()


def _other_dtype(rng: random.Random, value: Tensor) -> Tensor:
    dtypes = [
        torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float32,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    ]  # fmt: skip
    changes: list[Callable[[], Tensor]] = [
        lambda: value.to("meta"),
        lambda: value.to_sparse() if value.ndim else value.to(torch.complex64),
        lambda: torch.nn.Parameter(value.float()),
        lambda: torch.view_as_real(value.to(torch.complex64)),
        lambda: torch.quantize_per_tensor(value.float(), 1.0, 0, torch.qint8),
    ]
    changes += [lambda: value.to(rng.choice(dtypes))] * len(changes)
    return rng.choice(changes)()


def _plain(rng: random.Random, value: Any) -> tuple[str, Any]:
    """Send something else in the place of a value."""
    if isinstance(value, int | float) and rng.random() < 0.6:
        number: Any = rng.choice(
            (
                -1, 0, 1, 2, 2**31, 2**39, 2**63 - 1, -(2**63), 2**63, 10**400,
                0.5, -0.0, 1.0001, 1e6, 1e300, math.nan, math.inf, -math.inf, 5e-324,
            )
        )  # fmt: skip
        return "another number", number
    return "another type", rng.choice(
        [
            None, True, "nonsense", "", "x" * 10_000, "\ud800", "\0", 10**400, 2**63, math.nan,
            b"bytes", Foreign(), Foreign, len, {1, 2}, range(3), np.zeros(3), np.float64(1.0),
            1j, [value], (value,), {"value": value}, {}, [], torch.zeros(()), torch.zeros(3),
            torch.device("cpu"), torch.float32, _nested(value, 200),
        ]
    )  # fmt: skip


def _container(rng: random.Random, part: Any) -> tuple[str, Any]:
    """Change the keys or the length of a dict, a list or a tuple."""
    if isinstance(part, dict):
        return _dict(rng, part)
    entries = list(part)
    changes: list[Callable[[], Any]] = [
        lambda: type(part)([*entries, *entries[-1:]]),
        lambda: type(part)(entries[:-1]),
        lambda: type(part)([]),
        lambda: type(part)(reversed(entries)),
        lambda: type(part)(entries * 1000),
        lambda: tuple(entries) if isinstance(part, list) else entries,
        lambda: dict(enumerate(entries)),
    ]
    return "entries", rng.choice(changes)()


def _dict(rng: random.Random, part: dict[Any, Any]) -> tuple[str, Any]:
    value = rng.choice(list(part.values())) if part else 0
    key = rng.choice(list(part)) if part else "key"
    without = {name: entry for name, entry in part.items() if name != key}
    strange = rng.choice((1, -1, None, 1.5, math.nan, (1, 2), "", "x" * 1000, "\ud800", b"k", True))
    values = list(part.values())
    rng.shuffle(values)
    alike = [
        (one, other)
        for one in part
        for other in part
        if isinstance(part[one], Tensor) and one != other and _alike(part[other], part[one])
    ]
    if alike and rng.random() < 0.3:
        one, other = rng.choice(alike)
        return "swapped", {**part, one: part[other], other: part[one]}
    changes: list[Callable[[], Any]] = [
        lambda: without,
        lambda: {**part, "more": value},
        lambda: {**part, strange: value},
        lambda: {**without, f"{key}x": part.get(key, 0)},
        lambda: {**without, strange: part.get(key, 0)},
        lambda: dict(zip(part, values, strict=True)),
        lambda: dict(reversed(part.items())),
        lambda: {**part, **{f"{i}": value for i in range(2000)}},
        lambda: list(part.values()),
        lambda: list(part.items()),
        lambda: {},
    ]
    return "keys", rng.choice(changes)()
