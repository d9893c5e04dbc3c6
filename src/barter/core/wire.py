"""The one function through which everything that crosses between parties passes."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from barter.core.errors import PayloadError
from barter.core.payload import isolate, leaves, nbytes

__all__ = ["Direction", "Wire"]

Direction: TypeAlias = Literal["up", "down"]
T = TypeVar("T")


class Wire:
    """Checks, counts and isolates payloads; knows nothing of algorithms."""

    def __init__(self, may_be_infinite: frozenset[str] = frozenset()) -> None:
        self.may_be_infinite = may_be_infinite
        self._bytes: Counter[tuple[str, int, Direction]] = Counter()

    def carry(self, tree: T, method: str, client: int, direction: Direction, device: torch.device | None = None) -> T:
        """The tree as it arrives on the other side."""
        arrived = isolate(tree, device, path=method)
        if method not in self.may_be_infinite:
            _require_finite(arrived, method)
        self.count(arrived, method, client, direction)
        return arrived

    def count(self, tree: object, method: str, client: int, direction: Direction) -> None:
        """The same tree goes to one more client: what was looked at once is not looked at again."""
        self._bytes[method, client, direction] += nbytes(tree)

    def take_bytes(self) -> Counter[tuple[str, int, Direction]]:
        """Bytes by method, client and direction since the last time this was asked."""
        taken, self._bytes = self._bytes, Counter()
        return taken

    def told(self) -> set[str]:
        """The methods by which clients have told the server anything since then."""
        return {method for (method, _, direction), count in self._bytes.items() if direction == "up" and count}


def _require_finite(tree: object, method: str) -> None:
    floating = [
        (at, torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64))
        for at, value in leaves(tree, method)
        if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    ]
    verdicts = [value.isfinite().all() for _, value in floating]
    # One look per device at all verdicts together, so that a GPU is waited for once.
    for device in {verdict.device for verdict in verdicts}:
        if not bool(torch.stack([verdict for verdict in verdicts if verdict.device == device]).all()):
            bad = next(at for (at, _), verdict in zip(floating, verdicts, strict=True) if not verdict)
            raise PayloadError(f"{bad} holds NaN or infinity, which {method!r} does not allow")
