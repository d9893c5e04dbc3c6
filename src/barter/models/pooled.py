"""Features of another width: pooled, for networks that have different ones, or projected."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.model import Classifier, SplitClassifier

__all__ = ["Pool", "pooled", "projected"]


class Pool(nn.Module):
    """Feature vectors brought to a width: each new number is the mean of those that lie in its part of the old ones.

    What `nn.AdaptiveAvgPool1d` does, as a product with a matrix, whose gradient is the same each time on a GPU too.
    """

    matrix: Tensor

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        matrix = torch.zeros(before, after)
        for i in range(after):
            start, end = i * before // after, -(-(i + 1) * before // after)
            matrix[start:end, i] = 1 / (end - start)
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.to(x.dtype)


def pooled(network: Classifier, width: int) -> Classifier:
    """The network with features of this width and a new head behind them; itself if it has that width already."""
    if network.feature_dim == width:
        return network
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"features={width}: {type(network).__name__} has {network.feature_dim} and was split by hand; give it as a "
            "torch module that ends in a Linear layer, which can be pooled, "
            f"or with feature_dim = {width}, or give the method features={network.feature_dim}"
        )
    body = nn.Sequential(network.body, Pool(network.feature_dim, width))
    return SplitClassifier(body, nn.Linear(width, network.head.out_features))


def projected(network: Classifier, width: int) -> Classifier:
    """The network with a projection head, two linear layers that end in features of this width, and a new head."""
    if not isinstance(network, SplitClassifier):
        raise ConfigError(
            f"{type(network).__name__} was split by hand and cannot be given a projection head: give it as a plain "
            "module that ends in a Linear layer, or write the projection into its features"
        )
    before = network.feature_dim
    projection = nn.Sequential(nn.Linear(before, before), nn.ReLU(), nn.Linear(before, width))
    return SplitClassifier(
        nn.Sequential(network.body, projection), nn.Linear(width, network.head.out_features)
    )
