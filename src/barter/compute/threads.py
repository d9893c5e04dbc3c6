"""How many threads a run on the CPU computes with.

A kernel is as slow as the slowest of its threads: where others compute too, one thread too many can make it many times
slower, and one too few never does. The number is part of a result: sums are added up in another order, and last digits
differ.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["free", "threaded"]

SECONDS = 0.2  # of looking at what others do
CGROUP, STAT = Path("/sys/fs/cgroup"), Path("/proc/stat")


def free() -> int:
    """As many as there are cores that nobody else uses now; where OMP_NUM_THREADS is set, that many."""
    most = torch.get_num_threads()
    if most == 1 or os.environ.get("OMP_NUM_THREADS"):
        return most
    return max(1, round(min(most, _allowance(), _idle())))


@contextmanager
def threaded(threads: int | None) -> Iterator[None]:
    """Inside, a kernel uses so many threads; none means as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _allowance() -> float:
    """How many cores' time a container may take."""
    if (limit := CGROUP / "cpu.max").is_file():  # version 2 of control groups
        quota, period = limit.read_text().split()
    elif (limit := CGROUP / "cpu" / "cpu.cfs_quota_us").is_file():
        quota, period = limit.read_text(), limit.with_name("cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def _idle() -> float:
    """How many of the cores that this process may use are idle: measured, or by the load of the last minute."""
    if not STAT.is_file():
        return (os.cpu_count() or 1) - os.getloadavg()[0]
    before = _ticks()
    time.sleep(SECONDS)
    spent = {
        core: [b - a for a, b in zip(before[core], now, strict=True)]
        for core, now in _ticks().items()
    }
    return sum(idle / total if total else 1.0 for idle, total in spent.values())


def _ticks() -> dict[int, tuple[int, int]]:
    """How long each core that this process may use has been idle, and how long it has been there."""
    mine, found = os.sched_getaffinity(0), {}
    for line in STAT.read_text().splitlines():
        name, *numbers = line.split()
        core = name.removeprefix("cpu")
        if name.startswith("cpu") and core.isdigit() and int(core) in mine:
            user, nice, system, idle, waiting, *others = map(int, numbers[:8])
            found[int(core)] = idle + waiting, user + nice + system + idle + waiting + sum(others)
    return found
