"""Fixed classifier heads with equally distant classes (equiangular tight frames)."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.model import Classifier, SplitClassifier

__all__ = ["FrameHead", "add_frame_head", "frame_head"]


class FrameHead(nn.Linear):
    """A head whose logits are scaled cosines with the corners of a simplex.

    Features are projected to one number per class. The corners form a simplex equiangular tight
    frame (ETF): corner c is the unit vector of c minus the mean of all unit vectors, normalised. It
    is not rotated at random, because the projection can rotate instead.
    """

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__(width, classes)
        self.scale = scale

    def project(self, features: Tensor) -> Tensor:
        """Return the features' projection (N, classes), of length 1 as the corners are."""
        return F.normalize(super().forward(features).float())

    def forward(self, features: Tensor) -> Tensor:
        points = self.project(features)
        centred = points - points.mean(1, keepdim=True)
        cosines = centred / math.sqrt(1 - 1 / self.out_features)
        return self.scale * cosines


def add_frame_head(network: Classifier, scale: float) -> Classifier:
    """Return the network with an ETF head (`FrameHead`).

    The new head starts from the old head's weights. The body is shared with the given network,
    which keeps its own head.

    Args:
        network: The network.
        scale: Factor of the cosines.

    Raises:
        ConfigError: If the network has a hand-written split.
    """
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"{type(network).__name__} was split by hand, and its head cannot be replaced: "
            "give it as a torch module that ends in a Linear layer"
        )
    head = FrameHead(network.feature_dim, network.head.out_features, scale)
    head.load_state_dict({**head.state_dict(), **network.head.state_dict()})
    return SplitClassifier(network.body, head)


def frame_head(network: Classifier) -> FrameHead:
    """Return the head of a network that `add_frame_head` returned.

    Other networks fail an assertion.
    """
    head = network.head
    assert isinstance(head, FrameHead)
    return head
