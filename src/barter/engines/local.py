"""Engine for clients on this machine, on GPU streams or CPU cores."""

from __future__ import annotations

import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from barter.compute import lanes
from barter.compute.flops import count_flops, set_aside
from barter.compute.lanes import Lane, Tune
from barter.compute.parking import Parking
from barter.compute.threads import limit_threads
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.client_states import ClientStates
from barter.core.clients import Failure, Replies
from barter.core.evaluation import record_local_only
from barter.core.metrics import MANY_CLIENTS
from barter.core.nodes import Client, Monitor
from barter.core.payload import Payload, State, isolate, leaves, map_leaves
from barter.core.wire_codec import WireCodec
from barter.engines import forks
from barter.engines.adversaries import Adversaries, poison, states_in
from barter.engines.base import BaseEngine
from barter.engines.deliveries import Deliveries, is_deferrable
from barter.engines.forks import ForkedCall
from barter.engines.network import CallWork, Clock
from barter.privacy.guard import Guard
from barter.privacy.side_information import EPSILON, FAILURES

__all__ = ["LocalEngine", "device_slot"]

log = logging.getLogger("barter")

_EVALUATION = Algorithm.evaluate.__name__
EVERYBODY = -1  # Stands for all clients where a client's id is expected.
DELIVERY = "delivery"  # Stands for a method where any of the deferred ones may run.
FORK_SECONDS = 0.1  # A shorter call costs less than a process of its own.


