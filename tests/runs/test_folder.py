from __future__ import annotations

import os
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from barter.core.errors import CheckpointError
from barter.core.payload import isolate
from barter.core.record import Round
from barter.runs import checkpoint
from barter.runs import folder as folders
from barter.runs.folder import (
    RunFolder,
    checkpoint_of,
    checkpoint_rounds,
    count_rounds,
    last_checkpoint,
)
from tests.forked import forked, status, until


def record(t: int) -> Round:
    return Round(
        t,
        {0: {"global": 0.5}, 3: {"global": 0.1}},
        {"loss": 1.5},
        {"round": 0.1},
        {"m": {"up": 3, "down": 4}},
        [],
    )


def test_records_survive_json() -> None:
    assert Round.from_json(record(2).to_json()) == record(2)
    assert record(2).mean("global") == pytest.approx(0.3)
    assert (record(2).traffic("up"), record(2).traffic("down")) == (3, 4)
    with pytest.raises(KeyError, match="no client reports 'accuracy'; there are: global"):
        record(1).mean("accuracy")


def test_checkpoints_come_back_whole_and_only_the_last_stays(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    shared = torch.arange(1000.0)
    for t in (1, 2, 3):
        tree = {
            "a": isolate(shared),
            "b": [isolate(shared), {7: (t, None, "x", 0.1)}],
            "e": torch.zeros(0, 3),
        }
        folder.append(record(t))
        folder.save(t, tree, {})
    (file,) = folder.checkpoints.iterdir()
    assert file.name == "round-000003.safetensors"
    assert file.stat().st_size < 2 * 4000, "what parties share is written once"
    found = last_checkpoint(folder.path)
    assert found is not None
    assert found[0] == 3
    assert torch.equal(found[1]["a"], shared)
    assert torch.equal(found[1]["b"][0], shared)
    assert found[1]["b"][1] == {7: (3, None, "x", 0.1)}
    assert found[1]["e"].shape == (0, 3)


def test_earlier_checkpoints_stay_as_asked_and_the_disk_holds_no_more_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    written, during = folders.write_checkpoint, list[list[int]]()

    def watched(*args: Any) -> None:
        during.append(checkpoint_rounds(folder.path))
        written(*args)

    monkeypatch.setattr(folders, "write_checkpoint", watched)
    for t in range(1, 6):
        folder.append(record(t))
        folder.save(t, {"x": torch.ones(1)}, {}, keep={1, t - 1})
    assert during == [[], [1], [1, 2], [1, 3], [1, 4]], "what can go goes before"
    assert checkpoint_rounds(folder.path) == [1, 4, 5]
    assert [checkpoint_of(folder.path, which)[0] for which in (1, 4, "last")] == [1, 4, 5]
    folder.go_on_after(4)
    assert checkpoint_rounds(folder.path) == [1, 4]
    assert [r.round for r in folder.records()] == [1, 2, 3, 4]


def test_lines_behind_the_checkpoint_and_torn_lines_go(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    folder.append(record(1))
    folder.save(1, {"x": torch.ones(1)}, {"seed": "1"})
    folder.append(record(2))
    with folder.metrics.open("a") as file:
        file.write('{"round": 3, "cli')
    assert [r.round for r in folder.records()] == [1, 2]
    found = last_checkpoint(folder.path)
    assert found is not None
    assert [r.round for r in folder.records()] == [1, 2], "looking changes nothing"
    assert found[2]["seed"] == "1"
    folder.go_on_after(found[0])
    assert [r.round for r in folder.records()] == [1]


@pytest.mark.parametrize("kind", ["torn", "gone"])
def test_records_that_are_damaged_or_gone_are_said_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    for t in (1, 2, 3):
        folder.append(record(t))
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([lines[0], "{]\n", lines[2]]))
    if kind == "gone":
        folder.metrics.unlink()
    folder.go_on_after(3)
    (said,) = caplog.messages
    assert ("no complete record of round 2:" if kind == "torn" else "of rounds 1 to 3:") in said
    assert [r.round for r in folder.records()] == ([1, 3] if kind == "torn" else [])
    aside = folder.metrics.with_suffix(".damaged")
    assert aside.exists() == (kind == "torn") == (str(aside) in said)
    if kind == "torn":
        assert "{]" in aside.read_text()


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    folder.save(
        1,
        {"x": torch.arange(100.0), "n": 3, "b": torch.tensor(True), "e": torch.zeros(0)},
        {"seed": "1"},
    )
    (file,) = folder.checkpoints.iterdir()
    whole = file.read_bytes()
    for place in range(8, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            last_checkpoint(folder.path)
    file.write_bytes(whole)
    assert last_checkpoint(folder.path) is not None


def test_no_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    folder.append(record(1))
    (folder.checkpoints / ".round-000001.safetensors.tmp").write_bytes(b"torn")
    assert last_checkpoint(folder.path) is None
    folder.go_on_after(0)
    assert folder.records() == []


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="not empty"):
            RunFolder.create(path, "")
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", "")


def test_a_run_killed_before_it_began_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".config.toml.tmp").write_text("see")
    folder = RunFolder.create(tmp_path / "run", "seed = 1\n")
    assert folder.config.read_text() == "seed = 1\n"


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    with pytest.raises(CheckpointError, match="in use by another process"):
        RunFolder.existing(tmp_path / "run")
    folder.release()
    RunFolder.existing(tmp_path / "run")


