"""Data that Python has: arrays, PyTorch's data sets, one for each client, lists of indices, functions by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from barter import Experiment
from barter.core.errors import CheckpointError, ConfigError
from barter.data.dataset import from_python
from barter.data.partition import Dirichlet, Domains, Indices, Listed, Partition
from barter.data.sources import load_dataset
from barter.data.task import Data, make_task
from barter.setup.config import read_run_values, read_toml, resolve, with_settings
from tests.conftest import federation, same, state, tiny

CPU = torch.device("cpu")


def arrays(n: int = 40, seed: int = 0, classes: int = 4) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8), np.arange(n) % classes


class Pictures(TorchDataset[Any]):
    """As torchvision's data sets are: a picture and a number, and names of classes."""

    def __init__(self, n: int, size: int = 8) -> None:
        self.x, self.y = arrays(n)
        self.size, self.classes = size, ["a", "b", "c", "d"]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        side = 8 if i else self.size
        return Image.fromarray(self.x[i, :, :, 0]).resize((side, side)), int(self.y[i])


class Texts(TorchDataset[Any]):
    """What is no data set of images."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[str, int]:
        return "good", i % 2


def test_arrays_and_data_sets_are_the_same_images() -> None:
    x, y = arrays(40)
    tensor = torch.from_numpy(x).permute(0, 3, 1, 2)
    expected = from_python({"x_train": x, "y_train": y}, "mine")
    assert expected.held_out
    assert (len(expected.y_train), len(expected.y_test)) == (32, 8)
    for given in (
        (x, y),
        (tensor, torch.from_numpy(y)),
        TensorDataset(tensor, torch.from_numpy(y)),
        TensorDataset(tensor.float() / 255, torch.from_numpy(y)),
        Pictures(40),
    ):
        dataset = from_python(given, "mine")
        assert torch.equal(dataset.x_train, expected.x_train)
        assert torch.equal(dataset.y_test, expected.y_test)
    assert from_python(Pictures(40), "mine").classes == ["a", "b", "c", "d"]
    both = from_python((Pictures(40), Pictures(8)), "mine")
    assert (len(both.y_train), len(both.y_test), both.held_out) == (40, 8, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "data: a int is no data set; give arrays"),
        ([], "data: a list is no data set"),
        (
            TensorDataset(torch.randn(6, 1, 4, 4), torch.arange(6)),
            "barter normalises images itself",
        ),
        (Pictures(10, size=9), r"images of \(8, 8, 1\) and of \(9, 9, 1\); bring them to one size"),
        (Pictures(0), "there are no images"),
        (
            (np.full((4, 8, 8, 1), 255.0), np.zeros(4, int)),
            "x_train is float64.*divide them by the largest",
        ),
        (TensorDataset(torch.rand(6, 1, 4, 4), torch.rand(6)), "a label is 0.*regression"),
        (TensorDataset(torch.rand(6, 1, 4, 4), torch.eye(6)), "a label is float32 of shape"),
        ([("some text", 1), ("more", 0)], "a tuple is no data set"),
        (Texts(), "an image is a str, .*text.* are not supported"),
        (TensorDataset(torch.rand(6, 1, 4, 4)), r"has 1 parts, a pair \(image, label\)"),
        ([arrays(), (np.zeros((4, 5, 5, 1), np.uint8), np.zeros(4, int))], "client 1 .*one size"),
        ([Pictures(10), arrays(10)], "client 1 has other classes"),
    ],
)
def test_what_is_no_data_is_said(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_python(given, "mine")
    with pytest.raises(ConfigError):
        Experiment(tiny("local"), data=given)


def test_every_client_with_data_of_its_own() -> None:
    each = [(*arrays(30 + 10 * k, seed=k), *arrays(8, seed=k + 9)) for k in range(3)]
    experiment = federation(tiny("dffke"), data=each, clients=None)
    assert isinstance(experiment.config.partition, Domains)
    assert [len(images) for images in experiment.task.train] == [30, 40, 50]
    for k, images in enumerate(experiment.task.train):
        assert torch.equal(images.pixels, torch.from_numpy(each[k][0]).permute(0, 3, 1, 2))
        assert torch.equal(
            experiment.task.local_tests[k].pixels, torch.from_numpy(each[k][2]).permute(0, 3, 1, 2)
        )
    assert len(experiment.task.global_test) == 24
    assert next(experiment.rounds(1)).round == 1
    pooled = federation(tiny("local"), data=each, partition="dirichlet", clients=2)
    assert isinstance(pooled.config.partition, Dirichlet)


def test_lists_of_indices() -> None:
    given = (*arrays(40), *arrays(8, seed=1))
    lists = [[0, 5, 1], list(range(10, 40))]
    task = federation(tiny("local"), data=given, partition=lists, clients=None).task
    assert torch.equal(task.train[0].pixels[1], torch.from_numpy(given[0][1]).permute(2, 0, 1))
    assert [len(images) for images in task.train] == [3, 30]
    for bad, message in (
        ([[0, 1], [1, 2]], "sample 1 is assigned more than once"),
        ([[0, 1], [40]], "whole numbers from 0 to 39"),
        ([[0, 1], [0.5]], "whole numbers"),
        ([[0, 1], []], "smallest of 2 clients would get 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            federation(tiny("local"), data=given, partition=bad, clients=None)
    with pytest.raises(ConfigError, match="2 lists of indices for 3 clients"):
        federation(tiny("local"), data=given, partition=lists, clients=3)
    with pytest.raises(ConfigError, match="held out for testing: give test images"):
        federation(tiny("local"), data=arrays(40), partition=lists, clients=None)


def test_runs_on_data_from_python_go_on_there_and_only_with_the_same(tmp_path: Path) -> None:
    given, lists = (*arrays(40), *arrays(8, seed=1)), [list(range(20)), list(range(20, 40))]
    options: dict[str, Any] = {"partition": lists, "clients": None, "models": "small-mlp"}
    straight = federation(tiny("local"), data=given, **options)
    list(straight.rounds(2))
    first = federation(tiny("local"), data=given, **options, out=tmp_path / "run")
    list(first.rounds(1))
    assert first.folder is not None
    first.folder.release()
    for changed, key in (
        ({"data": arrays(40) + arrays(8)}, "data"),
        ({"partition": lists[::-1]}, "partition.lists"),
    ):
        with pytest.raises(CheckpointError, match=f"another configuration: {key}"):
            federation(
                tiny("local"),
                **{"data": given, **options, **changed},
                out=tmp_path / "run",
                resume=True,
            )
    with pytest.raises(ConfigError, match="data were given in Python"):
        Experiment.from_config(resolve(read_toml(tmp_path / "run" / "config.toml")))
    second = federation(tiny("local"), data=given, **options, out=tmp_path / "run", resume=True)
    list(second.rounds(2))
    assert same(state(second), state(straight))


def mine() -> Any:
    return arrays(40)


def clients() -> Any:
    return [arrays(30, seed=k) for k in range(2)]


@dataclass(frozen=True, kw_only=True)
class EveryOther(Partition):
    """Turn by turn, from one's own module."""

    first: int = 0  # who begins

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        return [
            np.arange(len(labels))[(k + self.first) % clients :: clients] for k in range(clients)
        ]


