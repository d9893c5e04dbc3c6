"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2 (arXiv:1812.06127).

FedAvg, with clients held near the server's model while they train: whoever has odd data does not run off with it.

The paper tunes μ for each task, among 0.001, 0.01, 0.1 and 1. Its clients that are too slow for all epochs are not
here: everyone does the same work.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.core import lanes
from barter.core.images import Augment, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import NonNegative
from barter.ops.fit import classification, fit_by, sgd

__all__ = ["FedProx", "loss"]


def loss(
    model: Classifier, start: Classifier, mu: float, spec: Spec, augment: Augment, pixels: Tensor, labels: Tensor
) -> Tensor:
    """Cross entropy, and μ/2 times the square of the way that the weights have gone (Eq. 2)."""
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    gone = torch.cat([(w - w_t).flatten() for w, w_t in pairs])
    return classification(model, spec, augment, pixels, labels)[0] + mu / 2 * gone.square().sum()


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose clients stay near the server's model."""

    mu: NonNegative = 0.01  # μ: how much going away costs

    def train(self, client: Client) -> None:
        data, model = client.data, client.model
        start = lanes.keep(("start", client.architecture), copy.deepcopy(model)).requires_grad_(False)
        near = partial(loss, model, start, self.mu, data.spec, data.augment)
        fit_by(client, near, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
