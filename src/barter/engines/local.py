"""All clients in this process: side by side on the streams of a GPU, or on the cores of a CPU."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from barter.compute import lanes
from barter.compute.lanes import Lane, Tune
from barter.compute.parking import Parking
from barter.compute.threads import threaded
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Failure, Replies
from barter.core.evaluation import knowing_alone
from barter.core.nodes import Client, Monitor
from barter.core.payload import Payload, leaves
from barter.engines import forks
from barter.engines.base import BaseEngine
from barter.engines.forks import Job
from barter.privacy.guard import Guard
from barter.privacy.side_information import EPSILON, ERRORS

__all__ = ["LocalEngine"]

FORK_SECONDS = 0.1  # a turn shorter than this is not worth a process of its own


def _again(error: Exception) -> Any:
    raise error


class Elsewhere(Exception):
    """What went wrong in another process."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason)
        self.reason, self.traceback = reason, traceback


class LocalEngine(BaseEngine):
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
        tune: Tune | None = None,
        threads: int | None = None,
        guard: Guard | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(algorithm, seed=seed, min_clients=min_clients, monitor=monitor)
        self.clients, self.guard, self.timeout = clients, guard, timeout
        # of a site, which knows of no other client: whether the server wants its tests in this round
        self.tested: bool | None = None
        for client in clients.values():
            client.monitor = self
        self._cost: dict[str, float] = {}  # seconds of a turn, by method, when last measured
        self._alone = True  # whether the call that is answered is one to clients that nothing of others has reached
        self._took: dict[tuple[str, int], float] = {}  # and of each client's
        self.parking = Parking(clients, device_memory)
        self.lanes: list[Lane] = []
        self.home: Lane | None = None
        self.cores = threads or torch.get_num_threads() if forks.possible() else 1
        device = next(iter(clients.values())).device
        if device.type == "cuda":
            # A quarter of the memory is for modules that lanes keep; see Parking for clients between their turns.
            width = min(streams, len(clients))
            # How much there is to do for each client, roughly: its images times the size of its network.
            self.loads = {
                k: len(client.data) * lanes.footprint(client.model) for k, client in clients.items()
            }
            # Networks much larger than the others would be the last to finish: they get lanes that go first.
            much = 1.5 * statistics.fmean(self.loads.values())
            urgent = min(sum(load > much for load in self.loads.values()), width // 2)
            self.lanes = [
                Lane(device, device_memory // 8 // width, tune=tune, urgent=i < urgent)
                for i in range(width)
            ]
            self.home = Lane(device, device_memory // 8, tune=tune)

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.clients)

    def examples(self, client: int) -> int:
        return len(self.clients[client].data)

    def memory(self) -> dict[int, Payload]:
        return {k: client.memory() for k, client in self.clients.items()}

    def recall(self, memory: Mapping[int, Payload]) -> None:
        for k, client in self.clients.items():
            client.recall(memory[k])

    @contextmanager
    def at_home(self) -> Iterator[None]:
        with nullcontext() if self.home is None else self.home.open():
            yield
            lanes.rest()

    def tests_due(self, client: int, method: str) -> bool:
        return super().tests_due(client, method) if self.tested is None else self.tested

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """The order in which clients take their turns; any gives the same result."""
        return sorted(ids)

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], alone: bool | None = None
    ) -> Replies[Any]:
        """As everywhere; a site is told whether its client is alone, for it does not know of the others."""
        self._alone = self.alone() if alone is None else alone
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}

        def settle(k: int, answer: Callable[[], Any]) -> None:
            try:
                answers[k] = answer()
            except Elsewhere as error:
                failures[k] = Failure(k, method, self.round, error.reason, error.traceback)
            except Exception as error:
                failures[k] = self.failure(k, method, error)

        with self.phase(method, len(args)):
            order = self.order(list(args))
            if self.lanes:
                self._on_streams(
                    {k: partial(settle, k, partial(self._turn, method, k, args[k])) for k in order}
                )
            elif self._worth_forking(method, len(args)):
                for k, answer in self._on_cores(method, {k: args[k] for k in order}):
                    settle(k, answer)
            else:
                start = time.perf_counter()
                with threaded(1 if self._by_core(len(args)) else None):
                    for k in order:
                        settle(k, partial(self._turn, method, k, args[k]))
                self._cost[method] = (time.perf_counter() - start) / max(1, len(args))
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.counting(answers), failures)

    def _turn(self, method: str, k: int, args: tuple[Any, ...]) -> Any:
        """A client's turn, here and now."""
        arrived = self.wire.carry(args, method, k, "down", self.clients[k].device)
        try:
            answer = self._work(method, k, self._path(method, k), arrived)
        except Exception:
            self.note(k, [ERRORS])
            raise
        self.hear(k, self.clients[k].report.get(EPSILON))
        return self.arrived(answer, method, k, args)

    def _path(self, method: str, client: int) -> tuple[object, ...]:
        """The name of a call's random stream."""
        before = self.asked_before(method, client)
        return (self.round, method, client, before) if before else (self.round, method, client)

    def _work(self, method: str, k: int, path: tuple[object, ...], arrived: tuple[Any, ...]) -> Any:
        client, lane = self.clients[k], id(lanes.current())
        client.tested = self.tests_due(k, method)
        self._credit[lane] = 1.0
        try:
            seed = self.seed if self.guard is None else self.guard.seed(self.seed)
            stream = seeds.scope(seed, *path, device=client.device)
            with self.parking.fetched(client), client.seated(), stream:
                with knowing_alone(client) if self._alone else nullcontext():
                    answer = self._answered(method, client, path, arrived)
                    lanes.rest()
                return answer
        finally:
            self.watched.advance(self._credit.pop(lane))

    def _answered(
        self, method: str, client: Client, path: tuple[object, ...], arrived: tuple[Any, ...]
    ) -> Any:
        """What leaves the client when its method is done."""
        if self.guard is None:
            return getattr(self.algorithm, method)(client, *arrived)
        came, stream = (
            self.guard.kept(method, arrived),
            seeds.stream_seed(self.seed, *path, "privacy"),
        )
        with self.guard.sealing(client, method, stream):
            answer = getattr(self.algorithm, method)(client, *arrived)
        return self.guard.protect(client, method, answer, came, stream)

    def _on_streams(self, turns: Mapping[int, Callable[[], None]]) -> None:
        """The largest first, each on the lane where least is to be done yet, best one that has its graphs."""
        load, seats = [0] * len(self.lanes), [[] for _ in self.lanes]  # type: list[int], list[list[Callable[[], None]]]
        for k in sorted(turns, key=lambda k: -self.loads[k]):
            name = ("model", self.clients[k].architecture)
            at = min(
                range(len(load)), key=lambda i: (load[i], name not in self.lanes[i].modules, i)
            )
            load[at] += self.loads[k]
            seats[at].append(turns[k])
        # Until all are done, nothing that a client may read is given back: another lane might take its memory.
        held = [leaf for k in turns for leaf in self.clients[k].holdings()]
        lanes.take_turns(self.lanes, seats)
        held.clear()

    def _by_core(self, clients: int) -> bool:
        """Whether each of so many clients computes on one core; fewer than half as many as cores have all of them."""
        return self.cores > 1 and 2 * clients >= self.cores

    def can_end(self) -> bool:
        """Whether a client that is not done in time can be ended: if all clients are asked, each has a process."""
        return not self.lanes and self._by_core(len(self.clients))

    def _worth_forking(self, method: str, clients: int) -> bool:
        """Whether they also do so at the same time: not where a process costs more than a turn."""
        if self.timeout is not None:
            return self._by_core(clients)  # only a process can be ended
        return (
            clients > 1
            and self._by_core(clients)
            and self._cost.get(method, math.inf) > FORK_SECONDS
        )

    def _on_cores(
        self, method: str, args: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Turns in other processes, the longest first; how to get each answer, as they come home."""
        start, jobs = time.perf_counter(), {}
        for k in sorted(
            args, key=lambda k: (-self._took.get((method, k), 0.0), -len(self.clients[k].data))
        ):
            try:
                jobs[k] = self._job(method, k, args[k])
            except Exception as error:
                yield k, partial(_again, error)
        homes = forks.side_by_side(
            jobs, self.cores, self._report_to, self.watched.advance, self.timeout
        )
        for k, home, death in homes:
            yield k, partial(self._at_home_again, method, k, args[k], home, death)
        self._cost[method] = (time.perf_counter() - start) * min(self.cores, len(args)) / len(args)

    def _job(self, method: str, k: int, args: tuple[Any, ...]) -> Job:
        arrived = self.wire.carry(args, method, k, "down")
        known = [leaf for _, leaf in leaves(arrived)] + self.clients[k].holdings()
        work = partial(self._away, method, k, self._path(method, k), arrived)
        return Job(work, [leaf for leaf in known if isinstance(leaf, Tensor)])

    def _report_to(self, monitor: Monitor) -> None:
        self.watched = monitor

    def _away(
        self, method: str, k: int, path: tuple[object, ...], arrived: tuple[Any, ...]
    ) -> Payload:
        """A turn in another process: all that it changes here."""
        client, start = self.clients[k], time.perf_counter()
        try:
            outcome: dict[str, Payload] = {"answer": self._work(method, k, path, arrived)}
            list(leaves(outcome["answer"], method))  # what is no payload is refused here
        except Exception as error:
            outcome = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        flags = (
            [p.requires_grad for p in client.model.parameters()],
            [m.training for m in client.model.modules()],
        )
        return {
            **outcome,
            "memory": client.memory(),
            "report": client.report,
            "flags": flags,
            "took": time.perf_counter() - start,
        }

    def _at_home_again(
        self, method: str, k: int, args: tuple[Any, ...], home: Payload | None, death: str
    ) -> Any:
        if home is None:
            raise Elsewhere(death, "")
        client = self.clients[k]
        self._took[method, k] = home["took"]
        client.recall(home["memory"])
        client.report = home["report"]
        for parameter, trained in zip(client.model.parameters(), home["flags"][0], strict=True):
            parameter.requires_grad_(trained)
        for part, training in zip(client.model.modules(), home["flags"][1], strict=True):
            part.training = training
        if "error" in home:
            self.note(k, [ERRORS])
            raise Elsewhere(home["error"], home["traceback"])
        self.hear(k, client.report.get(EPSILON))
        return self.arrived(home["answer"], method, k, args)
