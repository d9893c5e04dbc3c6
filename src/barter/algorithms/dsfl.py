"""DS-FL: Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient
Collaborative Training with Non-IID Private Data", IEEE Transactions on Mobile Computing 2021, Algorithm 1
(arXiv:2008.06180).

One round:

1. Sampled clients train on their own data and upload their predictions on some unlabelled public
   images.
2. The server averages the predictions. The average is uncertain where clients know different
   classes, so the server sharpens it (entropy reduction aggregation, ERA).
3. The clients and a model of the server learn from the result.

ERA is softmax(mean / T) of probabilities, not of logits: with T = 0.1 it sharpens, but not to
certainty.

Differences from the paper:

- In the paper all clients and the server have one architecture. Here clients' architectures may
  differ; the server has the first client's.
- `temperature = none` is the paper's simple aggregation (SA), the mean as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.algorithm import ServerModel
from barter.core.nodes import Server
from barter.core.params import Count, Positive
from barter.ops.ensemble import public_images, reduce_entropy
from barter.ops.fit import Recipe, sgd

__all__ = ["DSFL"]


@dataclass(frozen=True, kw_only=True)
class DSFL(PublicDistillation):
    """Clients and server learn a sharpened mean of predictions on public images."""

    server_model = ServerModel("own")

    # T: temperature of ERA; lower values sharpen the mean more, none leaves it as it is
    temperature: Positive | None = 0.1
    epochs: Count = 5  # passes over private data per round
    distil_epochs: Count = 5  # passes over the round's public images
    batch_size: Count = 100  # private images per step
    distil_batch: Count = 100  # public images per step
    lr: Positive = 0.1  # learning rate of SGD, on private and on public images

    @property
    def recipe(self) -> Recipe:
        return sgd(self.lr)

    def compute_targets(self, server: Server, places: Tensor, mean: Tensor) -> Tensor:
        """Sharpen the mean, train the server's model on it and return the sharpened mean.

        Without a temperature, the mean is only normalised to sum to 1.

        Args:
            server: The server, whose model is trained in place.
            places: Indices of the round's public images.
            mean: The clients' mean probabilities, a row per place.
        """
        target = mean / mean.sum(1, keepdim=True)
        if self.temperature is not None:
            target = reduce_entropy(mean, self.temperature)
        track = partial(server.track, "distil")
        self.distil_public(server.model, public_images(server), places, [target], self.loss, track)
        return target
