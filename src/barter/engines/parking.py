"""Device memory for hundreds of clients: those that wait for their turn may have to wait in the host's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from barter.core import lanes
from barter.core.errors import ConfigError
from barter.core.nodes import Client

__all__ = ["Parking", "budget"]

HOST = torch.device("cpu")


def budget(device: torch.device, gib: float | None) -> int:
    """The bytes of device memory a run may take, which torch enforces from now on; on the CPU none."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    limit = total if gib is None else int(gib * 2**30)
    if limit > total:
        raise ConfigError(f"device_memory={gib}: this device has {total / 2**30:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return limit


class Parking:
    """Clients stay on the device while there is room; who was not asked for longest goes first."""

    def __init__(self, clients: Mapping[int, Client], limit: int) -> None:
        self.clients, self.limit = clients, limit
        self.sizes: OrderedDict[int, int] = OrderedDict()  # bytes of those on the device, the last asked last
        self.at_work: set[int] = set()

    @contextmanager
    def fetched(self, client: Client) -> Iterator[None]:
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
