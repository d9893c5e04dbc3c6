from __future__ import annotations

import sys
from pathlib import Path

import pytest

from barter.cli.app import main
from barter.core.record import Round
from barter.runs.folder import read_records

SMALL = (
    "--algorithm",
    "local",
    "--set",
    "algorithm.max_epochs=1",
    "--set",
    "clients=2",
    "--set",
    "models=small-mlp",
)


def record(t: int, accuracy: float) -> Round:
    clients = {k: {"global": accuracy + k / 4, "bytes_up": 3.0, "bytes_down": 1.0} for k in (0, 1)}
    return Round(
        t,
        clients,
        {"global": 0.5},
        {"round": 1.5},
        {"learn": {"up": 6, "down": 2}},
        ["client 1 failed"],
    )


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        name: [(event.step, event.value) for event in log.Scalars(name)]
        for name in log.Tags()["scalars"]
    }


def test_a_round_is_a_dict_of_numbers() -> None:
    assert record(1, 0.25).scalars() == {
        "bytes_down/mean": 1,
        "bytes_down/client-0": 1,
        "bytes_down/client-1": 1,
        "bytes_up/mean": 3,
        "bytes_up/client-0": 3,
        "bytes_up/client-1": 3,
        "global/mean": 0.375,
        "global/client-0": 0.25,
        "global/client-1": 0.5,
        "global/server": 0.5,
        "bytes/up": 6,
        "bytes/down": 2,
        "seconds/round": 1.5,
        "failures": 1,
    }


def test_what_a_resumed_run_takes_back_is_not_in_its_log(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("barter.runs.tensorboard")

    def recorded(*rounds: Round) -> None:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{r.to_json()}\n" for r in rounds))

    first, second, lost = record(1, 0.0), record(2, 0.25), record(2, 0.75)
    log = tensorboard.TensorBoard(tmp_path)
    for rounds in ([first], [first, lost]):
        recorded(*rounds)
        log(rounds[-1])
    recorded(first, second)
    tensorboard.TensorBoard(tmp_path)(second)
    assert curves(tmp_path)["global/client-0"] == [(1, 0.0), (2, 0.25)]


def test_a_log_that_was_begun_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["run", *SMALL, "--set", "rounds=1", "--out", str(run), "--tensorboard"]) == 0
    assert main(["resume", str(run), "--rounds", "2"]) == 0
    means = [(r.round, pytest.approx(r.mean("global"), abs=1e-6)) for r in read_records(run)]
    assert len(means) == 2
    assert curves(run)["global/mean"] == means


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [
        name
        for name in sys.modules
        if name.startswith(("barter.runs.tensorboard", "torch.utils.tensor"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["run", *SMALL, "--out", str(tmp_path / "run"), "--tensorboard"]) == 2
    assert (
        capsys.readouterr().err
        == "barter: TensorBoard is not installed here: pip install '.[tensorboard]' in a checkout of barter\n"
    )
    assert not (tmp_path / "run").exists()
