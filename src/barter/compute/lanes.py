"""Lanes: CUDA streams on which clients compute side by side.

A lane is a CUDA stream with the objects that live on it from call to call: modules at fixed
addresses, trainers with their captured graphs, and a random generator. Each lane has a thread, and
the threads pass on a lock: one at a time runs Python and submits work to the device, the others
wait for the device. So algorithms need not be thread-safe, and every stream always has work.

On the CPU there are no lanes, and everything here does nothing.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

__all__ = [
    "Lane",
    "current_lane",
    "footprint",
    "keep",
    "lane_module",
    "run_branches",
    "take_over",
    "take_turns",
    "throttle",
    "wait_for_device",
]

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Tune: TypeAlias = Callable[[nn.Module], object]

STRIDE = 4  # Steps between two events by which the device's progress is followed.
AHEAD = 4  # Number of such events by which the host may be ahead of the device.
TRAINERS = 32  # Most trainers that a lane caches with their graphs, and most forward passes.

_here = threading.local()
_baton = threading.Lock()


class Stopped(BaseException):
    """Raised in a lane that waits when the run is interrupted."""


class Track:
    """A stream and a thread that works on it.

    cuDNN keeps its plans for every thread, and torch the workspaces of cuBLAS for every thread and
    stream, as long as the process lives. Tracks therefore outlive their lanes, and serve those of
    the next run.
    """

    idle: defaultdict[tuple[torch.device, int], list[Track]] = defaultdict(list)

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.sides: list[torch.cuda.Stream] = []  # streams of concurrent jobs, see `run_branches`
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._begun = False

    @classmethod
    def for_lane(cls, lane: Lane, priority: int) -> Track:
        """Return an idle track of the lane's device and this priority, or a new one.

        It is idle again once the lane is deleted. A priority of -1 goes before 0.
        """
        idle = cls.idle[lane.device, priority]
        track = idle.pop() if idle else cls(lane.device, priority)
        weakref.finalize(lane, idle.append, track)
        return track

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job on the thread, after those submitted before; return at once."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=_serve, args=(self._work,), daemon=True).start()
        self._work.put(job)


class Lane:
    """A CUDA stream and the modules, graphs and random generator that live on it.

    Args:
        device: The CUDA device.
        room: Bytes that the modules kept here may take.
        tune: Called with each module that is to be kept, to make it faster.
        urgent: Give the stream priority where the device has to choose.
    """

    def __init__(
        self, device: torch.device, room: int, *, tune: Tune | None = None, urgent: bool = False
    ) -> None:
        self.device = device
        self.room = room
        self.tune = tune
        self.track = Track.for_lane(self, -1 if urgent else 0)
        self.stream = self.track.stream
        # Graphs of one lane never run at the same time and can share their memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.generator = torch.Generator(device)
        self.modules: OrderedDict[Hashable, nn.Module] = OrderedDict()
        self.trainers: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
        self.forwards: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
        self.shared = False  # other lanes run at the same time
        self.stopped = False
        self._steps = 0
        self._marks: deque[torch.cuda.Event] = deque()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Compute on this lane in the current thread, inside the block.

        The lane first waits for the work on the current stream. Random numbers of the device are
        drawn from the lane's generator.
        """
        before = current_lane()
        default = torch.cuda.default_generators[self.device.index]
        outer = default.graphsafe_get_state()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        _here.lane = self
        self.draw_here()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            _here.lane = before
            default.graphsafe_set_state(outer)

    def draw_here(self) -> None:
        """Give the device's default generator the state of this lane's generator."""
        default = torch.cuda.default_generators[self.device.index]
        default.graphsafe_set_state(self.generator.graphsafe_get_state())

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has reached this event; let other lanes run meanwhile.

        Random states are the same afterwards as before. Outside of `take_turns`, the thread just
        waits.

        Raises:
            Stopped: If the run was interrupted in the meantime.
        """
        if not self.shared:
            mark.synchronize()
            return
        state = torch.get_rng_state()
        _baton.release()
        try:
            mark.synchronize()
        finally:
            _baton.acquire()
            torch.set_rng_state(state)
            self.draw_here()
        if self.stopped:
            raise Stopped

    def mark(self) -> torch.cuda.Event:
        """Return an event that is recorded after all work submitted so far."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)  # type: ignore[no-untyped-call]
        return event

    def throttle(self) -> None:
        """Count a step, and wait if the host is too far ahead of the device.

        That is more than `AHEAD` events, one every `STRIDE` steps.
        """
        self._steps += 1
        if self._steps % STRIDE == 0:
            self._marks.append(self.mark())
            if len(self._marks) > AHEAD:
                self.wait(self._marks.popleft())

    def trainer(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """Return the cached trainer of this key, made if there is none.

        At most `TRAINERS` are cached; the least recently used is dropped.
        """
        return _cached(self.trainers, key, make)

    def forward(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """Return the key's cached forward pass, made if there is none; as `trainer`."""
        return _cached(self.forwards, key, make)

    def keep(self, name: Hashable, module: nn.Module) -> None:
        """Store a module under a name; evict least recently used ones to make room.

        Modules may take `room` bytes together; the last one stays even if it takes more. Trainers
        and forward passes of an evicted module are dropped too.
        """
        self.modules[name] = module
        sizes = {name: footprint(module) for name, module in self.modules.items()}
        while len(sizes) > 1 and sum(sizes.values()) > self.room:
            del sizes[next(iter(sizes))]
            _, evicted = self.modules.popitem(last=False)
            for table in (self.trainers, self.forwards):
                for key in [key for key in table if evicted in key]:
                    del table[key]


def _serve(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    """Run the jobs of a queue without end; the target of a track's thread."""
    while True:
        job = work.get()
        job()
        del job  # Releases what it holds before the next job arrives.


def _cached(
    table: OrderedDict[tuple[Hashable, ...], Any],
    key: tuple[Hashable, ...],
    make: Callable[[], Any],
) -> Any:
    """Return the value of a key, made if missing; evict the least recently used.

    At most `TRAINERS` values are kept.
    """
    if key not in table:
        table[key] = make()
        if len(table) > TRAINERS:
            table.popitem(last=False)
    table.move_to_end(key)
    return table[key]


def footprint(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def current_lane() -> Lane | None:
    """Return the lane this thread computes on; None outside of a lane, as on the CPU."""
    return getattr(_here, "lane", None)


def throttle() -> None:
    """Count a step of this lane, see `Lane.throttle`; outside of a lane do nothing."""
    lane = current_lane()
    if lane is not None:
        lane.throttle()


def run_branches(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run independent jobs, concurrently while a graph is captured.

    The kernels of a single job may be too small to fill the device. Gradients are computed
    concurrently too. No module may be used by two jobs. Without a capture, jobs run one after the
    other.

    Returns:
        The jobs' results, in order.
    """
    lane = current_lane()
    if lane is None or len(jobs) < 2 or not torch.cuda.is_current_stream_capturing():
        return [job() for job in jobs]
    sides = lane.track.sides
    while len(sides) < len(jobs):
        sides.append(torch.cuda.Stream(lane.device))  # type: ignore[no-untyped-call]
    results = []
    for side, job in zip(sides, jobs, strict=False):
        side.wait_stream(lane.stream)
        with torch.cuda.stream(side):
            results.append(job())
    for side in sides[: len(jobs)]:
        lane.stream.wait_stream(side)
    return results


def wait_for_device() -> None:
    """Wait until the device has finished the work that this lane submitted so far.

    Other lanes may submit work in the meantime. Outside of a lane, as on the CPU, it returns at
    once. Call it before reading a result.

    Raises:
        Stopped: If the run was interrupted in the meantime.
    """
    lane = current_lane()
    if lane is not None:
        lane.wait(lane.mark())


def lane_module(name: Hashable, make: Callable[[], M]) -> M:
    """Return this lane's module of a name, made if there is none.

    The module is as its last user left it. A new one is tuned and kept, which may evict others.
    Without a lane, a new module is made in every call.
    """
    lane = current_lane()
    if lane is None:
        return make()
    if name not in lane.modules:
        module = make()
        if lane.tune is not None:
            lane.tune(module)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                # A graph writes without torch noticing, so this memory must not be shared copy on
                # write. torch makes true copies of memory that it does not own.
                tensor.data = torch.from_dlpack(tensor.data)  # type: ignore[attr-defined]
        lane.keep(name, module)
    lane.modules.move_to_end(name)
    return lane.modules[name]  # type: ignore[return-value]


def keep(name: Hashable, module: M) -> M:
    """Return this lane's module of a name, with the state of a new module.

    Graphs that were captured for it stay valid. Without a lane, the new module itself is returned.

    Args:
        name: The name.
        module: A new module of the same structure.
    """
    resident = lane_module(name, lambda: module)
    if resident is not module:
        take_over(resident, module)
    return resident


def take_over(module: nn.Module, other: nn.Module) -> None:
    """Copy weights, `requires_grad` and training modes from an equal module.

    Args:
        module: The module to change.
        other: A module of the same structure.

    Raises:
        RuntimeError: If names or shapes of weights differ.
    """
    module.load_state_dict(other.state_dict())
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    for part, counterpart in zip(module.modules(), other.modules(), strict=True):
        part.training = counterpart.training


def take_turns(lanes: Sequence[Lane], jobs: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Run the jobs of each lane in order; lanes overlap on the device.

    Each lane has a thread, and one thread at a time runs Python: a lane goes on while the others
    wait for the device. A job that raises ends its lane, whose further jobs are left out; the other
    lanes go on. The calling thread's exception, such as KeyboardInterrupt, ends all lanes at their
    next wait. Torch's random state on the CPU is the same afterwards as before.

    Args:
        lanes: The lanes, at least one; they may be on several devices.
        jobs: The jobs of each lane; a lane may have none.

    Raises:
        BaseException: The error of a job that was raised first, when all lanes have finished.
        ValueError: If there are not as many lists of jobs as lanes.
    """
    outer = current_lane()
    caller_device = lanes[0].device if outer is None else outer.device
    caller_stream = torch.cuda.current_stream(caller_device)
    errors: list[BaseException] = []
    busy = [(lane, lane_jobs) for lane, lane_jobs in zip(lanes, jobs, strict=True) if lane_jobs]
    finished = {id(lane): threading.Event() for lane, _ in busy}
    submitted: list[Lane] = []

    def serve(lane: Lane, lane_jobs: Sequence[Callable[[], None]]) -> None:
        # What a lane of another device does on the caller's device, such as checks of what it hands
        # over, is in the caller's stream: the caller reads it there.
        at_home = lane.device == caller_device
        handover = nullcontext() if at_home else torch.cuda.stream(caller_stream)
        try:
            with _baton, handover, lane.open():
                lane.stream.wait_stream(caller_stream)
                for job in lane_jobs:
                    job()
        except Stopped:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            finished[id(lane)].set()

    rng = torch.get_rng_state()
    try:
        for lane, lane_jobs in busy:
            lane.shared = True
            lane.stopped = False
            submitted.append(lane)
            lane.track.submit(partial(serve, lane, lane_jobs))
        for lane in submitted:
            finished[id(lane)].wait()
    except BaseException:
        for lane in submitted:
            lane.stopped = True
        for lane in submitted:
            finished[id(lane)].wait()
        raise
    finally:
        for lane in submitted:
            caller_stream.wait_stream(lane.stream)
            lane.shared = False
        torch.set_rng_state(rng)
        if outer is not None:
            outer.draw_here()
    if errors:
        raise errors[0]
