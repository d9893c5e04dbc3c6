"""What the tests share: small algorithms, small federations, and a look at their state."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from barter import ALGORITHMS, Experiment, conformance
from barter.core.algorithm import Algorithm
from barter.core.payload import isolate, leaves

torch.set_num_threads(1)
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
        "decoder_steps": 2,
        "exchange_epochs": 1,
        "exchange_steps": 2,
    },
    "fedzge": {"epochs": 2, "samples": 20, "queries": 2, "global_steps": 2, "local_steps": 2, "noise": 8},
    "fedaf": {"ipc": 2, "steps": 3, "server_epochs": 30, "server_lr": 0.05},
    "feddm": {"ipc": 2, "steps": 3, "server_epochs": 30},
    "fedfree": {"epochs": 1, "batch_size": 50},
    "dfrd": {"epochs": 1, "batch_size": 50, "iterations": 2, "samples": 4, "noise": 8, "global_steps": 2},
    "heterofl": {"epochs": 1, "batch_size": 50},
    "feddropout": {"epochs": 1, "batch_size": 50},
    "fedrolex": {"epochs": 1, "batch_size": 50},
    "fedproto": {"features": 48, "batch_size": 50},
    "feddistill": {"batch_size": 50},
    "lgfedavg": {"features": 48, "batch_size": 50},
    "fedavg": {"epochs": 1, "batch_size": 50},
    "fedprox": {"epochs": 1, "batch_size": 50},
    "local": {"max_epochs": 2},
    "central": {"max_epochs": 1},
}


def tiny(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return ALGORITHMS[name](**{**TINY[name], **changes})


def federation(algorithm: Algorithm[Any, Any], **options: Any) -> Experiment:
    models = "small-mlp" if algorithm.one_architecture else "small-5"
    return Experiment(algorithm, **{"clients": 3, "models": models, "device": "cpu", **options})


def small_federation(algorithm: Algorithm[Any, Any], **options: Any) -> Experiment:
    """The same of so few images that a round takes half as long."""
    return federation(algorithm, **{"data": conformance.few_digits(), **options})


def digits_file(folder: Path) -> str:
    """A source of as few images, in a file that other processes can read too."""
    arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), conformance.few_digits(), strict=True))
    images = {name: a.permute(0, 2, 3, 1) if name.startswith("x") else a for name, a in arrays.items()}
    np.savez(folder / "digits.npz", **{name: a.numpy() for name, a in images.items()})
    return f"npz:{folder / 'digits.npz'}"


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
