"""Find the parts of answers whose shape private images can change.

Return types say it.

Noise changes numbers, not how many there are. If an answer has a row for each class that a client
holds, the number of rows reveals the number of these classes, however much noise is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.contracts import RUN_SIZES, Counts, DistinctClasses, Floats
from barter.core.schema import (
    AnySchema,
    ListSchema,
    MethodSchema,
    NoneSchema,
    NumberSchema,
    OtherSchema,
    RecordSchema,
    Schema,
    StateSchema,
    TensorSchema,
    TupleSchema,
    UnionSchema,
    WordSchema,
    compile_method,
    find_record,
)
from barter.privacy.parts import answer_fields

__all__ = [
    "allows_floats",
    "blanks",
    "parts_shaped_by_images",
    "receives_floats",
    "unsent_parts",
    "words",
]

Names = frozenset[str]


def parts_shaped_by_images(
    algorithm: Algorithm[Any, Any], parts: Mapping[str, list[str]]
) -> set[str]:
    """Return parts whose shape no contract fixes, and methods with such parts.

    For a part in the algorithm's `tells`, the declared dependence on an image is complete, so its
    shape counts as fixed.

    Args:
        algorithm: The algorithm with its configuration.
        parts: The parts of each method's answer, see `answer_parts`.

    Returns:
        Parts as METHOD.KEY, and METHOD for each method that has such a part.
    """
    found: set[str] = set()
    for method, names in parts.items():
        schema = compile_method(algorithm, method)
        known = RUN_SIZES | _own_sizes(algorithm, schema)
        for parameter in schema.parameters:  # The server sent the arguments and knows their sizes.
            known |= set(_sizes(parameter))
        if names != [method]:
            free = _free_parts(algorithm, method, schema.answer, known)
        elif method in algorithm.tells or _is_fixed(schema.answer, known):
            free = set()
        else:
            free = {method}
        found |= free
        if free:
            found.add(method)
    return found


def unsent_parts(algorithm: Algorithm[Any, Any], methods: Iterable[str]) -> set[str]:
    """Return the optional parts of answers that the configuration disables.

    A part is optional if its type is annotated with `When`.

    Args:
        algorithm: The algorithm with its configuration.
        methods: Names of its remote methods.

    Returns:
        Parts as METHOD.KEY.
    """
    found: set[str] = set()
    for method in methods:
        for key, part in _fields(algorithm, method).items():
            if part.is_present(algorithm) is False:
                found.add(f"{method}.{key}")
    return found


def blanks(algorithm: Algorithm[Any, Any], method: str) -> dict[str, Callable[[Any], Any]]:
    """Return functions that blank parts of an answer for which zeros are not valid.

    Distinct classes are replaced by 0, 1, 2 and so on, counts with a fixed sum by equal ones.

    Args:
        algorithm: The algorithm.
        method: The method that returns the answer.

    Returns:
        Key of the answer -> function from the true value to a valid one of the same shape. Keys for
        which zeros are valid are left out.
    """
    found: dict[str, Callable[[Any], Any]] = {}
    for key, part in _fields(algorithm, method).items():
        values = part.values if isinstance(part, TensorSchema) else None
        if isinstance(values, DistinctClasses):
            found[key] = _first_classes
        elif isinstance(values, Counts) and values.total:
            found[key] = _even_counts
    return found


def words(algorithm: Algorithm[Any, Any], method: str) -> list[str]:
    """Return the keys of a method's answer with strings, which cannot be blanked."""
    parts = _fields(algorithm, method)
    return [key for key, part in parts.items() if isinstance(part, WordSchema)]


def _first_classes(value: Tensor) -> Tensor:
    return torch.arange(len(value), dtype=value.dtype, device=value.device)


def _even_counts(value: Tensor) -> Tensor:
    """Return counts of the same shape and sum, as equal as possible."""
    total = int(value.sum())
    ends = torch.arange(1, value.numel() + 1) * total // max(1, value.numel())
    counts = ends.diff(prepend=ends.new_zeros(1))
    return counts.view(value.shape).to(value.dtype).to(value.device)