def device_slot(client: int, devices: int) -> int:
    """Return the index of a client's device: its id modulo the number of devices.

    It does not depend on the clients that take part in a round.
    """
    return client % devices


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
        streams: The number of CUDA streams (lanes) of each device on which clients run in
            parallel.
        device_memory: Bytes of each GPU's memory for modules and for clients between their calls.
        tune: Called with each module that a lane keeps, to make it faster.
        threads: The number of CPU cores; None for torch's number of threads.
        guard: Protects answers as the run's privacy settings require; None for no protection.
        timeout: Seconds that a client has for one call; None for no limit.
        adversaries: What simulated adversarial clients do, and their ids.
        clock: Simulated time and network; None for none.
        codec: Encodes what server and clients send each other; None to send it as it is.
        devices: The run's devices, the server's first. Client k is on that of `device_slot`. None
            if all clients are on one device, which is the server's too.
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
        clock: Clock | None = None,
        codec: WireCodec | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        super().__init__(
            algorithm, seed=seed, min_clients=min_clients, monitor=monitor, codec=codec
        )
        self.clock = clock
        self.clients = clients
        self.states: ClientStates | None = None  # None keeps all clients in memory.
        self._ids = sorted(clients)
        self.deliveries = Deliveries()
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
        self._flops: dict[int, int] = {}  # Client -> operations of its current call.
        self._local_only = True  # True if nothing was exchanged before the current call.
        self.parking = Parking(clients, device_memory)
        self.lanes: list[Lane] = []
        self._lane_slots: list[int] = []  # Which of the devices each lane is on.
        self.server_lane: Lane | None = None
        self.cores = threads or torch.get_num_threads() if forks.can_fork() else 1
        self.devices = tuple(devices or [next(iter(clients.values())).device])
        if self.devices[0].type == "cuda":
            # Rough estimate of a client's work: its images times the size of its network.
            self.loads = {
                k: len(client.data) * client.model_bytes() for k, client in clients.items()
            }
            for slot in range(len(self.devices)):
                own_lanes = self._make_lanes(slot, streams, device_memory, tune)
                self.lanes += own_lanes
                self._lane_slots += [slot] * len(own_lanes)
            self.server_lane = Lane(self.devices[0], device_memory // 8, tune=tune)

    def _make_lanes(
        self, slot: int, streams: int, device_memory: int, tune: Tune | None
    ) -> list[Lane]:
        """Return the lanes of one of the run's devices.

        A quarter of a device's memory is for the modules of lanes and of the server. Parking
        manages the memory of clients between their calls.
        """
        device = self.devices[slot]
        loads = [load for k, load in self.loads.items() if self._slot(k) == slot]
        if not loads:
            return []
        width = min(streams, len(loads))
        # Clients with much more work would finish last, so they get lanes of high priority.
        threshold = 1.5 * statistics.fmean(loads)
        urgent = min(sum(load > threshold for load in loads), width // 2)
        room = device_memory // 8 // self.devices.count(device) // width
        return [Lane(device, room, tune=tune, urgent=i < urgent) for i in range(width)]

    def _slot(self, client: int) -> int:
        """Return which of the run's devices a client computes on."""
        return device_slot(client, len(self.devices))

    @property
    def client_ids(self) -> Sequence[int]:
        return self._ids

    def store_states(self, states: ClientStates) -> None:
        """Let `states` put clients to rest from now on, to save memory."""
        self.states = states
        states.on_rest = self._leave_device

    def _leave_device(self, client: int) -> None:
        """Note that a resting client takes no device memory."""
        self.parking.sizes.pop(client, None)

    def _using(self, method: str, client: int) -> AbstractContextManager[None]:
        """Keep a client in memory while the block runs a method or its consequences."""
        if self.states is None:
            return nullcontext()
        changes = method != Algorithm.evaluate.__name__
        return self.states.using(self.clients[client], changes=changes)

    def examples(self, client: int) -> int:
        return len(self.clients[client].data)

    def memory(self) -> dict[int, Payload]:
        self.deliver_all()
        return {k: client.memory() for k, client in self.clients.items()}

    def recall(self, memory: Mapping[int, Payload]) -> None:
        for k, client in self.clients.items():
            client.recall(memory[k])
            if self.states is not None:
                self.states.make_room(client)

    @contextmanager
    def on_server_stream(self) -> Iterator[None]:
        with nullcontext() if self.server_lane is None else self.server_lane.open():
            yield
            lanes.wait_for_device()

    def tests_due(self, client: int, method: str) -> bool:
        return super().tests_due(client, method) if self.tested is None else self.tested

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the order in which clients run, here by id.

        Any order gives the same result.
        """
        return sorted(ids)

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], local_only: bool | None = None
    ) -> Replies[Any]:
        """Run a method of the algorithm on clients.

        Args:
            method: The method's name.
            args: Client -> its arguments.
            local_only: True if nothing was exchanged before this call. The server sends it to a site,
                which does not know the other clients; None lets this engine decide.

        Returns:
            The answers that were accepted, and the failures: clients that raised, whose process
            died, that the simulated network lost, or whose answer was invalid or an outlier. No
            exception of a client is raised. With many clients, a deferrable method runs later and
            all answers are None (`Replies.deferred`).
        """
        if self._may_defer(method, args):
            return self._defer(method, args)
        self._local_only = self.is_local_only() if local_only is None else local_only
        # What the engine computes here, such as checks of answers, is not the server's work.
        with set_aside():
            if self.clock is None or method == _EVALUATION:
                answers, failures = self._call_all(method, args)
            else:
                answers, failures = self._call_in_time(self.clock, method, args)
            failures |= self.drop_outliers(method, answers, args)
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.image_counts(answers), failures)

    def _call_in_time(
        self, clock: Clock, method: str, args: Mapping[int, tuple[Any, ...]]
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Run a method on clients that the simulated network reaches, and add its time.

        Returns the answers and the failures by client. A client whose answer comes too late is as
        it was before the call, except that what it released stays counted.
        """
        unreachable = clock.begin_call(method, args, self.round)
        reached = {k: args[k] for k in args if k not in unreachable}
        states: dict[int, tuple[Payload, dict[str, float]]] = {}
        if clock.network.policy != "wait":
            for k in reached:
                client = self.clients[k]
                states[k] = isolate(client.memory()), dict(client.report)
        before = {k: self._bytes(method, k) for k in reached}
        self._flops = {}
        answers, failures = self._call_all(method, reached) if reached else ({}, {})
        work = {}
        for k in reached:
            down, up = self._bytes(method, k)
            work[k] = CallWork(down - before[k][0], self._flops.get(k, 0), up - before[k][1])
        late = clock.end_call(method, len(args), work, answers)
        for k in late:
            del answers[k]
            memory, report = states[k]
            client = self.clients[k]
            released = client.released
            client.recall(memory)
            client.released = released
            client.report = report
        for k, error in {**unreachable, **late}.items():
            failures[k] = self.failure(k, method, error)
        return answers, failures

    def _bytes(self, method: str, k: int) -> tuple[int, int]:
        """Return the bytes (down, up) of a client's calls of a method so far this round."""
        return self.wire.bytes_of(method, k, "down"), self.wire.bytes_of(method, k, "up")

    def _call_all(
        self, method: str, args: Mapping[int, tuple[Any, ...]]
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Run a method on clients; return the answers and the failures by client.

        Outliers among the answers are not dropped yet, and failures not recorded.
        """
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
        return answers, failures

    def _may_defer(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> bool:
        """Return whether a call waits until each client next takes part.

        This is so if there are many clients, all of them receive the same, and the algorithm
        declares that it makes no difference. A simulated network and encodings treat each client's
        payload on its own, so nothing is deferred with them.
        """
        if self.clock is not None or self.wire.codec is not None:
            return False
        if len(self._ids) <= MANY_CLIENTS or len(args) < len(self._ids):
            return False
        first = args[self._ids[0]]
        same = all(one is first for one in args.values())
        return same and is_deferrable(self.algorithm, method)

    def _defer(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Check and count what all clients receive, and defer the call.

        They run the method when they next take part. The replies are None for all clients.
        """
        first = self._ids[0]
        with self.phase(method, len(args)):
            received = self.wire.carry(args[first], method, first, "down")
            self.wire.count_all(received, method, self._ids[1:])
            before = self.count_call(method, EVERYBODY)
            path = (self.round, method, before) if before else (self.round, method)
            self.deliveries.add(self.algorithm, path, received)
            self.watched.advance(len(args))
        replies = Replies(dict.fromkeys(self._ids), self.image_counts(self._ids), {})
        replies.deferred = True
        return replies

    def _deliver_pending(self, client: Client) -> None:
        """Run the methods that were deferred until this client takes part."""
        for delivery in self.deliveries.pending(client.id):
            path = delivery.stream(client.id)
            received = isolate(delivery.args, client.device)
            seed = self.seed if self.guard is None else self.guard.seed(self.seed)
            stream = seeds.scope(seed, *path, device=client.device)
            with self.parking.on_device(client), client.use_lane_module(), stream:
                self._run_protected(delivery.method, client, path, received)
                lanes.wait_for_device()
        self.deliveries.note(client.id)

    def deliver_all(self) -> None:
        """Run all deferred methods now, at all clients that have not run them yet."""
        for k, client in self.clients.items():
            if self.deliveries.pending(k):
                with self._using(DELIVERY, k):
                    self._deliver_pending(client)

    def receive_answer(
        self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]
    ) -> Payload:
        if client in self.adversarial and method != Algorithm.evaluate.__name__:
            references = [*states_in(sent), self._before[client]]
            stream = self.stream(f"attack {method} {client}")
            answer = poison(answer, self.adversaries, self.algorithm, method, references, stream)
        answer = self._move_answer(answer, method, self.clients[client].device)
        return super().receive_answer(answer, method, client, sent)

    def _move_answer(self, answer: Payload, method: str, device: torch.device) -> Payload:
        """Return an answer with what is on the client's device moved to the server's."""
        server = self.devices[0]
        if device == server:
            return answer

        def move(_: str, leaf: Any) -> Any:
            is_there = isinstance(leaf, Tensor) and leaf.device == device
            return isolate(leaf, server) if is_there else leaf

        return map_leaves(answer, move, method)

    def _call_here(self, method: str, k: int, args: tuple[Any, ...]) -> Any:
        """Run a client's call in this process and return the checked answer.

        Raises:
            PayloadError: If the arguments or the answer are invalid. The client's own exceptions
                are raised too, and count as a release.
        """
        with self._using(method, k):
            return self._call_awake(method, k, args)

    def _call_awake(self, method: str, k: int, args: tuple[Any, ...]) -> Any:
        """Run a call as `_call_here` does; the caller keeps the client in memory."""
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
        """Warn if a call exceeded a timeout that is not enforced; its answer counts.

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
        """Return the path of a call's random stream, and count the call.

        It is (round, method, client); repeated calls of a round add the number of earlier ones.
        """
        before = self.count_call(method, client)
        return (self.round, method, client, before) if before else (self.round, method, client)

    def _work(
        self, method: str, k: int, path: tuple[object, ...], received: tuple[Any, ...]
    ) -> Any:
        """Run a client's call with its model on the device and its own random stream.

        With a guard that keeps its noise secret, the stream is secret too. The monitor has one more
        unit of progress at the end, also if the call raises.
        """
        client = self.clients[k]
        self._deliver_pending(client)
        lane = id(lanes.current_lane())
        client.tested = self.tests_due(k, method)
        self._credit[lane] = 1.0
        try:
            seed = self.seed if self.guard is None else self.guard.seed(self.seed)
            stream = seeds.scope(seed, *path, device=client.device)
            with self.parking.on_device(client), client.use_lane_module(), stream:
                with record_local_only(client) if self._local_only else nullcontext():
                    with self._count_work(method, k):
                        answer = self._run_protected(method, client, path, received)
                    lanes.wait_for_device()
                return answer
        finally:
            self.watched.advance(self._credit.pop(lane))

    @contextmanager
    def _count_work(self, method: str, k: int) -> Iterator[None]:
        """Count the operations of a client's call, if time is simulated."""
        if self.clock is None or method == _EVALUATION:
            yield
            return
        with count_flops() as count:
            try:
                yield
            finally:
                self._flops[k] = count.total

    def _run_protected(
        self, method: str, client: Client, path: tuple[object, ...], received: tuple[Any, ...]
    ) -> Any:
        """Run a method and return its answer as the privacy guard releases it.

        Without a guard the answer is returned as it is.

        Args:
            method: The remote method.
            client: The client that runs it.
            path: Identifies the call among the run's random streams; noise has a stream of its own.
            received: The method's arguments after the client.

        Raises:
            PrivacyError: If the budget does not allow the answer, or the algorithm does not declare
                the method.
            ConfigError: If the answer lacks a mechanism's part, or the rows, labels or floats that
                it works on.
        """
        if self.guard is None:
            return getattr(self.algorithm, method)(client, *received)
        kept = self.guard.copy_arguments(method, received)
        stream = seeds.stream_seed(self.seed, *path, "privacy")
        with self.guard.seal_images(client, method, stream):
            answer = getattr(self.algorithm, method)(client, *received)
        return self.guard.protect(client, method, answer, kept, stream)

    def _run_on_lanes(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Distribute clients' tasks over the lanes and run them.

        The largest come first, each on the lane of its device with the least work so far,
        preferably one that has graphs for the client's architecture.
        """
        loads = [0] * len(self.lanes)
        queues: list[list[Callable[[], None]]] = [[] for _ in self.lanes]
        for k in sorted(tasks, key=lambda k: -self.loads[k]):
            name = ("model", self.clients[k].architecture)
            there = [i for i, slot in enumerate(self._lane_slots) if slot == self._slot(k)]
            chosen = min(there, key=lambda i: (loads[i], name not in self.lanes[i].modules, i))
            loads[chosen] += self.loads[k]
            queues[chosen].append(tasks[k])
        # References keep all tensors that clients may read alive until every lane is done. Memory
        # freed earlier could be reused by another lane while it is still being read.
        held = [leaf for k in tasks for leaf in self.clients[k].holdings()]
        lanes.take_turns(self.lanes, queues)
        held.clear()

    def _by_core(self, clients: int) -> bool:
        """Return whether each client computes on one core.

        That is if there are several cores, and clients for at least half of them. Otherwise clients
        run one after the other with all cores.
        """
        return self.cores > 1 and 2 * clients >= self.cores

    def timeout_gap(self) -> str:
        """Return why the timeout cannot be enforced here; empty if it can."""
        if self.lanes:
            return "on a GPU all clients compute in one process"
        return forks.fork_obstacle()

    def _worth_forking(self, method: str, clients: int) -> bool:
        """Return whether calls run in forked processes.

        With a timeout that can be enforced they always do, however short they were before: only a
        process can be killed, and any call may hang. Otherwise they do if there are several
        clients, each on one core, and the method took more than 0.1 s per client before (or never
        ran).
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
            finish; first those whose arguments cannot be sent.
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
        """Return a client's call as a job for a forked process.

        The call is counted here, so that its random stream is that of a call in this process.

        Raises:
            PayloadError: If the arguments cannot be sent.
        """
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

        The result has the answer, or the error and its traceback, and the client's memory, report,
        `requires_grad` and training modes, and the seconds taken. No exception is raised.
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
        outcome["flops"] = self._flops.get(k, 0)
        outcome["took"] = time.perf_counter() - start
        return outcome

    def _finish_job(
        self, method: str, k: int, args: tuple[Any, ...], outcome: Payload | None, death: str
    ) -> Any:
        """Apply a forked call's changes to the client; return the checked answer.

        The changes of a failed call are applied too. A client whose process died is as before.

        Raises:
            Elsewhere: The call failed, or its process died.
            PayloadError: The answer is invalid.
        """
        if outcome is None:
            raise Elsewhere(death, "")
        with self._using(method, k):
            return self._apply_outcome(method, k, args, outcome)

    def _apply_outcome(
        self, method: str, k: int, args: tuple[Any, ...], outcome: dict[str, Payload]
    ) -> Any:
        """Do what `_finish_job` does with the outcome of a process that did not die.

        The caller keeps the client in memory.
        """
        client = self.clients[k]
        self._took[method, k] = outcome["took"]
        self._flops[k] = outcome["flops"]
        self.deliveries.note(k)  # The other process has run what was deferred.
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
