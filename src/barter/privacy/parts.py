"""The parts of what a method answers: the keys of its annotated TypedDict, or the answer as a whole."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from barter.core.algorithm import Algorithm
from barter.core.payload import Payload, nbytes

__all__ = ["covered", "crossed", "parts_of", "put", "take"]


def parts_of(algorithm: Algorithm[Any, Any]) -> dict[str, list[str]]:
    """Every method that a client answers, and the parts of its answers: METHOD.KEY, or METHOD alone."""
    kind = type(algorithm)
    found = {method: _keys(getattr(kind, method, None)) for method in getattr(kind, "crosses", {})}
    return {
        m: [f"{m}.{key}" for key in keys] or [m] for m, keys in found.items() if keys is not None
    }


def covered(part: str, parts: Mapping[str, list[str]]) -> list[str]:
    """The parts that a name stands for: itself, or all of its method."""
    return parts.get(part, [part])


@lru_cache(maxsize=512)
def _keys(method: Callable[..., Any] | None) -> tuple[str, ...] | None:
    """The keys of what a method returns; none at all where it returns nothing."""
    try:
        return _named(get_type_hints(method).get("return", Any))
    except Exception:  # annotated with what only its author can see
        return ()


def _named(hint: Any) -> tuple[str, ...] | None:
    if hint in (None, type(None)):
        return None
    if is_typeddict(hint):
        return tuple(get_type_hints(hint))
    if get_origin(hint) in (list, Union, types.UnionType):
        return next((keys for arm in get_args(hint) if (keys := _named(arm))), ())
    return ()


def take(answer: Payload, key: str) -> list[Payload]:
    """What stands under a key in an answer, or in each entry of its list; without a key, all of it."""
    if not key:
        return [answer]
    if isinstance(answer, list):
        return [value for entry in answer for value in take(entry, key)]
    return [answer[key]] if isinstance(answer, dict) and key in answer else []


def put(answer: Payload, key: str, values: list[Payload]) -> Payload:
    """The answer with other values where `take` took them; they are used up."""
    if not key:
        return values.pop(0)
    if isinstance(answer, list):
        return [put(entry, key, values) for entry in answer]
    return {**answer, key: values.pop(0)} if isinstance(answer, dict) and key in answer else answer


def crossed(algorithm: Algorithm[Any, Any], method: str, answer: Payload) -> list[str]:
    """The parts in which this answer says anything, and the whole of it where it says what is no part."""
    keys = _keys(getattr(type(algorithm), method, None)) or ()
    said = {f"{method}.{key}": sum(map(nbytes, take(answer, key))) for key in keys}
    beside = nbytes(answer) - sum(said.values())
    return [part for part, count in {**said, method: beside}.items() if count]
