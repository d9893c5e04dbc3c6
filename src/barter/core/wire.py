"""The single point through which all payloads between server and clients pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

import torch

from barter.core.errors import PayloadError
from barter.core.payload import infinite_leaves, isolate, nbytes

__all__ = ["Direction", "Wire"]

Direction: TypeAlias = Literal["up", "down"]
T = TypeVar("T")


class Wire:
    """The path of all payloads: isolates them, counts bytes, checks downloads.

    Downloads are checked for NaN and infinity. Uploads are checked against contracts instead, see
    `core/answers.py`.

    Args:
        may_be_infinite: Methods whose payloads may contain NaN or infinity.
    """

    def __init__(self, may_be_infinite: frozenset[str] = frozenset()) -> None:
        self.may_be_infinite = may_be_infinite
        self._bytes: Counter[tuple[str, int, Direction]] = Counter()

    def carry(
        self,
        tree: T,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
    ) -> T:
        """Return a payload as the receiving party gets it, and count its bytes.

        Args:
            tree: The payload.
            method: The remote method to which it belongs.
            client: The client that sends or receives it.
            direction: "down" to the client or "up" to the server.
            device: The device of the copied tensors; None keeps theirs.

        Raises:
            PayloadError: If the tree is not a payload or holds values that are not allowed.
        """
        received = isolate(tree, device, path=method)
        if direction == "down" and method not in self.may_be_infinite:
            _require_finite(received, method)
        self.count(received, method, client, direction)
        return self.deliver(received, method, client, direction)

    def deliver(self, received: T, method: str, client: int, direction: Direction) -> T:
        """Return a checked and counted payload; subclasses may record or replace it."""
        return received

    def count(self, tree: object, method: str, client: int, direction: Direction) -> None:
        """Count a payload's bytes, without checking it; for one sent to several clients."""
        self._bytes[method, client, direction] += nbytes(tree)

    def bytes_of(self, method: str, client: int, direction: Direction) -> int:
        """Return the bytes of a method's payloads since the counts were last reset."""
        return self._bytes[method, client, direction]

    def count_all(self, tree: object, method: str, clients: Iterable[int]) -> None:
        """Count a payload that was checked and goes down to several clients."""
        size = nbytes(tree)
        for client in clients:
            self._bytes[method, client, "down"] += size

    def take_bytes(self) -> Counter[tuple[str, int, Direction]]:
        """Return the bytes by method, client and direction, and reset the counts."""
        counts = self._bytes
        self._bytes = Counter()
        return counts

    def methods_with_uploads(self) -> set[str]:
        """Return the methods with uploads since the counts were last reset."""
        return {
            method
            for (method, _, direction), count in self._bytes.items()
            if direction == "up" and count
        }


def _require_finite(tree: object, method: str) -> None:
    """Raise PayloadError if a payload holds NaN or infinity."""
    for path in infinite_leaves(tree, method):
        raise PayloadError(f"{path} holds NaN or infinity, which {method!r} does not allow")
