"""DS-FL: Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient
Collaborative Training with Non-IID Private Data", IEEE Transactions on Mobile Computing 2021, Algorithm 1
(arXiv:2008.06180).

Clients train on their own data and say their predictions on some unlabelled public images. Their mean is unsure where
clients know different classes, so the server makes it surer (entropy reduction, ERA); the clients and a model of the
server's learn from the result.

- ERA is softmax(mean / T) of probabilities, not of logits: with T = 0.1 it sharpens, though not to certainty.
- All clients and the server have one network in the paper. Here clients' may differ; the server's is the first's.
- `temperature = none` is the paper's simple aggregation (SA), the mean as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.nodes import Server
from barter.core.params import Count, Positive
from barter.ops.ensemble import public_images, sharpened
from barter.ops.fit import Recipe, sgd

__all__ = ["DSFL"]


@dataclass(frozen=True, kw_only=True)
class DSFL(PublicDistillation):
    """Predictions on public images go up, a surer mean of them comes down."""

    global_model = True

    # T of ERA: the lower, the surer the mean is made; none leaves it as it is
    temperature: Positive | None = 0.1
    epochs: Count = 5  # passes over private data per round
    distil_epochs: Count = 5  # passes over the round's public images
    batch_size: Count = 100  # private images per step
    distil_batch: Count = 100  # public images per step
    lr: Positive = 0.1  # learning rate of SGD, on private and on public images

    @property
    def recipe(self) -> Recipe:
        return sgd(self.lr)

    def decided(self, server: Server, places: Tensor, mean: Tensor) -> Tensor:
        target = (
            mean / mean.sum(1, keepdim=True)
            if self.temperature is None
            else sharpened(mean, self.temperature)
        )
        track = partial(server.track, "distil")
        self.taught(server.model, public_images(server), places, [target], self.loss, track)
        return target
