from __future__ import annotations

import pytest
import torch

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.models.families import FAMILIES
from barter.models.zoo import ZOO, build_network, client_architectures


def spec(channels: int, side: int, classes: int = 10) -> Spec:
    return Spec(channels, side, side, classes, (0.5,) * channels, (0.5,) * channels)


def parameters(name: str, task: Spec) -> int:
    return sum(p.numel() for p in build_network(name, task).parameters())


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("convnet", spec(3, 32), 320_010),
        ("convnet", spec(3, 32, 100), 504_420),
        ("convnet", spec(1, 28), 317_706),
        ("convnet", spec(3, 64), 381_450),
        ("resnet18", spec(3, 32), 11_181_642),
        ("fedfree-cnn", spec(3, 32), 3_233_930),
        ("cnn", spec(3, 32), 878_538),
    ],
)
def test_published_parameter_counts(name: str, task: Spec, count: int) -> None:
    assert parameters(name, task) == count


HEAVY = {"resnet101", "resnet152", "resnet50", "efficientnet-v2-s"}


@pytest.mark.parametrize("name", sorted(set(ZOO) - HEAVY))
def test_every_model_takes_grey_and_colour_and_trains(name: str) -> None:
    for channels in (1, 3):
        model = build_network(name, spec(channels, 32, classes=7))
        features = model.features(torch.randn(2, channels, 32, 32))
        assert features.shape == (2, model.feature_dim)
        logits = model.logits(features)
        assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_the_large_ones_build(name: str) -> None:
    assert build_network(name, spec(3, 32)).feature_dim > 1000


@pytest.mark.parametrize("side", [8, 12, 16, 28, 32])
@pytest.mark.parametrize("name", FAMILIES["small-5"])
def test_small_models_take_small_images(name: str, side: int) -> None:
    assert build_network(name, spec(1, side))(torch.randn(2, 1, side, side)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "side"), [("cnn", 8), ("googlenet", 8), ("convnet", 4), ("vit-tiny", 30)]
)
def test_an_input_that_does_not_fit_says_so(name: str, side: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{side}x{side}"):
        build_network(name, spec(3, side))


def test_unknown_names_have_neighbours() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        build_network("resnet-18", spec(3, 32))
    with pytest.raises(ConfigError, match="did you mean 'htfe-10'"):
        client_architectures("hfte-10", 3)


def test_small_stems_keep_the_resolution() -> None:
    x = torch.randn(1, 3, 32, 32)
    small, large = (
        build_network(name, spec(3, 32)).eval() for name in ("resnet18-3x3", "resnet18")
    )
    shapes = [m.body.layer1(m.body.maxpool(m.body.conv1(x))).shape[-1] for m in (small, large)]  # type: ignore[union-attr]
    assert shapes == [32, 8]


def test_families() -> None:
    assert client_architectures("small-5", 7) == [*FAMILIES["small-5"], "small-cnn", "small-vgg"]
    assert client_architectures("resnet18", 2) == ["resnet18", "resnet18"]
    assert {name: len(family) for name, family in FAMILIES.items()} == {
        "htfe-1": 1, "htfe-2": 2, "htfe-3": 3, "htfe-4": 4, "htfe-5": 5, "htfe-8": 8, "htfe-9": 9, "htfe-10": 10,
        "fedfree-8": 8, "resnets-3-3-4": 10, "small-5": 5,
    }  # fmt: skip
    assert all(name in ZOO for family in FAMILIES.values() for name in family)
    assert len(set(FAMILIES["htfe-10"])) == 10
    assert client_architectures("resnets-3-3-4", 10).count("resnet50") == 4
