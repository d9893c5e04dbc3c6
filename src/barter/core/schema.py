"""Compile the type hints of remote methods into schemas, once per class.

A schema is a tree with a node for each type, which holds its annotations (`core/contracts.py`).
`core/answers.py` checks answers against it and bounds their bytes; `privacy/parts.py` and
`privacy/answer_shapes.py` read from it what an answer consists of and which shapes are fixed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from torch import Tensor

from barter.core.contracts import (
    RUN_SIZES,
    Content,
    ContentKind,
    Counts,
    Entries,
    Floats,
    Named,
    Room,
    Size,
    Weights,
    When,
    Within,
)

__all__ = [
    "AnySchema",
    "DictSchema",
    "ListSchema",
    "MethodSchema",
    "NoneSchema",
    "NumberSchema",
    "OtherSchema",
    "RecordSchema",
    "Schema",
    "StateSchema",
    "TensorSchema",
    "TupleSchema",
    "UnionSchema",
    "WordSchema",
    "choose_member",
    "compile_hint",
    "compile_method",
    "find_record",
    "has_structure",
]

M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A type with its annotations; each kind of type is a subclass."""

    hint: Any  # The type without annotations, for messages.
    optional: bool = False  # True for a NotRequired key of a TypedDict.
    when: str = ""  # The algorithm's field or property that decides about it; empty for none.
    names: tuple[Named, ...] = ()  # Further names of sizes inside of it.
    room: Size | None = None  # Largest size in bytes, where an annotation gives one.
    # What its tensors hold, where an annotation says so; empty otherwise.
    content: ContentKind | Literal[""] = ""

    def is_present(self, algorithm: object) -> bool | None:
        """Return whether a part must be present; None if no `When` decides it.

        True if the algorithm's field or property that `When` names is true, or does not exist.
        False means that the part must be absent or, if it is no NotRequired key, an empty tensor.
        """
        return bool(getattr(algorithm, self.when, True)) if self.when else None

    def children(self) -> tuple[Schema, ...]:
        """Return the schemas directly inside this one, such as those of a record's keys."""
        return ()

    def walk(self) -> Iterator[Schema]:
        """Yield this schema and all schemas inside of it at any depth, depth first."""
        yield self
        for child in self.children():
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class AnySchema(Schema):
    """Any payload: `Any`, or a type that cannot be evaluated."""

    hint: Any = Any


@dataclass(frozen=True, kw_only=True)
class TensorSchema(Schema):
    """A tensor."""

    hint: Any = Tensor
    values: Floats | None = None  # Its shape, dtype and range; None if it is not annotated.


@dataclass(frozen=True, kw_only=True)
class NumberSchema(Schema):
    """An int, float or bool; an int may stand for a float."""

    within: Within | None = None


@dataclass(frozen=True, kw_only=True)
class WordSchema(Schema):
    """A string, or one of the values of a Literal."""

    choices: tuple[object, ...] = ()  # Empty for any string.


@dataclass(frozen=True, kw_only=True)
class NoneSchema(Schema):
    """None."""


@dataclass(frozen=True, kw_only=True)
class OtherSchema(Schema):
    """A type of which only the type itself is checked."""


@dataclass(frozen=True, kw_only=True)
class StateSchema(Schema):
    """A `dict[str, Tensor]`: the weights of a network, or tensors with given names."""

    weights: Weights | None = None  # Whose weights; the client's if it is not annotated.
    entries: Mapping[str, TensorSchema] | None = None  # None for a network's weights.

    def children(self) -> tuple[Schema, ...]:
        return tuple((self.entries or {}).values())


@dataclass(frozen=True, kw_only=True)
class DictSchema(Schema):
    """Any other dict, with arbitrary keys."""

    key: Any
    value: Schema

    def children(self) -> tuple[Schema, ...]:
        return (self.value,)


@dataclass(frozen=True, kw_only=True)
class RecordSchema(Schema):
    """A TypedDict."""

    fields: Mapping[str, Schema]

    def children(self) -> tuple[Schema, ...]:
        return tuple(self.fields.values())


@dataclass(frozen=True, kw_only=True)
class ListSchema(Schema):
    """A list or tuple of any length with entries of one type."""

    container: type[list[Any]] | type[tuple[Any, ...]]
    item: Schema

    def children(self) -> tuple[Schema, ...]:
        return (self.item,)


@dataclass(frozen=True, kw_only=True)
class TupleSchema(Schema):
    """A tuple with a type for each entry."""

    items: tuple[Schema, ...]

    def children(self) -> tuple[Schema, ...]:
        return self.items


@dataclass(frozen=True, kw_only=True)
class UnionSchema(Schema):
    """One of several types."""

    members: tuple[Schema, ...]

    def children(self) -> tuple[Schema, ...]:
        return self.members


