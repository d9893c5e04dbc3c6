"""Remote calls are type-checked: mypy accepts the right ones and refuses each wrong one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = """
from dataclasses import dataclass
from torch import Tensor
from barter import Algorithm, Client, Clients, Replies, Server

class Hub(Server):
    total: float = 0.0

@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm[Hub]):
    def learn(self, client: Client, weights: dict[str, Tensor], epochs: int = 1) -> float:
        return 0.0

    def send(self, client: Client, number: int) -> int:
        return number

    def not_remote(self, text: str) -> str:
        return text

    def round(self, server: Hub, clients: Clients, t: int) -> None:
        w: dict[str, Tensor] = {}
        server.total += 1
        good: Replies[float] = clients.run(self.learn, w)
        clients.run(self.learn, w, epochs=2)
        numbers: int = clients.relay(self.send, 1)
        each: Replies[int] = clients.scatter(self.send, {0: 1})
"""
WRONG = {
    "clients.run(self.learn)": "Missing positional argument",
    "clients.run(self.learn, 3)": "incompatible type",
    "clients.run(self.learn, w, 'many')": "incompatible type",
    "clients.run(self.learn, w, 1, 2)": "Too many arguments",
    "clients.run(self.learn, w, epoch=2)": "Unexpected keyword argument",
    "clients.run(self.not_remote, 'x')": 'cannot be "str"',
    "bad: Replies[str] = clients.run(self.learn, w)": "incompatible type",
    "clients.scatter(self.send, {0: 'one'})": "incompatible type",
    "clients.scatter(self.send, 1)": "incompatible type",
    "clients.relay(self.send, 'text')": "incompatible type",
    "clients.run('learn', w)": "incompatible type",
    "server.docking": "has no attribute",
}


def test_mypy_refuses_wrong_remote_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = SOURCE.splitlines() + ["        " + call for call in WRONG]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines) + "\n")
    # From the project's folder: what its last check knows of torch and of barter is not found out again.
    command = [sys.executable, "-m", "mypy", "--strict", str(path)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    output = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment
    ).stdout
    errors = [line for line in output.splitlines() if ": error:" in line]
    for number, (call, reason) in enumerate(WRONG.items(), start=len(SOURCE.splitlines()) + 1):
        assert any(f"mine.py:{number}: error:" in e and reason in e for e in errors), (
            f"{call} was accepted:\n{output}"
        )
    right = [e for e in errors if int(e.split(":")[1]) <= len(SOURCE.splitlines())]
    assert not right, "mypy refuses right calls:\n" + "\n".join(right)
