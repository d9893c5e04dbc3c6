"""Payloads that all clients receive, delivered when a client next takes part.

Some methods send the same payload to all clients in every round, although ten of thousands train.
If the client only stores it, it makes no difference when: before the client's next call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from barter.core.algorithm import Algorithm
from barter.core.payload import Payload

__all__ = ["DeferredCall", "Deliveries", "is_deferrable"]


@dataclass(frozen=True)
class DeferredCall:
    """A call of all clients that is made up for when each of them next takes part.

    Attributes:
        number: Its place in the order of all deliveries, from 1 on.
        path: Names of its random stream before the client's id: the round and the method; and, if
            the method was called in the round before, how often.
        args: The arguments, whose tensors nobody modifies.
    """

    number: int
    path: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def method(self) -> str:
        return str(self.path[1])

    def stream(self, client: int) -> tuple[Any, ...]:
        """Return the path of its random stream at a client: (round, method, client, ...)."""
        return (*self.path[:2], client, *self.path[2:])


class Deliveries:
    """Deliveries in their order, and which of them each client has received."""

    def __init__(self) -> None:
        self.log: list[DeferredCall] = []
        self.last = 0  # The number of the last delivery.
        self.received: dict[int, int] = {}  # Client -> number of the last delivery it received.

    def add(self, algorithm: Algorithm[Any, Any], path: tuple[Any, ...], args: Any) -> None:
        """Add a deferred call of all clients.

        Earlier calls of the same method that wait are reduced to what the new one leaves of them,
        or dropped (`Algorithm.remaining`).

        Args:
            algorithm: The algorithm.
            path: The call's `DeferredCall.path`: round, method, and how often if called before.
            args: The method's arguments after the client.
        """
        self.last += 1
        new = DeferredCall(self.last, path, args)
        log = []
        for earlier in self.log:
            rest: tuple[Any, ...] | None = earlier.args
            if earlier.method == new.method:
                rest = algorithm.remaining(new.method, earlier.args, new.args)
            if rest is not None:
                log.append(replace(earlier, args=rest))
        self.log = [*log, new]

    def pending(self, client: int) -> list[DeferredCall]:
        """Return the deferred calls that a client has not received yet, in their order."""
        received = self.received.get(client, 0)
        if received == self.last:
            return []
        return [delivery for delivery in self.log if delivery.number > received]

    def note(self, client: int) -> None:
        """Note that a client has received all deferred calls so far."""
        if self.last:
            self.received[client] = self.last

    def memory(self) -> Payload:
        """Return the deferred calls and who has received them, for a checkpoint."""
        log = [[d.number, list(d.path), list(d.args)] for d in self.log]
        return {"log": log, "last": self.last, "received": dict(self.received)}

    def recall(self, memory: Mapping[str, Payload]) -> None:
        """Restore what `memory` returned."""
        self.log = [DeferredCall(n, tuple(path), tuple(args)) for n, path, args in memory["log"]]
        self.last = memory["last"]
        self.received = dict(memory["received"])


def is_deferrable(algorithm: Algorithm[Any, Any], method: str) -> bool:
    """Return whether a method may run later than it is called: `deferrable` names it.

    A class that overrides the method must declare `deferrable` anew; otherwise the result is False.
    """
    if method not in algorithm.deferrable:
        return False
    classes = type(algorithm).__mro__
    declared = next(i for i, kind in enumerate(classes) if "deferrable" in vars(kind))
    defined = next(i for i, kind in enumerate(classes) if method in vars(kind))
    return declared <= defined
