"""MOON: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1 (arXiv:2103.16257).

FedAvg, with clients that learn to see an image as the server's model sees it, and not as their own did when they last
trained: what all have found counts for more than what one has drifted to. What is compared are the outputs of a
projection head, which every network gets behind its features; the classes are read from them.

- A client's last model is the one of its last training, however long ago. In the first round it is the one that all
  start from, and the contrast pulls nowhere; the authors' code starts from random ones.
- Models that are compared with are in evaluation mode, as in the code.
- Local training is the paper's: SGD with rate 0.01 and momentum 0.9. The code's parser has 0.1 and 5 epochs.
- The paper tunes μ for each task among 0.1, 1, 5 and 10; 1 is the code's. With `mu = 0` it is FedAvg on networks with a
  projection head, which is what to compare with: the head alone changes results.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.compute import lanes
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State
from barter.models.pooled import projected
from barter.ops.fit import fit_by, sgd

__all__ = ["MOON", "contrast", "loss"]


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """-log(g / (g + p)) with g = exp(sim(z, z_glob) / τ) and p = exp(sim(z, z_prev) / τ); a batch's mean (Eq. 3)."""
    nearer = F.cosine_similarity(z, z_glob) - F.cosine_similarity(z, z_prev)
    return F.softplus(-nearer / tau).mean()


def loss(
    model: Classifier,
    glob: Classifier,
    prev: Classifier,
    mu: float,
    tau: float,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
) -> Tensor:
    """Cross entropy, and μ times the contrast between the server's model and the client's last (Eq. 4)."""
    x = prepared(pixels, spec, augment)
    z = model.features(x)
    with torch.no_grad():
        z_glob, z_prev = glob.features(x), prev.features(x)
    return F.cross_entropy(model.logits(z), labels) + mu * contrast(z, z_glob, z_prev, tau)


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    """FedAvg whose clients see images as the server's model does, not as their last one did."""

    epochs: Count = 10  # E: local epochs
    batch_size: Count = 64  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD
    momentum: NonNegative = 0.9  # of SGD
    weight_decay: NonNegative = 1e-5  # of SGD
    mu: NonNegative = 1.0  # μ: how much the contrast counts
    tau: Positive = 0.5  # τ: temperature of the contrast
    projection: Count = 256  # outputs of the projection head

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        return projected(network, self.projection)

    def client_update(self, client: Client, w: State) -> State:
        data, model = client.data, client.model
        prev = frozen("previous", client)
        model.load_state_dict(w)
        by = partial(
            loss, model, frozen("start", client), prev, self.mu, self.tau, data.spec, data.augment
        )
        recipe = sgd(self.lr, self.momentum, self.weight_decay)
        fit_by(client, by, epochs=self.epochs, batch_size=self.batch_size, recipe=recipe)
        return model.state_dict()


def frozen(name: str, client: Client) -> Classifier:
    """The client's network as it is now, to compare with."""
    return (
        lanes.keep((name, client.architecture), copy.deepcopy(client.model))
        .eval()
        .requires_grad_(False)
    )
