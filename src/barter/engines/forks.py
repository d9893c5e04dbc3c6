"""Clients side by side on the cores of a CPU: each takes its turn in a process of its own, and its memory comes home.

A forked process sees all that this one holds and computes with one thread, so what it returns is to the bit what the
turn would have given here. What it returns is a payload: tensors that it did not touch are only named.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from barter.core.payload import Payload, isolate, pack, unpack

__all__ = ["Job", "one_thread", "possible", "side_by_side"]

# Looked up here: a forked process may not wait for the loader's lock, which nobody is left to release.
MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
STEP = struct.Struct("d")
LENGTH = struct.Struct("Q")


@dataclass(frozen=True)
class Job:
    """A turn: what to do, and the tensors that come home by name if the turn leaves them as they are."""

    work: Callable[[], Payload]
    known: list[Tensor]


def possible() -> bool:
    """Whether turns can be forked here.

    macOS has the call, but its libraries do not survive it; and where there is a GPU, training starts threads that a
    forked process would miss.
    """
    return sys.platform == "linux" and torch.cuda.device_count() == 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, a kernel uses one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def side_by_side(
    jobs: Mapping[int, Job], width: int, begin: Callable[[Reporter], None], advance: Callable[[float], None]
) -> Iterator[tuple[int, Payload | None, str]]:
    """What each job returned, as they finish: (key, result, "") or (key, None, why its process died)."""
    waiting = list(jobs.items())
    running: dict[int, tuple[int, int, int, list[Tensor]]] = {}  # pipe -> key, process, result, known tensors
    try:
        while waiting or running:
            while waiting and len(running) < width:
                k, job = waiting.pop(0)
                result, known = os.memfd_create("barter"), _shared(job.known)  # memory that ends with its last user
                pid, pipe = _fork(job.work, known, result, begin)
                running[pipe] = (k, pid, result, known)
            for pipe in _ready(running):
                told = os.read(pipe, 64 * STEP.size)
                for (amount,) in STEP.iter_unpack(told):
                    advance(amount)
                if not told:
                    k, pid, result, known = running.pop(pipe)
                    os.close(pipe)
                    status = os.waitpid(pid, 0)[1]
                    returned = status == 0 and os.fstat(result).st_size > 0
                    home = _load(result, known) if returned else None
                    os.close(result)
                    yield k, home, "" if returned else _cause(status)
    finally:
        for pipe, (_, pid, result, _) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
            os.close(result)


def _ready(pipes: Iterable[int]) -> list[int]:
    return [pipe for pipe in wait(list(pipes)) if isinstance(pipe, int)]


def _cause(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def _shared(tensors: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that are shared copy on write with what is returned: writing to one of them moves it."""
    return [shared for t in tensors if torch._C._is_cow_tensor(shared := isolate(t))]  # type: ignore[attr-defined]


def _fork(
    work: Callable[[], Payload], known: list[Tensor], result: int, begin: Callable[[Reporter], None]
) -> tuple[int, int]:
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        return pid, reading
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is for the process this one came from
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        torch.set_num_threads(1)
        _keep_memory()
        begin(Reporter(writing))
        _save(result, work(), known)
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
    """What is freed in this process stays with it, as its end is near.

    A training step frees and takes the same memory again and again. By default the C library gives much of it back to
    the system in between, and then much of the step goes into page faults.
    """
    if MALLOPT is not None:
        MALLOPT(TRIM_THRESHOLD, 2**31 - 1)
        MALLOPT(MMAP_THRESHOLD, 2**30) or MALLOPT(MMAP_THRESHOLD, 2**25)  # older C libraries refuse the first


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return (torch._C._data_address(tensor), tensor.shape, tensor.stride(), tensor.dtype)  # type: ignore[attr-defined]


def _save(result: int, tree: Payload, known: list[Tensor]) -> None:
    places = {_address(t): name for name, t in pack(known)[0].items()}
    tensors, header = pack(tree)
    names = {name: places[_address(t)] for name, t in tensors.items() if _address(t) in places}
    head = json.dumps({"header": header, "known": names}).encode()
    fresh = save({name: t.clone() for name, t in tensors.items() if name not in names})
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
