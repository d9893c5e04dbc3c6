"""Run clients in parallel in forked processes, one for each CPU core.

A forked process sees the memory of this one and computes with the number of threads that the call
would use here (one if clients run in parallel), so its result is bitwise equal. The result is a
payload; tensors that the call did not modify are sent by name only. The processes live for one
remote call, and each works on one client after the other, so that only the first one runs with cold
caches.
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

__all__ = ["ForkedCall", "can_fork", "die_with", "fork_obstacle", "run_in_processes"]

# Resolved before forking: in a forked process the loader's lock may never be released.
LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
MALLOPT = getattr(LIBRARY, "mallopt", None)
PRCTL = getattr(LIBRARY, "prctl", None)
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in prctl.h.
TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD in malloc.h.
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h.
KEY = struct.Struct("q")  # Sent to a process: the key of its next job.
PROGRESS_AMOUNT = struct.Struct(
    "d"
)  # Sent by a process: an amount of progress, or NaN when a job is done.
HEADER_LENGTH = struct.Struct("Q")  # The length of a result's header.


@dataclass(frozen=True)
class ForkedCall:
    """A call to run in a forked process.

    Attributes:
        work: Returns the result as a payload.
        known: Tensors of this process that are sent back by name if the call does not modify them.
    """

    work: Callable[[], Payload]
    known: list[Tensor]


def can_fork() -> bool:
    """Return whether calls can run in forked processes on this machine."""
    return not fork_obstacle()


def fork_obstacle() -> str:
    """Return why calls cannot run in forked processes here; empty if they can.

    macOS can fork, but its libraries do not survive it. With a GPU, training starts threads that
    would be missing in a forked process.
    """
    if sys.platform != "linux":
        return "a client can have a process of its own only on Linux"
    if torch.cuda.device_count():
        return "torch sees a GPU, and then a client on the CPU cannot have a process of its own"
    return ""


def die_with(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Linux only: on other systems a process notices when it next communicates with its parent. If the
    parent has ended already, this process exits at once with status 1.

    Args:
        parent: The process id of the parent.
        sign: The signal.
    """
    if PRCTL is not None:
        PRCTL(PARENT_DEATH_SIGNAL, int(sign))
    if os.getppid() != parent:  # The parent ended before the signal was set up.
        os._exit(1)


