"""All clients in this process: side by side on a GPU's streams, or in processes of their own on a CPU's cores."""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from barter.core import lanes, seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Failure, Replies
from barter.core.lanes import Lane
from barter.core.nodes import Client, Monitor, Silence
from barter.core.wire import Wire
from barter.engines.parking import Parking

__all__ = ["LocalEngine"]


class LocalEngine:
    """Runs remote methods in-process. Results do not depend on the order in which clients run, nor on what overlaps."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Mapping[int, Client],
        *,
        seed: int,
        min_clients: int | None = None,
        monitor: Monitor | None = None,
        streams: int = 1,
        device_memory: int = 0,
    ) -> None:
        self.algorithm, self.clients, self.seed, self.min_clients = algorithm, clients, seed, min_clients
        self.wire = Wire(algorithm.may_be_infinite)
        self.watched = monitor or Silence()
        self.round = 0
        self.failures: list[Failure] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for client in clients.values():
            client.monitor = self
        self._calls: Counter[tuple[int, str, int]] = Counter()
        self._credit: dict[int | None, float] = {}  # how much of each lane's current turn is still to be shown
        self.lanes: list[Lane] = []
        self.home: Lane | None = None
        self.parking = Parking(clients, device_memory // 2)
        device = next(iter(clients.values())).device
        if device.type == "cuda":
            # Half of the memory is for clients between their turns, half for those at work and for the server.
            width = min(streams, len(clients))
            self.lanes = [Lane(device, device_memory // 8 // width) for _ in range(width)]
            self.home = Lane(device, device_memory // 8)

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.clients)

    def stream(self, name: str) -> torch.Generator:
        """A random stream of the server's own in this round."""
        return torch.Generator().manual_seed(seeds.stream_seed(self.seed, self.round, name))

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """The server's place: inside, its work goes to its own stream."""
        with nullcontext() if self.home is None else self.home.open():
            yield
            lanes.rest()

    def _path(self, method: str, client: int) -> tuple[object, ...]:
        """The name of a call's random stream; a method asked for again in one round draws anew."""
        before = self._calls[self.round, method, client]
        self._calls[self.round, method, client] += 1
        return (self.round, method, client, before) if before else (self.round, method, client)

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """The order in which clients take their turns; any gives the same result."""
        return sorted(ids)

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Run a method of the algorithm at each of these clients."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}

        def turn(k: int) -> None:
            try:
                answers[k] = self._turn(method, k, args[k])
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                failures[k] = Failure(k, method, self.round, reason, traceback.format_exc())

        with self.phase(method, len(args)):
            turns = {k: partial(turn, k) for k in self.order(list(args))}
            if self.lanes:
                # Until all are done, nothing that a client may read is given back: another lane might take its memory.
                held = [leaf for k in args for leaf in self.clients[k].holdings()]
                lanes.take_turns(self.lanes, self._seating(turns))
                del held
            else:
                for take in turns.values():
                    take()
        self.failures += failures.values()
        examples = {k: len(self.clients[k].data) for k in answers}
        return Replies(answers, examples, failures)

    def _turn(self, method: str, k: int, args: tuple[Any, ...]) -> Any:
        client, lane = self.clients[k], id(lanes.current())
        self._credit[lane] = 1.0
        arrived = self.wire.carry(args, method, k, "down", client.device)
        stream = seeds.scope(self.seed, *self._path(method, k), device=client.device)
        try:
            with self.parking.fetched(client), client.seated(), stream:
                answer = getattr(self.algorithm, method)(client, *arrived)
                lanes.rest()
                return self.wire.carry(answer, method, k, "up")
        finally:
            self.watched.advance(self._credit.pop(lane))

    def _seating(self, turns: Mapping[int, Callable[[], None]]) -> list[list[Callable[[], None]]]:
        """Who takes turns on which lane: the largest first, each where least is to be done yet."""
        load, seats = [0] * len(self.lanes), [[] for _ in self.lanes]  # type: list[int], list[list[Callable[[], None]]]
        for k in sorted(turns, key=lambda k: -len(self.clients[k].data)):
            name = ("model", self.clients[k].architecture)
            at = min(range(len(load)), key=lambda i: (load[i], name not in self.lanes[i].modules, i))
            load[at] += len(self.clients[k].data)
            seats[at].append(turns[k])
        return seats

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[None]:
        """Time a phase and show it to whoever watches."""
        start = time.perf_counter()
        with self.watched.phase(name, total):
            try:
                yield
                lanes.rest()
            finally:
                self.seconds[name] += time.perf_counter() - start

    def advance(self, amount: float) -> None:
        """A part of a client's turn, or a step of the server's, is done."""
        lane = id(lanes.current())
        amount = min(amount, self._credit.get(lane, math.inf))
        if lane in self._credit:
            self._credit[lane] -= amount
        self.watched.advance(amount)