def test_functions_and_partitions_by_name(tmp_path: Path) -> None:
    settings = [
        f"data.source={__name__}:clients",
        "partition.name=domains",
        "clients=2",
        "algorithm.name=local",
    ]
    config = resolve(with_settings({}, settings))
    assert [
        len(images) for images in make_task(config.data, config.partition, 2, 0, CPU).train
    ] == [24, 24]
    assert len(load_dataset(f"{__name__}:mine").y_train) == 32
    for source, message in (
        (
            "nodules:mine",
            "unknown kind of data 'nodules:', and no module either: there are: clients, domains, folder, npz",
        ),
        ("fodler:mine", "did you mean 'folder'"),
        (f"{__name__}:nothing", "cannot be imported: module .* has no attribute 'nothing'"),
        (f"{__name__}:CPU", "data: a device is no data set"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dataset(source)

    here = f"{__name__}:EveryOther"
    config = resolve(
        with_settings({}, [f"partition.name={here}", "partition.first=1", "algorithm.name=local"])
    )
    assert config.partition == EveryOther(first=1)
    first = federation(tiny("local"), partition=EveryOther(first=1), out=tmp_path / "run", rounds=2)
    list(first.rounds(1))
    assert first.folder is not None
    first.folder.release()
    resumed = Experiment.from_config(
        resolve(read_toml(tmp_path / "run" / "config.toml")), tmp_path / "run", resume=True
    )
    assert resumed.round == 1
    for name, message in (
        (f"{__name__}:CPU", "is no Partition with a split of its own"),
        (f"{Partition.__module__}:Partition", "is no Partition with a split of its own"),
        (f"{Listed.__module__}:Listed", "lists of indices were given in Python"),
        ("nowhere:Mine", "partition 'nowhere:Mine' cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=message):
            Experiment.from_config(
                resolve(with_settings({}, [f"partition.name={name}", "algorithm.name=local"]))
            )


def test_images_are_mirrored_where_somebody_says_so() -> None:
    x, y = arrays(40)

    def flips(**options: Any) -> tuple[int, bool]:
        augment = (
            make_task(Data(source=(x, y), **options), Dirichlet(alpha=10.0), 2, 0, CPU)
            .train[0]
            .augment
        )
        return augment.crop, augment.flip

    assert flips() == (1, False)
    assert flips(flip=True) == (1, True)
    assert flips(augment=False) == (0, False)
    assert flips(augment=False, flip=True) == (0, True)
    config = resolve({"algorithm": {"name": "local"}, "data": {"flip": True}})
    assert make_task(config.data, config.partition, 2, 0, CPU).train[0].augment.flip


def test_a_run_of_an_older_version_keeps_its_test_images(tmp_path: Path) -> None:
    """Its config.toml does not say how they were held out, which was by class."""
    x, y = arrays(60)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y)
    data = Data(source=f"npz:{tmp_path / 'mine.npz'}", hold_out="class")
    federation(tiny("local"), models="small-mlp", data=data, out=tmp_path / "run").step()
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace('hold_out = "class"\n', ""))
    config = resolve(read_run_values(tmp_path / "run"))
    assert config.data == data
    assert Experiment.from_config(config, tmp_path / "run", resume=True).round == 1
    anew = Data(source=data.source)
    with pytest.raises(CheckpointError, match=r"another configuration: data\.hold_out differs"):
        federation(tiny("local"), models="small-mlp", data=anew, out=tmp_path / "run", resume=True)
    named = tmp_path / "named"
    federation(tiny("local"), models="small-mlp", out=named).step()
    assert resolve(read_run_values(named)).data.hold_out == "position", (
        "its test images never change"
    )