def has_structure(tree: object, schema: Schema) -> bool:
    """Return whether a part of a payload has the outer structure of a type.

    That is a dict for TypedDicts, States and dicts, whatever its keys; a list or tuple for both of
    these, of the right length for a tuple with a type for each entry; a tensor for a tensor. For
    all other types, also Any, it is a single value that is no tensor. What lies inside does not
    count.
    """
    match schema:
        case RecordSchema() | StateSchema() | DictSchema():
            return isinstance(tree, dict)
        case ListSchema():
            return isinstance(tree, list | tuple)
        case TupleSchema():
            return isinstance(tree, list | tuple) and len(tree) == len(schema.items)
        case TensorSchema():
            return isinstance(tree, Tensor)
        case UnionSchema():
            return choose_member(tree, schema) is not None
    return not isinstance(tree, dict | list | tuple | Tensor)


def choose_member(tree: object, union: UnionSchema) -> Schema | None:
    """Return the first member of a union that a part of a payload can be, else None.

    The outer structure (`has_structure`) decides. A dict can be a TypedDict if that has all of its
    keys, and a State if all values are tensors. What lies inside is not compared.
    """

    def can_be(member: Schema) -> bool:
        if isinstance(tree, dict) and isinstance(member, RecordSchema):
            return tree.keys() <= member.fields.keys()
        if isinstance(tree, dict) and isinstance(member, StateSchema):
            return all(isinstance(value, Tensor) for value in tree.values())
        return has_structure(tree, member)

    return next(filter(can_be, union.members), None)


@dataclass(frozen=True)
class MethodSchema:
    """The arguments and the return value of a remote method."""

    parameters: tuple[Schema, ...]  # Without `self` and `client`.
    answer: Schema
    own_sizes: frozenset[str]  # Sizes in its contracts that the algorithm declares.


def compile_method(algorithm: object, method: str) -> MethodSchema:
    """Return the schema of a remote method's arguments and answer.

    It is compiled once for each class and method. What is not annotated, or cannot be evaluated,
    may be any payload; `barter check` reports it.

    Args:
        algorithm: The algorithm.
        method: The method's name. One that the class does not have has no parameters and may
            return any payload.

    Raises:
        TypeError: If an annotation does not apply to its type, or the name of a size is ambiguous.
    """
    kind: Any = type(algorithm)
    return _compile_once(kind, method)


@lru_cache(maxsize=512)
def _compile_once(kind: type, method: str) -> MethodSchema:
    """Compile the type hints of a class's remote method, without self and client.

    Raises:
        TypeError: A type contains itself, or an annotation does not apply.
    """
    function = getattr(kind, method, None)
    if function is None:
        return MethodSchema((), AnySchema(), frozenset())
    hints = _read_hints(function)
    names = list(inspect.signature(function).parameters)[2:]
    try:
        parameters = tuple(compile_hint(hints.get(name, Any)) for name in names)
        answer = compile_hint(hints.get("return", Any))
        own_sizes = _find_own_sizes(kind, (*parameters, answer))
    except RecursionError:
        raise TypeError(
            f"{kind.__name__}.{method}: a type that contains itself has no contract: use Any inside"
        ) from None
    except TypeError as error:
        raise TypeError(f"{kind.__name__}.{method}: {error}") from None
    return MethodSchema(parameters, answer, own_sizes)


def compile_hint(hint: Any) -> Schema:
    """Compile a type hint to a schema, with the annotations of `Annotated`.

    Types that no rule covers get an `OtherSchema`. Of several annotations of a kind, the first
    counts; of `Named`, all do.

    Raises:
        TypeError: If an annotation does not apply to its type.
    """
    kind, marks, optional = _unwrap(hint)
    schema = _compile_type(kind, marks)
    when = _find(When, marks)
    room = _find(Room, marks)
    content = _find(Content, marks)
    return replace(
        schema,
        optional=optional,
        when="" if when is None else when.says,
        names=tuple(mark for mark in marks if isinstance(mark, Named)),
        room=None if room is None else room.most,
        content="" if content is None else content.kind,
    )


def find_record(schema: Schema) -> RecordSchema | None:
    """Return the first TypedDict of an answer; None without one.

    It may be the answer itself, or lie in a list or union, not in a dict or tuple.
    """
    if isinstance(schema, RecordSchema):
        return schema
    inside: tuple[Schema, ...] = ()
    if isinstance(schema, UnionSchema) or (
        isinstance(schema, ListSchema) and schema.container is list
    ):
        inside = schema.children()
    return next((record for child in inside if (record := find_record(child))), None)


def _read_hints(of: Callable[..., Any] | type) -> dict[str, Any]:
    """Return the type hints of a method or TypedDict, with their annotations.

    They are empty if one of them cannot be evaluated.
    """
    try:
        return get_type_hints(of, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError):
        # Annotations can use names that only their author's module has.
        return {}


def _unwrap(hint: Any) -> tuple[Any, tuple[object, ...], bool]:
    """Split a type hint into bare type, annotations, and whether it is NotRequired.

    Annotations of nested `Annotated` are joined, inner ones first.
    """
    if get_origin(hint) is NotRequired:
        kind, marks, _ = _unwrap(get_args(hint)[0])
        return kind, marks, True
    if get_origin(hint) is Annotated:
        kind, marks, optional = _unwrap(hint.__origin__)
        return kind, (*marks, *hint.__metadata__), optional
    return hint, (), False


