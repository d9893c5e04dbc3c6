"""The `[wire]` table of a configuration: the encoding of each payload field.

A field is named by its path in the types of a remote method: `learn.embeddings` for a key of the
answer, `client_update` for an answer that is a single part, `client_update.w` for the argument `w`.
Entries of lists and of dicts with arbitrary keys have the path of the list or dict.

Every field has a kind, by which a profile chooses its encoding:

| kind | fields |
|---|---|
| weights | a State: the weights of a network, or tensors with given names |
| images | uint8 images, and floats that are declared as images |
| logits | floats with one number for each class in every row |
| embeddings | floats with a vector in every row, such as features, codes or prototypes |
| values | other floats of two or more axes |
| exact | integers, numbers, variances, and what a method declares to need exactly |
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from barter.core.contracts import ContentKind, Floats, NonNegatives, Pixels
from barter.core.encodings import IMAGE_ENCODINGS, EncodingName
from barter.core.errors import ConfigError
from barter.core.params import check_fields, did_you_mean
from barter.core.schema import (
    AnySchema,
    DictSchema,
    ListSchema,
    RecordSchema,
    Schema,
    StateSchema,
    TensorSchema,
    TupleSchema,
    UnionSchema,
    compile_method,
)

__all__ = [
    "PROFILES",
    "ProfileChoice",
    "ProfileName",
    "WireField",
    "WireSettings",
    "kind_of_tensor",
    "list_fields",
    "parameter_names",
]

ProfileName: TypeAlias = Literal["exact", "lean", "small"]
ProfileChoice: TypeAlias = Literal["auto", "exact", "lean", "small"]
# Profile -> kind of field -> encoding; kinds that are not named are exact.
PROFILES: Final[Mapping[ProfileName, Mapping[ContentKind, EncodingName]]] = {
    "exact": {},
    "lean": {
        "weights": "half",
        "embeddings": "int8",
        "logits": "half",
        "images": "webp-6bit",
        "values": "half",
    },
    "small": {
        "weights": "int8",
        "embeddings": "int4",
        "logits": "int8",
        "images": "webp-75",
        "values": "half",
    },
}
DEFLATED_PROFILES: Final[frozenset[ProfileName]] = frozenset({"small"})
# Names of the last axis of tensors that hold a vector in every row.
VECTOR_AXES = frozenset({"features", "code_dim", "vector"})


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """Configuration table [wire]: encodings of payloads between server and clients."""

    # encodings of all fields: exact sends values as they are, lean loses hardly anything, small
    # sends the fewest bytes; auto is lean on Flower and over a simulated network, else exact
    profile: ProfileChoice = "auto"
    # encoding of single fields, by path (learn.embeddings), by name (embeddings) or by kind
    # (weights, images, logits, embeddings, values); the first of these that is given counts
    fields: dict[str, EncodingName] = field(default_factory=dict)
    # rounding of int8 and int4: to the nearest level, or at random so that the mean is right
    rounding: Literal["nearest", "stochastic"] = "nearest"
    # compress encoded floats by zlib too: a tenth fewer bytes or more, at the cost of time; none
    # does so in profile small
    deflate: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, "wire.")

    def __str__(self) -> str:
        fields = [f"{name}: {encoding}" for name, encoding in sorted(self.fields.items())]
        extras = [*fields]
        if self.deflate is not None:
            extras.append("deflated" if self.deflate else "not deflated")
        if self.rounding != "nearest":
            extras.append(f"{self.rounding} rounding")
        return f"{self.profile} ({', '.join(extras)})" if extras else self.profile

    def settle(self, *, over_network: bool) -> WireSettings:
        """Replace profile "auto" by the one it stands for; others stay.

        Args:
            over_network: Whether payloads leave the process, on Flower or in simulation.
        """
        if self.profile != "auto":
            return self
        return replace(self, profile="lean" if over_network else "exact")

    @property
    def _settled_profile(self) -> ProfileName:
        """Return the profile.

        Raises:
            ConfigError: It is "auto", which only a run's configuration can settle.
        """
        if self.profile == "auto":
            raise ConfigError(
                "wire.profile='auto' depends on the run: use the settings of its configuration, or "
                "choose exact, lean or small"
            )
        return self.profile

    @property
    def deflates(self) -> bool:
        """Return whether encoded floats are compressed by zlib."""
        return self._settled_profile in DEFLATED_PROFILES if self.deflate is None else self.deflate

    @property
    def is_exact(self) -> bool:
        """Return whether everything is sent as it is."""
        exact_fields = all(name == "exact" for name in self.fields.values())
        return self._settled_profile == "exact" and exact_fields

    def encoding_of(self, path: str, kind: ContentKind) -> EncodingName:
        """Return the encoding of a field.

        Args:
            path: Its path, such as "learn.embeddings".
            kind: Its kind.
        """
        if kind == "exact":
            return "exact"
        for key in (path, path.rpartition(".")[2], kind):
            if key in self.fields:
                return self.fields[key]
        return PROFILES[self._settled_profile].get(kind, "exact")

    def require(self, algorithm: Any) -> None:
        """Raise ConfigError if the algorithm does not send or encode a field of `fields`."""
        found = list_fields(algorithm)
        kinds = {kind for kind in get_args(ContentKind) if kind != "exact"}
        paths = {row.path for row in found if row.kind != "exact"}
        names = {path.rpartition(".")[2] for path in paths}
        exact = {row.path for row in found if row.kind == "exact"}
        for name, encoding in self.fields.items():
            if name in exact:
                raise ConfigError(
                    f"wire.fields.{name}={encoding!r}: {type(algorithm).__name__} needs this field "
                    "exactly; leave it out"
                )
            if name not in kinds | paths | names:
                raise ConfigError(
                    f"wire.fields.{name}={encoding!r}: {type(algorithm).__name__} has no such "
                    f"field: {did_you_mean(name, kinds | paths)}"
                )
            images_only = encoding in IMAGE_ENCODINGS
            rows = [row for row in found if name in (row.path, row.path.rpartition(".")[2])]
            if images_only and name not in kinds and all(row.kind != "images" for row in rows):
                raise ConfigError(
                    f"wire.fields.{name}={encoding!r}: this encoding is for images, and the field "
                    f"holds {rows[0].kind}"
                )
            if images_only and name in kinds - {"images"}:
                raise ConfigError(f"wire.fields.{name}={encoding!r}: this encoding is for images")


@dataclass(frozen=True)
class WireField:
    """A field of a remote method's arguments or answer."""

    method: str
    direction: Literal["up", "down"]
    path: str
    kind: ContentKind
    itemsize: int = 4  # Bytes of a value that is not encoded.


