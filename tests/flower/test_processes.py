"""Real processes: a SuperLink, nodes with keys and TLS, workers, and what happens when some of them die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from barter.cli.app import main
from barter.core.payload import isolate, leaves
from barter.core.wire_settings import ProfileName, WireSettings
from barter.flower.supervise import FLOWER, free_port
from barter.runs import checkpoint
from barter.runs.folder import last_checkpoint, read_records
from tests.conftest import TINY, digits_file, federation, same, tiny

CPU = torch.device("cpu")


def remembered(folder: Path) -> Any:
    """What the sites of a deployment remember, by name."""
    found = {path.parts[-4]: path for path in folder.glob("sites/*/memory/*/now.safetensors")}
    found |= {
        f"client-{path.parts[-3]}": path for path in folder.glob("memory/*/*/now.safetensors")
    }
    return {
        name: checkpoint.read_checkpoint(path, CPU)[0]["memory"]
        for name, path in sorted(found.items())
    }


@pytest.mark.parametrize(
    ("name", "clients", "place", "profile"),
    [
        ("feddistill", 2, [], "lean"),
        pytest.param("dffke", 3, [], "exact", marks=pytest.mark.slow),
        pytest.param("dffke", 3, ["--simulate"], "lean", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_this_machine_is_the_run_of_one_process(
    tmp_path: Path, name: str, clients: int, place: list[str], profile: ProfileName
) -> None:
    """Sites with different architectures, over TLS and with keys, or simulated; and no process is left behind."""
    if place:
        pytest.importorskip("ray")
    fields = {f"algorithm.{key}": json.dumps(value) for key, value in TINY[name].items()}
    chosen = {
        "algorithm.name": name,
        "clients": clients,
        "rounds": 2,
        "data.source": digits_file(tmp_path),
        "wire.profile": profile,
        **fields,
    }
    settings = [f"--set={key}={value}" for key, value in chosen.items()]
    command = [
        "run",
        "--engine",
        "flower",
        *place,
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        *settings,
    ]
    assert main(command) == 0
    local = federation(
        tiny(name),
        clients=clients,
        models="small-5",
        data=digits_file(tmp_path),
        wire=WireSettings(profile=profile),
    )
    sent = [(record.bytes, record.wire) for record in local.rounds(2)]
    records = read_records(tmp_path / "run")
    assert [(record.bytes, record.wire) for record in records] == sent
    remote = last_checkpoint(tmp_path / "run")
    assert remote is not None
    assert same(dict(leaves(remote[1]["server"])), dict(leaves(isolate(local.server.memory()))))
    members = {f"client-{k}": memory for k, memory in local.engine.memory().items()}
    assert same(
        dict(leaves(remembered(tmp_path / "run" / "flower"))), dict(leaves(isolate(members)))
    )
    assert not left_behind(tmp_path)


def left_behind(folder: Path, patience: float = 20) -> list[str]:
    """Processes of a deployment that still run after a while: each has the folder in its environment."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    f"FLWR_HOME={folder}".encode() in (path / "environ").read_bytes()
                    and int(path.name) != os.getpid()
                ):
                    found.append(
                        (path / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def processes(folder: Path, *words: str) -> list[int]:
    """Who runs for the deployment of this folder, with all of these words in its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ours = f"FLWR_HOME={folder}".encode() in path.with_name("environ").read_bytes()
            if (
                ours
                and all(word in command for word in words)
                and int(path.parent.name) != os.getpid()
            ):
                found.append(int(path.parent.name))
    return found


FAULTY = '''
import os, signal, time
import torch
from dataclasses import dataclass
from barter.algorithms.fedavg import FedAvg
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.nodes import Client, Server
from barter.core.payload import State

class Clumsy(Client):
    turns: int = 0

@dataclass(frozen=True, kw_only=True)
class Faulty(Algorithm[Server, Clumsy]):
    """Averages weights, and does at a site what the file of its name says for a turn."""
    server_model = ServerModel("shared")
    crosses = {"update": Crossing(down="weights", up="weights")}

    def round(self, server: Server, clients, t: int) -> None:
        replies = clients.run(self.update, dict(server.model.state_dict()))
        mean = {name: sum(w[name] for w in replies.values()) / len(replies) if w0.is_floating_point() else w0
                for name, w0 in next(iter(replies.values())).items()}
        server.model.load_state_dict(mean)

    def update(self, client: Clumsy, w: State) -> State:
        client.model.load_state_dict(w)
        client.turns += 1
        with open("turns", "a") as file:
            file.write(f"{client.turns}\\n")
        fault = ""
        if os.path.exists("fault"):
            fault = dict(line.split() for line in open("fault")).get(str(client.turns), "")
        with torch.no_grad():
            for p in client.model.parameters():
                p += 0.01 * torch.randn_like(p)
        if fault.startswith(("sleep", "stop")) and not os.path.exists("asleep"):
            open("asleep", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP) if fault == "stop" else time.sleep(float(fault[5:]))
        if fault == "raise":
            raise ValueError("the coffee is out")
        out = {name: value.clone() for name, value in client.model.state_dict().items()}
        first = next(iter(out))
        if fault == "nan":
            out[first] = out[first] * float("nan")
        if fault == "shape":
            out[first] = out[first][:1]
        return ["not", "weights"] if fault == "tree" else out
'''


class Deployment:
    """A coordinator and its sites, as their users start them."""

    def __init__(self, folder: Path, sites: int, **settings: Any) -> None:
        self.folder, self.names = folder / "d", [f"s{k}" for k in range(sites)]
        (folder / "faulty.py").write_text(FAULTY)
        self.env = {
            **os.environ,
            **FLOWER,
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        chosen = {
            "data.source": "digits",
            "models": "small-mlp",
            "device": "cpu",
            "timeout": 60,
            **settings,
        }
        flags = [f"--set={key}={value}" for key, value in chosen.items()]
        address = f"127.0.0.1:{free_port()}"
        names = ",".join(self.names)
        command = ["flower", "init", str(self.folder), "--sites", names, "--address", address]
        self.barter(*command, "--algorithm", "faulty:Faulty", *flags).wait()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def barter(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder.parent / "log").open("ab")
        command = [sys.executable, "-m", "barter", *arguments]
        return subprocess.Popen(
            command, env=self.env, cwd=self.folder.parent, stdout=log, stderr=log
        )

    def fault(self, site: str, **turns: str) -> None:
        lines = "".join(f"{turn.removeprefix('t')} {what}\n" for turn, what in turns.items())
        (self.home(site) / "fault").write_text(lines)

    def home(self, site: str) -> Path:
        return self.folder / "sites" / site

    def start(self) -> None:
        for name in self.names:
            self.site(name)
        self.coordinator()

    def site(self, name: str) -> None:
        self.running[name] = self.barter("site", str(self.home(name) / "site.toml"))

    def coordinator(self) -> None:
        self.running["coordinator"] = self.barter(
            "flower", "start", str(self.folder), "--host", "127.0.0.1"
        )

    def finish(self, seconds: float = 400) -> list[Any]:
        assert self.running["coordinator"].wait(seconds) == 0, self.log
        return read_records(self.folder / "run")

    @property
    def log(self) -> str:
        return (self.folder.parent / "log").read_text()

    def until(self, holds: Callable[[], Any], seconds: float = 120) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)
        return found

    def asleep(self, name: str) -> None:
        """Wait until a site is in the middle of a call."""
        self.until((self.home(name) / "asleep").exists, 300)

    def turns(self, name: str) -> int:
        return len((self.home(name) / "turns").read_text().split())

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made = []

    def make(sites: int, **settings: Any) -> Deployment:
        made.append(Deployment(tmp_path, sites, **settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.stop()
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_bad_answers_are_failures_of_their_site(deploy: Callable[..., Deployment]) -> None:
    d = deploy(2, rounds=8, min_clients=1, timeout=25)
    d.fault("s1", t1="nan", t2="raise", t3="shape", t4="tree", t5="stop")
    d.start()
    failures = [r.failures for r in d.finish()]
    for found, said in zip(
        failures,
        ["NaN", "in the site's log", "the client's is", "is a list", "no answer in time"],
        strict=False,
    ):
        line, *others = found
        assert bool(others) == (said == "no answer in time"), (
            "who hangs is not evaluated in that round either"
        )
        assert "site s1" in line
        assert said in line
    assert failures[-1] == []  # it was ended, started again, and takes part


@pytest.mark.slow
def test_a_site_computes_no_longer_than_it_consents_to(deploy: Callable[..., Deployment]) -> None:
    d = deploy(2, rounds=3, min_clients=1, timeout=200)
    with (d.home("s1") / "site.toml").open("a") as setup:
        setup.write("[consent]\nseconds = 4\n")
    for name in d.names:
        d.fault(
            name, t2="sleep60" if name == "s1" else "sleep6"
        )  # who has not said so may take longer
    d.start()
    first, second, third = d.finish()
    assert first.failures == third.failures == []
    assert len(second.failures) == 1
    assert (
        "site s1: site s1 computes for at most 4 s (consent.seconds) in a call, "
        "and this call has used them up" in second.failures[0]
    )
    assert (d.home("s1") / "turns").read_text().split() == ["1", "2", "2"], (
        "it was begun once, and not again"
    )
    assert second.seconds["round"] < 60


@pytest.mark.slow
def test_a_killed_node_comes_back(deploy: Callable[..., Deployment]) -> None:
    d = deploy(3, rounds=40, min_clients=2, timeout=200)
    d.fault("s2", t2="sleep15")
    d.start()
    d.asleep("s2")
    (node,) = processes(d.folder, "barter.flower.node", "s2")
    os.kill(node, signal.SIGKILL)
    d.until(lambda: any(r.failures for r in read_records(d.folder / "run")), 200)
    broken = next(r for r in read_records(d.folder / "run") if r.failures)
    assert "site s2" in broken.failures[0]
    back = d.until(
        lambda: [
            r for r in read_records(d.folder / "run") if r.round > broken.round and not r.failures
        ],
        300,
    )
    assert back[0].clients[2]["bytes_up"] > 0
    assert (
        d.turns("s2")
        == sum(r.clients[2]["bytes_up"] > 0 for r in read_records(d.folder / "run")) + 1
    )


@pytest.mark.slow
def test_a_killed_client_process_is_asked_again_and_not_trained_twice(
    deploy: Callable[..., Deployment],
) -> None:
    d = deploy(2, rounds=4, timeout=300)
    for name in d.names:
        with (d.home(name) / "site.toml").open("a") as setup:
            setup.write("supernode = true\n")  # Flower's, which starts a process for every call
    d.fault("s1", t2="sleep8")
    d.start()
    d.asleep("s1")
    (client,) = d.until(
        lambda: len(found := processes(d.folder, "flwr-clientapp")) == 1 and found
    )  # the other site is done
    os.kill(client, signal.SIGKILL)
    rounds = d.finish()
    assert len(rounds) == 4
    assert all(not r.failures for r in rounds)
    assert d.turns("s1") == 4
    assert "a client process was killed during a message" in d.log


@pytest.mark.slow
def test_a_killed_worker_starts_again_from_its_memory(deploy: Callable[..., Deployment]) -> None:
    d = deploy(2, rounds=4, timeout=300)
    d.fault("s1", t3="sleep8")
    d.start()
    d.asleep("s1")
    (worker,) = processes(d.folder, "--worker", "s1")
    os.kill(worker, signal.SIGKILL)
    assert all(not r.failures for r in d.finish())
    assert (d.home("s1") / "turns").read_text().split() == ["1", "2", "3", "3", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["flwr-serverapp", "barter.flower.gateway"])
def test_a_killed_coordinator_goes_on_where_it_was(
    deploy: Callable[..., Deployment], victim: str
) -> None:
    d = deploy(2, rounds=4, timeout=300)
    d.fault("s1", t3="sleep5")
    d.start()
    d.asleep("s1")
    assert processes(d.folder, victim)
    for pid in processes(d.folder, victim):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    d.running["coordinator"].wait(120)
    assert len(read_records(d.folder / "run")) == 2
    d.coordinator()
    rounds = d.finish()
    assert [r.round for r in rounds] == [1, 2, 3, 4]
    straight = (d.home("s0") / "turns").read_text().split()
    assert straight[-2:] == ["3", "4"]  # the third turn was taken back and done again
    assert (d.home("s1") / "turns").read_text().split()[-2:] == ["3", "4"]


@pytest.mark.slow
def test_strangers_are_refused(deploy: Callable[..., Deployment], tmp_path: Path) -> None:
    d = deploy(2, rounds=1)
    (tmp_path / "other").mkdir()
    other = Deployment(tmp_path / "other", 1)
    for site, stolen in (
        ("s0", "key"),
        ("s1", "ca.crt"),
    ):  # a key nobody registered; a coordinator nobody vouches for
        (d.home(site) / stolen).write_bytes((other.home("s0") / stolen).read_bytes())
    d.start()
    assert d.running["coordinator"].wait(600) != 0
    assert "0 of 2 sites came within 120 s" in d.log
    assert "s0: node ended with status 77" in d.log
    assert f"refuses the key {d.home('s0') / 'key'}" in d.log
    said = [(d.home(site) / "logs" / "node.log").read_text().lower() for site in ("s0", "s1")]
    assert "failed to activate supernode" in said[0]
    assert "certificate" in said[1]