def _compile_type(kind: Any, marks: tuple[object, ...]) -> Schema:
    """Compile a bare type with its annotations into a schema.

    Raises:
        TypeError: An annotation does not apply to this kind of type.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind is Tensor:
        _refuse(kind, marks, Within, Weights, Entries)
        return TensorSchema(values=_find(Floats, marks))
    if kind in (int, float, bool):
        _refuse(kind, marks, Floats, Weights, Entries)
        return NumberSchema(hint=kind, within=_find(Within, marks))
    if (origin, arguments) == (dict, (str, Tensor)):
        _refuse(kind, marks, Floats, Within)
        entries = _find(Entries, marks)
        tensors = None
        if entries is not None:
            tensors = {
                name: TensorSchema(values=Floats(*shape)) for name, shape in entries.shapes.items()
            }
        return StateSchema(hint=kind, weights=_find(Weights, marks), entries=tensors)
    _refuse(kind, marks, Floats, Within, Weights, Entries)
    if kind is Any:
        return AnySchema()
    if kind in (None, type(None)):
        return NoneSchema(hint=kind)
    if kind is str or origin is Literal:
        return WordSchema(hint=kind, choices=arguments)
    if is_typeddict(kind):
        parts = {key: compile_hint(part) for key, part in _read_hints(kind).items()}
        return RecordSchema(hint=kind, fields=parts)
    if origin is dict:
        return DictSchema(hint=kind, key=arguments[0], value=compile_hint(arguments[1]))
    if origin is list:
        return ListSchema(hint=kind, container=list, item=compile_hint(arguments[0]))
    if origin is tuple and arguments[1:] == (...,):
        return ListSchema(hint=kind, container=tuple, item=compile_hint(arguments[0]))
    if origin is tuple:
        return TupleSchema(hint=kind, items=tuple(map(compile_hint, arguments)))
    if origin in (Union, types.UnionType):
        return UnionSchema(hint=kind, members=tuple(map(compile_hint, arguments)))
    return OtherSchema(hint=kind)


def _find(wanted: type[M], marks: tuple[object, ...]) -> M | None:
    """Return the first annotation of a kind; None without one."""
    return next((mark for mark in marks if isinstance(mark, wanted)), None)


def _refuse(kind: Any, marks: tuple[object, ...], *others: type) -> None:
    """Raise TypeError if an annotation is for other types: it would never be checked."""
    for mark in marks:
        if isinstance(mark, others):
            raise TypeError(
                f"{type(mark).__name__} does not apply to {kind}: annotate the tensor, number or "
                "State itself"
            )


def _find_own_sizes(kind: type, schemas: tuple[Schema, ...]) -> frozenset[str]:
    """Return the sizes that schemas refer to and the algorithm declares.

    Raises:
        TypeError: If a name could mean two sizes, or `sizes` names nothing.
    """
    declared = getattr(kind, "sizes", ())
    if not isinstance(declared, tuple):
        raise TypeError(f'sizes is {declared!r}, expected names: sizes = ("views",)')
    known = RUN_SIZES | set(declared)
    for name in declared:
        if name in RUN_SIZES:
            raise TypeError(f"sizes declares {name!r}, which is a size of every run: rename it")
        if not _has_attribute(kind, name):
            raise TypeError(f"sizes declares {name!r}, and there is no such field or method")
    nodes = [node for schema in schemas for node in schema.walk()]
    for name in {name for node in nodes for name in _defined_names(node)} & known:
        raise TypeError(f"its contract gives the name {name!r} to another size: rename one of them")
    names = {name for node in nodes for name in _size_names(node)}
    for name in sorted(names - known):
        if _has_attribute(kind, name):
            raise TypeError(
                f"its contract has a size {name!r}, and {kind.__name__}.{name} exists: add the "
                "name to sizes if this is the size, otherwise rename the size in the contract"
            )
    return frozenset(names & set(declared))


def _has_attribute(kind: type, name: str) -> bool:
    """Return whether a class has an attribute or dataclass field of this name."""
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {})


def _size_names(schema: Schema) -> Iterator[str]:
    """Yield the names of sizes in a schema's own annotations, used or given.

    Schemas inside of it do not count.
    """
    sizes: list[object] = [schema.room, *(named.size for named in schema.names)]
    if isinstance(schema, TensorSchema) and schema.values is not None:
        sizes += [*schema.values.shape, schema.values.most]
        if isinstance(schema.values, Counts) and schema.values.total:
            sizes.append(schema.values.total)
    elif isinstance(schema, NumberSchema) and schema.within is not None:
        sizes.append(schema.within.most)
    yield from (size for size in sizes if isinstance(size, str))
    yield from _defined_names(schema)


def _defined_names(schema: Schema) -> Iterator[str]:
    """Yield the names that a schema's own `Named` and `Within` give to sizes."""
    yield from (named.name for named in schema.names)
    if isinstance(schema, NumberSchema) and schema.within is not None and schema.within.name:
        yield schema.within.name
