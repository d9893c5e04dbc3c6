"""Fused versions of torchvision's blocks, for networks that are made of them.

They are apart from `fused`, because torchvision takes seconds to load.
"""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.googlenet import BasicConv2d
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from barter.compute.activations import RELU
from barter.compute.graphs import has_hooks

__all__ = ["FUSED_BLOCKS"]


class _BasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's basic block with fused normalisations."""

    def forward(self, x: Tensor) -> Tensor:
        if has_hooks(self.bn1, self.bn2, self.relu):
            return super().forward(x)  # type: ignore[no-any-return]
        y = self.conv2(self.bn1(self.conv1(x), act=RELU))
        out: Tensor = self.bn2(y, x if self.downsample is None else self.downsample(x), RELU)
        return out


class _Bottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's bottleneck block with fused normalisations."""

    def forward(self, x: Tensor) -> Tensor:
        if has_hooks(self.bn1, self.bn2, self.bn3, self.relu):
            return super().forward(x)  # type: ignore[no-any-return]
        y = self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x), act=RELU)), act=RELU))
        out: Tensor = self.bn3(y, x if self.downsample is None else self.downsample(x), RELU)
        return out


class _ResNet(ResNet):  # type: ignore[misc]
    """torchvision's ResNet with a fused first normalisation."""

    def _forward_impl(self, x: Tensor) -> Tensor:
        if has_hooks(self.bn1, self.relu):
            return super()._forward_impl(x)  # type: ignore[no-any-return]
        x = self.maxpool(self.bn1(self.conv1(x), act=RELU))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


class _BasicConv2d(BasicConv2d):  # type: ignore[misc]
    """GoogLeNet's convolution with a fused normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        if has_hooks(self.bn):
            return super().forward(x)  # type: ignore[no-any-return]
        out: Tensor = self.bn(self.conv(x), act=RELU)
        return out


# Class of torchvision -> its fused version.
FUSED_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    BasicBlock: _BasicBlock,
    Bottleneck: _Bottleneck,
    ResNet: _ResNet,
    BasicConv2d: _BasicConv2d,
}
