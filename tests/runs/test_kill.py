"""A run killed at any instant and resumed ends as if it had never been killed, bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from barter.core.payload import leaves
from barter.runs.folder import RunFolder
from tests.conftest import same

ROUNDS = 3
SETTINGS = [
    "clients=3", f"rounds={ROUNDS}", "algorithm.max_epochs=2", "algorithm.share=0.1", "algorithm.code_dim=16",
    "algorithm.docking_epochs=3", "algorithm.decoder_epochs=1", "algorithm.decoder_steps=2",
    "algorithm.exchange_epochs=1", "algorithm.exchange_steps=2",
]  # fmt: skip

# Runs the command line, and ends it with SIGKILL the n-th time the named function is entered or left.
HARNESS = """
import os, signal, sys
import barter.runs.checkpoint as checkpoint
import barter.runs.folder as folder
from barter.algorithms.dffke import DFFKE
from barter.cli import main

where, count = sys.argv[1], int(sys.argv[2])
left = count

def countdown():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    original = getattr(owner, name)
    def wrapped(*args, **kwargs):
        countdown()
        return original(*args, **kwargs)
    setattr(owner, name, wrapped)

def torn_write(tensors, path, metadata):
    global left
    left -= 1
    if left == 0:
        original_save(tensors, path, metadata)
        whole = open(path, "rb").read()
        with open(path, "wb") as file:
            file.write(whole[: len(whole) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    original_save(tensors, path, metadata)

original_save = checkpoint.save_file
if where == "torn":
    checkpoint.save_file = torn_write
elif where == "exchange":
    before(DFFKE, "exchange_loss")
elif where == "append":
    before(folder.RunFolder, "append")
elif where == "save":
    before(folder.RunFolder, "save")
elif where == "flush":
    before(checkpoint, "flush")
sys.exit(main(sys.argv[3:]))
"""


def barter(harness: Path, where: str, count: int, *arguments: str) -> int:
    command = [sys.executable, str(harness), where, str(count), *arguments]
    return subprocess.run(command, capture_output=True, text=True).returncode


def outcome(run: Path) -> tuple[dict[str, Any], list[Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    folder = RunFolder.existing(run)
    found = folder.load(torch.device("cpu"))
    folder.release()
    assert found is not None
    assert found[0] == ROUNDS
    return dict(leaves(found[1])), lines


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill") / "harness.py"
    path.write_text(HARNESS)
    return path


@pytest.fixture(scope="module")
def straight(harness: Path) -> tuple[dict[str, Any], list[Any]]:
    out = harness.parent / "straight"
    flags = [flag for setting in SETTINGS for flag in ("--set", setting)]
    assert barter(harness, "nowhere", 0, "run", "--out", str(out), *flags) == 0
    return outcome(out)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("exchange", 3),
        ("exchange", 20),
        ("append", 1),
        ("append", 2),
        ("save", 3),
        ("torn", 1),
        ("torn", 2),
        ("flush", 3),
    ],
)
def test_killed_and_resumed_equals_straight(
    harness: Path, straight: tuple[dict[str, Any], list[Any]], where: str, count: int
) -> None:
    out = harness.parent / f"{where}-{count}"
    flags = [flag for setting in SETTINGS for flag in ("--set", setting)]
    assert barter(harness, where, count, "run", "--out", str(out), *flags) == -signal.SIGKILL
    assert barter(harness, "nowhere", 0, "resume", str(out)) == 0
    tensors, lines = outcome(out)
    assert lines == straight[1]
    assert same(tensors, straight[0])
    assert len(list((out / "checkpoints").iterdir())) == 1, "a torn file is cleared away"
