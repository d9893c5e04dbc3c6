"""Change the width of a network's features, by pooling or by a projection head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.model import Classifier, SplitClassifier

__all__ = ["Pool", "add_projection_head", "pool_features"]


class Pool(nn.Module):
    """Average pooling of feature vectors to another width.

    It computes what `nn.AdaptiveAvgPool1d` does, as a product with a matrix, whose gradient is
    deterministic on a GPU too.
    """

    matrix: Tensor

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        matrix = torch.zeros(before, after)
        for i in range(after):
            start = i * before // after
            end = -(-(i + 1) * before // after)
            matrix[start:end, i] = 1 / (end - start)
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.to(x.dtype)


def pool_features(network: Classifier, width: int) -> Classifier:
    """Return the network with features pooled to this width, and a new random head.

    The body is shared with the given network, not copied. A network that has this width already is
    returned as it is, with its head.

    Raises:
        ConfigError: If the network has a hand-written split and another width.
    """
    if network.feature_dim == width:
        return network
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"features={width}: {type(network).__name__} has {network.feature_dim} and was split "
            "by hand; give it as a torch module that ends in a Linear layer, which can be pooled, "
            f"or with feature_dim = {width}, or give the method features={network.feature_dim}"
        )
    body = nn.Sequential(network.body, Pool(network.feature_dim, width))
    return SplitClassifier(body, nn.Linear(width, network.head.out_features))


def add_projection_head(network: Classifier, width: int) -> Classifier:
    """Return the network with a projection head and a new classifier head.

    The projection head has two linear layers and ends in features of this width. Both heads are
    random; the body is shared with the given network, not copied.

    Raises:
        ConfigError: If the network has a hand-written split.
    """
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"{type(network).__name__} was split by hand and cannot be given a projection head: "
            "give it as a plain module that ends in a Linear layer, or write the projection into "
            "its features"
        )
    before = network.feature_dim
    projection = nn.Sequential(nn.Linear(before, before), nn.ReLU(), nn.Linear(before, width))
    body = nn.Sequential(network.body, projection)
    return SplitClassifier(body, nn.Linear(width, network.head.out_features))