def parameter_names(algorithm: object, method: str) -> list[str]:
    """Return the names of a remote method's parameters after `self` and the client."""
    function = getattr(type(algorithm), method, None)
    return [] if function is None else list(inspect.signature(function).parameters)[2:]


def list_fields(algorithm: Any) -> list[WireField]:
    """Return all fields with tensors that an algorithm's remote methods declare."""
    rows: list[WireField] = []
    for method in algorithm.crosses:
        schema = compile_method(algorithm, method)
        names = parameter_names(algorithm, method)
        for name, parameter in zip(names, schema.parameters, strict=True):
            for path, kind, itemsize in _static_fields(parameter, f"{method}.{name}", ""):
                rows.append(WireField(method, "down", path, kind, itemsize))
        for path, kind, itemsize in _static_fields(schema.answer, method, ""):
            rows.append(WireField(method, "up", path, kind, itemsize))
    return list(dict.fromkeys(rows))


def _static_fields(
    schema: Schema, path: str, content: ContentKind | Literal[""]
) -> Iterator[tuple[str, ContentKind, int]]:
    """Yield path, kind and bytes of a value of every field with tensors in a schema."""
    content = schema.content or content
    match schema:
        case RecordSchema():
            for key, part in schema.fields.items():
                yield from _static_fields(part, f"{path}.{key}", content)
        case StateSchema():
            yield path, content or "weights", 4
        case TensorSchema():
            itemsize = 4 if schema.values is None else schema.values.dtype.itemsize
            yield path, content or kind_of_tensor(schema), itemsize
        case AnySchema():
            yield path, content or "values", 4
        case DictSchema() | ListSchema() | TupleSchema() | UnionSchema():
            for child in schema.children():
                yield from _static_fields(child, path, content)


def kind_of_tensor(schema: TensorSchema) -> ContentKind:
    """Return a tensor's kind, by its declared dtype and the name of its last axis."""
    declared: Floats | None = schema.values
    if declared is None:
        return "values"
    if isinstance(declared, Pixels):
        return "images"
    if isinstance(declared, NonNegatives) or declared.dtype not in (torch.float32, torch.float16):
        return "exact"
    if len(declared.shape) < 2:
        # Vectors are always exact; with `...` there may be more axes.
        return "exact"
    last = declared.shape[-1]
    if last == "classes":
        return "logits"
    return "embeddings" if last in VECTOR_AXES else "values"
