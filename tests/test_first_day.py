"""What somebody meets who uses barter for the first time: names, messages, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import barter
from barter import ALGORITHMS, Algorithm, Client, Clients, Crossing, Experiment, Server
from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.data.task import Data
from barter.models.zoo import build_network
from barter.runs.folder import RunFolder
from barter.setup.config import resolve, with_settings
from barter.testing.conformance import few_digits
from tests.conftest import digits_file


def test_every_method_can_be_imported_from_the_package_and_given_by_name() -> None:
    classes = {kind.__name__: kind for kind in ALGORITHMS.values()}
    for name, kind in classes.items():
        assert getattr(barter, name) is kind
    assert classes.keys() <= set(dir(barter))
    assert set(barter.algorithms.__all__) == {"ALGORITHMS", *classes}, "type checkers read this"
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        _ = barter.FedNothing  # type: ignore[attr-defined]


def test_an_experiment_takes_a_method_by_name_and_by_class() -> None:
    small: dict[str, Any] = {"data": few_digits(), "models": "small-mlp", "clients": 2}
    assert Experiment("fedavg", **small).algorithm == barter.FedAvg()
    assert Experiment(barter.FedAvg, **small).algorithm == barter.FedAvg()
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedawg'.*'fedavg'"):
        Experiment("fedawg")


@pytest.mark.parametrize("command", ["run", "show config"])
def test_the_file_of_a_comparison_is_led_to_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "small.toml"
    file.write_text('[compare.variants]\nalone = ["algorithm.name=local"]\n')
    assert main([*command.split(), str(file)]) == 2
    assert "give this file to `barter compare`" in capsys.readouterr().err


def unknown(*settings: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(with_settings({}, settings))
    return str(refused.value)


def test_unknown_keys_are_answered_briefly_and_for_the_chosen_method() -> None:
    said = unknown("x=1")
    assert said.startswith("unknown key 'x': there are answer_mb, clients, ")
    assert "tables adversaries, algorithm, data, " in said
    assert "algorithm.lr" not in said
    assert len(said) < 400
    of_fedavg = unknown("algorithm.name=fedavg", "algorithm.qqq=1")
    assert "algorithm.fraction" in of_fedavg
    assert "algorithm.code_dim" not in of_fedavg, "that of another method"
    assert unknown("algorithm.name=fedavg", "algorithm.fracton=1").endswith(
        "did you mean 'algorithm.fraction'?"
    )


def test_a_run_says_what_it_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(10):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / kind).mkdir(parents=True, exist_ok=True)
            picture = Image.new("L", (20 + i, 10), color=25 * i)
            picture.save(tmp_path / "pets" / kind / f"{i}.png")
    source = f"folder:{tmp_path / 'pets'}"
    options = ["models=small-mlp", "clients=2", "rounds=1", "algorithm.max_epochs=1"]
    settings = [
        part for option in [f"data.source={source}", *options] for part in ("--set", option)
    ]
    run = ["run", "--algorithm", "local", *settings, "--set", "partition.name=iid"]
    assert main([*run, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert (
        f"{source}: 16 training and 4 test images, held out of them, 2 classes, 64x64 colour\n"
        in said
    )
    assert "Local on folder:" in said
    assert ": 2 clients, 1 architecture, 1 round, cpu" in said
    assert "images of 20x10 to 29x10 pixels were resized to 64x64; set data.size" in caplog.text
    task = Experiment("local", clients=2, data=Data(size=16)).task
    assert task.summary("digits") == (
        "digits: 1,433 training and 364 test images, 10 classes, 8x8, resized to 16x16 grey"
    )


@dataclass(frozen=True, kw_only=True)
class Broken(Algorithm[Any, Any]):
    """Fails before anything is exchanged, or after."""

    crosses = {"count": Crossing(up="how many images the client has")}
    late: bool = False  # whether clients answer first

    def round(self, server: Server, clients: Clients, t: int) -> None:
        if self.late:
            clients.run(self.count)
        raise ValueError("no such luck")

    def count(self, client: Client) -> int:
        return len(client.data)


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    options = [f"data.source={digits_file(tmp_path)}", "models=small-mlp", "clients=2", "rounds=1"]
    return [part for option in options for part in ("--set", option)]


def test_a_run_that_fails_before_it_begins_leaves_no_folder(
    tmp_path: Path, few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "--algorithm", "tests.test_first_day:Broken", *few]
    out = tmp_path / "run"
    for _ in range(2):
        assert main([*run, "--out", str(out)]) == 1
        said = capsys.readouterr().err
        assert "the server stopped in round 1: ValueError: no such luck" in said
        assert "barter resume" not in said
        assert not out.exists(), "the same command can be given again"
    out.mkdir()
    assert main([*run, "--out", str(out)]) == 1
    assert list(out.iterdir()) == [], "a folder of somebody else's stays"
    assert main([*run, "--set", "algorithm.late=true", "--out", str(out)]) == 1
    assert (out / "privacy.json").is_file(), "something has left the clients"
    assert "barter resume" in capsys.readouterr().err


def test_what_somebody_put_into_the_folder_of_a_failed_run_stays(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    (tmp_path / "run" / "thesis.txt").write_text("dear")
    folder.discard()
    assert (tmp_path / "run" / "thesis.txt").read_text() == "dear"
    assert folder.config.exists()
    resumed = RunFolder.existing(tmp_path / "run")
    (tmp_path / "run" / "thesis.txt").unlink()
    resumed.discard()
    assert folder.config.exists(), "it was begun earlier"


@pytest.mark.parametrize("place", ["barter.experiment.assemble", "barter.cli.running.resolve"])
def test_an_interrupt_before_the_first_round_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    few: list[str],
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(place, interrupted)
    try:
        assert main(["run", *few, "--out", str(tmp_path / "run")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.startswith("barter: interrupted")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_that_breaks_a_module_while_it_loads_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading(*_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise RecursionError("half of a module") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("barter.cli.running.resolve", loading)
    try:
        assert main(["run"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "barter: interrupted\n"


def test_show_partition_takes_a_configuration(
    tmp_path: Path, few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "small.toml", ["--out", str(tmp_path / "split.png")]
    file.write_text('[partition]\nname = "iid"\n[compare.variants]\na = ["algorithm.name=local"]\n')
    assert main(["show", "partition", str(file), *few, *picture]) == 0
    assert "partition.min_samples" in capsys.readouterr().out
    assert (tmp_path / "split.png").is_file()
    assert main(["show", "partition", str(file), "--config", str(file)]) == 2
    assert "give one configuration" in capsys.readouterr().err
    assert main(["show", "partition", "missing.toml"]) == 2
    assert "missing.toml: there is no such file" in capsys.readouterr().err


NETWORKS = """
from torch import nn

