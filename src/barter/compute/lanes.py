"""Where parties compute on a GPU: in turns on the host, side by side on the device.

A lane is a CUDA stream with what lives on it from call to call: modules whose place in memory never changes, trainers
with their captured graphs, and a random generator. Threads that share lanes hand a baton around: one of them at a time
runs Python and asks the device for work, the others wait for the device. So nothing an algorithm does needs to be
thread-safe, and every stream always has work.

On the CPU there are no lanes, and everything here does nothing.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

__all__ = [
    "Lane",
    "abreast",
    "breathe",
    "current",
    "footprint",
    "keep",
    "kept",
    "rest",
    "take_over",
    "take_turns",
]

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Tune: TypeAlias = Callable[[nn.Module], object]

STRIDE = 4  # steps between two looks at how far the device has come
AHEAD = 4  # how many such looks the host may be ahead
TRAINERS = 32  # how many trainers, with their graphs, a lane keeps; and of how many networks what is asked of them

_here = threading.local()
_baton = threading.Lock()


class Stopped(BaseException):
    """The run was interrupted while this lane waited."""


class Track:
    """A stream, and a thread to compute there.

    cuDNN keeps its plans for every thread, and torch the workspaces of cuBLAS for every thread and stream, as long as
    the process lives. So tracks outlive their lanes, and serve those of the next run.
    """

    idle: defaultdict[tuple[torch.device, int], list[Track]] = defaultdict(list)

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.sides: list[torch.cuda.Stream] = []  # for what a step can do abreast
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._begun = False

    @classmethod
    def for_lane(cls, lane: Lane, priority: int) -> Track:
        """One that no lane has any more, or a new one, until this lane is no more."""
        idle = cls.idle[lane.device, priority]
        track = idle.pop() if idle else cls(lane.device, priority)
        weakref.finalize(lane, idle.append, track)
        return track

    def submit(self, job: Callable[[], None]) -> None:
        """Have the thread do this."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=_serve, args=(self._work,), daemon=True).start()
        self._work.put(job)


