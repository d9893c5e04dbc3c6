"""The device that a run asks for, on machines with none, one and several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from barter import Experiment, Local
from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.setup.config import resolve, to_toml
from barter.setup.hardware import resolve_device, resolve_precision


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


def test_a_configuration_holds_a_numbered_device() -> None:
    config = resolve({"device": "cuda:1"})
    assert config.device == "cuda:1"
    assert 'device = "cuda:1"' in to_toml(config)


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:01", "cuda:1x", "cpu:0", "gpu", 1])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match=r"must be one of auto, cpu, cuda, cuda:N \(where the"):
        resolve({"device": name})


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


def test_a_simulation_takes_no_single_device(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from barter.flower import loopback

    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES$"):
        loopback.simulate(resolve({"device": "cuda:1"}), tmp_path, None, resume=False)