def test_damage_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    (folder.checkpoints / "round-000001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"round-000001\.safetensors is damaged"):
        last_checkpoint(folder.path)
    with pytest.raises(CheckpointError, match=r"no config\.toml"):
        RunFolder.existing(tmp_path)


def test_a_forked_process_does_not_hold_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    child = forked(lambda: time.sleep(60) or 0, tmp_path / "said")  # type: ignore[func-returns-value]
    until((tmp_path / "said").exists)
    try:
        with pytest.raises(CheckpointError, match="in use"):
            RunFolder.existing(tmp_path / "run")
        folder.release()
        RunFolder.existing(tmp_path / "run").release()
    finally:
        os.kill(child, signal.SIGKILL)
        status(child)


STATE: dict[str, Any] = {"server": {}, "clients": {}}


@pytest.mark.parametrize("said", ["1000000000", "-5", "../../x", "", "1e3", "9", "2" * 9])
def test_a_checkpoint_that_claims_another_round_is_damaged(tmp_path: Path, said: str) -> None:
    """Whatever follows from a round's number, such as a list of all rounds before, is not made of a false one."""
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    checkpoint.write_checkpoint(
        folder.checkpoints / "round-000002.safetensors", STATE, {"round": said}
    )
    with pytest.raises(CheckpointError, match=r"round-000002\.safetensors is damaged"):
        last_checkpoint(folder.path)


def test_rounds_without_records_are_counted_without_a_list_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    folder.append(record(1))
    tracemalloc.start()
    folder.go_on_after(999_999)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "rounds 2 to 999999" in caplog.text
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {**STATE, "server": None},
        {**STATE, "clients": {0: "x"}},
        {**STATE, "crossed": {0: 1}},
        {**STATE, "networks": {"architectures": []}},
    ],
)
def test_a_checkpoint_of_something_else_is_damaged(tmp_path: Path, state: Any) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    folder.save(1, state, {})
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
        last_checkpoint(folder.path)


def test_a_round_that_is_recorded_twice_counts_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1")
    for t in (1, 2, 2, 1):
        folder.append(record(t))
    with folder.metrics.open("a") as file:
        file.write("\n{]\n" + record(-3).to_json() + "\n")
        file.write(record(3).to_json()[:-9])  # cut short
    assert [r.round for r in folder.records()] == [1, 2]
    assert count_rounds(folder.path) == 2


def test_a_folder_that_could_not_be_prepared_is_free_at_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room") as caught:
        RunFolder.create(tmp_path / "run", "", fail)
    assert caught.value.__traceback__ is not None, "which holds what was created"
    RunFolder.create(tmp_path / "run", "").release()
