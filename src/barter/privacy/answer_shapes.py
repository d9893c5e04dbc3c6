"""Read from return types which parts of an answer have a shape that private images can change.

Noise changes numbers, not how many there are. If an answer has a row for each class that a client
holds, the number of rows reveals the number of these classes, however much noise is added.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.contracts import Counts, DistinctClasses, Entries, Floats, Named, When, Within

__all__ = [
    "allows_floats",
    "blanks",
    "parts_shaped_by_images",
    "receives_floats",
    "unsent_parts",
    "words",
]

# Names of sizes that all parties know.
AGREED = frozenset({"classes", "channels", "height", "width", "features", "examples"})
SHAPELESS_TYPES = (int, float, bool, str, None, type(None))  # types without a shape
WHOLE = (int, bool, str, bytes, None, type(None))  # types without floats
Names = frozenset[str]


def parts_shaped_by_images(
    algorithm: Algorithm[Any, Any], parts: Mapping[str, list[str]]
) -> set[str]:
    """Return the parts whose shape no contract fixes, and the methods that have such parts.

    For a part in the algorithm's `tells`, the declared dependence on an image is complete, so its
    shape counts as fixed.

    Args:
        algorithm: The algorithm with its configuration.
        parts: The parts of each method's answer, see `answer_parts`.
    """
    found: set[str] = set()
    for method, names in parts.items():
        hints = _hints(getattr(type(algorithm), method, None))
        answer = hints.pop("return", Any)
        known = AGREED | _own_sizes(algorithm)
        for hint in hints.values():  # The server sent the arguments and knows their sizes.
            known |= set(_sizes(hint))
        if names != [method]:
            free = _free_parts(algorithm, method, answer, known)
        elif method in algorithm.tells or _is_fixed(answer, known):
            free = set()
        else:
            free = {method}
        found |= free
        if free:
            found.add(method)
    return found


def unsent_parts(algorithm: Algorithm[Any, Any], parts: Iterable[str]) -> set[str]:
    """Return the parts that an algorithm does not send as it is configured.

    Args:
        algorithm: The algorithm with its configuration.
        parts: Names of its methods.
    """
    found: set[str] = set()
    for method in parts:
        answer = _hints(getattr(type(algorithm), method, None)).get("return", Any)
        for key, hint in _keys(answer):
            conditions = [mark for mark in _marks(hint) if isinstance(mark, When)]
            if not all(getattr(algorithm, condition.says, True) for condition in conditions):
                found.add(f"{method}.{key}")
    return found


def blanks(algorithm: Algorithm[Any, Any], method: str) -> dict[str, Callable[[Any], Any]]:
    """Return how to blank those parts of an answer for which zero breaks the contract.

    Such are classes, which are all different, and counts with a given sum.

    Args:
        algorithm: The algorithm.
        method: The method that returns the answer.

    Returns:
        Key -> function that returns a valid value with the shape of the given one.
    """
    found: dict[str, Callable[[Any], Any]] = {}
    answer = _hints(getattr(type(algorithm), method, None)).get("return", Any)
    for key, hint in _keys(answer):
        for mark in _marks(hint):
            if isinstance(mark, DistinctClasses):
                found[key] = _first_classes
            elif isinstance(mark, Counts) and mark.total:
                found[key] = _even_counts
    return found


def words(algorithm: Algorithm[Any, Any], method: str) -> list[str]:
    """Return the keys of an answer that hold words, which nothing but themselves can stand for."""
    answer = _hints(getattr(type(algorithm), method, None)).get("return", Any)
    kinds = {key: _split(hint)[0] for key, hint in _keys(answer)}
    return [key for key, kind in kinds.items() if kind is str or get_origin(kind) is Literal]


def _first_classes(value: Tensor) -> Tensor:
    return torch.arange(len(value), dtype=value.dtype, device=value.device)


def _even_counts(value: Tensor) -> Tensor:
    """Return counts with the same sum, as equal as possible."""
    total = int(value.sum())
    ends = torch.arange(1, value.numel() + 1) * total // max(1, value.numel())
    counts = ends.diff(prepend=ends.new_zeros(1))
    return counts.view(value.shape).to(value.dtype).to(value.device)


def allows_floats(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Return whether the type of a part, or of a method's answer, allows floats."""
    method, _, key = part.partition(".")
    answer = _hints(getattr(type(algorithm), method, None)).get("return", Any)
    return _allows_floats(dict(_keys(answer))[key] if key else answer)


