"""Engine for clients on this machine: in parallel on the streams of a GPU or the cores of a CPU."""

from __future__ import annotations

import logging
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
from barter.compute.threads import limit_threads
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Failure, Replies
from barter.core.evaluation import record_local_only
from barter.core.nodes import Client, Monitor
from barter.core.payload import Payload, State, isolate, leaves
from barter.core.wire_codec import WireCodec
from barter.engines import forks
from barter.engines.adversaries import Adversaries, poison, states_in
from barter.engines.base import BaseEngine
from barter.engines.forks import ForkedCall
from barter.privacy.guard import Guard
from barter.privacy.side_information import EPSILON, FAILURES

__all__ = ["LocalEngine"]

log = logging.getLogger("barter")

FORK_SECONDS = 0.1  # A shorter call costs less than a process of its own.


def _raise(error: Exception) -> Any:
    raise error


class Elsewhere(Exception):
    """An error in a forked process, with its traceback as text."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback


class LocalEngine(BaseEngine):
    """Engine that runs clients in this process or in processes forked from it.

    Results do not depend on the order in which clients run, nor on which run in parallel.

    Args:
        algorithm: The algorithm.
        clients: The clients, by id.
        seed: The run's seed.
        min_clients: The number of clients that must answer a call; None for all that are called.
        monitor: Observes the progress of the run.
        streams: The number of CUDA streams (lanes) on which clients run in parallel.
        device_memory: Bytes of GPU memory for modules and for clients between their calls.
        tune: Called with each module that a lane keeps, to make it faster.
        threads: The number of CPU cores; None for torch's number of threads.
        guard: Protects answers as the run's privacy settings require; None for no protection.
        timeout: Seconds that a client has for one call; None for no limit.
        adversaries: What simulated adversarial clients do, and their ids.
        codec: Encodes what server and clients send each other; None to send it as it is.
    """

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
        adversaries: tuple[Adversaries, Sequence[int]] = (Adversaries(), ()),
        codec: WireCodec | None = None,
    ) -> None:
        super().__init__(
            algorithm, seed=seed, min_clients=min_clients, monitor=monitor, codec=codec
        )
        self.clients = clients
        self.guard = guard
        self.adversaries, self.adversarial = adversaries
        self._before: dict[int, State] = {}  # Adversarial client -> its weights before the call.
        self.timeout = timeout
        # At a site, which knows no other client: whether the server wants an evaluation in this
        # round. None lets this engine decide.
        self.tested: bool | None = None
        for client in clients.values():
            client.monitor = self
        self._cost: dict[str, float] = {}  # Method -> seconds of a call when last measured.
        self._took: dict[tuple[str, int], float] = {}  # (method, client) -> the same.
        self._alone = True  # True if nothing was exchanged before the current call.
        self.parking = Parking(clients, device_memory)
        self.lanes: list[Lane] = []
        self.home: Lane | None = None
        self.cores = threads or torch.get_num_threads() if forks.can_fork() else 1
        device = next(iter(clients.values())).device
        if device.type == "cuda":
            # A quarter of the memory is for the modules of lanes. Parking manages the memory of
            # clients between their calls.
            width = min(streams, len(clients))
            # Rough estimate of a client's work: its images times the size of its network.
            self.loads = {
                k: len(client.data) * lanes.footprint(client.model) for k, client in clients.items()
            }
            # Clients with much more work would finish last, so they get lanes of high priority.
            threshold = 1.5 * statistics.fmean(self.loads.values())
            n_large = sum(load > threshold for load in self.loads.values())
            urgent = min(n_large, width // 2)
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
    def on_server_stream(self) -> Iterator[None]:
        with nullcontext() if self.home is None else self.home.open():
            yield
            lanes.wait_for_device()

    def tests_due(self, client: int, method: str) -> bool:
        return super().tests_due(client, method) if self.tested is None else self.tested

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the order in which clients run; any order gives the same result."""
        return sorted(ids)

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], alone: bool | None = None
    ) -> Replies[Any]:
        """Run a method of the algorithm on clients.

        Args:
            method: The method's name.
            args: Client -> its arguments.
            alone: True if nothing was exchanged before this call. The server tells it to a site,
                which does not know the other clients; None lets this engine decide.
        """
        self._alone = self.is_local_only() if alone is None else alone
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        for k in set(self.adversarial) & set(args):
            self._before[k] = isolate(dict(self.clients[k].model.state_dict()))

        def settle(k: int, get_answer: Callable[[], Any]) -> None:
            """Store a client's answer or its failure."""
            try:
                answers[k] = get_answer()
            except Elsewhere as error:
                failures[k] = Failure(k, method, self.round, error.reason, error.traceback)
            except Exception as error:
                failures[k] = self.failure(k, method, error)

        with self.phase(method, len(args)), self.wire.during_call(self.round):
            order = self.order(list(args))
            if self.lanes:
                tasks = {}
                for k in order:
                    call_here = partial(self._call_here, method, k, args[k])
                    tasks[k] = partial(settle, k, call_here)
                self._run_on_lanes(tasks)
            elif self._worth_forking(method, len(args)):
                for k, get_answer in self._run_in_forks(method, {k: args[k] for k in order}):
                    settle(k, get_answer)
            else:
                start = time.perf_counter()
                with limit_threads(1 if self._by_core(len(args)) else None):
                    for k in order:
                        settle(k, partial(self._call_here, method, k, args[k]))
                self._cost[method] = (time.perf_counter() - start) / max(1, len(args))
        failures |= self.drop_outliers(method, answers, args)
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.image_counts(answers), failures)

    def receive_answer(
        self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]
    ) -> Payload:
        if client in self.adversarial and method != Algorithm.evaluate.__name__:
            references = [*states_in(sent), self._before[client]]
            stream = self.stream(f"attack {method} {client}")
            answer = poison(answer, self.adversaries, self.algorithm, method, references, stream)
        return super().receive_answer(answer, method, client, sent)

    def _call_here(self, method: str, k: int, args: tuple[Any, ...]) -> Any:
        """Run a client's call in this process and return the checked answer."""
        received = self.wire.carry(args, method, k, "down", self.clients[k].device)
        start = time.perf_counter()
        try:
            answer = self._work(method, k, self._path(method, k), received)
        except Exception:
            self.count_release(k, [FAILURES])
            raise
        finally:
            self._warn_if_late(method, k, time.perf_counter() - start)
        self.record_epsilon(k, self.clients[k].report.get(EPSILON))
        return self.receive_answer(answer, method, k, args)

    def _warn_if_late(self, method: str, k: int, seconds: float) -> None:
        """Warn that a call exceeded a timeout that cannot be enforced here; its answer counts.

        A client whose process is killed is as it was before the call. A client that has finished in
        this process has changed, so dropping its answer would not undo the call.
        """
        if self.timeout is not None and seconds > self.timeout:
            log.warning(
                "client %d took %.1f s in '%s', round %d, longer than timeout=%g: "
                "its answer counts",
                k,
                seconds,
                method,
                self.round,
                self.timeout,
            )

    def _path(self, method: str, client: int) -> tuple[object, ...]:
        """Return the path of a call's random stream."""
        before = self.count_call(method, client)
        return (self.round, method, client, before) if before else (self.round, method, client)

    def _work(
        self, method: str, k: int, path: tuple[object, ...], received: tuple[Any, ...]
    ) -> Any:
        """Run a client's call with its model on the device and its own random stream."""
        client = self.clients[k]
        lane = id(lanes.current_lane())
        client.tested = self.tests_due(k, method)
        self._credit[lane] = 1.0
        try:
            seed = self.seed if self.guard is None else self.guard.seed(self.seed)
            stream = seeds.scope(seed, *path, device=client.device)
            with self.parking.on_device(client), client.use_lane_module(), stream:
                with record_local_only(client) if self._alone else nullcontext():
                    answer = self._run_protected(method, client, path, received)
                    lanes.wait_for_device()
                return answer
        finally:
            self.watched.advance(self._credit.pop(lane))

    def _run_protected(
        self, method: str, client: Client, path: tuple[object, ...], received: tuple[Any, ...]
    ) -> Any:
        """Run a method and return its answer as the privacy guard releases it."""
        if self.guard is None:
            return getattr(self.algorithm, method)(client, *received)
        kept = self.guard.copy_arguments(method, received)
        stream = seeds.stream_seed(self.seed, *path, "privacy")
        with self.guard.seal_images(client, method, stream):
            answer = getattr(self.algorithm, method)(client, *received)
        return self.guard.protect(client, method, answer, kept, stream)

    def _run_on_lanes(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Distribute clients' tasks over the lanes and run them.

        The largest come first, each on the lane with the least work so far, preferably one that has
        graphs for the client's architecture.
        """
        loads = [0] * len(self.lanes)
        queues: list[list[Callable[[], None]]] = [[] for _ in self.lanes]
        for k in sorted(tasks, key=lambda k: -self.loads[k]):
            name = ("model", self.clients[k].architecture)
            chosen = min(
                range(len(loads)), key=lambda i: (loads[i], name not in self.lanes[i].modules, i)
            )
            loads[chosen] += self.loads[k]
            queues[chosen].append(tasks[k])
        # References keep all tensors that clients may read alive until every lane is done. Memory
        # freed earlier could be reused by another lane while it is still being read.
        held = [leaf for k in tasks for leaf in self.clients[k].holdings()]
        lanes.take_turns(self.lanes, queues)
        held.clear()

    def _by_core(self, clients: int) -> bool:
        """Return whether each client computes on one core.

        If there are fewer clients than half the cores, they run one after the other with all cores.
        """
        return self.cores > 1 and 2 * clients >= self.cores

    def timeout_gap(self) -> str:
        """Return why the timeout cannot be enforced here; empty if it can."""
        if self.lanes:
            return "on a GPU all clients compute in one process"
        return forks.fork_obstacle()

    def _worth_forking(self, method: str, clients: int) -> bool:
        """Return whether calls run in forked processes.

        With a timeout they always do, however short they were before: only a process can be killed,
        and any call may hang. Otherwise a process must cost less than the call.
        """
        if self.timeout is not None and not self.timeout_gap():
            return True
        return (
            clients > 1
            and self._by_core(clients)
            and self._cost.get(method, math.inf) > FORK_SECONDS
        )

    def _run_in_forks(
        self, method: str, args: Mapping[int, tuple[Any, ...]]
    ) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Run calls in forked processes, the longest first.

        Yields:
            A client and a function that returns its answer or raises, in the order in which calls
            finish.
        """
        start = time.perf_counter()
        # A forked call uses the number of threads that it would use in this process: results must
        # not depend on where it runs.
        by_core = self._by_core(len(args))
        width = self.cores if by_core else 1
        threads = 1 if by_core else torch.get_num_threads()

        def expected_length(k: int) -> tuple[float, int]:
            return self._took.get((method, k), 0.0), len(self.clients[k].data)

        jobs = {}
        for k in sorted(args, key=expected_length, reverse=True):
            try:
                jobs[k] = self._make_job(method, k, args[k])
            except Exception as error:
                yield k, partial(_raise, error)
        outcomes = forks.run_in_processes(
            jobs, width, self._set_monitor, self.watched.advance, self.timeout, threads
        )
        for k, outcome, death in outcomes:
            yield k, partial(self._finish_job, method, k, args[k], outcome, death)
        self._cost[method] = (time.perf_counter() - start) * min(width, len(args)) / len(args)

    def _make_job(self, method: str, k: int, args: tuple[Any, ...]) -> ForkedCall:
        """Return a client's call as a job for a forked process."""
        received = self.wire.carry(args, method, k, "down")
        known = [leaf for _, leaf in leaves(received)] + self.clients[k].holdings()
        work = partial(self._call_in_fork, method, k, self._path(method, k), received)
        return ForkedCall(work, [leaf for leaf in known if isinstance(leaf, Tensor)])

    def _set_monitor(self, monitor: Monitor) -> None:
        self.watched = monitor

    def _call_in_fork(
        self, method: str, k: int, path: tuple[object, ...], received: tuple[Any, ...]
    ) -> Payload:
        """Run a client's call in a forked process and return all that it changed.

        The result has the answer or the error, and the client's memory, report and model flags.
        """
        client = self.clients[k]
        start = time.perf_counter()
        outcome: dict[str, Payload]
        try:
            outcome = {"answer": self._work(method, k, path, received)}
            list(leaves(outcome["answer"], method))  # Raises if the answer is not a payload.
        except Exception as error:
            outcome = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        outcome["memory"] = client.memory()
        outcome["report"] = client.report
        outcome["requires_grad"] = [p.requires_grad for p in client.model.parameters()]
        outcome["training"] = [module.training for module in client.model.modules()]
        outcome["took"] = time.perf_counter() - start
        return outcome

    def _finish_job(
        self, method: str, k: int, args: tuple[Any, ...], outcome: Payload | None, death: str
    ) -> Any:
        """Apply what a forked call changed to the client here and return the checked answer."""
        if outcome is None:
            raise Elsewhere(death, "")
        client = self.clients[k]
        self._took[method, k] = outcome["took"]
        client.recall(outcome["memory"])
        client.report = outcome["report"]
        parameters = client.model.parameters()
        for parameter, requires_grad in zip(parameters, outcome["requires_grad"], strict=True):
            parameter.requires_grad_(requires_grad)
        for module, training in zip(client.model.modules(), outcome["training"], strict=True):
            module.training = training
        if "error" in outcome:
            self.count_release(k, [FAILURES])
            raise Elsewhere(outcome["error"], outcome["traceback"])
        self.record_epsilon(k, client.report.get(EPSILON))
        return self.receive_answer(outcome["answer"], method, k, args)
