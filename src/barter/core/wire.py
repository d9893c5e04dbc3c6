"""The one function through which everything that crosses between parties passes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from barter.core.errors import PayloadError
from barter.core.payload import isolate, leaves, nbytes, numbers

__all__ = ["Direction", "Wire"]

Direction: TypeAlias = Literal["up", "down"]
T = TypeVar("T")


class Wire:
    """Counts and isolates payloads, and checks what goes down; what comes up has a contract of its own."""

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
        """The tree as it arrives on the other side."""
        arrived = isolate(tree, device, path=method)
        if direction == "down" and method not in self.may_be_infinite:
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
        return {
            method
            for (method, _, direction), count in self._bytes.items()
            if direction == "up" and count
        }


def _require_finite(tree: object, method: str) -> None:
    found = list(leaves(tree, method))
    plain = [(at, value) for at, value in found if isinstance(value, float)]
    tensors = [
        (at, x) for at, x in found if isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    ]
    ends = numbers([end for _, tensor in tensors for end in torch.aminmax(tensor)])
    plain += [(at, end) for i, (at, _) in enumerate(tensors) for end in ends[2 * i : 2 * i + 2]]
    for at, value in plain:
        if not math.isfinite(value):
            raise PayloadError(f"{at} holds NaN or infinity, which {method!r} does not allow")
