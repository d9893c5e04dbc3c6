from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from barter import Crossing, Local
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import ClientError
from barter.core.nodes import Client, Server
from barter.engines import local
from barter.engines.forks import ForkedCall, run_in_processes
from barter.experiment import Experiment
from tests.conftest import federation, perceptrons, same, small_federation, state, tiny
from tests.engines.test_local import Notes
from tests.forked import forked, status, until


def work_of(
    jobs: dict[int, Any],
    known: list[torch.Tensor] | None = None,
    width: int = 2,
    timeout: float | None = None,
) -> dict[int, Any]:
    told: list[float] = []
    turns = {k: ForkedCall(work, known or []) for k, work in jobs.items()}
    homes = run_in_processes(turns, width, lambda _: None, told.append, timeout)
    return {k: (home, death) for k, home, death in homes}


def goes_on(pid: int) -> bool:
    """Whether a process does; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_come_home_whole() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    trees = {k: {"x": image + k, "n": (k, None, "text", 0.1)} for k in range(5)}
    home = work_of({k: (lambda tree=tree: tree) for k, tree in trees.items()})
    assert home.keys() == trees.keys()
    for k, (tree, death) in home.items():
        assert death == ""
        assert torch.equal(tree["x"], trees[k]["x"])
        assert tree["x"].stride() == image.stride()
        assert tree["n"] == trees[k]["n"]


def test_what_was_not_touched_is_not_sent_and_what_was_is() -> None:
    big, small = torch.ones(1000, 1000), torch.zeros(3)

    def work() -> Any:
        small.add_(1)
        return {"big": big, "small": small}

    ((home, _),) = work_of({0: work}, [big, small]).values()
    assert torch._C._data_address(home["big"]) == torch._C._data_address(big)  # type: ignore[attr-defined]
    assert home["small"].tolist() == [1, 1, 1]
    assert small.tolist() == [0, 0, 0], "this process keeps its own"
    home["big"][0, 0] = 7
    assert big[0, 0] == 1


def test_a_view_that_was_written_to_comes_home_written() -> None:
    part = torch.zeros(10)[2:5]

    def work() -> Any:
        part.fill_(4)
        return part

    ((home, _),) = work_of({0: work}, [part]).values()
    assert home.tolist() == [4, 4, 4]


def test_a_process_that_dies_is_named() -> None:
    home = work_of(
        {0: lambda: os.kill(os.getpid(), signal.SIGKILL), 1: lambda: 5, 2: lambda: os._exit(3)}
    )
    assert home[0] == (None, "its process was ended by SIGKILL")
    assert home[1] == (5, "")
    assert home[2] == (None, "its process ended with 3")


def test_processes_die_with_the_one_they_came_from(tmp_path: Path) -> None:
    def turn() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    parent = forked(lambda: len(work_of({0: turn, 1: turn})), tmp_path / "said")
    turns = until(
        lambda: len(found := [int(p.name) for p in tmp_path.glob("[0-9]*")]) == 2 and found
    )
    os.kill(parent, signal.SIGKILL)
    assert status(parent) == -signal.SIGKILL
    until(lambda: not any(goes_on(pid) for pid in turns))


def test_who_is_not_done_in_time_is_ended_and_others_go_on() -> None:
    lock = threading.Lock()
    lock.acquire()  # nobody is left to release it in a forked process
    jobs: dict[int, Any] = {
        0: lock.acquire,
        1: lambda: 5,
        2: lambda: os.kill(os.getpid(), signal.SIGSTOP),
        3: lambda: 6,
    }
    home = work_of(jobs, timeout=0.4)
    assert home[0] == home[2] == (None, "it was not done within 0.4 s, the run's timeout")
    assert home[1] == (5, "")
    assert home[3] == (6, "")


def test_time_counts_from_the_start_of_a_turn() -> None:
    home = work_of({k: lambda: time.sleep(0.2) for k in range(4)}, width=1, timeout=0.5)
    assert [death for _, death in home.values()] == [""] * 4


def test_a_process_takes_one_turn_after_the_other() -> None:
    sizes = dict(enumerate([1000, 10, 500, 0, 2000, 3]))
    jobs = {k: (lambda n=n: {"pid": os.getpid(), "x": torch.arange(n)}) for k, n in sizes.items()}
    home = work_of(jobs)
    assert len({tree["pid"] for tree, _ in home.values()}) == 2
    assert os.getpid() not in {tree["pid"] for tree, _ in home.values()}
    assert all(torch.equal(home[k][0]["x"], torch.arange(n)) for k, n in sizes.items())


def test_after_a_death_another_process_goes_on() -> None:
    jobs: dict[int, Any] = {0: os.getpid, 1: lambda: os._exit(4), 2: os.getpid, 3: os.getpid}
    home = work_of(jobs, width=1)
    assert list(home) == [0, 1, 2, 3]
    assert home[1] == (None, "its process ended with 4")
    assert home[0][0] != home[2][0] == home[3][0]
    assert [death for _, death in home.values()] == ["", "its process ended with 4", "", ""]


def child_processes() -> set[int]:
    """Return the ids of this process's children, those that ended unnoticed included."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in brackets come the state and the parent's id.
            parent = entry.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # It has ended.
        if int(parent) == os.getpid():
            found.add(int(entry.parent.name))
    return found


