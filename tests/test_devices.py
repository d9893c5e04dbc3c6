"""The device that a run asks for, on machines with none, one and several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from barter import Experiment, Local
from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.data.partition import Dirichlet
from barter.data.task import Data, make_task, place_clients
from barter.engines import local
from barter.setup.config import resolve, to_toml
from barter.setup.hardware import resolve_device, resolve_devices, resolve_precision
from barter.setup.participants import make_client
from tests.conftest import perceptrons, same, state, tiny


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "device"),
    {
        "auto": "cuda:0",
        "cuda": "cuda:0",
        "cuda:0": "cuda:0",
        "cuda:1": "cuda:1",
        "cpu": "cpu",
    }.items(),
)
def test_a_name_leads_to_its_device(name: str, device: str) -> None:
    assert str(resolve_device(name)) == device


@pytest.mark.usefixtures("two_gpus")
def test_a_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^device='cuda:2': this machine has 2 CUDA devices"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^device='cuda:1': this machine has 1 CUDA device, "):
        resolve_device("cuda:1")


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_without_a_gpu_experiments_and_commands_say_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    why = f"device='{name}': this machine has no CUDA device; use auto or cpu"
    with pytest.raises(ConfigError, match=f"^{why}$"):
        Experiment(Local(), device=name)
    for asked in (["--device", name], ["--set", f"device={name}"]):
        assert main(["run", "--out", str(tmp_path / "run"), *asked]) == 2
        assert capsys.readouterr().err == f"barter: {why}\n"


@pytest.mark.parametrize(
    ("given", "stored"),
    [("cuda:1", "cuda:1"), (["cuda:0", "cuda:1"], "cuda:0,cuda:1"), ("cpu,cpu", "cpu,cpu")],
)
def test_a_configuration_holds_one_device_or_several(given: object, stored: str) -> None:
    config = resolve({"device": given})
    assert config.device == stored
    assert f'device = "{stored}"' in to_toml(config)


@pytest.mark.parametrize(
    "name",
    [
        *("cuda:", "cuda:-1", "cuda:01", "cuda:1x", "cpu:0", "gpu", 1),
        *("cpu,cuda:0", ["cuda:0", "cpu"], "auto,auto", "cuda:0,", []),
    ],
)
def test_other_names_and_mixtures_are_refused(name: object) -> None:
    why = r"must be one of auto, cpu, cuda, cuda:N, or several of one kind such as cuda:0,cuda:1 \("
    with pytest.raises(ConfigError, match=why):
        resolve({"device": name})


@pytest.mark.usefixtures("two_gpus")
def test_every_listed_device_must_exist() -> None:
    devices = resolve_devices("cuda:1,cuda:0,cuda:1")
    assert list(map(str, devices)) == ["cuda:1", "cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"^device='cuda:2': this machine has 2 CUDA devices"):
        resolve_devices("cuda:0,cuda:2")


def test_flower_sites_take_no_list() -> None:
    with pytest.raises(ConfigError, match=r"^device='cuda:0,cuda:1': on Flower every site"):
        resolve({"device": "cuda:0,cuda:1", "engine": "flower"})


def test_a_device_listed_twice_changes_nothing() -> None:
    one = perceptrons(tiny("fedavg"), device="cpu")
    two = perceptrons(tiny("fedavg"), device=["cpu", "cpu"])
    assert two.devices == [torch.device("cpu")] * 2
    for experiment in (one, two):
        list(experiment.rounds(2))
    assert same(state(one), state(two))


def test_clients_and_their_images_are_spread_over_devices() -> None:
    """The meta device stands for a second one: its tensors have no values, only a place."""
    cpu, second = torch.device("cpu"), torch.device("meta")
    for shared in (False, True):
        task = make_task(Data(validation=0.1), Dirichlet(), 3, 0, cpu, shared=shared)
        placed = place_clients(task, [cpu, second, cpu])
        for parts in (placed.train, placed.local_tests, placed.validation):
            assert [images.device for images in parts] == [cpu, second, cpu]
        network = perceptrons(Local()).engine.clients[1].model
        client = make_client(resolve({}), 1, network, "small-mlp", placed, second)
        assert {images.device for images in client.tests.values()} == {second}
        assert placed.global_test.device == cpu
        if shared:
            assert placed.local_tests[1].pixels.device == second
    assert task.global_test.to(second) is task.global_test.to(second)


def test_answers_go_to_the_server_and_clients_have_lanes_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = perceptrons(Local(), clients=5).engine
    assert isinstance(engine, local.LocalEngine)
    cpu, second = torch.device("cpu"), torch.device("meta")
    engine.devices = (second, cpu)
    answer = {"w": torch.ones(2), "n": 3}
    moved = engine._move_answer(answer, "fit", cpu)
    assert moved["w"].device == second
    assert moved["n"] == 3
    assert engine._move_answer(answer, "fit", second) is answer
    assert engine._move_answer(answer, "fit", torch.device("cuda", 1))["w"].device == cpu, (
        "what a client left on the host stays there"
    )
    made: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(local, "Lane", lambda device, room, **_: made.append((device, room)))
    engine.loads = dict.fromkeys(range(5), 10)
    assert len(engine._make_lanes(0, 2, 1600, None)) == 2
    assert len(engine._make_lanes(1, 9, 1600, None)) == 2
    assert made == [(second, 100), (second, 100), (cpu, 100), (cpu, 100)]


def test_precision_is_that_of_the_chosen_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    class Chosen:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: entered == [second]
    )
    assert resolve_precision("auto", second) == "bf16"
    assert resolve_precision("auto", torch.device("cuda", 0)) == "fp32"
    assert resolve_precision("auto", second, torch.device("cuda", 0)) == "fp32"


def test_a_simulation_takes_no_single_device(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from barter.flower import loopback

    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES$"):
        loopback.simulate(resolve({"device": "cuda:1"}), tmp_path, None, resume=False)