def allows_floats(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Return whether the type of a part, or of a method's answer, allows floats.

    Types without annotation do. A part is METHOD.KEY or METHOD.

    Raises:
        KeyError: If the answer's type has no such key.
    """
    method, _, key = part.partition(".")
    if key:
        return _allows_floats(_fields(algorithm, method)[key])
    return _allows_floats(compile_method(algorithm, method).answer)


def receives_floats(algorithm: Algorithm[Any, Any], part: str) -> bool:
    """Return whether the server's arguments to a part's method can hold floats.

    A part is METHOD.KEY or METHOD.
    """
    schema = compile_method(algorithm, part.partition(".")[0])
    return any(map(_allows_floats, schema.parameters))


def _allows_floats(schema: Schema) -> bool:
    """Return whether a value with this schema can hold floats."""
    match schema:
        case TensorSchema():
            return schema.values is None or schema.values.dtype.is_floating_point
        case NumberSchema():
            return schema.hint is float
        case StateSchema() | AnySchema():
            return True
        case OtherSchema():
            return schema.hint is not bytes
        case _:  # Words and None have no children.
            return any(map(_allows_floats, schema.children()))


def _fields(algorithm: Algorithm[Any, Any], method: str) -> Mapping[str, Schema]:
    """Return the keys of a method's answer with their types; empty if it has none."""
    return answer_fields(compile_method(algorithm, method).answer)


def _own_sizes(algorithm: Algorithm[Any, Any], schema: MethodSchema) -> Names:
    """Return the algorithm's own sizes that are known: not those that are None."""
    return frozenset(name for name in schema.own_sizes if getattr(algorithm, name) is not None)


def _free_parts(
    algorithm: Algorithm[Any, Any], method: str, answer: Schema, known: Names
) -> set[str]:
    """Return the parts of an answer with keys whose shape private images can change.

    Args:
        algorithm: The algorithm.
        method: The method that returns the answer.
        answer: The type of the answer, which has a TypedDict in it.
        known: Names of sizes that are known beforehand.
    """
    declared = algorithm.tells
    parts = {f"{method}.{key}": part for key, part in answer_fields(answer).items()}
    for name, part in parts.items():
        if name in declared:
            known |= set(_sizes(part))
    known |= {named.name for named in answer.names}
    # The number of entries of a list may depend on private images, unless one of them is declared.
    open_list = isinstance(answer, ListSchema) and not any(name in declared for name in parts)
    free = set()
    for name, part in parts.items():
        if name not in declared and (open_list or not _is_fixed(part, known)):
            free.add(name)
    if isinstance(answer, UnionSchema):
        # Alternatives without keys belong to the answer as a whole.
        alternatives = [member for member in answer.members if find_record(member) is None]
        if not all(_is_fixed(member, known) for member in alternatives):
            free.add(method)
    return free


def _sizes(schema: Schema) -> Iterator[str]:
    """Yield the names of the sizes that follow from a value with this schema."""
    if isinstance(schema, TensorSchema) and schema.values is not None:
        yield from (size for size in schema.values.shape if isinstance(size, str))
    elif isinstance(schema, NumberSchema) and schema.within is not None and schema.within.name:
        yield schema.within.name


def _is_fixed(schema: Schema, known: Names) -> bool:
    """Return whether all values of a schema have one shape, given known sizes.

    A NotRequired part without `When`, a tensor without annotation, a list, a dict of any keys, a
    union and `Any` have not.
    """
    if schema.optional and not schema.when:
        return False
    known |= {named.name for named in schema.names}
    match schema:
        case TensorSchema(values=None):
            return False
        case TensorSchema(values=Floats(shape=shape)):
            return all(isinstance(size, int) or size in known for size in shape)
        case StateSchema() | RecordSchema() | TupleSchema():
            return all(_is_fixed(child, known) for child in schema.children())
        case _:
            return isinstance(schema, NumberSchema | WordSchema | NoneSchema)
