"""Small networks written here: for images from 8 x 8 on, and those that papers define themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from barter.core.images import Spec
from barter.core.model import Classifier, SplitClassifier

__all__ = [
    "cnn",
    "convnet",
    "fedfree_cnn",
    "small_cnn",
    "small_mlp",
    "small_resnet",
    "small_separable",
    "small_vgg",
]


def _conv(
    inputs: int, outputs: int, *, stride: int = 1, groups: int = 1, kernel: int = 3
) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _body(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten())


def _grid() -> nn.Module:
    """A 4x4 grid of what the convolutions saw: features that still know where."""
    return nn.AdaptiveAvgPool2d(4)


def _measured(body: nn.Module, spec: Spec) -> Classifier:
    """The body with a head as wide as what the body puts out for this input."""
    with torch.no_grad():
        width = body.eval()(torch.zeros(1, *spec.shape)).shape[1]
    return SplitClassifier(body.train(), nn.Linear(width, spec.classes))


def small_cnn(spec: Spec) -> Classifier:
    """Two 3x3 convolutions, 512 features."""
    return _measured(_body(_conv(spec.channels, 32), nn.AvgPool2d(2), _conv(32, 32), _grid()), spec)


def small_vgg(spec: Spec) -> Classifier:
    """Four convolutions in two stages, 384 features."""
    stages = [
        _conv(spec.channels, 16),
        _conv(16, 16),
        nn.MaxPool2d(2),
        _conv(16, 24),
        _conv(24, 24),
    ]
    return _measured(_body(*stages, _grid()), spec)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, stride=stride)
        self.second = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.second(self.first(x)) + self.shortcut(x))


def small_resnet(spec: Spec) -> Classifier:
    """Two residual blocks, 512 features."""
    return _measured(
        _body(_conv(spec.channels, 16), _Residual(16, 16, 1), _Residual(16, 32, 2), _grid()), spec
    )


def small_separable(spec: Spec) -> Classifier:
    """Depthwise separable convolutions as in MobileNet, 640 features."""
    layers = [_conv(spec.channels, 24)]
    for inputs, outputs, stride in ((24, 32, 1), (32, 40, 2)):
        layers += [
            _conv(inputs, inputs, stride=stride, groups=inputs),
            _conv(inputs, outputs, kernel=1),
        ]
    return _measured(_body(*layers, _grid()), spec)


def small_mlp(spec: Spec) -> Classifier:
    """No convolution at all: one hidden layer, 256 features."""
    inputs = spec.channels * spec.height * spec.width
    layers = [nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True)]
    return _measured(nn.Sequential(nn.Flatten(), *layers), spec)


def convnet(spec: Spec) -> Classifier:
    """The ConvNet of dataset condensation (DM) with batch normalisation: 320,010 parameters at 3x32x32, 10 classes."""
    layers: list[nn.Module] = []
    channels = spec.channels
    for block in range(3):
        # 28 x 28 images are padded to 32 x 32 by the first convolution, as DM does.
        padding = 3 if block == 0 and spec.height == 28 else 1
        layers += [nn.Conv2d(channels, 128, 3, padding=padding), nn.BatchNorm2d(128)]
        layers += [nn.ReLU(inplace=True), nn.AvgPool2d(2)]
        channels = 128
    return _measured(_body(*layers), spec)


def _two_convolutions(spec: Spec) -> list[nn.Module]:
    first = [nn.Conv2d(spec.channels, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return [*first, nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]


def _flat_width(spec: Spec) -> int:
    height, width = (((side - 4) // 2 - 4) // 2 for side in spec.shape[1:])
    return 64 * height * width


def cnn(spec: Spec) -> Classifier:
    """The CNN of FedAvg as HtFLlib has it: two 5x5 convolutions, 512 features."""
    body = _body(*_two_convolutions(spec)).extend(
        [nn.Linear(_flat_width(spec), 512), nn.ReLU(inplace=True)]
    )
    return _measured(body, spec)


def fedfree_cnn(spec: Spec) -> Classifier:
    """The CNN of FedFree, two convolutions and three linear layers: 3,233,930 parameters at 3x32x32, 10 classes."""
    width = _flat_width(spec)
    hidden = [
        nn.Linear(width, 1600),
        nn.ReLU(inplace=True),
        nn.Linear(1600, 384),
        nn.ReLU(inplace=True),
    ]
    return _measured(_body(*_two_convolutions(spec)).extend(hidden), spec)