class Lane:
    """A stream of a CUDA device, and what is kept there."""

    def __init__(
        self, device: torch.device, room: int, *, tune: Tune | None = None, urgent: bool = False
    ) -> None:
        self.device, self.room = device, room  # bytes that the modules kept here may take
        self.tune = tune  # what makes a module faster that is to be kept here
        # What is urgent goes first wherever the device has to choose.
        self.track = Track.for_lane(self, -1 if urgent else 0)
        self.stream = self.track.stream
        self.pool = (
            torch.cuda.graph_pool_handle()
        )  # graphs of one lane never run at once and can share their memory
        self.generator = torch.Generator(device)
        self.modules: OrderedDict[Hashable, nn.Module] = OrderedDict()
        self.trainers: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
        self.forwards: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
        self.shared = False  # whether other lanes run at the same time
        self.stopped = False
        self._steps = 0
        self._marks: deque[torch.cuda.Event] = deque()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, this thread computes on this lane."""
        before, default = current(), torch.cuda.default_generators[self.device.index]
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
        """The device's default generator has this lane's state from now on."""
        default = torch.cuda.default_generators[self.device.index]
        default.graphsafe_set_state(self.generator.graphsafe_get_state())

    def wait(self, mark: torch.cuda.Event) -> None:
        """Others take their turn until the device has come to this mark."""
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
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)  # type: ignore[no-untyped-call]
        return event

    def breathe(self) -> None:
        self._steps += 1
        if self._steps % STRIDE == 0:
            self._marks.append(self.mark())
            if len(self._marks) > AHEAD:
                self.wait(self._marks.popleft())

    def trainer(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """The trainer of these modules and this recipe."""
        return _latest(self.trainers, key, make)

    def forward(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """What asks these modules."""
        return _latest(self.forwards, key, make)

    def keep(self, name: Hashable, module: nn.Module) -> None:
        """Give a module its place; those that were not used for longest go when there is no room for all."""
        self.modules[name] = module
        sizes = {name: footprint(kept) for name, kept in self.modules.items()}
        while len(sizes) > 1 and sum(sizes.values()) > self.room:
            del sizes[next(iter(sizes))]
            _, gone = self.modules.popitem(last=False)
            for table in (self.trainers, self.forwards):
                for key in [key for key in table if gone in key]:
                    del table[key]


def _serve(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        job = work.get()
        job()
        del job  # what it holds must not wait for the next


def _latest(
    table: OrderedDict[tuple[Hashable, ...], Any],
    key: tuple[Hashable, ...],
    make: Callable[[], Any],
) -> Any:
    """What the table has for a key, made if there is none; of too many, the one not used for longest goes."""
    if key not in table:
        table[key] = make()
        if len(table) > TRAINERS:
            table.popitem(last=False)
    table.move_to_end(key)
    return table[key]


def footprint(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def current() -> Lane | None:
    """The lane this thread computes on."""
    return getattr(_here, "lane", None)


def breathe() -> None:
    """One more step was asked for: now and then, see that the host does not run too far ahead of the device."""
    lane = current()
    if lane is not None:
        lane.breathe()


def abreast(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """What jobs give that do not wait for each other: in a step that is captured, the device does them side by side.

    Their kernels may be too small to fill it one after the other. Gradients take the ways that values took. No module
    may be used by two jobs.
    """
    lane = current()
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


def rest() -> None:
    """Before looking at a result: others take their turn until the device has done all that was asked here."""
    lane = current()
    if lane is not None:
        lane.wait(lane.mark())


def kept(name: Hashable, make: Callable[[], M]) -> M:
    """The module of this name in its place on this lane, as its last user left it; made if there is none."""
    lane = current()
    if lane is None:
        return make()
    if name not in lane.modules:
        module = make()
        if lane.tune is not None:
            lane.tune(module)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                # A graph writes behind torch's back: this memory must not be shared copy on write. Of memory that is
                # not its own, torch makes true copies.
                tensor.data = torch.from_dlpack(tensor.data)  # type: ignore[attr-defined]
        lane.keep(name, module)
    lane.modules.move_to_end(name)
    return lane.modules[name]  # type: ignore[return-value]


def keep(name: Hashable, module: M) -> M:
    """The module of this name in its place on this lane, in the state of this new one of the same structure.

    Graphs that were captured for it stay valid. Without a lane, it is the new module itself.
    """
    place = kept(name, lambda: module)
    if place is not module:
        take_over(place, module)
    return place


def take_over(module: nn.Module, other: nn.Module) -> None:
    """Give a module the weights of another of the same structure, and also which of them are trained, and the modes."""
    module.load_state_dict(other.state_dict())
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    for part, counterpart in zip(module.modules(), other.modules(), strict=True):
        part.training = counterpart.training


def take_turns(lanes: Sequence[Lane], jobs: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Run the jobs of every lane one after the other, and all lanes at the same time."""
    home = torch.cuda.current_stream(lanes[0].device)
    errors: list[BaseException] = []
    busy = [(lane, mine) for lane, mine in zip(lanes, jobs, strict=True) if mine]
    finished = {id(lane): threading.Event() for lane, _ in busy}
    submitted: list[Lane] = []

    def serve(lane: Lane, mine: Sequence[Callable[[], None]]) -> None:
        try:
            with _baton, lane.open():
                lane.stream.wait_stream(home)
                for job in mine:
                    job()
        except Stopped:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            finished[id(lane)].set()

    rng = torch.get_rng_state()
    try:
        for lane, mine in busy:
            lane.shared, lane.stopped = True, False
            submitted.append(lane)
            lane.track.submit(partial(serve, lane, mine))
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
            home.wait_stream(lane.stream)
            lane.shared = False
        torch.set_rng_state(rng)
        outer = current()
        if outer is not None:
            outer.draw_here()
    if errors:
        raise errors[0]
