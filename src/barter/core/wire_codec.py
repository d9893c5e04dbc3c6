"""Encode and decode whole payloads, field by field, as the `[wire]` table says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from barter.core import seeds
from barter.core.contracts import ContentKind
from barter.core.encodings import (
    ENCODED,
    IMAGE_ENCODINGS,
    EncodedTensor,
    RowAxis,
    encode_tensor,
    is_image_batch,
)
from barter.core.errors import PayloadError
from barter.core.payload import DEPTH, Payload, leaves, map_leaves, nbytes
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
    choose_member,
    compile_method,
    has_structure,
)
from barter.core.wire_settings import WireSettings, kind_of_tensor, parameter_names

__all__ = ["Direction", "WireCodec", "decode_payload", "decoded_nbytes", "encoded_nbytes"]

Direction: TypeAlias = Literal["up", "down"]
ANY = AnySchema()


class WireCodec:
    """Encodes the payloads of an algorithm's remote methods.

    Args:
        algorithm: The algorithm, whose type hints say what the fields of payloads are.
        settings: The encodings.
        seed: The run's seed, for stochastic rounding.
    """

    def __init__(self, algorithm: Any, settings: WireSettings, seed: int) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.seed = seed
        self._round = 0
        # What the server sends to several clients is encoded once in a call:
        # id of a tensor, encoding and path -> the tensor itself, to keep its id, and its code.
        self._shared: dict[tuple[int, str, str], tuple[Tensor, EncodedTensor | None]] | None = None

    @contextmanager
    def during_call(self, round: int) -> Iterator[None]:
        """Encode tensors that several clients are sent inside the block once."""
        self._round = round
        self._shared = {}
        try:
            yield
        finally:
            self._shared = None

    def encode(
        self, tree: Payload, method: str, direction: Direction, client: int, round: int
    ) -> Payload:
        """Return a payload with coded tensors, as it is sent.

        Args:
            tree: The payload.
            method: The remote method to which it belongs.
            direction: "down" for the method's arguments, "up" for its answer.
            client: The client that sends it; what comes down does not depend on it.
            round: The round, for stochastic rounding.

        Raises:
            PayloadError: If the tree is not a payload.
        """
        self._round = round
        coded = self._code_leaves(tree, method, direction, client)
        return map_leaves(
            tree, lambda path, value: coded[path].to_payload() if path in coded else value, method
        )

    def transmit(
        self, tree: Payload, method: str, direction: Direction, client: int
    ) -> tuple[Payload, int]:
        """Return a payload as its receiver decodes it, and its encoded size in bytes.

        The arguments are those of `encode`; the round is that of `during_call`.
        """
        coded = self._code_leaves(tree, method, direction, client)
        sizes: list[int] = []

        def receive(path: str, value: Any) -> Any:
            if path not in coded:
                sizes.append(nbytes(value))
                return value
            sizes.append(coded[path].nbytes)
            return coded[path].value

        return map_leaves(tree, receive, method), sum(sizes)

    def _code_leaves(
        self, tree: Payload, method: str, direction: Direction, client: int
    ) -> dict[str, EncodedTensor]:
        """Return the code of each tensor that is not sent as it is, by its path."""
        plan: dict[str, tuple[str, RowAxis]] = {}
        for path, field, kind, tensor in self._fields(tree, method, direction):
            plan[path] = self._choose(field, kind, tensor)
        coded: dict[str, EncodedTensor] = {}
        for path, value in leaves(tree, method):
            if f".{ENCODED}" in path:
                raise PayloadError(f"{path}: a payload must not have the key {ENCODED!r}")
            encoding, rows = plan.get(path, ("exact", "last"))
            if encoding == "exact":
                continue
            code = self._code(value, encoding, rows, (method, direction, client, path))
            if code is not None:
                coded[path] = code
        return coded

    def _code(
        self,
        tensor: Tensor,
        encoding: str,
        rows: RowAxis,
        place: tuple[str, Direction, int, str],
    ) -> EncodedTensor | None:
        """Encode a tensor, or return its code if sent to another client in this call."""
        method, direction, client, path = place
        noise: torch.Generator | None = None
        if self.settings.rounding == "stochastic":
            # What comes down is the same for all clients.
            sender = client if direction == "up" else "server"
            stream = seeds.stream_seed(self.seed, self._round, "wire", method, sender, path)
            noise = torch.Generator().manual_seed(stream)
        is_shared = direction == "down" and self._shared is not None
        key = (id(tensor), encoding, "" if noise is None else path)
        if is_shared and self._shared is not None and key in self._shared:
            return self._shared[key][1]
        code = encode_tensor(
            tensor, encoding, rows=rows, deflate=self.settings.deflates, noise=noise
        )
        if is_shared and self._shared is not None:
            if code is not None and tensor.is_cuda:
                _ = code.value
                # Other clients read it on other streams.
                torch.cuda.current_stream(tensor.device).synchronize()
            self._shared[key] = (tensor, code)
        return code

    def _choose(self, field: str, kind: ContentKind, tensor: Tensor) -> tuple[str, RowAxis]:
        """Return the encoding of a tensor, and which of its values share a scale."""
        if kind == "images" and tensor.is_floating_point() and not is_image_batch(tensor):
            kind = "embeddings"  # What images are decoded from, in place of images.
        encoding = self.settings.encoding_of(field, kind)
        if encoding in IMAGE_ENCODINGS and kind != "images":
            # A field that holds images in other runs is named with an encoding of images.
            encoding = self.settings.encoding_of("", kind)
        return encoding, "first" if kind == "weights" else "last"

    def _fields(
        self, tree: Payload, method: str, direction: Direction
    ) -> Iterator[tuple[str, str, ContentKind, Tensor]]:
        """Yield path in the tree, path of the field, kind and value of each tensor."""
        if method not in self.algorithm.crosses:
            return
        schema = compile_method(self.algorithm, method)
        if direction == "up":
            yield from _walk(tree, schema.answer, method, method, "")
            return
        names = parameter_names(self.algorithm, method)
        for i, (value, name) in enumerate(zip(tree, names, strict=False)):
            yield from _walk(value, schema.parameters[i], f"{method}[{i}]", f"{method}.{name}", "")


def _walk(
    tree: Payload, schema: Schema, path: str, field: str, content: ContentKind | Literal[""]
) -> Iterator[tuple[str, str, ContentKind, Tensor]]:
    """Yield path, field, kind and value of each tensor in a part of a payload.

    Args:
        tree: The part.
        schema: Its type. A part of another type is taken as one without annotations.
        path: Its path in the payload.
        field: Its path in the types.
        content: Its kind, if an annotation further up declares one.
    """
    content = schema.content or content
    if isinstance(schema, UnionSchema):
        yield from _walk(tree, choose_member(tree, schema) or ANY, path, field, content)
        return
    if not has_structure(tree, schema):
        schema = ANY
    match schema:
        case RecordSchema():
            for key, value in tree.items():
                part = schema.fields.get(key, ANY)
                yield from _walk(value, part, f"{path}.{key}", f"{field}.{key}", content)
        case StateSchema():
            for key, value in tree.items():
                if isinstance(value, Tensor):
                    yield f"{path}.{key}", field, content or "weights", value
        case DictSchema():
            for key, value in tree.items():
                yield from _walk(value, schema.value, f"{path}.{key}", field, content)
        case ListSchema():
            for i, value in enumerate(tree):
                yield from _walk(value, schema.item, f"{path}[{i}]", field, content)
        case TupleSchema():
            for i, (value, item) in enumerate(zip(tree, schema.items, strict=True)):
                yield from _walk(value, item, f"{path}[{i}]", field, content)
        case TensorSchema():
            yield path, field, content or _kind_of(tree, schema), tree
        case _:
            for at, value in leaves(tree, path):
                if isinstance(value, Tensor):
                    yield at, field, content or _kind_of(value, TensorSchema()), value


def _kind_of(tensor: Tensor, schema: TensorSchema) -> ContentKind:
    """Return a tensor's kind by its annotation.

    Without an annotation, bytes are images if they can be (`is_image_batch`).
    """
    if schema.values is None and tensor.dtype == torch.uint8 and is_image_batch(tensor):
        return "images"
    return kind_of_tensor(schema)


def _map_coded(
    tree: Payload,
    coded: Callable[[str, Payload], Any],
    other: Callable[[Any], Any],
    path: str,
    depth: int = 0,
) -> Payload:
    """Return a payload with functions applied to coded tensors and to other leaves."""
    if depth > DEPTH:
        raise PayloadError(f"a payload is nested more than {DEPTH} deep")
    if isinstance(tree, dict):
        if ENCODED in tree:
            return coded(path, tree)
        return {
            key: _map_coded(value, coded, other, f"{path}.{key}", depth + 1)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(
            _map_coded(value, coded, other, f"{path}[{i}]", depth + 1)
            for i, value in enumerate(tree)
        )
    return other(tree)


def encoded_nbytes(tree: Payload, path: str = "payload") -> int:
    """Return a payload's size in bytes as it is sent; it may have coded tensors."""
    return _sum_nbytes(tree, lambda code: code.nbytes, path)


