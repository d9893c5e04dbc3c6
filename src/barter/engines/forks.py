"""Clients side by side on the cores of a CPU: they take their turns in other processes, and their memory comes home.

A forked process sees all that this one holds and computes with as many threads as the turn would have here (one where
clients compute side by side), so what it returns is to the bit what the turn would have given here. What it returns is
a payload: tensors that it did not touch are only named. For the time of one call there is a process for each core,
which takes one turn after the other: only the first finds its memory cold.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from barter.core.payload import Payload, isolate, pack, unpack

__all__ = ["Job", "die_with", "obstacle", "possible", "side_by_side"]

# Looked up here: a forked process may not wait for the loader's lock, which nobody is left to release.
LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
MALLOPT, PRCTL = getattr(LIBRARY, "mallopt", None), getattr(LIBRARY, "prctl", None)
PARENT_DEATH_SIGNAL = 1  # as prctl.h numbers it
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
KEY = struct.Struct("q")
STEP = struct.Struct("d")
LENGTH = struct.Struct("Q")


@dataclass(frozen=True)
class Job:
    """A turn: what to do, and the tensors that come home by name if the turn leaves them as they are."""

    work: Callable[[], Payload]
    known: list[Tensor]


def possible() -> bool:
    """Whether turns can be forked here."""
    return not obstacle()


def obstacle() -> str:
    """Say why turns cannot be forked here; empty where they can.

    macOS has the call, but its libraries do not survive it; and where there is a GPU, training starts threads that a
    forked process would miss.
    """
    if sys.platform != "linux":
        return "only on Linux can a client have a process of its own"
    if torch.cuda.device_count():
        return "torch sees a GPU, and then a client on the CPU cannot have a process of its own"
    return ""


def die_with(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets the signal when its parent ends. Linux only: others see it when they next talk."""
    if PRCTL is not None:
        PRCTL(PARENT_DEATH_SIGNAL, int(sign))
    if os.getppid() != parent:  # it was faster
        os._exit(1)


class Reporter:
    """The monitor of a forked turn: tells the process it came from how far it is."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return nullcontext()

    def advance(self, amount: float) -> None:
        try:
            os.write(self.pipe, STEP.pack(amount))
        except BrokenPipeError:
            os._exit(1)  # nobody waits for this turn any more


class Worker:
    """A forked process, and how to talk to it."""

    def __init__(self, pid: int, orders: int, reports: int, result: int) -> None:
        self.pid, self.orders, self.reports = pid, orders, reports
        self.result = result  # memory that ends with its last user
        self.busy: int | None = None  # with which job
        self.since = 0.0
        self.late = False

    def take(self, key: int) -> None:
        """Begin with a job."""
        self.busy, self.since = key, time.monotonic()
        with suppress(BrokenPipeError):  # if the process is gone, its reports end, and that is seen
            os.write(self.orders, KEY.pack(key))

    def dismiss(self) -> None:
        """There is nothing more to do."""
        os.close(self.orders)
        self.orders, self.busy = -1, None

    def end(self) -> None:
        """Its job took too long."""
        self.late = True
        os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> int:
        """How the process ended."""
        for end in (self.orders, self.reports, self.result):
            if end >= 0:
                os.close(end)
        return os.waitpid(self.pid, 0)[1]


def side_by_side(
    jobs: Mapping[int, Job],
    width: int,
    begin: Callable[[Reporter], None],
    advance: Callable[[float], None],
    timeout: float | None = None,
    threads: int = 1,
) -> Iterator[tuple[int, Payload | None, str]]:
    """Run jobs in forked processes; yield (key, result, "") or (key, None, why its process died) as they finish.

    Args:
        jobs: What to do, by key.
        width: How many processes run at the same time.
        begin: Called once in each process with its monitor.
        advance: Called here with the progress that processes report.
        timeout: Seconds after which a job's process is ended; none means never.
        threads: How many threads a kernel of a process uses.
    """
    known = {k: _shared(job.known) for k, job in jobs.items()}
    waiting, crew = list(jobs), {}  # type: list[int], dict[int, Worker]
    # OpenMP's threads belong to the one that began them, and a process forked from there would wait for them for ever:
    # ARM's libraries do so even if they are told to use one. So a new thread forks, which has none. It stays until the
    # end, for processes die with the thread that they come from.
    forker = ThreadPoolExecutor(1)

    def recruit() -> Worker:
        worker = _fork(jobs, known, list(crew.values()), begin, threads)
        crew[worker.reports] = worker
        return worker

    try:
        while waiting or crew:
            while waiting and len(crew) < width:
                forker.submit(copy_context().run, recruit).result().take(waiting.pop(0))
            for pipe in _ready(crew, timeout):
                worker, told = crew[pipe], os.read(pipe, 64 * STEP.size)
                for (amount,) in STEP.iter_unpack(told):
                    if not math.isnan(amount):
                        advance(amount)
                        continue
                    k = worker.busy
                    assert k is not None
                    home = _load(worker.result, known[k])
                    if waiting:
                        worker.take(waiting.pop(0))
                    else:
                        worker.dismiss()
                    yield k, home, ""
                if not told:
                    died, status = crew.pop(pipe).busy, worker.bury()
                    if died is not None:
                        late = (
                            f"it was not done within {timeout:g} s, the run's timeout"
                            if worker.late
                            else ""
                        )
                        yield died, None, late or _cause(status)
    finally:
        forker.shutdown()
        for worker in crew.values():
            os.kill(worker.pid, signal.SIGKILL)
            worker.bury()


def _ready(crew: Mapping[int, Worker], timeout: float | None) -> list[int]:
    """Whose reports can be read; who is late is ended, and its reports end too."""
    busy = [worker for worker in crew.values() if worker.busy is not None and not worker.late]
    first = min((worker.since for worker in busy), default=None)
    patience = (
        None if timeout is None or first is None else max(0.0, first + timeout - time.monotonic())
    )
    ready = [pipe for pipe in wait(list(crew), patience) if isinstance(pipe, int)]
    for worker in busy:
        if (
            timeout is not None
            and worker.reports not in ready
            and time.monotonic() >= worker.since + timeout
        ):
            worker.end()
    return ready


def _cause(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return (
        f"its process was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"its process ended with {code}"
    )


def _shared(tensors: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that are shared copy on write with what is returned: writing to one of them moves it."""
    return [shared for t in tensors if torch._C._is_cow_tensor(shared := isolate(t))]  # type: ignore[attr-defined]


