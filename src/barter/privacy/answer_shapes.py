"""What contracts say of an answer's parts: which have a shape that private images can change, which hold what.

Noise changes numbers, not how many of them there are: a row for each class that a client has tells which number of
classes that is, whatever is added to it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
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

from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.contracts import Entries, Floats, Named, When, Within

__all__ = ["decimals", "decimals_come", "shaped_by_images", "unsent"]

AGREED = frozenset(
    {"classes", "channels", "height", "width", "features", "examples"}
)  # sizes that all parties know
NUMBERS = (int, float, bool, str, None, type(None))  # which have no shape
WHOLE = (int, bool, str, bytes, None, type(None))  # which are no decimal numbers
Names = frozenset[str]


def shaped_by_images(algorithm: Algorithm[Any, Any], parts: Mapping[str, list[str]]) -> set[str]:
    """The parts of which no contract fixes the shape, and the methods that have such parts.

    What a method says that one image can change of a part (`tells`) is all that it can change there.
    """
    found: set[str] = set()
    for method, names in parts.items():
        hints = _hints(getattr(type(algorithm), method, None))
        answer, known = hints.pop("return", Any), AGREED | _own(algorithm)
        known |= {name for hint in hints.values() for name in _met(hint)}
        if names == [method]:
            free = set() if method in algorithm.tells or _fixed(answer, known) else {method}
        else:
            free = _free_keys(algorithm, method, answer, known)
        found |= free | ({method} if free else set())
    return found


def unsent(algorithm: Algorithm[Any, Any], parts: Iterable[str]) -> set[str]:
    """The parts that these methods, as the algorithm is configured, do not send."""
    found: set[str] = set()
    for method in parts:
        for key, hint in _keys(_hints(getattr(type(algorithm), method, None)).get("return", Any)):
            if not all(
                getattr(algorithm, mark.says, True)
                for mark in _marks(hint)
                if isinstance(mark, When)
            ):
                found.add(f"{method}.{key}")
    return found


def decimals(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Whether there can be decimal numbers in a part, or in a method's answer, as far as its type says."""
    method, _, key = part.partition(".")
    answer = _hints(getattr(type(algorithm), method, None)).get("return", Any)
    return _decimal(dict(_keys(answer))[key] if key else answer)


def decimals_come(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Whether decimal numbers can come down with the call of a part's method."""
    method = getattr(type(algorithm), part.partition(".")[0])
    hints = _hints(method)
    return any(
        _decimal(hints.get(name, Any)) for name in list(inspect.signature(method).parameters)[2:]
    )


def _decimal(hint: Any) -> bool:
    kind, marks = _split(hint)
    if kind is Tensor:
        return all(mark.dtype.is_floating_point for mark in marks if isinstance(mark, Floats))
    if is_typeddict(kind):
        return any(map(_decimal, _hints(kind).values()))
    return any(map(_decimal, get_args(kind))) if get_args(kind) else kind not in WHOLE


def _own(algorithm: Algorithm[Any, Any]) -> Names:
    """The sizes that are fields of the algorithm, or that it works out."""
    values = {
        name: getattr(algorithm, name, None) for name in dir(algorithm) if not name.startswith("_")
    }
    return frozenset(
        name for name, value in values.items() if isinstance(value, int) or callable(value)
    )


def _free_keys(algorithm: Algorithm[Any, Any], method: str, answer: Any, known: Names) -> set[str]:
    keys, told = {f"{method}.{key}": hint for key, hint in _keys(answer)}, algorithm.tells
    known |= {name for part, hint in keys.items() if part in told for name in _met(hint)}
    known |= {mark.name for mark in _marks(answer) if isinstance(mark, Named)}
    kind = _split(answer)[0]
    # or as many entries as images make it
    counted = get_origin(kind) is not list or any(part in told for part in keys)
    beside = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    free = {
        part
        for part, hint in keys.items()
        if part not in told and not (counted and _fixed(hint, known))
    }
    return free | (
        {method} if any(not _keys(arm) and not _fixed(arm, known) for arm in beside) else set()
    )


@lru_cache(maxsize=512)
def _annotated(of: Any) -> dict[str, Any]:
    try:
        return get_type_hints(of, include_extras=True)
    except Exception:  # annotated with what only its author can see
        return {}


def _hints(of: Any) -> dict[str, Any]:
    return dict(_annotated(of))


def _split(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """What is annotated, and with what."""
    if get_origin(hint) is NotRequired:
        return _split(get_args(hint)[0])
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _marks(hint: Any) -> tuple[object, ...]:
    return _split(hint)[1]


def _met(hint: Any) -> Iterator[str]:
    """The sizes that whoever knows a value of this type knows."""
    for mark in _marks(hint):
        if isinstance(mark, Floats):
            yield from (size for size in mark.shape if isinstance(size, str))
        elif isinstance(mark, Within) and mark.name:
            yield mark.name


def _keys(hint: Any) -> list[tuple[str, Any]]:
    """The keys of the TypedDict that is somewhere in an answer's type."""
    kind = _split(hint)[0]
    if is_typeddict(kind):
        return list(_hints(kind).items())
    return next((keys for arm in get_args(kind) if (keys := _keys(arm))), [])


def _fixed(hint: Any, known: Names) -> bool:
    """Whether everything of this type has one shape, given these sizes."""
    kind, marks = _split(hint)
    origin, args = get_origin(kind), get_args(kind)
    known |= {mark.name for mark in marks if isinstance(mark, Named)}
    if get_origin(hint) is NotRequired and not any(isinstance(mark, When) for mark in marks):
        return False
    if kind is Tensor:
        shapes = [mark.shape for mark in marks if isinstance(mark, Floats)]
        return bool(shapes) and all(isinstance(size, int) or size in known for size in shapes[0])
    if origin is dict:  # the state of a network, or one with entries of its own
        entries = [
            size
            for mark in marks
            if isinstance(mark, Entries)
            for s in mark.shapes.values()
            for size in s
        ]
        return args == (str, Tensor) and all(
            isinstance(size, int) or size in known for size in entries
        )
    if origin in (Union, types.UnionType, list) or kind is Any:
        return False
    if is_typeddict(kind):
        return all(_fixed(inner, known) for inner in _hints(kind).values())
    if origin is tuple:
        return ... not in args and all(_fixed(inner, known) for inner in args)
    return kind in NUMBERS or origin is Literal
