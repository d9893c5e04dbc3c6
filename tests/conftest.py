"""What the tests share: small algorithms, small federations, and a look at their state."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from barter import ALGORITHMS, Experiment
from barter.algorithms import moments
from barter.compare.comparison import RunJob
from barter.core.algorithm import Algorithm
from barter.core.payload import isolate, leaves
from barter.data import sources
from barter.data.sources import load_dataset
from barter.data.task import Data
from barter.testing import conformance

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, help="of each fuzzer; without, a few cases, always the same"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="other cases")
    parser.addoption(
        "--soak-seconds", type=float, default=900.0, help="how long the soak goes on doing harm"
    )
    parser.addoption("--soak-seed", type=int, default=0, help="other harm")


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which is then fast and makes forks copy fewer pages."""
    gc.collect()
    gc.freeze()


settings.register_profile("barter", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("barter")

# Every algorithm with so little work that a round takes well under a second.
TINY: dict[str, dict[str, Any]] = {
    "dffke": {
        "max_epochs": 2,
        "later_epochs": 1,
        "share": 0.1,
        "code_dim": 16,
        "docking_epochs": 3,
        "decoder_epochs": 1,
        "decoder_batch": 10,
        "decoder_steps": 2,
        "exchange_epochs": 1,
        "exchange_steps": 2,
    },
    "moments": {
        "max_epochs": 2,
        "components": 16,
        "decoder_steps": 4,
        "decoder_batch": 10,
        "samples": 20,
        "batch_size": 20,
    },
    "fedzge": {
        "epochs": 2,
        "samples": 20,
        "generator_steps": 2,
        "queries": 2,
        "global_steps": 2,
        "local_steps": 2,
        "noise": 8,
    },
    "fedaf": {"ipc": 2, "steps": 3, "server_epochs": 30, "server_lr": 0.05},
    "feddm": {"ipc": 2, "steps": 3, "server_epochs": 30},
    "fedfree": {"epochs": 1, "batch_size": 50},
    "dfrd": {
        "epochs": 1,
        "batch_size": 50,
        "iterations": 2,
        "samples": 4,
        "noise": 8,
        "global_steps": 2,
    },
    "fedftg": {
        "epochs": 1,
        "batch_size": 50,
        "iterations": 2,
        "generator_steps": 1,
        "samples": 6,
        "noise": 8,
    },
    "dense": {
        "epochs": 1,
        "batch_size": 50,
        "passes": 2,
        "generator_steps": 2,
        "samples": 6,
        "noise": 8,
        "pool": 30,
    },
    "fedzkt": {
        "epochs": 1,
        "batch_size": 50,
        "iterations": 2,
        "client_steps": 2,
        "samples": 6,
        "noise": 8,
    },
    "fediod": {
        "epochs": 1,
        "batch_size": 50,
        "iterations": 1,
        "global_steps": 1,
        "samples": 6,
        "noise": 8,
        "discriminator_width": 4,
    },
    "heterofl": {"epochs": 1, "batch_size": 50},
    "feddropout": {"epochs": 1, "batch_size": 50},
    "fedrolex": {"epochs": 1, "batch_size": 50},
    "fedproto": {"features": 48, "batch_size": 50},
    "fedtgp": {"features": 48, "batch_size": 50, "server_epochs": 5},
    "feddistill": {"batch_size": 50},
    "lgfedavg": {"features": 48, "batch_size": 50},
    "fedmd": {
        "public_epochs": 1,
        "private_epochs": 1,
        "samples": 60,
        "epochs": 1,
        "batch_size": 50,
    },
    "dsfl": {"epochs": 1, "samples": 60, "distil_epochs": 1},
    "mhat": {"epochs": 1, "samples": 60, "distil_epochs": 1},
    "feddf": {"epochs": 1, "samples": 60, "distil_steps": 3},
    "fml": {"shared": "small-mlp", "epochs": 1, "batch_size": 50},
    "fedkd": {"shared": "small-mlp", "batch_size": 50},
    "fedgh": {"features": 48, "batch_size": 50, "server_epochs": 5},
    "fedgen": {"features": 48, "batch_size": 50, "noise": 8, "hidden": 16, "generator_steps": 5},
    "fedktl": {"features": 48, "batch_size": 50, "server_epochs": 3, "server_batch_size": 20},
    "fedavg": {"epochs": 1, "batch_size": 50},
    "fedprox": {"epochs": 1, "batch_size": 50},
    "fedbn": {"batch_size": 50},
    "moon": {"epochs": 1, "batch_size": 50, "projection": 16},
    "feddyn": {"epochs": 1},
    "perfedavg": {"epochs": 1, "batch_size": 50},
    "pfedla": {"epochs": 1, "batch_size": 50},
    "local": {"max_epochs": 2},
    "central": {"max_epochs": 1},
}


# Even less, for what runs dozens of rounds of every algorithm and asks for no accuracy: one step
# where TINY takes some.
LEAST: dict[str, dict[str, Any]] = {
    "dffke": {"max_epochs": 1, "docking_epochs": 1, "decoder_steps": 1, "exchange_steps": 1},
    "moments": {"max_epochs": 1, "decoder_steps": 1, "exchange_epochs": 1, "samples": 10},
    "fedzge": {
        "epochs": 1,
        "samples": 10,
        "global_steps": 1,
        "local_steps": 1,
    },
    "fedaf": {"steps": 1, "server_epochs": 2},
    "feddm": {"steps": 1, "server_epochs": 2},
    "dfrd": {"iterations": 1, "generator_steps": 1, "global_steps": 1},
    "fedftg": {"iterations": 1, "global_steps": 1},
    "dense": {"passes": 1, "generator_steps": 1},
    "fedzkt": {"iterations": 1, "client_steps": 1},
    "fedtgp": {"server_epochs": 1},
    "fedgh": {"server_epochs": 1},
    "fedgen": {"generator_steps": 1},
    "fedktl": {"server_epochs": 1},
    "local": {"max_epochs": 1},
}


# What has no default that could work.
NEEDED: dict[str, dict[str, Any]] = {"fedktl": {"generator": "tests.conftest:blots"}}


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What barter remembers of its user is not written to the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """No test cuts the power: what was written is there without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


ALL_CROPS = moments.CROPS


@pytest.fixture(autouse=True, scope="session")
def few_crops() -> Iterator[None]:
    """Whiten the features of `moments` with a tenth of the crops, in this process and its forks alone.

    Tests that check accuracy use `all_crops`, and so do comparisons with a process that is started anew.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "CROPS", ALL_CROPS // 10)
        yield


@pytest.fixture
def all_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whiten features with as many crops of photographs as outside of tests."""
    monkeypatch.setattr(moments, "CROPS", ALL_CROPS)


def tiny(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return ALGORITHMS[name](**{**NEEDED.get(name, {}), **TINY[name], **changes})


def least(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return tiny(name, **{**LEAST.get(name, {}), **changes})


class Blots(nn.Module):
    """A generator of images that nobody trained: five numbers are the corners and the middle of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.latent_dim = 5

    def forward(self, codes: Tensor) -> Tensor:
        a, b, c, d, e = codes.tanh().unbind(1)
        picture = torch.stack(
            [a, (a + b) / 2, b, (a + c) / 2, e, (b + d) / 2, c, (c + d) / 2, d], 1
        )
        return picture.view(-1, 1, 3, 3)


def blots() -> nn.Module:
    return Blots()


def federation(
    algorithm: Algorithm[Any, Any], source: Any = "digits", **options: Any
) -> Experiment:
    models = "small-mlp" if algorithm.server_model.one_architecture else "small-cnn,small-mlp"
    data = Data(source=source, public="digits" if algorithm.needs_public_data else "")
    return Experiment(
        algorithm, **{"clients": 3, "models": models, "data": data, "device": "cpu", **options}
    )


def small_federation(algorithm: Algorithm[Any, Any], **options: Any) -> Experiment:
    """The same of so few images that a round takes half as long."""
    return federation(algorithm, conformance.few_digits(), **options)


def other_digits() -> tuple[Tensor, Tensor]:
    """Images that no client of a small federation has, as a public source."""
    digits = load_dataset("digits")
    return digits.x_train[conformance.IMAGES :], digits.y_train[conformance.IMAGES :]


def perceptrons(algorithm: Algorithm[Any, Any], **options: Any) -> Experiment:
    """The same of networks that take no time, for what does not depend on them."""
    return small_federation(algorithm, **{"models": "small-mlp", **options})


def digits_file(folder: Path, images: int = conformance.IMAGES) -> str:
    """A source of as few images, in a file that other processes can read too."""
    parts = ("x_train", "y_train", "x_test", "y_test")
    arrays = dict(zip(parts, conformance.few_digits(images), strict=True))
    files = {
        name: a.permute(0, 2, 3, 1) if name.startswith("x") else a for name, a in arrays.items()
    }
    np.savez(folder / "digits.npz", **{name: a.numpy() for name, a in files.items()})
    return f"npz:{folder / 'digits.npz'}"


@contextmanager
def fewer_digits(images: int = 400) -> Iterator[None]:
    """Let `digits` be the first of its images, for what takes them by name and shows no accuracy."""
    x, y = sources._eight_by_eight()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_eight_by_eight", lambda: (x[:images], y[:images]))
        yield


@pytest.fixture
def few_images() -> Iterator[None]:
    with fewer_digits():
        yield


def run_jobs_here(jobs: Sequence[RunJob], *_: object) -> list[RunJob]:
    """Run the jobs of a comparison in this process: another takes seconds to start."""
    for job in jobs:
        list(Experiment.from_config(job.config, job.folder).rounds(job.config.rounds))
    return []


def state(experiment: Experiment) -> dict[str, Any]:
    """Every tensor and number that a checkpoint of the experiment holds."""
    return dict(leaves(isolate(experiment._state())))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[at]) if isinstance(value, torch.Tensor) else value == other[at]
        for at, value in one.items()
    )


@pytest.fixture(params=list(ALGORITHMS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
