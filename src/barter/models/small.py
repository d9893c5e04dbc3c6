"""Small networks for images from 8 x 8 pixels on, and networks of papers."""

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
    """Return a bias-free convolution, followed by batch normalisation and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _body(*layers: nn.Module) -> nn.Sequential:
    """Return the layers with a flattening at the end."""
    return nn.Sequential(*layers, nn.Flatten())


def _grid() -> nn.Module:
    """Return a pooling to a 4x4 grid, which keeps coarse positions in the features."""
    return nn.AdaptiveAvgPool2d(4)


def _with_head(body: nn.Module, spec: Spec) -> Classifier:
    """Return the body with a head whose width is measured by a forward pass."""
    with torch.no_grad():
        width = body.eval()(torch.zeros(1, *spec.shape)).shape[1]
    return SplitClassifier(body.train(), nn.Linear(width, spec.classes))


def small_cnn(spec: Spec) -> Classifier:
    """Return a network of two 3x3 convolutions, 512 features."""
    return _with_head(
        _body(_conv(spec.channels, 32), nn.AvgPool2d(2), _conv(32, 32), _grid()), spec
    )


def small_vgg(spec: Spec) -> Classifier:
    """Return a network of four convolutions in two stages, 384 features."""
    stages = [
        _conv(spec.channels, 16),
        _conv(16, 16),
        nn.MaxPool2d(2),
        _conv(16, 24),
        _conv(24, 24),
    ]
    return _with_head(_body(*stages, _grid()), spec)


class _Residual(nn.Module):
    """A residual block of two convolutions."""

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
    """Return a network of two residual blocks, 512 features."""
    return _with_head(
        _body(_conv(spec.channels, 16), _Residual(16, 16, 1), _Residual(16, 32, 2), _grid()), spec
    )


def small_separable(spec: Spec) -> Classifier:
    """Return a network of depthwise separable convolutions with 640 features.

    The convolutions are those of MobileNet.
    """
    layers = [_conv(spec.channels, 24)]
    for inputs, outputs, stride in ((24, 32, 1), (32, 40, 2)):
        layers += [
            _conv(inputs, inputs, stride=stride, groups=inputs),
            _conv(inputs, outputs, kernel=1),
        ]
    return _with_head(_body(*layers, _grid()), spec)


def small_mlp(spec: Spec) -> Classifier:
    """Return a network without convolutions: one hidden layer, 256 features."""
    inputs = spec.channels * spec.height * spec.width
    layers = [nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True)]
    return _with_head(nn.Sequential(nn.Flatten(), *layers), spec)


def convnet(spec: Spec) -> Classifier:
    """Return the ConvNet of dataset condensation (DM), with batch normalisation.

    It has 320,010 parameters at 3x32x32 and 10 classes.
    """
    layers: list[nn.Module] = []
    channels = spec.channels
    for block in range(3):
        # 28 x 28 images are padded to 32 x 32 by the first convolution, as DM does.
        padding = 3 if block == 0 and spec.height == 28 else 1
        layers += [nn.Conv2d(channels, 128, 3, padding=padding), nn.BatchNorm2d(128)]
        layers += [nn.ReLU(inplace=True), nn.AvgPool2d(2)]
        channels = 128
    return _with_head(_body(*layers), spec)


def _two_convolutions(spec: Spec) -> list[nn.Module]:
    """Return two 5x5 convolutions, each with ReLU and max pooling."""
    first = [nn.Conv2d(spec.channels, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return [*first, nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)]


def _flat_width(spec: Spec) -> int:
    """Return the number of outputs of `_two_convolutions`."""
    height = ((spec.height - 4) // 2 - 4) // 2
    width = ((spec.width - 4) // 2 - 4) // 2
    return 64 * height * width


def cnn(spec: Spec) -> Classifier:
    """Return the CNN of FedAvg as in HtFLlib: two 5x5 convolutions, 512 features."""
    convolutions = _body(*_two_convolutions(spec))
    body = convolutions.extend([nn.Linear(_flat_width(spec), 512), nn.ReLU(inplace=True)])
    return _with_head(body, spec)


def fedfree_cnn(spec: Spec) -> Classifier:
    """Return the CNN of FedFree: two convolutions and three linear layers.

    It has 3,233,930 parameters at 3x32x32 and 10 classes.
    """
    width = _flat_width(spec)
    hidden = [
        nn.Linear(width, 1600),
        nn.ReLU(inplace=True),
        nn.Linear(1600, 384),
        nn.ReLU(inplace=True),
    ]
    return _with_head(_body(*_two_convolutions(spec)).extend(hidden), spec)
