"""Splits as files: written, read, as other libraries write them, and never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from barter import Experiment, Local
from barter.cli.app import app
from barter.core.errors import ConfigError
from barter.data.sources import load_dataset
from barter.data.task import Data
from barter.setup.assembly import resolve_partition
from barter.setup.config import resolve


def images(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 6, 5, 3), dtype=np.uint8)


def save(path: Path, **changes: Any) -> Path:
    """A split among two clients with 8 and 12 images, and 4 for testing each."""
    for k, n in enumerate((8, 12)):
        for part, count in (("train", n), ("test", 4)):
            (path / part).mkdir(parents=True, exist_ok=True)
            arrays = {"x": images(count, seed=k), "y": np.arange(count) % 4} | changes
            np.savez(path / part / f"{k}.npz", **arrays)
    return path


@pytest.mark.usefixtures("few_images")
def test_a_split_that_was_saved_is_the_run_that_it_was_saved_from(tmp_path: Path) -> None:
    split = tmp_path / "split"
    settings = [
        "--set",
        "clients=3",
        "--set",
        "seed=4",
        "--out",
        str(tmp_path / "p.png"),
        "--save",
        str(split),
    ]
    said = CliRunner().invoke(app, ["show", "partition", *settings])
    assert said.exit_code == 0, said.output
    assert f"data.source=clients:{split}" in said.output.replace("\n", "")
    straight = Experiment(Local(max_epochs=2), clients=3, seed=4, device="cpu")
    again = Experiment(
        Local(max_epochs=2),
        data=f"clients:{split}",
        models=straight.config.models,
        seed=4,
        device="cpu",
    )
    assert again.config.clients == 3
    for one, other in zip(straight.task.train, again.task.train, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)
    for one, other in zip(straight.task.local_tests, again.task.local_tests, strict=True):
        assert torch.equal(one.pixels, other.pixels)
    assert torch.equal(straight.task.global_test.pixels, again.task.global_test.pixels)
    assert straight.task.spec == again.task.spec
    ((first,), (second,)) = (experiment.rounds(1) for experiment in (straight, again))
    assert first.clients == second.clients
    refused = CliRunner().invoke(app, ["show", "partition", *settings])
    assert isinstance(refused.exception, ConfigError)
    assert "already exists: give a new folder for the split" in str(refused.exception)


@pytest.mark.parametrize("scale", ["bytes", "0 to 1", "-1 to 1"])
def test_files_as_other_libraries_write_them(tmp_path: Path, scale: str) -> None:
    """An object under one name, images with channels first, often already normalised by half and half."""
    made = {"bytes": lambda x: x, "0 to 1": lambda x: x / 255, "-1 to 1": lambda x: x / 127.5 - 1}[
        scale
    ]
    for part, n in (("train", 8), ("test", 4)):
        for k in range(2):
            (tmp_path / part).mkdir(exist_ok=True)
            x = np.asarray(
                made(images(n, seed=k)), dtype=np.uint8 if scale == "bytes" else np.float32
            )
            held = {"x": x.transpose(0, 3, 1, 2), "y": np.arange(n) % 4}
            np.savez_compressed(tmp_path / part / f"{k}.npz", data=np.array(held, dtype=object))
    data = load_dataset(f"clients:{tmp_path}")
    assert torch.equal(data.x_train[:8].permute(0, 2, 3, 1), torch.as_tensor(images(8, seed=0)))
    assert torch.equal(data.x_train[8:].permute(0, 2, 3, 1), torch.as_tensor(images(8, seed=1)))
    assert data.domain_train.tolist() == 8 * [0] + 8 * [1]
    assert len(data.x_test) == 8, "the test set of all is everybody's"
    config = resolve({"data": {"source": f"clients:{tmp_path}"}})
    assert (config.clients, type(config.partition).__name__) == (2, "Domains")
    (tmp_path / "train" / "1.npz").unlink()
    (tmp_path / "test" / "1.npz").unlink()
    partition, clients = resolve_partition(Data(source=f"clients:{tmp_path}"), None, None)
    assert (clients, type(partition).__name__) == (1, "Domains"), "one client is a split too"


def test_a_client_may_have_fewer_images_than_there_are_classes(tmp_path: Path) -> None:
    """Files of other libraries name no classes; a client may hold three images of class 9."""
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for k, y in enumerate([np.arange(10).repeat(3), np.array([9, 9, 9])]):
            np.savez(tmp_path / part / f"{k}.npz", data={"x": images(len(y)), "y": y})
    dataset = load_dataset(f"clients:{tmp_path}")
    assert dataset.numbered
    assert dataset.classes == [str(c) for c in range(10)]
    np.savez(tmp_path / "train" / "1.npz", data={"x": images(3), "y": np.array([9, 9, 10**9])})
    with pytest.raises(ConfigError, match="class number 1000000000"):
        load_dataset(f"clients:{tmp_path}")


def test_a_bright_file_is_on_the_scale_of_the_others(tmp_path: Path) -> None:
    """Of images from -1 on, those without a dark pixel look as if they began at 0."""
    save(tmp_path, x=np.full((4, 6, 5, 3), -1, dtype=np.float32), y=np.arange(4))
    np.savez(
        tmp_path / "train" / "1.npz", x=np.full((4, 6, 5, 3), 0.6, dtype=np.float32), y=np.arange(4)
    )
    bright = load_dataset(f"clients:{tmp_path}").x_train[4:]
    assert bright.unique().tolist() == [204], "(0.6 + 1) / 2 of 255"


def test_every_client_is_tested_on_its_own_file(tmp_path: Path) -> None:
    save(tmp_path)
    np.savez(tmp_path / "test" / "1.npz", x=images(3, seed=9), y=np.array([2, 2, 1]))
    experiment = Experiment(
        Local(max_epochs=1), data=Data(source=f"clients:{tmp_path}", size=8), device="cpu"
    )
    assert experiment.task.local_tests[1].labels.tolist() == [2, 2, 1]
    assert [len(test) for test in experiment.task.local_tests] == [4, 3]
    assert len(experiment.task.global_test) == 7


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (TRAPPED,)


TRAPPED = Path("trapped")


def test_nothing_that_a_file_asks_for_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "split")
    held = np.array({"x": images(8), "y": np.arange(8), "more": Trap()}, dtype=object)
    np.savez(tmp_path / "split" / "train" / "0.npz", data=held)
    with pytest.raises(
        ConfigError,
        match=r"Python objects, which are not loaded.*np\.savez\(path, x=d\['x'\], y=d\['y'\]\)",
    ):
        load_dataset(f"clients:{tmp_path / 'split'}")
    assert not TRAPPED.exists()
    np.load(tmp_path / "split" / "train" / "0.npz", allow_pickle=True)["data"].item()
    assert TRAPPED.exists(), "and that was a real trap"


def test_what_is_not_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no train/0.npz"):
        load_dataset(f"clients:{tmp_path}")
    path = save(tmp_path / "split")
    for settings, message in (
        ({"partition": {"name": "iid"}}, "split already; leave out partition"),
        ({"partition": {"alpha": 0.1}}, "split already; leave out partition"),
        ({"clients": 5}, "clients=5: .* is split among 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve({"data": {"source": f"clients:{path}"}, **settings})
    (path / "train" / "2.npz").write_bytes(b"no archive")
    (path / "test" / "1.npz").unlink()
    with pytest.raises(ConfigError, match="test/1.npz: there is no such file"):
        load_dataset(f"clients:{path}")
    (path / "train" / "1.npz").unlink()
    with pytest.raises(ConfigError, match="lacks 1.npz: clients are numbered from 0 on"):
        load_dataset(f"clients:{path}")
    for changes, message in (
        ({"x": images(4).astype(np.float32)}, "float32 of shape .* between 0 and 2.*; give bytes"),
        ({"x": images(4)[..., 0, 0]}, "uint8 of shape"),
        ({"data": np.zeros(3)}, "x and y are expected"),
        ({"x": images(4), "y": np.array([0, 1.7, 2, 3])}, "classes must be integers"),
    ):
        other = save(tmp_path / message[:3])
        np.savez(
            other / "train" / "0.npz",
            **({"y": np.arange(4)} | changes if "x" in changes else changes),
        )
        with pytest.raises(ConfigError, match=message):
            load_dataset(f"clients:{other}")
    (other / "train" / "0.npz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read as an npz file"):
        load_dataset(f"clients:{other}")
