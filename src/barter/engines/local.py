"""All clients in this process, one after the other."""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Failure, Replies
from barter.core.nodes import Client, Monitor, Silence
from barter.core.wire import Wire

__all__ = ["LocalEngine"]


class LocalEngine:
    """Runs remote methods in-process. Results do not depend on the order in which clients run."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Mapping[int, Client],
        *,
        seed: int,
        min_clients: int | None = None,
        monitor: Monitor | None = None,
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
        self._credit = math.inf  # how much of the current client's turn is still to be shown

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.clients)

    def stream(self, name: str) -> torch.Generator:
        """A random stream of the server's own in this round."""
        return torch.Generator().manual_seed(seeds.stream_seed(self.seed, self.round, name))

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
        with self.phase(method, len(args)):
            for k in self.order(list(args)):
                self._credit = 1.0
                arrived = self.wire.carry(args[k], method, k, "down", self.clients[k].device)
                try:
                    with seeds.scope(self.seed, *self._path(method, k), device=self.clients[k].device):
                        answer = getattr(self.algorithm, method)(self.clients[k], *arrived)
                    answers[k] = self.wire.carry(answer, method, k, "up")
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    failures[k] = Failure(k, method, self.round, reason, traceback.format_exc())
                self.watched.advance(self._credit)
        self._credit = math.inf
        self.failures += failures.values()
        examples = {k: len(self.clients[k].data) for k in answers}
        return Replies(answers, examples, failures)

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[None]:
        """Time a phase and show it to whoever watches."""
        start = time.perf_counter()
        with self.watched.phase(name, total):
            try:
                yield
            finally:
                self.seconds[name] += time.perf_counter() - start

    def advance(self, amount: float) -> None:
        """A part of a client's turn, or a step of the server's, is done."""
        amount = min(amount, self._credit)
        self._credit -= amount
        self.watched.advance(amount)
