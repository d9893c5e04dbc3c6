"""Device memory for hundreds of clients: those that wait for their turn may have to wait in the host's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from barter.compute import lanes

__all__ = ["Parking"]

HOST = torch.device("cpu")


class Guest(Protocol):
    """Somebody who holds memory, here or there."""

    id: int
    device: torch.device

    def move(self, device: torch.device) -> None: ...

    def footprint(self) -> int: ...


class Parking:
    """Clients stay on the device while there is room; who was not asked for longest goes first."""

    def __init__(self, clients: Mapping[int, Guest], limit: int) -> None:
        self.clients, self.limit = clients, limit
        self.sizes: OrderedDict[int, int] = (
            OrderedDict()
        )  # bytes of those on the device, the last asked last
        self.at_work: set[int] = set()

    @contextmanager
    def fetched(self, client: Guest) -> Iterator[None]:
        """Inside, this client is on the device and stays there."""
        if not self.limit:
            yield
            return
        self.at_work.add(client.id)
        try:
            self._make_room()
            if client.id not in self.sizes:
                client.move(client.device)
            yield
        finally:
            try:
                lanes.rest()  # what this turn still writes must have arrived before another lane may move it
            finally:
                self.at_work.discard(client.id)
                self.sizes[client.id] = client.footprint()
                self.sizes.move_to_end(client.id)
            self._make_room()

    def crowded(self) -> bool:
        """Whether waiting clients hold half of the budget, or all together three fifths: work needs the rest."""
        taken = torch.cuda.memory_allocated()  # nothing where there is no CUDA
        return sum(self.sizes.values()) > self.limit // 2 or taken > self.limit * 3 // 5

    def _make_room(self) -> None:
        idle = [k for k in self.sizes if k not in self.at_work]
        while idle and self.crowded():
            k = idle.pop(0)
            del self.sizes[k]
            self.clients[k].move(HOST)
