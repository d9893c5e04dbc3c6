"""A run killed at any instant and resumed ends as if it had never been killed, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from barter.algorithms.dffke import DFFKE
from barter.cli.app import main
from barter.core import files
from barter.core.payload import leaves
from barter.runs import checkpoint
from barter.runs.folder import RunFolder, last_checkpoint
from tests.conftest import TINY, digits_file, same
from tests.forked import forked, status

ROUNDS = 3
SETTINGS = {
    **{"clients": 3, "rounds": ROUNDS, "models": "small-mlp"},
    **{f"algorithm.{key}": value for key, value in TINY["dffke"].items()},
}
PLACES: dict[str, tuple[Any, str]] = {
    "exchange": (DFFKE, "exchange_loss"),
    "append": (RunFolder, "append"),
    "save": (RunFolder, "save"),
    "flush": (files, "flush"),
    "torn": (checkpoint, "save_file"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_half(save: Callable[..., None], tensors: Any, path: Path, metadata: Any) -> None:
    save(tensors, path, metadata)
    whole = path.read_bytes()
    with path.open("wb") as file:
        file.write(whole[: len(whole) // 2])
        file.flush()
        die()


def barter(where: str, count: int, arguments: list[str]) -> int:
    """The command line, which SIGKILL ends the n-th time that it comes to this place; for use in a process of its own.

    Where a file is torn, half of it is written first.
    """
    if where:
        owner, name = PLACES[where]
        original, left = getattr(owner, name), count

        def counted(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                save_half(original, *args) if where == "torn" else die()
            return original(*args)

        setattr(owner, name, counted)
    return main(arguments)


def ended(folder: Path, *arguments: str, where: str = "", count: int = 0) -> int:
    """How the command line ends in a process of its own."""
    return status(forked(partial(barter, where, count, list(arguments)), folder / "said"))


def outcome(run: Path) -> tuple[dict[str, Any], list[Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    RunFolder.existing(run).release()
    found = last_checkpoint(run)
    assert found is not None
    assert found[0] == ROUNDS
    return dict(leaves(found[1])), lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="module")
def flags(place: Path) -> list[str]:
    return [
        f"--set={key}={value}"
        for key, value in {**SETTINGS, "data.source": digits_file(place)}.items()
    ]


@pytest.fixture(scope="module")
def straight(place: Path, flags: list[str]) -> tuple[dict[str, Any], list[Any]]:
    assert ended(place, "run", "--out", str(place / "straight"), *flags) == 0
    return outcome(place / "straight")


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
    place: Path,
    flags: list[str],
    straight: tuple[dict[str, Any], list[Any]],
    where: str,
    count: int,
) -> None:
    out = place / f"{where}-{count}"
    assert (
        ended(place, "run", "--out", str(out), *flags, where=where, count=count) == -signal.SIGKILL
    )
    assert ended(place, "resume", str(out)) == 0, (place / "said").read_text()
    tensors, lines = outcome(out)
    assert lines == straight[1]
    assert same(tensors, straight[0])
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == [f"round-{t:06d}.safetensors" for t in (ROUNDS - 1, ROUNDS)], "no torn file"