def decoded_nbytes(tree: Payload, path: str = "payload") -> int:
    """Return a payload's size in bytes when decoded, without decoding it.

    Raises:
        PayloadError: If a coded tensor is malformed.
    """
    return _sum_nbytes(tree, lambda code: code.decoded_nbytes, path)


def _sum_nbytes(tree: Payload, size: Callable[[EncodedTensor], int], path: str) -> int:
    """Return the size in bytes of a payload's leaves, of coded tensors by `size`."""
    sizes: list[int] = []
    _map_coded(
        tree,
        lambda at, code: sizes.append(size(EncodedTensor.from_payload(code, at))),
        lambda value: sizes.append(nbytes(value)),
        path,
    )
    return sum(sizes)


def decode_payload(tree: Payload, most: int | None = None, path: str = "payload") -> Payload:
    """Decode a payload of an untrusted party.

    Args:
        tree: The payload, whose tensors may be coded.
        most: The largest size of the decoded payload in bytes; None for any.
        path: The path of the tree, for messages.

    Raises:
        PayloadError: If a coded tensor is malformed or damaged, or the payload is larger. Its size
            is computed from shapes and headers, before memory is allocated.
    """
    size = decoded_nbytes(tree, path)
    if most is not None and size > most:
        raise PayloadError(
            f"{path} has {size / 1e6:.1f} MB when decoded, expected at most {most / 1e6:.1f}"
        )
    return _map_coded(
        tree,
        lambda at, code: EncodedTensor.from_payload(code, at).decode(at),
        lambda value: value,
        path,
    )
