"""A network of the zoo whose features are larger by a factor, and whose logits are the same.

    barter run --set models=benchmarks.magnified:magnify:name=small-cnn:factor=32,small-mlp --set clients=2

Run this in the repository's root. A method that compares or shares features should not depend on
their size, because the head of a network can undo any factor.
"""

from __future__ import annotations

from torch import Tensor

from barter.core.images import Spec
from barter.core.model import Classifier
from barter.models import zoo

__all__ = ["MagnifiedNetwork", "magnify"]


class MagnifiedNetwork(Classifier):
    """A network whose features are multiplied by a factor, which its head undoes.

    Args:
        network: The network.
        factor: The factor; a power of two leaves the logits equal bit for bit.
    """

    def __init__(self, network: Classifier, factor: float) -> None:
        super().__init__()
        self.network = network
        self.feature_dim = network.feature_dim
        self.factor = factor

    def features(self, x: Tensor) -> Tensor:
        return self.factor * self.network.features(x)

    def logits(self, features: Tensor) -> Tensor:
        return self.network.logits(features / self.factor)


def magnify(spec: Spec, name: str = "small-cnn", factor: float = 1.0) -> MagnifiedNetwork:
    """Build the network `name` of the zoo with magnified features."""
    return MagnifiedNetwork(zoo.build_network(name, spec), float(factor))