def test_child_processes_are_found() -> None:
    before = child_processes()
    child = os.fork()
    if not child:
        os._exit(0)
    assert child_processes() - before == {child}
    os.waitpid(child, 0)
    assert child_processes() == before


def test_no_process_and_no_file_is_left_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    others = child_processes()  # such as multiprocessing's resource tracker, of other tests
    for _ in range(3):
        work_of({k: (lambda k=k: k) for k in range(5)})
        turns = {k: ForkedCall(lambda: 1, []) for k in range(4)}
        half = run_in_processes(turns, 2, lambda _: None, lambda _: None)
        next(half)
        half.close()  # as after an interrupt
    assert set(os.listdir("/proc/self/fd")) == before
    assert child_processes() == others


def test_a_process_that_cannot_write_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            if os.getpid() != parent:
                raise BrokenPipeError

    parent = os.getpid()
    monkeypatch.setattr(sys, "stdout", Broken())
    home = work_of({0: lambda: 1, 1: lambda: 2})
    assert os.getpid() == parent, "no second copy of this test runs on"
    assert home == {0: (1, ""), 1: (2, "")}


def test_a_process_that_brings_nothing_home_is_a_death() -> None:
    assert work_of({0: lambda: os._exit(0)}) == {0: (None, "its process ended with 0")}


def test_memory_that_is_freed_and_taken_again_is_not_fetched_from_the_system_each_time() -> None:
    def step() -> None:
        kept = [torch.ones(10_000_000) for _ in range(3)]  # 40 MB each
        del kept

    def faults() -> float:
        # Until the heap has three holes of this size, which takes up to eight steps.
        for _ in range(20):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            step()
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    pages = 5 * 3 * 40_000_000 / resource.getpagesize()
    home, _ = work_of({0: faults})[0]
    # All of them if freed memory were given back. A heap with two holes fetches a third of them.
    assert home < pages / 2


def test_a_payload_that_may_not_go_down_is_that_clients_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tell(Algorithm[Server, Client]):
        """The second client is told nonsense."""

        crosses = {"hear": Crossing(down="a number")}

        def round(self, server: Server, clients: Clients, t: int) -> None:
            clients.scatter(
                self.hear, {k: torch.tensor(float("nan" if k == 1 else k)) for k in clients}
            )

        def hear(self, client: Client, number: torch.Tensor) -> None:
            client.report["heard"] = float(number)

    (away,) = on_two_cores(monkeypatch, Tell(), min_clients=1).rounds(1)
    (here,) = federation(Tell(), min_clients=1).rounds(1)
    assert away.failures == here.failures
    assert len(here.failures) == 1
    assert away.clients[2]["heard"] == 2


class Report(Algorithm[Server, Client]):
    """Clients that answer, fail, and answer nonsense."""

    crosses = {"ask": Crossing(up="what a client has to say")}

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.ask)

    def ask(self, client: Client) -> Any:
        client.report["seen"] = client.id
        match client.id:
            case 0:
                return torch.get_num_threads()
            case 1:
                raise ValueError("no")
            case 2:
                return {"what": object()}
            case 3:
                return torch.tensor(float("nan"))
        return os.kill(os.getpid(), signal.SIGKILL)


def on_two_cores(monkeypatch: pytest.MonkeyPatch, algorithm: Any, **options: Any) -> Experiment:
    monkeypatch.setattr(local, "FORK_SECONDS", 0)
    experiment = federation(algorithm, **options)
    experiment.engine.cores = 2
    return experiment


def test_failures_are_those_of_a_turn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    (away,) = on_two_cores(monkeypatch, Report(), clients=5, min_clients=1).rounds(1)
    (here,) = federation(Report(), clients=4, min_clients=1).rounds(1)
    assert [f for f in away.failures if "client 4" not in f] == here.failures
    assert len(here.failures) == 3
    assert "client 4 failed in 'ask', round 1: its process was ended by SIGKILL" in away.failures
    assert away.clients[1]["seen"] == 1, "what a failing client noted is not lost"


