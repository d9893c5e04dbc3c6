"""Torchvision's classifiers, from a module to a run that goes on from its checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchvision import models as tv

from barter import Experiment
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.data.task import Data
from tests.conftest import same, state, tiny

LARGER = {
    "alexnet": 64,
    "maxvit_t": 224,
    "vit_h_14": 28,
}  # images that smaller ones cannot be: all others take 32
WITHOUT_AUXILIARY = {"googlenet": 32, "inception_v3": 75}


def made(name: str, side: int, **options: Any) -> nn.Module:
    extra = {"image_size": side} if name.startswith("vit") else {}
    module: nn.Module = tv.get_model(name, weights=None, num_classes=3, **extra, **options)
    return module


def federation(
    algorithm: Algorithm[Any, Any],
    name: str,
    side: int,
    folder: Path,
    *,
    resume: bool = False,
    **options: Any,
) -> Experiment:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 4, 4, 3), dtype=np.uint8), np.arange(12) % 3
    np.savez(folder / "few.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:])
    data = Data(source=f"npz:{folder / 'few.npz'}", size=side)
    return Experiment(
        algorithm,
        data=data,
        partition="iid",
        clients=1,
        models=lambda spec: made(name, side, **options),
        device="cpu",
        out=folder / "run",
        resume=resume,
    )


def goes_on_from_its_checkpoint(
    algorithm: Algorithm[Any, Any], name: str, side: int, folder: Path, **options: Any
) -> None:
    first = federation(algorithm, name, side, folder, **options)
    next(first.rounds(1))
    kept = state(first)
    assert first.folder is not None
    first.folder.release()
    del first  # the largest networks have 2.5 GB of weights
    gc.collect()
    second = federation(algorithm, name, side, folder, resume=True, **options)
    assert same(kept, state(second))
    del kept
    assert [r.round for r in second.rounds(2)] == [2]


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Two of the largest networks do not fit into 24 GiB one after the other, unless the first is gone."""
    yield
    gc.collect()


STEP = {"max_epochs": 1, "optimizer": "sgd", "lr": 1e-6, "batch_size": 6}


@pytest.mark.parametrize("name", ["local", "dffke", "fedavg"])
def test_layers_that_ask_for_their_version_get_it(name: str, tmp_path: Path) -> None:
    # With FedAvg's usual rate this network diverges on six images, and its answer is refused.
    algorithm = tiny(name, lr=1e-3) if name == "fedavg" else tiny(name)
    goes_on_from_its_checkpoint(algorithm, "mnasnet0_5", 32, tmp_path)


def test_auxiliary_classifiers_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Outputs instead of logits while it is trained.*aux_logits=False"
    ):
        federation(tiny("local", **STEP), "googlenet", 32, tmp_path, init_weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", tv.list_models(module=tv))
def test_every_classifier_trains_and_goes_on(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    side = LARGER.get(name, 32)
    if name in WITHOUT_AUXILIARY:
        side, options = WITHOUT_AUXILIARY[name], {"aux_logits": False, "init_weights": False}
    if name.startswith("squeezenet"):  # ends in a convolution
        with pytest.raises(ConfigError, match="SqueezeNet has no Linear layer"):
            federation(tiny("local", **STEP), name, side, tmp_path)
        return
    goes_on_from_its_checkpoint(tiny("local", **STEP), name, side, tmp_path, **options)
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.unlink()
