"""What a run has trained is of use after it: loaded, judged on other data, exported, and started from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import barter
from barter.cli.app import main
from barter.core.errors import CheckpointError, ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.data.task import Data
from barter.experiment import Experiment
from barter.models.zoo import build_network
from barter.setup.config import read_toml, resolve
from barter.trained.export import export_model
from barter.trained.model import TrainedModel
from tests.conftest import federation, same, state, tiny


def stripes(
    path: Path, classes: int = 3, n: int = 60, only: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Images whose class is the row that is bright."""
    rng = np.random.default_rng(len(path.name))
    data: dict[str, Any] = {}
    for part in ("train", "test"):
        y = np.asarray(only or range(classes))[np.arange(n) % len(only or range(classes))]
        x = rng.integers(0, 60, (n, 8, 8, 1), dtype=np.uint8)
        x[np.arange(n), y * 2] += 180
        data |= {f"x_{part}": x, f"y_{part}": y}
    np.savez(path, **data)
    return data


pytestmark = pytest.mark.usefixtures("few_images")


def finished(out: Path, algorithm: str = "local", rounds: int = 1, **options: Any) -> Experiment:
    experiment = federation(tiny(algorithm), out=out, rounds=rounds, **options)
    list(experiment.rounds(rounds))
    assert experiment.folder is not None
    experiment.folder.release()
    return experiment


def test_a_network_is_loaded_without_the_data(tmp_path: Path) -> None:
    x = torch.from_numpy(stripes(tmp_path / "a.npz")["x_test"]).permute(0, 3, 1, 2)
    experiment = finished(tmp_path / "run", data=f"npz:{tmp_path / 'a.npz'}", partition="iid")
    (tmp_path / "a.npz").unlink()
    kept = barter.load(tmp_path / "run", client=2)
    trained = experiment.engine.clients[2].model.eval()  # type: ignore[attr-defined]
    assert not kept.network.training
    assert (kept.architecture, kept.owner, kept.round) == ("small-cnn", "client 2", 1)
    assert kept.spec == experiment.task.spec
    assert kept.classes == ("0", "1", "2")
    with torch.no_grad():
        expected = trained(experiment.task.global_test.batch(torch.arange(60)))
        assert torch.equal(kept.network(kept.prepare(x)), expected)
    assert torch.equal(kept(x), expected)
    assert kept(x.repeat_interleave(3, 2).repeat_interleave(3, 3)).shape == (60, 3), (
        "images of any size"
    )


def test_a_servers_model_and_one_that_is_not_there(tmp_path: Path) -> None:
    experiment = finished(tmp_path / "run", "fedavg")
    kept = barter.load(tmp_path / "run")
    assert same(dict(kept.network.state_dict()), dict(experiment.server.model.state_dict()))
    assert not same(
        dict(kept.network.state_dict()), dict(barter.load(tmp_path / "run", 1).network.state_dict())
    )
    with pytest.raises(ConfigError, match=r"client 3: .*run has clients 0 to 2"):
        barter.load(tmp_path / "run", client=3)
    finished(tmp_path / "alone")
    with pytest.raises(ConfigError, match="Local's server has no model of its own: name a client"):
        barter.load(tmp_path / "alone")
    federation(tiny("local"), out=tmp_path / "begun")
    with pytest.raises(CheckpointError, match="no checkpoint of a finished round"):
        barter.load(tmp_path / "begun", client=0)
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        barter.load(tmp_path, client=0)


def test_narrower_networks_and_those_from_python(tmp_path: Path) -> None:
    experiment = finished(tmp_path / "narrow", "heterofl", models="small-cnn")
    for k in range(3):
        kept = barter.load(tmp_path / "narrow", client=k)
        assert kept.architecture == experiment.architectures[k]
        assert same(dict(kept.network.state_dict()), experiment.engine.memory()[k]["model"])
    assert len(set(experiment.architectures)) > 1
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    experiment = finished(tmp_path / "mine", models=[module])
    with pytest.raises(ConfigError, match="Sequential-0 was given in Python"):
        barter.load(tmp_path / "mine", client=1)
    kept = barter.load(tmp_path / "mine", client=1, network=module)
    assert same(dict(kept.network.state_dict()), experiment.engine.memory()[1]["model"])


