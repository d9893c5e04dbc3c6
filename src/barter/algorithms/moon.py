"""MOON: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1 (arXiv:2103.16257).

FedAvg whose clients learn features that are similar to those of the server's model and dissimilar
to those of their own previous model, which counteracts drift.

One round:

1. The server samples a fraction of the clients and sends them its weights.
2. Each client minimises cross entropy plus μ times a contrastive loss (Eqs. 3 and 4). It compares
   the outputs of a projection head, which every network gets after its features and from which the
   classes are predicted.
3. The server averages the weights as in FedAvg.

Differences from the paper:

- A client's previous model is the one of its last training, however many rounds ago. In the first
  round it is the initial model, which all clients share, so that the contrastive loss has no
  gradient; in the authors' code previous models start as random ones.
- `lr`, `momentum`, `epochs`: the paper's, SGD with rate 0.01 and momentum 0.9. The code's parser
  has 0.1 and 5 epochs.
- `mu`: the paper tunes μ for each task among 0.1, 1, 5 and 10; 1 is the code's. With `mu = 0` the
  method is FedAvg on networks with a projection head. Compare with that: the head by itself changes
  results.

As in the code, the models that are compared with are in evaluation mode.
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
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Momentum, NonNegative, Positive
from barter.core.payload import State
from barter.models.pooled import add_projection_head
from barter.ops.fit import fit_by, sgd

__all__ = ["MOON", "contrast", "moon_loss"]


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return the contrastive loss (Eq. 3), averaged over a batch.

    It is -log(g / (g + p)) with g = exp(sim(z, z_glob) / τ) and p = exp(sim(z, z_prev) / τ), where
    sim is the cosine similarity.

    Args:
        z: Features of the model that is trained.
        z_glob: Features of the server's model.
        z_prev: Features of the client's previous model.
        tau: τ, the temperature.
    """
    difference = F.cosine_similarity(z, z_glob) - F.cosine_similarity(z, z_prev)
    return F.softplus(-difference / tau).mean()


def moon_loss(
    model: Classifier,
    glob: Classifier,
    prev: Classifier,
    mu: float,
    tau: float,
    x: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return cross entropy plus μ times the contrastive loss (Eq. 4).

    Args:
        model: The model to train.
        glob: The server's model.
        prev: The client's previous model.
        mu: μ, the weight of the contrastive loss.
        tau: τ, its temperature.
        x: Images.
        labels: Their classes.
    """
    z = model.features(x)
    with torch.no_grad():
        z_glob = glob.features(x)
        z_prev = prev.features(x)
    return F.cross_entropy(model.logits(z), labels) + mu * contrast(z, z_glob, z_prev, tau)


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    """FedAvg with a contrastive loss that keeps features near the global model's."""

    epochs: Count = 10  # E: local epochs
    batch_size: Count = 64  # B: images per step
    lr: Positive = 0.01  # η: learning rate of SGD
    momentum: Momentum = 0.9  # momentum of SGD
    weight_decay: NonNegative = 1e-5  # weight decay of SGD
    mu: NonNegative = 1.0  # μ: weight of the contrastive loss
    tau: Positive = 0.5  # τ: temperature of the contrastive loss
    projection: Count = 256  # number of outputs of the projection head

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        return add_projection_head(network, self.projection)

    def client_update(self, client: Client, w: State) -> State:
        """Train the server's weights with the contrastive loss and return the result.

        The previous model of the loss is the client's before it loads `w`.
        """
        model = client.model
        prev = frozen_copy("previous", client)
        model.load_state_dict(w)
        glob = frozen_copy("start", client)
        fit_by(
            client,
            partial(moon_loss, model, glob, prev, self.mu, self.tau),
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum, self.weight_decay),
        )
        return model.state_dict()


def frozen_copy(name: str, client: Client) -> Classifier:
    """Return a frozen copy of the client's current network, in evaluation mode.

    Args:
        name: The name under which the copy is kept for CUDA graphs.
        client: The client.
    """
    network = lanes.keep((name, client.architecture), copy.deepcopy(client.model))
    return network.eval().requires_grad_(False)
