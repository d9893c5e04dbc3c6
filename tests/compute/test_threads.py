from __future__ import annotations

from pathlib import Path

import pytest
import torch

from barter.compute import threads
from barter.compute.threads import free_cores, limit_threads

CORES = 4


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores that are idle, of five that there are."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: CORES)
    monkeypatch.setattr(
        threads.os, "sched_getaffinity", lambda process: set(range(CORES)), raising=False
    )
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    others(tmp_path, monkeypatch, [0] * CORES)
    return tmp_path


def others(machine: Path, monkeypatch: pytest.MonkeyPatch, busy: list[int]) -> None:
    """From now on others use so many percent of each core."""

    def stat(time: int) -> str:
        cores = [
            f"cpu{i} {b * time} 0 0 {(100 - b) * time} 0 0 0 0 0 0"
            for i, b in enumerate([*busy, 100])
        ]
        return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *cores, "intr 5 6", f"cpufreq {time}"])

    (machine / "stat").write_text(stat(3))
    monkeypatch.setattr(
        threads.time, "sleep", lambda seconds: (machine / "stat").write_text(stat(4))
    )


def test_as_many_threads_as_free_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_cores() == 4
    for busy, left in (
        ([20, 10, 0, 0], 4),
        ([100, 0, 0, 0], 3),
        ([90, 80, 80, 60], 1),
        ([100] * 4, 1),
    ):
        others(machine, monkeypatch, busy)
        assert free_cores() == left, busy


def test_no_more_than_a_container_may_use(machine: Path) -> None:
    (machine / "cpu.max").write_text("max 100000\n")
    assert free_cores() == 4
    (machine / "cpu.max").write_text("200000 100000\n")
    assert free_cores() == 2
    (machine / "cpu.max").unlink()
    (machine / "cpu").mkdir()
    (machine / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, left in (("-1\n", 4), ("50000\n", 1), ("300000\n", 3)):
        (machine / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert free_cores() == left


def test_the_users_word_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others(machine, monkeypatch, [100] * 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert free_cores() == 4


def test_without_a_measurement_the_load_counts(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "stat").unlink()
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (1.2, 9.0, 9.0))
    assert free_cores() == 3


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with limit_threads(2):
        assert torch.get_num_threads() == 2
        with limit_threads(None):
            assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