SPEC = Spec(3, 32, 32, 4, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def some_network(name: str = "resnet4", network: Classifier | None = None) -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(
        (network or build_network(name, SPEC)).eval(),
        SPEC,
        ("a", "b", "c", "d"),
        name,
        "client 0",
        7,
    )


def means(facts: dict[str, str]) -> tuple[Any, ...]:
    return tuple(json.loads(facts[key]) for key in ("size", "mean", "std", "classes"))


EXPECTED = ([32, 32], [0.1, 0.2, 0.3], [0.5, 0.6, 0.7], ["a", "b", "c", "d"])
ONE_OF_EACH_KIND = [
    "resnet4",
    "vit-tiny",
    "shufflenet-v2-x1.5",
    "small-separable",
    "mobilenet-v3-small",
]


def test_exported_files_compute_the_same_and_say_how_images_are_prepared(tmp_path: Path) -> None:
    name = "resnet4"
    kept, x = some_network(name), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        expected = kept.network(x)
    for suffix in ("safetensors", "pt2", "onnx"):
        export_model(kept, tmp_path / f"model.{suffix}")

    again = build_network(name, SPEC).eval()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        facts = file.metadata()
        again.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert torch.equal(again(x), expected)
    assert (facts["architecture"], *means(facts)) == (name, *EXPECTED)

    extra = {"barter.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert torch.allclose(program.module()(x), expected, atol=1e-5)
    assert means(json.loads(extra["barter.json"])) == EXPECTED

    assert torch.allclose(run_onnx(tmp_path / "model.onnx", x), expected, atol=1e-4)
    assert means(onnx_facts(tmp_path / "model.onnx")) == EXPECTED
    with pytest.raises(ConfigError, match="exists"):
        export_model(kept, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors, \.onnx, \.pt2"):
        export_model(kept, tmp_path / "model.pth")
    assert len(list(tmp_path.iterdir())) == 3, "nothing else is left behind"


def run_onnx(path: Path, x: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def onnx_facts(path: Path) -> dict[str, str]:
    import onnx

    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_onnx_of_many_networks(name: str, tmp_path: Path) -> None:
    kept, x = some_network(name), torch.randn(3, 3, 32, 32)
    export_model(kept, tmp_path / "model.onnx")
    with torch.no_grad():
        assert torch.allclose(run_onnx(tmp_path / "model.onnx", x), kept.network(x), atol=1e-3)


class Undecided(Classifier):
    """What it does depends on what it sees, which no graph can express."""

    feature_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def features(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) if float(x.sum()) > 0 else x.amax((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        return self.head(features)


class Singular(Classifier):
    """What it computes can be traced, and ONNX has no word for it."""

    feature_dim = 32

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x[:, 0])

    def logits(self, features: Tensor) -> Tensor:
        return self.head(features)


def test_what_onnx_cannot_express_and_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = some_network("undecided", Undecided())
    for suffix, what in (("onnx", "ONNX"), ("pt2", "a PT2 program")):
        with pytest.raises(ConfigError, match=f"undecided cannot be written as {what}") as caught:
            export_model(kept, tmp_path / f"model.{suffix}")
        assert "\n" not in str(caught.value)
    why = r"\((No ONNX function found for .*svd|Constraints violated)"  # the latter with torch 2.7
    with pytest.raises(ConfigError, match=f"singular cannot be written as ONNX {why}") as caught:
        export_model(some_network("singular", Singular()), tmp_path / "model.onnx")
    assert "\x1b" not in str(caught.value), "torch's advice is coloured"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    with pytest.raises(ConfigError, match=r"pip install '\.\[onnx\]' in a checkout"):
        export_model(some_network(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_evaluation_on_its_own_data_is_what_the_run_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = finished(tmp_path / "run", "fedavg")
    assert experiment.folder is not None
    record = experiment.folder.records()[-1]
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits"]) == 0
    said = capsys.readouterr().out
    assert f"{len(experiment.task.global_test)} images of digits" in said
    expected = [record.clients[k]["global"] for k in range(3)] + [
        record.server["global"],
        record.mean("global"),
    ]
    rows = [
        line.split()
        for line in said.splitlines()
        if line.split()[:1] in (["client"], ["server"], ["mean"])
    ]
    assert [float(row[-1]) for row in rows] == [round(100 * value, 1) for value in expected]
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits", "--client", "1"]) == 0
    assert "mean" not in capsys.readouterr().out


def test_new_data_are_judged_whole_and_by_the_names_of_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    def folder(name: str, classes: dict[str, int], n: int = 10) -> str:
        rng = np.random.default_rng(n)
        for label, row in classes.items():
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(n):
                x = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8)
                x[row * 16 : row * 16 + 16] += 180
                Image.fromarray(x).save(tmp_path / name / label / f"{i}.png")
        return f"folder:{tmp_path / name}"

    data = Data(source=folder("old", {"a": 0, "b": 1, "c": 2}), size=16)
    algorithm = barter.Local(max_epochs=30, batch_size=10)
    list(
        Experiment(
            algorithm, data=data, partition="iid", clients=1, device="cpu", out=tmp_path / "run"
        ).rounds(1)
    )
    new = folder("new", {"b": 1, "c": 2})
    assert main(["evaluate", str(tmp_path / "run"), "--data", new, "--client", "0"]) == 0
    said = capsys.readouterr().out
    assert "on 20 images of folder:" in said
    assert float(said.split()[-1]) > 90, "b is the second class, also where there is no first"
    odd = folder("odd", {"b": 1, "x": 2})
    for source, reason in (
        (odd, "classes that the run does not know: x"),
        ("digits", "images of 1 channels for 3"),
    ):
        assert main(["evaluate", str(tmp_path / "run"), "--data", source]) == 2
        assert reason in capsys.readouterr().err


def test_a_run_starts_from_another_ones_networks(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", "fedavg")
    for algorithm in ("fedavg", "local"):
        second = federation(
            tiny(algorithm), models="small-mlp", start=tmp_path / "first", out=tmp_path / algorithm
        )
        for k, memory in first.engine.memory().items():
            assert same(second.engine.memory()[k]["model"], memory["model"])
        if algorithm == "fedavg":
            assert same(
                dict(second.server.model.state_dict()), dict(first.server.model.state_dict())
            )


def test_a_warm_start_is_resumed_like_any_run(tmp_path: Path) -> None:
    finished(tmp_path / "first", rounds=2)
    warm = {"start": tmp_path / "first"}
    straight = finished(tmp_path / "straight", rounds=2, **warm)
    killed = federation(tiny("local"), out=tmp_path / "killed", **warm)  # before its first round
    assert killed.folder is not None
    killed.folder.release()
    config = resolve(read_toml(tmp_path / "killed" / "config.toml"))
    resumed = Experiment.from_config(config, tmp_path / "killed", resume=True)
    list(resumed.rounds(1))
    assert resumed.folder is not None
    resumed.folder.release()
    (tmp_path / "first").rename(
        tmp_path / "gone"
    )  # from its first round on, a run needs nothing but itself
    again = Experiment.from_config(config, tmp_path / "killed", resume=True)
    list(again.rounds(2))
    assert same(state(again), state(straight))


def test_what_cannot_be_started_from_is_said_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path / "first", models="small-mlp")
    start = [
        "run",
        "--from",
        str(tmp_path / "first"),
        "--out",
        str(tmp_path / "second"),
        "--set",
        "clients=3",
    ]
    for more, reason in (
        (
            ["--algorithm", "local", "--set", "models=small-cnn"],
            "network of client 0 is small-mlp there and small-cnn",
        ),
        (["--algorithm", "fedavg", "--set", "models=small-mlp"], "the server has no network there"),
        (
            ["--algorithm", "local", "--set", "models=small-mlp", "--set", "data.size=9"],
            "another number",
        ),
        (
            ["--algorithm", "local", "--set", "clients=4", "--set", "models=small-mlp"],
            "client 3 has no network there",
        ),
        (["--engine", "flower"], "start from the seed"),
    ):
        assert main([*start, *more]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "second").exists()
