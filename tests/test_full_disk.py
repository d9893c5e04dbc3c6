"""A disk without room, and a folder whose files are damaged: one line each, and what there was before goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from barter.cli import inspecting
from barter.cli.app import main
from barter.core.payload import leaves
from barter.runs import checkpoint
from barter.runs.folder import last_checkpoint
from tests.conftest import digits_file, same
from tests.test_bad_input import said

ROUNDS = 2


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    source = digits_file(tmp_path_factory.mktemp("data"))
    chosen = {
        "clients": 2,
        "rounds": ROUNDS,
        "models": "small-mlp",
        "data.source": source,
        "algorithm.epochs": 1,
    }
    return ["--algorithm", "fedavg", *(f"--set={key}={value}" for key, value in chosen.items())]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    out = tmp_path_factory.mktemp("calm") / "run"
    assert main(["run", "--out", str(out), *flags]) == 0
    return out


def outcome(run: Path) -> tuple[dict[str, Any], list[Any]]:
    found = last_checkpoint(run)
    assert found is not None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return dict(leaves(found[1])), [{**line, "seconds": None} for line in lines]


def require_same(run: Path, calm: Path) -> None:
    (one, lines), (other, expected) = outcome(run), outcome(calm)
    assert lines == expected
    assert same(one, other)
    assert not [path for path in run.rglob("*") if path.suffix == ".tmp"]


class FullDisk:
    """From the n-th time on that something is written under a folder, there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left, self.monkeypatch, self.thread = after, monkeypatch, threading.get_ident()
        for owner, name in ((Path, "write_text"), (os, "fsync"), (checkpoint, "save_file")):
            monkeypatch.setattr(owner, name, self._until_full(getattr(owner, name)))

    def _until_full(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def full(*args: Any) -> Any:
            if threading.get_ident() != self.thread:  # what another test left behind
                return write(*args)
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        return full


BEGIN, ROUND = 3, 7  # writes before the first round, and in each


@pytest.mark.parametrize("after", range(BEGIN))
def test_a_run_that_finds_no_room_to_begin_can_begin_again(
    after: int, flags: list[str], calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, after)
        assert f"{run / 'config.toml'} cannot be written: No space left on device" in said(
            capsys, ["run", "--out", str(run), *flags]
        )
    if (
        after == BEGIN - 1
    ):  # the configuration is there, and whether the folder knows that on disk is all that failed
        assert main(["resume", str(run)]) == 0
    else:
        assert main(["run", "--out", str(run), *flags]) == 0
    require_same(run, calm)


@pytest.mark.parametrize("after", range(ROUND))
def test_a_run_that_fills_the_disk_goes_on_when_there_is_room(
    after: int, flags: list[str], calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, BEGIN + ROUND + after)
        line = said(capsys, ["run", "--out", str(run), *flags])
    assert "cannot be written: No space left on device" in line
    assert line.endswith(f"; when that is fixed, `barter resume {run}` continues")
    found = last_checkpoint(run)
    assert found is not None, "that of the round before, or the new one"
    assert main(["resume", str(run)]) == 0
    require_same(run, calm)


def test_resuming_on_a_full_disk_loses_nothing(
    calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(calm, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("\x00damaged\n" + lines[1])
    before = (run / "metrics.jsonl").read_bytes()
    with no_room():
        assert "cannot be written: File too large" in said(capsys, ["resume", str(run)])
    assert (run / "metrics.jsonl").read_bytes() == before
    assert main(["resume", str(run)]) == 0
    assert (run / "metrics.jsonl").read_text() == lines[1], "what was whole"
    assert (run / "metrics.damaged").read_bytes() == before


@contextmanager
def no_room(size: int = 0) -> Iterator[None]:
    """No file can be longer, whoever writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_is_too_large(
    flags: list[str], calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its library has an error of its own for a disk that refuses."""
    run = tmp_path / "run"
    with no_room(8192):
        line = said(capsys, ["run", "--out", str(run), *flags])
    assert f"{run / 'checkpoints' / 'round-000001.safetensors'} cannot be written" in line
    assert "File too large" in line
    assert not list((run / "checkpoints").iterdir()), "half of it only takes the room"
    assert main(["resume", str(run)]) == 0
    require_same(run, calm)


NO_ROOM: dict[str, tuple[list[str], str]] = {
    "report": (["report", "{run}", "--to", "{new}/r.html"], "r.html cannot be written"),
    "safetensors": (
        ["export", "{run}", "--to", "{new}/n.safetensors"],
        "n.safetensors cannot be written",
    ),
    "pt2": (["export", "{run}", "--to", "{new}/n.pt2"], "n.pt2 cannot be written"),
    "picture": (["show", "partition", "--out", "{new}/p.png"], "p.png cannot be written"),
    "split": (["show", "partition", "--save", "{new}/s"], "s cannot be written"),
    "comparison": (
        ["compare", "--algorithms", "local", "--out", "{new}/c"],
        "comparison.toml cannot be written",
    ),
    "looked at": (["compare", "{comparison}"], "table.md cannot be written"),
    "deployment": (
        [
            "flower",
            "init",
            "{new}/d",
            "--sites",
            "a",
            "--address",
            "h:1",
            "--set",
            "data.source=digits",
        ],
        "d cannot be written",
    ),
}


@pytest.mark.parametrize("case", NO_ROOM)
def test_without_room(
    case: str,
    calm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case == "deployment":
        pytest.importorskip("flwr")
    arguments, message = NO_ROOM[case]
    if case == "split":  # whose picture comes first
        monkeypatch.setattr(inspecting, "draw_bubbles", lambda *_: None)
    new, comparison = tmp_path / "new", tmp_path / "comparison"
    new.mkdir()
    (comparison / "fedavg").mkdir(parents=True)
    (comparison / "fedavg" / "seed-0").symlink_to(calm)
    (comparison / "comparison.toml").write_text(
        f"rounds = {ROUNDS}\nseeds = [0]\n[variants]\nfedavg = 'fedavg'\n"
    )
    places = {"run": calm, "new": new, "comparison": comparison}
    with no_room():
        line = said(capsys, [argument.format(**places) for argument in arguments])
    assert message in line
    assert not [path for path in new.rglob("*") if path.is_file() and path.stat().st_size], (
        "nothing of it is left"
    )
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".new")]


def of_another(path: Path) -> None:
    save_file({"w": torch.zeros(2)}, path)


def longer_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


LAST = f"checkpoints/round-{ROUNDS:06d}.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], list[str], str]] = {
    "checkpoint is empty": (LAST, lambda path: path.write_bytes(b""), ["resume"], "is damaged"),
    "checkpoint is torn": (
        LAST,
        lambda path: os.truncate(path, 999),
        ["resume"],
        "is damaged.*; `barter resume .* --round 1` goes back",
    ),
    "checkpoint has another header": (LAST, longer_header, ["resume"], "is damaged"),
    "checkpoint has a flipped bit": (
        LAST,
        flipped,
        ["resume"],
        "its contents are not what was written",
    ),
    "checkpoint is another file": (LAST, of_another, ["resume"], "is damaged"),
    "checkpoint is a folder": (LAST, folder, ["resume"], "is damaged"),
    "checkpoint for export": (LAST, flipped, ["export", "--to", "/tmp/n.onnx"], "is damaged"),
    "configuration is no text": (
        "config.toml",
        lambda p: p.write_bytes(b"\xff"),
        ["resume"],
        "is not TOML: 'utf-8'",
    ),
    "configuration is a folder": ("config.toml", folder, ["resume"], "cannot be read"),
    "configuration is deep": (
        "config.toml",
        lambda p: p.write_text(f"a = {'[' * 9999}"),
        ["resume"],
        "is not TOML",
    ),
    "metrics are a folder": ("metrics.jsonl", folder, ["resume"], "metrics.jsonl: Is a directory"),
    "metrics are no text": (
        "metrics.jsonl",
        lambda p: p.write_bytes(b"\xff\n[]\n"),
        ["report"],
        "no finished round",
    ),
    "privacy is no text": (
        "privacy.json",
        lambda p: p.write_bytes(b"\xff"),
        ["privacy"],
        "privacy.json is damaged",
    ),
    "privacy is another": (
        "privacy.json",
        lambda p: p.write_text("[1]"),
        ["privacy"],
        "privacy.json is damaged",
    ),
    "report over a folder": (
        "report.html",
        Path.mkdir,
        ["report"],
        "report.html cannot be written",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run(
    case: str, calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, damage, (command, *rest), message = DAMAGE[case]
    run = tmp_path / "run"
    shutil.copytree(calm, run)
    damage(run / where)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    line = said(capsys, [command, str(run), *rest])
    assert re.search(message, line), line
    assert str(run) in line
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, (
        "nothing is changed"
    )


def test_a_site_whose_file_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    (tmp_path / "site.toml").write_bytes(b'name = "caf\xe9"')
    assert f"{tmp_path / 'site.toml'} is not TOML: 'utf-8'" in said(
        capsys, ["site", str(tmp_path / "site.toml")]
    )
