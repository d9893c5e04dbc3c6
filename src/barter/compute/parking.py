"""Move waiting clients to host memory when device memory runs short."""

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
    """A holder of memory that can be moved between devices, such as a client."""

    id: int
    device: torch.device

    def move(self, device: torch.device) -> None:
        """Move its tensors to a device; `device`, where it works, stays the same."""

    def footprint(self) -> int:
        """Return the number of bytes of all tensors."""


class Parking:
    """Placement of clients on their devices; the least recently used are evicted.

    Args:
        clients: All clients by id.
        limit: Bytes that the run may use of each device's memory; 0 moves nothing.
    """

    def __init__(self, clients: Mapping[int, Guest], limit: int) -> None:
        self.clients = clients
        self.limit = limit
        # Bytes of the clients that are on their device, the least recently used first.
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.at_work: set[int] = set()

    @contextmanager
    def on_device(self, client: Guest) -> Iterator[None]:
        """Keep a client on its device inside the block, where it counts as at work.

        Clients that are not at work are moved to the host while memory of this device is short
        (`is_crowded`), least recently used first. After the block, the client stays until then.
        With a limit of 0, nothing moves.
        """
        if not self.limit:
            yield
            return
        self.at_work.add(client.id)
        try:
            self._make_room(client.device)
            if client.id not in self.sizes:
                client.move(client.device)
            yield
        finally:
            try:
                # All writes must be complete before another lane may move the client.
                lanes.wait_for_device()
            finally:
                self.at_work.discard(client.id)
                self.sizes[client.id] = client.footprint()
                self.sizes.move_to_end(client.id)
            self._make_room(client.device)

    def is_crowded(self, device: torch.device) -> bool:
        """Return whether clients must leave a device to free memory.

        This is so if the clients that have worked and are on the device take more than half of the
        limit, or all allocations more than three fifths.
        """
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        held = sum(self.sizes[k] for k in self._clients_on(device))
        return held > self.limit // 2 or allocated > self.limit * 3 // 5

    def _clients_on(self, device: torch.device) -> list[int]:
        """Return the clients that are on this device, the least recently used first."""
        return [k for k in self.sizes if self.clients[k].device == device]

    def _make_room(self, device: torch.device) -> None:
        """Move idle clients to the host, least recently used first, until there is room."""
        idle = [k for k in self._clients_on(device) if k not in self.at_work]
        while idle and self.is_crowded(device):
            k = idle.pop(0)
            del self.sizes[k]
            self.clients[k].move(HOST)
