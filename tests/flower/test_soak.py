"""A federation that is harmed at random for a quarter of an hour: it ends as if nobody had touched it.

    pytest -m slow tests/flower/test_soak.py --soak-seconds 900 --soak-seed 7

Any process is killed or stopped, sites answer nonsense, and disks are full for a while. The test does what an operator
does: it starts again what has ended. Processes are found by the folder that is in their environment.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from barter.algorithms import ALGORITHMS
from barter.core.payload import isolate, leaves
from barter.experiment import Experiment
from barter.flower.supervise import FLOWER, ROOMS, free_port
from barter.runs.folder import count_rounds, last_checkpoint, read_records
from barter.setup.config import read_toml, resolve
from tests.conftest import TINY, digits_file, same
from tests.flower.test_processes import left_behind, processes, remembered
from tests.forked import until

log = logging.getLogger("soak")

SITES = 6
PATIENCE = 600.0  # seconds that a run has to its end when nobody harms it any more
# How many must answer. Where all must, a lost answer stops the run, which is started again: it ends as a calm one does.
LEAST: dict[str, int] = {"feddistill": SITES, "fedavg": 3, "dffke": SITES, "fedproto": 3}

SOAKED = '''
"""Methods whose clients do in a turn what the file `fault` of their site says, once."""

import functools
import os
import torch
from barter import ALGORITHMS
from barter.algorithms import ALGORITHMS
from barter.core.payload import isolate

def faulty(method):
    @functools.wraps(method)
    def turn(self, client, *args):
        answer = method(self, client, *args)
        try:
            fault = open("fault").read()
            os.unlink("fault")
        except OSError:
            return answer
        if fault == "raise":
            raise ValueError("the coffee is out")
        if fault == "exit":
            os._exit(3)
        return spoilt(answer, fault)
    return turn

def spoilt(tree, fault):
    if fault == "tree":
        return ["nonsense"]
    if isinstance(tree, torch.Tensor):
        if fault == "nan":
            return tree * float("nan") if tree.is_floating_point() else tree
        return tree.flatten()[:1] if fault == "shape" else tree
    if isinstance(tree, dict):
        return {key: spoilt(value, fault) for key, value in tree.items()}
    return type(tree)(spoilt(value, fault) for value in tree) if isinstance(tree, (list, tuple)) else tree

def soaked(kind):
    methods = {name: faulty(getattr(kind, name)) for name in kind.crosses}
    return type(kind.__name__, (kind,), {**methods, "__module__": __name__, "__doc__": kind.__doc__})

globals().update({kind.__name__: soaked(kind) for kind in ALGORITHMS.values()})
'''


class Soak:
    """A deployment as its users start it, and whoever harms it."""

    def __init__(
        self, place: Path, algorithm: str, least: int, rounds: int, rng: random.Random
    ) -> None:
        self.place, self.folder, self.rng = place, place / "d", rng
        (place / "tmp").mkdir(parents=True)
        (place / "soaked.py").write_text(SOAKED)
        python = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.env = {**os.environ, **FLOWER, "PYTHONPATH": python, "TMPDIR": str(place / "tmp")}
        fields = {f"algorithm.{key}": value for key, value in TINY[algorithm].items()}
        chosen = {
            "rounds": rounds,
            "min_clients": least,
            "timeout": 60,
            "device": "cpu",
            "threads": 1,
            **fields,
        }
        chosen |= {"data.source": digits_file(place), "partition.name": "iid"}
        chosen |= {"models": "small-mlp"} if algorithm == "fedavg" else {}
        flags = [f"--set={key}={value}" for key, value in chosen.items()]
        names = [f"s{k}" for k in range(SITES)]
        address = f"127.0.0.1:{free_port()}"
        command = [
            "flower",
            "init",
            str(self.folder),
            "--sites",
            ",".join(names),
            "--address",
            address,
        ]
        assert (
            self.barter(
                "log", *command, "--algorithm", f"soaked:{ALGORITHMS[algorithm].__name__}", *flags
            ).wait()
            == 0
        ), self.said
        self.commands = {name: ["site", str(self.home(name) / "site.toml")] for name in names}
        self.commands["coordinator"] = ["flower", "start", str(self.folder), "--host", "127.0.0.1"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.mend: list[tuple[float, Callable[[], None]]] = []  # what is to be taken back, and when
        self.harmed: list[str] = []

    def home(self, name: str) -> Path:
        return self.folder / "sites" / name

    def barter(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.place / log).open("ab") as out:
            command = [sys.executable, "-m", "barter", *arguments]
            return subprocess.Popen(command, env=self.env, cwd=self.place, stdout=out, stderr=out)

    @property
    def said(self) -> str:
        logs = [*self.place.glob("log*"), *self.folder.glob("logs/*")]
        tails = [
            f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in logs
        ]
        return "\n".join([f"{count_rounds(self.folder / 'run')} rounds; {self.harmed}", *tails])

    def tend(self) -> bool:
        """Start again what has ended; whether the run is over."""
        for name, command in self.commands.items():
            process = self.running.get(name)
            if process is None or process.poll() is not None:
                if name == "coordinator" and process is not None and process.returncode == 0:
                    return True
                self.running[name] = self.barter(f"log-{name}", *command)
        due = [item for item in self.mend if item[0] < time.monotonic()]
        for item in due:
            self.mend.remove(item)
            item[1]()
        return False

    def harm(self) -> None:
        """One misfortune."""
        everybody = [*processes(self.folder), *(process.pid for process in self.running.values())]
        victim, seconds = self.rng.choice(everybody), self.rng.uniform(1, 12)
        kind = self.rng.choice(("kill", "stop", "full", "answer"))
        self.harmed.append(kind)
        log.warning("%s: %s", kind, command_of(victim) if kind != "answer" else "a site")
        with suppress(ProcessLookupError, FileNotFoundError):
            if kind == "kill":
                os.kill(victim, signal.SIGKILL)
            elif kind == "stop":
                os.kill(victim, signal.SIGSTOP)
                self.later(seconds, lambda: os.kill(victim, signal.SIGCONT))
            elif kind == "full":
                _, most = resource.prlimit(
                    victim, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)
                )
                self.later(
                    seconds, lambda: resource.prlimit(victim, resource.RLIMIT_FSIZE, (most, most))
                )
            else:
                site = self.rng.choice([name for name in self.commands if name != "coordinator"])
                (self.home(site) / "fault").write_text(
                    self.rng.choice(("nan", "raise", "tree", "shape", "exit"))
                )

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        def mended() -> None:
            with suppress(ProcessLookupError):
                act()

        self.mend.append((time.monotonic() + seconds, mended))

    def run(self, seconds: float) -> None:
        """From its first round on harm it for so long, and then let it come to its end."""
        end = time.monotonic() + PATIENCE
        while not count_rounds(self.folder / "run"):
            self.tend()
            assert time.monotonic() < end, self.said
            time.sleep(0.2)
        end, harm = time.monotonic() + seconds, time.monotonic()
        while not self.tend():
            now = time.monotonic()
            assert now < end + PATIENCE, self.said
            if harm < now < end:
                self.harm()
                harm = now + self.rng.uniform(1, 8)
            time.sleep(0.2)

    def sweep(self) -> None:
        """Start each site that was killed at the end once more: it removes what its predecessor left."""
        for name in self.commands.keys() - {"coordinator"}:
            note = json.loads((self.home(name) / "rooms").read_text())
            folder = Path(note["folder"])
            if not folder.exists():
                continue
            process = self.barter(f"log-{name}", *self.commands[name])
            until(lambda folder=folder: not folder.exists(), seconds=60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, self.said

    @contextmanager
    def whole(self) -> Iterator[None]:
        """However it ends, nobody runs on afterwards."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            for _, act in self.mend:
                act()
            for process in self.running.values():
                process.send_signal(signal.SIGTERM)
            for process in self.running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
                process.wait()


