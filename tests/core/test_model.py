from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision import models as tv

import barter
from barter.core.errors import ConfigError
from barter.core.model import verify_split


@pytest.mark.parametrize(
    "make", [tv.alexnet, tv.densenet121, tv.squeezenet1_0, tv.regnet_y_400mf, tv.convnext_tiny]
)
def test_models_outside_the_zoo_split_or_say_why(make: object) -> None:
    module = make(num_classes=7).eval()  # type: ignore[operator]
    if module.__class__.__name__ == "SqueezeNet":
        with pytest.raises(
            ConfigError,
            match=r"(?s)SqueezeNet has no Linear layer.*class Mine\(barter\.Classifier\)",
        ):
            barter.split(module)
        return
    classifier = barter.split(module).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = classifier.features(x)
        assert features.shape == (2, classifier.feature_dim)
        assert torch.equal(classifier.logits(features), module(x))
    verify_split(module, classifier, (3, 64, 64), 7)


def test_the_original_is_untouched() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    classifier = barter.split(module)
    assert isinstance(module[3], nn.Linear)
    with torch.no_grad():
        next(iter(classifier.parameters())).zero_()
    assert module[1].weight.abs().sum() > 0


class Bypass(nn.Module):
    """The last Linear is not what decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * 2 + 1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv2d(1, 1, 1), "no Linear layer"),
        (nn.Linear(4, 2), "single Linear"),
        (Bypass(), "bypass it"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 2)),
            "cannot be split",
        ),
    ],
)
def test_what_cannot_be_split_says_how_to_write_it_by_hand(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        verify_split(module, barter.split(module), (1, 2, 2), 2)
    assert "def features(self, x)" in str(caught.value)


def test_a_classifier_by_hand_needs_two_methods() -> None:
    class Mine(barter.Classifier):
        feature_dim = 4

        def features(self, x: Tensor) -> Tensor:
            return x.flatten(1)

        def logits(self, features: Tensor) -> Tensor:
            return features[:, :2]

    assert Mine()(torch.ones(1, 1, 2, 2)).tolist() == [[1, 1]]
    verify_split(Mine(), barter.split(Mine()), (1, 2, 2), 2)
    with pytest.raises(NotImplementedError):
        barter.Classifier()(torch.ones(1))


def test_a_module_for_another_number_of_classes_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5))
    with pytest.raises(
        ConfigError, match=r"gives \(5,\) outputs per image, the task has 10 classes"
    ):
        verify_split(module, barter.split(module), (1, 2, 2), 10)