def receives_floats(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Return whether the arguments of a part's method can hold floats."""
    method = getattr(type(algorithm), part.partition(".")[0])
    hints = _hints(method)
    arguments = list(inspect.signature(method).parameters)[2:]  # without self and client
    return any(_allows_floats(hints.get(name, Any)) for name in arguments)


def _allows_floats(hint: Any) -> bool:
    """Return whether a value of this type can hold floats."""
    kind, marks = _split(hint)
    if kind is Tensor:
        return all(mark.dtype.is_floating_point for mark in marks if isinstance(mark, Floats))
    if is_typeddict(kind):
        return any(map(_allows_floats, _hints(kind).values()))
    if get_args(kind):
        return any(map(_allows_floats, get_args(kind)))
    return kind not in WHOLE


def _own_sizes(algorithm: Algorithm[Any, Any]) -> Names:
    """Return the names of sizes that the algorithm has as a field or computes with a method."""
    names = [name for name in dir(algorithm) if not name.startswith("_")]
    values = {name: getattr(algorithm, name, None) for name in names}
    return frozenset(
        name for name, value in values.items() if isinstance(value, int) or callable(value)
    )


def _free_parts(algorithm: Algorithm[Any, Any], method: str, answer: Any, known: Names) -> set[str]:
    """Return the parts of an answer with keys whose shape private images can change.

    Args:
        algorithm: The algorithm.
        method: The method that returns the answer.
        answer: The type of the answer, which has a TypedDict in it.
        known: Names of sizes that are known beforehand.
    """
    declared = algorithm.tells
    hints = {f"{method}.{key}": hint for key, hint in _keys(answer)}
    for part, hint in hints.items():
        if part in declared:
            known |= set(_sizes(hint))
    known |= {mark.name for mark in _marks(answer) if isinstance(mark, Named)}
    kind = _split(answer)[0]
    # The number of entries of a list may depend on private images, unless one of them is declared.
    open_list = get_origin(kind) is list and not any(part in declared for part in hints)
    free = set()
    for part, hint in hints.items():
        if part not in declared and (open_list or not _is_fixed(hint, known)):
            free.add(part)
    if get_origin(kind) in (Union, types.UnionType):
        # Alternatives without keys belong to the answer as a whole.
        alternatives = [arm for arm in get_args(kind) if not _keys(arm)]
        if not all(_is_fixed(arm, known) for arm in alternatives):
            free.add(method)
    return free


@lru_cache(maxsize=512)
def _annotated(of: Any) -> dict[str, Any]:
    """Return the annotations of a function or class; empty if they cannot be evaluated."""
    try:
        return get_type_hints(of, include_extras=True)
    except Exception:  # Annotations can use names that only their author's module has.
        return {}


def _hints(of: Any) -> dict[str, Any]:
    """Return a copy of the annotations, which the caller may change."""
    return dict(_annotated(of))


def _split(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Return a type without its marks (the metadata of `Annotated`), and the marks."""
    if get_origin(hint) is NotRequired:
        return _split(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def _marks(hint: Any) -> tuple[object, ...]:
    """Return the marks of a type (the metadata of `Annotated`)."""
    return _split(hint)[1]


def _sizes(hint: Any) -> Iterator[str]:
    """Yield the names of the sizes that follow from a value of this type."""
    for mark in _marks(hint):
        if isinstance(mark, Floats):
            yield from (size for size in mark.shape if isinstance(size, str))
        elif isinstance(mark, Within) and mark.name:
            yield mark.name


def _keys(hint: Any) -> list[tuple[str, Any]]:
    """Return keys and types of the first TypedDict in an answer's type; empty without one."""
    kind = _split(hint)[0]
    if is_typeddict(kind):
        return list(_hints(kind).items())
    return next((keys for arm in get_args(kind) if (keys := _keys(arm))), [])


def _is_fixed(hint: Any, known: Names) -> bool:
    """Return whether all values of this type have the same shape, given the known sizes."""
    kind, marks = _split(hint)
    origin = get_origin(kind)
    args = get_args(kind)
    known |= {mark.name for mark in marks if isinstance(mark, Named)}

    def all_known(sizes: Iterable[object]) -> bool:
        return all(isinstance(size, int) or size in known for size in sizes)

    if get_origin(hint) is NotRequired and not any(isinstance(mark, When) for mark in marks):
        return False
    if kind is Tensor:
        shapes = [mark.shape for mark in marks if isinstance(mark, Floats)]
        return bool(shapes) and all_known(shapes[0])
    if origin is dict:  # the state of a network, or a state with its own entries
        entries = [mark for mark in marks if isinstance(mark, Entries)]
        shapes_fixed = all(all_known(shape) for mark in entries for shape in mark.shapes.values())
        return args == (str, Tensor) and shapes_fixed
    if origin in (Union, types.UnionType, list) or kind is Any:
        return False
    if is_typeddict(kind):
        return all(_is_fixed(inner, known) for inner in _hints(kind).values())
    if origin is tuple:
        return ... not in args and all(_is_fixed(inner, known) for inner in args)
    return kind in SHAPELESS_TYPES or origin is Literal