def make(spec, hidden=8, name="relu"):
    side = spec.channels * spec.height * spec.width
    last = nn.Linear(hidden, spec.classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(side, hidden), getattr(nn, name)(), last)

ready = nn.Linear(1, 1)
"""


def test_one_function_makes_several_networks_from_beside_the_configuration(
    tmp_path: Path, few: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "networks_beside.py").write_text(NETWORKS)
    models = "networks_beside:make:hidden=12:name=Tanh,networks_beside:make:name=ReLU"
    (tmp_path / "beside" / "run.toml").write_text(f'models = "{models}"\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = ["run", str(tmp_path / "beside" / "run.toml"), *few, "--set", f"models={models}"]
    out = tmp_path / "run"
    options = ["--algorithm", "local", "--set", "algorithm.max_epochs=1"]
    assert main([*run, *options, "--out", str(out)]) == 0
    widths = [barter.load(out, client=k).network.feature_dim for k in (0, 1)]
    assert widths == [12, 8]


def test_factories_say_what_is_wrong_with_their_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "networks_wrong.py").write_text(NETWORKS)
    spec = Spec(1, 8, 8, 10, (0.5,), (0.5,))
    for name, message in (
        ("networks_wrong:make:depth=2", "unexpected keyword argument 'depth'"),
        ("networks_wrong:ready:depth=2", "is a Linear, which takes no arguments"),
        (
            "networks_nowhere:make",
            "the current folder, next to the configuration and on PYTHONPATH",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            build_network(name, spec)


def test_a_run_of_small_networks_loads_neither_torchvision_nor_all_of_scipy() -> None:
    """They take longer to load than everything else, and describing a run needs them no more."""
    code = (
        "import sys; from barter.cli import describing, running; "
        "from barter.data.sources import load_dataset; load_dataset('digits'); "
        "slow = ('torchvision', 'sklearn', 'scipy.optimize', 'scipy.stats', 'torch._dynamo'); "
        "print([m for m in slow if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "[]\n"
