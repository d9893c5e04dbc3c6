"""The parts of a method's answer: the keys of its annotated TypedDict, or the answer as a whole."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from barter.core.algorithm import Algorithm
from barter.core.payload import Payload, nbytes

__all__ = ["answer_parts", "expand_part", "nonempty_parts", "put_part", "take_part"]


def answer_parts(algorithm: Algorithm[Any, Any]) -> dict[str, list[str]]:
    """Return the parts of each method's answer, as METHOD.KEY, or METHOD for an answer without keys.

    Methods that return nothing are left out.
    """
    kind = type(algorithm)
    parts: dict[str, list[str]] = {}
    for method in getattr(kind, "crosses", {}):
        keys = _keys(getattr(kind, method, None))
        if keys is not None:
            parts[method] = [f"{method}.{key}" for key in keys] or [method]
    return parts


def expand_part(part: str, parts: Mapping[str, list[str]]) -> list[str]:
    """Return the parts that a name stands for: the part itself, or all parts of a method."""
    return parts.get(part, [part])


@lru_cache(maxsize=512)
def _keys(method: Callable[..., Any] | None) -> tuple[str, ...] | None:
    """Return the keys of a method's answer; None if it returns nothing."""
    try:
        return _keys_of_type(get_type_hints(method).get("return", Any))
    except Exception:  # Annotations can use names that only their author's module has.
        return ()


def _keys_of_type(hint: Any) -> tuple[str, ...] | None:
    """Return the keys of the first TypedDict in a type; None for the type None."""
    if hint in (None, type(None)):
        return None
    if is_typeddict(hint):
        return tuple(get_type_hints(hint))
    if get_origin(hint) in (list, Union, types.UnionType):
        return next((keys for arm in get_args(hint) if (keys := _keys_of_type(arm))), ())
    return ()


def take_part(answer: Payload, key: str) -> list[Payload]:
    """Return the values of a key in an answer, or in each entry of a list; all of it without a key."""
    if not key:
        return [answer]
    if isinstance(answer, list):
        return [value for entry in answer for value in take_part(entry, key)]
    return [answer[key]] if isinstance(answer, dict) and key in answer else []


def put_part(answer: Payload, key: str, values: list[Payload]) -> Payload:
    """Return the answer with new values at the places where `take_part` finds them.

    Args:
        answer: The answer, which is not changed.
        key: The key of the values; empty for the answer as a whole.
        values: The new values in the order of `take_part`; used values are removed from the list.
    """
    if not key:
        return values.pop(0)
    if isinstance(answer, list):
        return [put_part(entry, key, values) for entry in answer]
    return {**answer, key: values.pop(0)} if isinstance(answer, dict) and key in answer else answer


def nonempty_parts(algorithm: Algorithm[Any, Any], method: str, answer: Payload) -> list[str]:
    """Return the parts that are not empty in this answer.

    The method itself is among them if the answer holds bytes outside of its known parts.
    """
    keys = _keys(getattr(type(algorithm), method, None)) or ()
    sizes = {f"{method}.{key}": sum(map(nbytes, take_part(answer, key))) for key in keys}
    sizes[method] = nbytes(answer) - sum(sizes.values())
    return [part for part, size in sizes.items() if size]
