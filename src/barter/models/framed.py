"""Heads whose classes are equally far from one another, and stay where they are."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.model import Classifier, SplitClassifier

__all__ = ["FrameHead", "frame_of", "framed"]


class FrameHead(nn.Linear):
    """A projection to as many numbers as there are classes, and its cosines with the corners of a simplex, scaled.

    Such a simplex is an equiangular tight frame (ETF). Corner c is the unit vector of c less the mean of all of them,
    made as long as one; it is not turned at random, for the projection can turn instead.
    """

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__(width, classes)
        self.scale = scale

    def projected(self, features: Tensor) -> Tensor:
        """Where features lie on the sphere that the corners lie on."""
        return F.normalize(super().forward(features).float())

    def forward(self, features: Tensor) -> Tensor:
        places = self.projected(features)
        cosines = (places - places.mean(1, keepdim=True)) / math.sqrt(1 - 1 / self.out_features)
        return self.scale * cosines


def framed(network: Classifier, scale: float) -> Classifier:
    """The network with such a head, whose projection starts from the head it had."""
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"{type(network).__name__} was split by hand, and its head cannot be replaced: "
            "give it as a torch module that ends in a Linear layer"
        )
    head = FrameHead(network.feature_dim, network.head.out_features, scale)
    head.load_state_dict({**head.state_dict(), **network.head.state_dict()})
    return SplitClassifier(network.body, head)


def frame_of(network: Classifier) -> FrameHead:
    """The head of a network that `framed` made."""
    head = network.head
    assert isinstance(head, FrameHead)
    return head