def command_of(process: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return " ".join(Path(word).name for word in words[1:5])  # tokens come later
    return "gone"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", LEAST)
def test_a_harmed_federation_ends_as_a_calm_one(
    algorithm: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = request.config.getoption("--soak-seconds") / len(LEAST)
    rng = random.Random(f"{request.config.getoption('--soak-seed')} {algorithm}")
    soak = Soak(tmp_path / "soak", algorithm, LEAST[algorithm], max(3, int(seconds / 15)), rng)
    with soak.whole():
        soak.run(seconds)
    soak.sweep()
    found, rounds = last_checkpoint(soak.folder / "run"), read_records(soak.folder / "run")
    log.warning("%s: %d rounds, harm: %s", algorithm, len(rounds), " ".join(soak.harmed))
    monkeypatch.syspath_prepend(soak.place)
    monkeypatch.chdir(tmp_path)
    config = resolve(read_toml(soak.folder / "run.toml"))
    assert [record.round for record in rounds] == list(range(1, config.rounds + 1)), soak.said
    assert not left_behind(soak.folder), "no process is left"
    # Torch has folders among the temporary ones, too.
    left = [
        path
        for path in soak.place.rglob("*")
        if path.suffix in (".tmp", ".new")
        or (path.parent.name == "tmp" and path.name.startswith(ROOMS))
    ]
    assert not left, "no temporary file is left"
    failures = [line for record in rounds for line in record.failures]
    assert LEAST[algorithm] < SITES or not failures
    if failures:
        return  # an answer was lost, and the others went on without
    calm = Experiment.from_config(config)
    list(calm.rounds(config.rounds))
    assert found is not None
    assert same(dict(leaves(found[1]["server"])), dict(leaves(isolate(calm.server.memory()))))
    members: dict[str, Any] = {f"s{k}": memory for k, memory in calm.engine.memory().items()}
    assert same(dict(leaves(remembered(soak.folder))), dict(leaves(isolate(members))))