def test_the_error_of_a_process_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = on_two_cores(monkeypatch, Report(), clients=5)
    with pytest.raises(Exception, match="1 of 5 clients answered") as caught:
        list(experiment.rounds(1))
    assert 'raise ValueError("no")' in "".join(caught.value.__notes__)


def test_progress_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    list(on_two_cores(monkeypatch, Local(max_epochs=3), monitor=notes).rounds(1))
    for name, total, done in notes.phases:
        assert done == pytest.approx(total), name


def test_short_turns_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "FORK_SECONDS", 1e9)
    experiment = federation(Local(max_epochs=1))
    experiment.engine.cores = 2
    experiment.engine._cost = {"learn": 1.0, "evaluate": 1.0}
    monkeypatch.setattr(local.forks, "run_in_processes", None)
    list(experiment.rounds(1))


def test_few_clients_have_all_cores() -> None:
    engine = federation(Local()).engine
    engine.cores = 8
    assert [engine._by_core(n) for n in (1, 3, 4, 100)] == [False, False, True, True]
    engine.cores = 1
    assert not engine._by_core(100)


@dataclass(frozen=True)
class Hang(Algorithm[Server, Client]):
    """One client does not answer in the second round."""

    crosses: ClassVar = {"ask": Crossing(up="who it is")}
    seconds: ClassVar = 60.0
    hanging: int = 1

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.ask, t)

    def ask(self, client: Client, t: int) -> int:
        client.report["asked"] = t
        if t == 2 and client.id == self.hanging:
            time.sleep(self.seconds)
        return client.id


# One client after the other on one core, side by side, and fewer clients than half the cores.
@pytest.mark.parametrize(("clients", "threads"), [(3, 1), (3, 2), (2, 8)])
def test_a_client_that_hangs_is_that_clients_failure(
    clients: int, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"clients": clients, "threads": threads, "min_clients": 1}
    experiment = perceptrons(Hang(), timeout=2, **options)
    # Quick turns have processes too: which client can hang is not known before.
    rounds = list(experiment.rounds(3))
    why = "client 1 failed in 'ask', round 2: it was not done within 2 s, the run's timeout"
    assert [r.failures for r in rounds] == [[], [why], []]
    assert [r.clients[0]["asked"] for r in rounds] == [1, 2, 3]
    assert not caplog.messages


def test_the_only_client_is_ended_too() -> None:
    experiment = perceptrons(Hang(0), clients=1, timeout=1, threads=1)
    with pytest.raises(ClientError, match="0 of 1 clients answered 'ask'"):
        list(experiment.rounds(2))


@pytest.mark.parametrize(("clients", "threads"), [(2, 1), (1, 3)])
def test_a_timeout_changes_no_result(clients: int, threads: int) -> None:
    options: dict[str, Any] = {"clients": clients, "threads": threads, "models": "small-cnn"}
    plain = small_federation(tiny("fedavg"), **options)
    with_timeout = small_federation(tiny("fedavg"), timeout=60, **options)
    list(plain.rounds(2))
    list(with_timeout.rounds(2))
    assert same(state(plain), state(with_timeout))


def test_a_timeout_that_cannot_be_enforced_is_said_at_the_start_and_when_it_is_exceeded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.forks.sys, "platform", "darwin")
    monkeypatch.setattr(Hang, "seconds", 0.2)
    experiment = perceptrons(Hang(), timeout=0.1, threads=1)
    (said,) = caplog.messages
    assert "timeout=0.1 is not enforced here: a client can have" in said
    caplog.clear()
    rounds = list(experiment.rounds(2))
    (said,) = [line for line in caplog.messages if "'ask'" in line]
    assert re.match(r"client 1 took 0\.\d s in 'ask', round 2, longer than timeout=0\.1", said)
    assert rounds[1].failures == []
    assert rounds[1].clients[1]["asked"] == 2


AFTER_THREADS = """
import torch
from torch import nn
from barter.engines.forks import ForkedCall, run_in_processes

torch.set_num_threads(2)
network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 32 * 32, 10))

def step():
    network(torch.ones(32, 3, 32, 32)).sum().backward()
    torch.ones(600, 600) @ torch.ones(600, 600)

step()
jobs = {k: ForkedCall(step, []) for k in range(3)}
for threads in (1, 2):
    homes = run_in_processes(jobs, 2, lambda _: None, lambda _: None, timeout=60, threads=threads)
    print(sorted(homes))
"""


def test_turns_compute_after_this_process_did_so_with_several_threads() -> None:
    """ARM's libraries waited for threads that a forked process does not have."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    told = subprocess.run(
        [sys.executable, "-c", AFTER_THREADS], env=free, capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == 2 * ["[(0, None, ''), (1, None, ''), (2, None, '')]"]