class Reporter:
    """Monitor inside a forked process; sends progress to the parent."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return nullcontext()

    def advance(self, amount: float) -> None:
        try:
            os.write(self.pipe, PROGRESS_AMOUNT.pack(amount))
        except BrokenPipeError:
            os._exit(1)  # The parent no longer waits for this call.


class Worker:
    """A forked process as its parent sees it.

    Args:
        pid: The process id.
        orders: Pipe to which keys of jobs are written.
        reports: Pipe from which progress is read.
        result: Anonymous file (memfd) that holds the result of the last job.
    """

    def __init__(self, pid: int, orders: int, reports: int, result: int) -> None:
        self.pid = pid
        self.orders = orders
        self.reports = reports
        self.result = result
        self.busy: int | None = None  # The key of the current job.
        self.since = 0.0  # When the current job started.
        self.late = False  # True if the process was killed because of the timeout.

    def take(self, key: int) -> None:
        """Start the job of this key in the process and mark it busy; its time begins now.

        Does not wait. If the process is gone, nothing is raised: the end of its reports shows it.
        """
        self.busy = key
        self.since = time.monotonic()
        # If the process is gone, the end of its reports shows it.
        with suppress(BrokenPipeError):
            os.write(self.orders, KEY.pack(key))

    def dismiss(self) -> None:
        """Tell the process to exit, since there are no more jobs; does not wait for it."""
        os.close(self.orders)
        self.orders = -1
        self.busy = None

    def end(self) -> None:
        """Kill the process and mark it as late: its job exceeded the timeout."""
        self.late = True
        os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> int:
        """Close pipes and result, wait for the process to end; return its wait status.

        It does not end the process: `dismiss` or a kill must come first.
        """
        for descriptor in (self.orders, self.reports, self.result):
            if descriptor >= 0:
                os.close(descriptor)
        return os.waitpid(self.pid, 0)[1]


def run_in_processes(
    jobs: Mapping[int, ForkedCall],
    width: int,
    begin: Callable[[Reporter], None],
    advance: Callable[[float], None],
    timeout: float | None = None,
    threads: int = 1,
) -> Iterator[tuple[int, Payload | None, str]]:
    """Run jobs in forked processes and yield their results as they finish.

    Args:
        jobs: The jobs, by key.
        width: The largest number of processes at once; each runs one job after the other.
        begin: Called once in each process with its monitor, whose progress goes to `advance`.
        advance: Called in this process with the progress that the others report.
        timeout: Seconds after which a job's process is killed; None for no limit.
        threads: The number of threads that torch uses in each process.

    Yields:
        (key, result, "") for a job that is done, (key, None, reason) for one whose process died.
        A job that raises ends its process, with its traceback on standard error. Jobs start in the
        order of `jobs`; if the caller stops the iteration, all processes are killed.
    """
    known = {k: _share(job.known) for k, job in jobs.items()}
    waiting = list(jobs)
    workers: dict[int, Worker] = {}  # By the pipe of their reports.
    # OpenMP's threads belong to the thread that started them, and a process forked from that thread
    # would wait for them for ever; ARM's libraries do so even if set to use one thread. So a new
    # thread forks, which has none. It stays until the end, since the processes die with the thread
    # that forked them.
    forker = ThreadPoolExecutor(1)

    def start_worker() -> Worker:
        worker = _fork(jobs, known, list(workers.values()), begin, threads)
        workers[worker.reports] = worker
        return worker

    try:
        while waiting or workers:
            while waiting and len(workers) < width:
                worker = forker.submit(copy_context().run, start_worker).result()
                worker.take(waiting.pop(0))
            for pipe in _ready_pipes(workers, timeout):
                worker = workers[pipe]
                data = os.read(pipe, 64 * PROGRESS_AMOUNT.size)
                for (amount,) in PROGRESS_AMOUNT.iter_unpack(data):
                    if not math.isnan(amount):
                        advance(amount)
                        continue
                    k = worker.busy
                    assert k is not None
                    result = _load(worker.result, known[k])
                    if waiting:
                        worker.take(waiting.pop(0))
                    else:
                        worker.dismiss()
                    yield k, result, ""
                if not data:  # The process closed its pipe: it has ended.
                    del workers[pipe]
                    unfinished = worker.busy
                    status = worker.bury()
                    if unfinished is not None:
                        yield unfinished, None, _death_reason(worker, status, timeout)
    finally:
        forker.shutdown()
        for worker in workers.values():
            os.kill(worker.pid, signal.SIGKILL)
            worker.bury()


def _ready_pipes(workers: Mapping[int, Worker], timeout: float | None) -> list[int]:
    """Wait for reports and return the pipes that can be read.

    Workers whose job exceeds the timeout are killed; their pipes become readable afterwards.
    """
    busy = [worker for worker in workers.values() if worker.busy is not None and not worker.late]
    oldest = min((worker.since for worker in busy), default=None)
    patience = None
    if timeout is not None and oldest is not None:
        patience = max(0.0, oldest + timeout - time.monotonic())
    ready = [pipe for pipe in wait(list(workers), patience) if isinstance(pipe, int)]
    if timeout is not None:
        for worker in busy:
            if worker.reports not in ready and time.monotonic() >= worker.since + timeout:
                worker.end()
    return ready


def _death_reason(worker: Worker, status: int, timeout: float | None) -> str:
    """Return why a process ended before its job: the timeout, a signal, an exit code."""
    if worker.late:
        return f"it was not done within {timeout:g} s, the run's timeout"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _share(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies on write of the tensors that torch can share in this way.

    A process that writes to such a tensor moves it to another address, which `_save` notices. The
    others are left out.
    """
    shared = []
    for tensor in tensors:
        copy = isolate(tensor)
        if torch._C._is_cow_tensor(copy):  # type: ignore[attr-defined]
            shared.append(copy)
    return shared