def _fork(
    jobs: Mapping[int, Job],
    known: Mapping[int, list[Tensor]],
    others: list[Worker],
    begin: Callable[[Reporter], None],
    threads: int,
) -> Worker:
    sys.stdout.flush()
    sys.stderr.flush()
    (listening, orders), (reports, telling) = os.pipe(), os.pipe()
    result = os.memfd_create("barter")
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(listening)
        os.close(telling)
        return Worker(pid, orders, reports, result)
    status = 1
    try:
        die_with(parent)
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # an interrupt is for the process this one came from
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Whoever holds an end of a pipe keeps it open.
        for end in (
            orders,
            reports,
            *(end for worker in others for end in (worker.orders, worker.reports)),
        ):
            if end >= 0:
                os.close(end)
        torch.set_num_threads(threads)
        _keep_memory()
        begin(Reporter(telling))
        while order := os.read(listening, KEY.size):
            (k,) = KEY.unpack(order)
            _save(result, jobs[k].work(), known[k])
            os.write(telling, STEP.pack(math.nan))  # done
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # whatever happens, this process goes no further


def _keep_memory() -> None:
    """What is freed in this process stays with it until its end, which is near.

    A training step frees and takes the same memory again and again. By default the C library gives much of it back to
    the system in between, and then much of the step goes into page faults.
    """
    if MALLOPT is not None:
        MALLOPT(TRIM_THRESHOLD, 2**31 - 1)
        MALLOPT(MMAP_THRESHOLD, 2**30) or MALLOPT(
            MMAP_THRESHOLD, 2**25
        )  # older C libraries refuse the first


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return (torch._C._data_address(tensor), tensor.shape, tensor.stride(), tensor.dtype)  # type: ignore[attr-defined]


def _save(result: int, tree: Payload, known: list[Tensor]) -> None:
    places = {_address(t): name for name, t in pack(known)[0].items()}
    tensors, header = pack(tree)
    names = {name: places[_address(t)] for name, t in tensors.items() if _address(t) in places}
    head = json.dumps({"header": header, "known": names}).encode()
    fresh = save({name: t.clone() for name, t in tensors.items() if name not in names})
    os.truncate(result, 0)
    os.lseek(result, 0, os.SEEK_SET)
    with open(result, "wb", closefd=False) as file:
        for part in (LENGTH.pack(len(head)), head, fresh):
            file.write(part)


def _load(result: int, known: list[Tensor]) -> Payload:
    with open(result, "rb", closefd=False) as file:
        file.seek(0)
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        head = json.loads(file.read(length))
        tensors = {name: tensor.clone() for name, tensor in load(file.read()).items()}
    unchanged = pack(known)[0]
    tensors |= {name: unchanged[place] for name, place in head["known"].items()}
    return unpack(tensors, head["header"])
