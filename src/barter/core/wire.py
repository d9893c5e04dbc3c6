"""The single point through which all payloads between server and clients pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from barter.core.errors import PayloadError
from barter.core.payload import Payload, infinite_leaves, isolate, nbytes
from barter.core.wire_codec import Direction, WireCodec, decode_payload, encoded_nbytes

__all__ = ["Direction", "Wire"]

T = TypeVar("T")


class Wire:
    """The path of all payloads between server and clients.

    It encodes and isolates payloads, counts their bytes, and checks downloads for NaN and infinity.
    Uploads are checked against contracts instead, see `core/answers.py`.

    In one process, `carry` returns what the receiver decodes. Between processes, one side calls
    `encode` and the other `decode`. Bytes are counted as they are sent.

    Args:
        may_be_infinite: Methods whose payloads may contain NaN or infinity.
        codec: Encodes payloads; None to send them as they are.
    """

    def __init__(
        self, may_be_infinite: frozenset[str] = frozenset(), codec: WireCodec | None = None
    ) -> None:
        self.may_be_infinite = may_be_infinite
        self.codec = codec
        self._bytes: Counter[tuple[str, int, Direction]] = Counter()

    def carry(
        self,
        tree: T,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
        size: int | None = None,
    ) -> T:
        """Return a payload as the receiving party gets it, and count its bytes.

        That is a copy that shares no memory with the payload (`isolate`), as the codec, if there is
        one, decodes it. Subclasses may replace it after it was checked and counted (`deliver`).

        Args:
            tree: The payload.
            method: The remote method to which it belongs.
            client: The client that sends or receives it.
            direction: "down" to the client or "up" to the server.
            device: The device of the copied tensors; None keeps theirs.
            size: The encoded size in bytes of an answer that `transmit` or `decode` returned; None
                for a payload that was not encoded yet.

        Raises:
            PayloadError: If the tree is not a payload, or goes down with NaN or infinity in it and
                the method is not in `may_be_infinite`. Uploads may hold any numbers here.
        """
        if size is None:
            if direction == "down" and self.codec is not None:
                self._require_finite(tree, method)
            tree, size = self.transmit(tree, method, client, direction)
        received = isolate(tree, device, path=method)
        if direction == "down" and self.codec is None:
            self._require_finite(received, method)
        self._bytes[method, client, direction] += nbytes(received) if size is None else size
        return self.deliver(received, method, client, direction)

    def during_call(self, round: int) -> AbstractContextManager[None]:
        """Inside the block, encode a tensor that several clients are sent only once."""
        return nullcontext() if self.codec is None else self.codec.during_call(round)

    def transmit(
        self, tree: T, method: str, client: int, direction: Direction
    ) -> tuple[T, int | None]:
        """Return a payload as its receiver decodes it, and its encoded size in bytes.

        The size is None if payloads are sent as they are. Nothing is counted.
        """
        if self.codec is None:
            return tree, None
        return self.codec.transmit(tree, method, direction, client)

    def encode(self, tree: T, method: str, client: int, round: int) -> Payload:
        """Return a download as it is sent to another process, and count its bytes.

        Args:
            tree: The arguments of the remote method.
            method: The remote method.
            client: The client that receives it.
            round: The round.

        Raises:
            PayloadError: If the tree is not a payload, or holds NaN or infinity and the method is
                not in `may_be_infinite`.
        """
        sent = isolate(tree, path=method)
        self._require_finite(sent, method)
        if self.codec is not None:
            # The original tensors: those that several clients are sent are encoded once.
            sent = self.codec.encode(tree, method, "down", client, round)
        self.count(sent, method, client, "down")
        return sent

    def decode(self, tree: Payload, method: str, most: int | None) -> tuple[Payload, int]:
        """Return an answer of another process, decoded, and its encoded size.

        Bytes are not counted.

        Args:
            tree: The answer as it was received, untrusted.
            method: The remote method.
            most: The largest size in bytes of the decoded answer; None for any.

        Raises:
            PayloadError: If its encoding is malformed, damaged, or larger when decoded.
        """
        return decode_payload(tree, most, method), encoded_nbytes(tree, method)

    def deliver(self, received: T, method: str, client: int, direction: Direction) -> T:
        """Return a checked and counted payload; subclasses may record or replace it."""
        return received

    def count(self, tree: object, method: str, client: int, direction: Direction) -> None:
        """Add the encoded size of a payload to the bytes of one client.

        For a payload that was encoded once and goes to several clients.
        """
        self._bytes[method, client, direction] += encoded_nbytes(tree, method)

    def bytes_of(self, method: str, client: int, direction: Direction) -> int:
        """Return the bytes of a method's payloads since the counts were last reset."""
        return self._bytes[method, client, direction]

    def count_all(self, tree: object, method: str, clients: Iterable[int]) -> None:
        """Add the size of a payload that goes down as it is to the bytes of each client."""
        size = nbytes(tree)
        for client in clients:
            self._bytes[method, client, "down"] += size

    def take_bytes(self) -> Counter[tuple[str, int, Direction]]:
        """Return the bytes by method, client and direction, and reset the counts."""
        counts = self._bytes
        self._bytes = Counter()
        return counts

    def _require_finite(self, tree: object, method: str) -> None:
        """Raise PayloadError if a payload holds NaN or infinity that its method forbids."""
        if method in self.may_be_infinite:
            return
        for path in infinite_leaves(tree, method):
            raise PayloadError(f"{path} holds NaN or infinity, which {method!r} does not allow")

    def methods_with_uploads(self) -> set[str]:
        """Return the methods with uploads of at least one byte since the last reset."""
        return {
            method
            for (method, _, direction), count in self._bytes.items()
            if direction == "up" and count
        }