def _fork(
    jobs: Mapping[int, ForkedCall],
    known: Mapping[int, list[Tensor]],
    others: list[Worker],
    begin: Callable[[Reporter], None],
    threads: int,
) -> Worker:
    """Fork a process that runs the jobs whose keys it receives.

    Args:
        jobs: All jobs, by key.
        known: The shared tensors of each job.
        others: The workers that exist already, whose pipes the new process must close.
        begin: Called once in the process with its monitor.
        threads: The number of threads that torch uses in the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    orders_in, orders = os.pipe()
    reports, reports_out = os.pipe()
    result = os.memfd_create("barter")
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(orders_in)
        os.close(reports_out)
        return Worker(pid, orders, reports, result)
    status = 1
    try:
        die_with(parent)
        # Interrupts are handled by the parent.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The parent's ends of all pipes are closed here: an open copy would keep a pipe alive.
        inherited = [orders, reports]
        for worker in others:
            inherited += [worker.orders, worker.reports]
        for descriptor in inherited:
            if descriptor >= 0:
                os.close(descriptor)
        torch.set_num_threads(threads)
        _keep_freed_memory()
        begin(Reporter(reports_out))
        while order := os.read(orders_in, KEY.size):
            (k,) = KEY.unpack(order)
            _save(result, jobs[k].work(), known[k])
            os.write(reports_out, PROGRESS_AMOUNT.pack(math.nan))  # The job is done.
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # The process must never return to the caller.


def _keep_freed_memory() -> None:
    """Have the C library keep freed memory in this short-lived process.

    A training step frees and allocates the same memory again and again. By default the C library
    returns much of it to the system in between, and page faults then take much of the step.
    """
    if MALLOPT is not None:
        MALLOPT(TRIM_THRESHOLD, 2**31 - 1)
        if not MALLOPT(MMAP_THRESHOLD, 2**30):
            MALLOPT(MMAP_THRESHOLD, 2**25)  # The largest value that older C libraries accept.


def _address(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they view memory in the same way."""
    address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return (address, tensor.shape, tensor.stride(), tensor.dtype)


def _save(result: int, tree: Payload, known: list[Tensor]) -> None:
    """Write a result to a file; store tensors at a known address by name only.

    Args:
        result: The file descriptor.
        tree: The result.
        known: Tensors that the receiver has, unmodified.
    """
    known_tensors, _ = pack(known)
    known_names = {_address(tensor): name for name, tensor in known_tensors.items()}
    tensors, header = pack(tree)
    unmodified = {}
    modified = {}
    for name, tensor in tensors.items():
        known_name = known_names.get(_address(tensor))
        if known_name is None:
            modified[name] = tensor.clone()
        else:
            unmodified[name] = known_name
    head = json.dumps({"header": header, "known": unmodified}).encode()
    body = save(modified)
    os.truncate(result, 0)
    os.lseek(result, 0, os.SEEK_SET)
    with open(result, "wb", closefd=False) as file:
        file.write(HEADER_LENGTH.pack(len(head)))
        file.write(head)
        file.write(body)


def _load(result: int, known: list[Tensor]) -> Payload:
    """Read a result that `_save` wrote, with the known tensors in their places.

    Args:
        result: The file descriptor.
        known: The same tensors as in `_save`.
    """
    with open(result, "rb", closefd=False) as file:
        file.seek(0)
        (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
        head = json.loads(file.read(length))
        tensors = {name: tensor.clone() for name, tensor in load(file.read()).items()}
    known_tensors, _ = pack(known)
    tensors |= {name: known_tensors[known_name] for name, known_name in head["known"].items()}
    return unpack(tensors, head["header"])
