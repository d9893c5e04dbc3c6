"""Number of CPU threads of a run.

A kernel is as slow as the slowest of its threads: on a machine that others use too, one thread too
many can make it many times slower, and one too few never does. The number of threads is part of a
result, because it changes the order of sums and thus the last digits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["free_cores", "limit_threads"]

SECONDS = 0.2  # Duration of the measurement of other processes' load.
CGROUP = Path("/sys/fs/cgroup")
STAT = Path("/proc/stat")


def free_cores() -> int:
    """Return the number of idle cores, or torch's threads if OMP_NUM_THREADS is set.

    It is rounded, at most torch's number of threads and the container's quota, and at least 1.
    Measuring takes 0.2 seconds.
    """
    most = torch.get_num_threads()
    if most == 1 or os.environ.get("OMP_NUM_THREADS"):
        return most
    return max(1, round(min(most, _allowance(), _idle())))


@contextmanager
def limit_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this number of CPU threads in the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _allowance() -> float:
    """Return the cores that the container's CPU quota allows; infinity without one."""
    version_2 = CGROUP / "cpu.max"
    version_1 = CGROUP / "cpu" / "cpu.cfs_quota_us"
    if version_2.is_file():
        quota, period = version_2.read_text().split()
    elif version_1.is_file():
        quota = version_1.read_text()
        period = version_1.with_name("cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def _idle() -> float:
    """Return how many of the cores that this process may use are idle.

    It is the average over 0.2 seconds. Without /proc/stat it is the number of all cores minus the
    load average, which may be negative.
    """
    if not STAT.is_file():
        return (os.cpu_count() or 1) - os.getloadavg()[0]
    before = _ticks()
    time.sleep(SECONDS)
    idle_cores = 0.0
    for core, (idle_now, total_now) in _ticks().items():
        idle_before, total_before = before[core]
        total = total_now - total_before
        idle_cores += (idle_now - idle_before) / total if total else 1.0
    return idle_cores


def _ticks() -> dict[int, tuple[int, int]]:
    """Return idle and total clock ticks of each core that this process may use."""
    allowed = os.sched_getaffinity(0)
    ticks = {}
    for line in STAT.read_text().splitlines():
        name, *numbers = line.split()
        core = name.removeprefix("cpu")
        if name.startswith("cpu") and core.isdigit() and int(core) in allowed:
            counts = list(map(int, numbers[:8]))
            idle, waiting = counts[3:5]  # after user, nice and system
            ticks[int(core)] = idle + waiting, sum(counts)
    return ticks
