"""The parts of a method's answer: the keys of its TypedDict, or all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from barter.core.algorithm import Algorithm
from barter.core.payload import Payload, nbytes
from barter.core.schema import NoneSchema, Schema, compile_method, find_record

__all__ = [
    "answer_fields",
    "answer_parts",
    "expand_part",
    "nonempty_parts",
    "put_part",
    "take_part",
]


def answer_parts(algorithm: Algorithm[Any, Any]) -> dict[str, list[str]]:
    """Return the parts of each method's answer.

    A part is METHOD.KEY, or METHOD for an answer without keys. Methods that return nothing are left
    out.
    """
    parts: dict[str, list[str]] = {}
    for method in getattr(type(algorithm), "crosses", {}):
        answer = compile_method(algorithm, method).answer
        if not isinstance(answer, NoneSchema):
            parts[method] = [f"{method}.{key}" for key in answer_fields(answer)] or [method]
    return parts


def answer_fields(answer: Schema) -> Mapping[str, Schema]:
    """Return the keys of an answer's first TypedDict with their types, or {}."""
    record = find_record(answer)
    return {} if record is None else record.fields


def expand_part(part: str, parts: Mapping[str, list[str]]) -> list[str]:
    """Return the parts that a name means: all of a method's, otherwise only the name.

    Args:
        part: A method or a part, METHOD.KEY.
        parts: The parts of each method's answer, see `answer_parts`.
    """
    return parts.get(part, [part])


def take_part(answer: Payload, key: str) -> list[Payload]:
    """Return the values of a key in an answer, or in each entry of a list.

    Without a key, the only value is the whole answer. Where the key is missing, there is none.
    """
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
    """Return the parts, as METHOD.KEY, that hold at least one byte in this answer.

    The method itself is the last of them if the answer holds bytes outside of its declared keys.
    """
    keys = answer_fields(compile_method(algorithm, method).answer)
    sizes = {f"{method}.{key}": sum(map(nbytes, take_part(answer, key))) for key in keys}
    sizes[method] = nbytes(answer) - sum(sizes.values())
    return [part for part, size in sizes.items() if size]
