"""FML: Shen et al., "Federated Mutual Learning: A Collaborative Machine Learning Method for Heterogeneous Data, Models,
and Objectives", Frontiers of Information Technology & Electronic Engineering 2023, Algorithm 1 (arXiv:2006.16765).

Every client has a network of its own, which never leaves it, and a copy of a small shared network
(the meme model).

One round:

1. Sampled clients receive the shared network.
2. A client trains both networks on its data; each also learns from the other's predictions.
3. The server averages the shared networks as in FedAvg.

Differences from the paper:

- `alpha`, `beta`: 0.5 as in the authors' code. HtFLlib sets both to 1, so that predictions have no
  weight and training is local only.
- KL is summed over classes and averaged over images. HtFLlib's default also divides by the number
  of classes.
- `batch_size`: 32; 128 in the code, whose clients have thousands of images.
- `lr`: constant; in the code it falls.

As in the code, gradients do not flow into the predictions that a network learns from. The client's
accuracy is that of its own network; that of the shared network is the server's, `server.global` in
the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.core.algorithm import Crossing, ServerModel
from barter.core.contracts import Weights
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Fraction, Momentum, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.ops.distill import kl
from barter.ops.fit import Optimizer, fit_by, recipe_by_name
from barter.ops.mutual import companion

__all__ = ["FML", "fml_loss"]


def fml_loss(
    own: Classifier,
    shared: Classifier,
    alpha: float,
    beta: float,
    x: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return the sum of both networks' losses: cross entropy and KL(other ‖ network).

    The other network's prediction is constant in a divergence.

    Args:
        own: The client's network.
        shared: The shared network.
        alpha: α, the weight of the labels for the client's network; KL has 1 - α.
        beta: β, the same for the shared network.
        x: Images.
        labels: Their classes.
    """
    p = own(x).float()
    q = shared(x).float()
    own_loss = alpha * F.cross_entropy(p, labels) + (1 - alpha) * kl(q.detach(), p)
    return own_loss + beta * F.cross_entropy(q, labels) + (1 - beta) * kl(p.detach(), q)


@dataclass(frozen=True, kw_only=True)
class FML(FedAvg):
    """Average a small shared model; each client's network and its copy co-train."""

    primary = "clients"
    crosses = {
        "client_update": Crossing(down="the shared model's weights", up="the trained weights"),
    }

    shared: str = "small-cnn"  # the shared network: a name of the zoo, or package.module:function
    # α: weight of the labels for the client's own network; the shared one's predictions have 1 - α
    alpha: Fraction = 0.5
    beta: Fraction = 0.5  # β: the same for the shared network
    batch_size: Count = 32  # B: images per step
    # the clients' optimizer; DFFKE's comparison uses adam with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate
    momentum: Momentum = 0.9  # momentum of SGD

    @property
    def server_model(self) -> ServerModel:  # type: ignore[override]  # FedAvg's is a constant
        return ServerModel("own", self.shared)

    def client_update(self, client: Client, w: State) -> Annotated[State, Weights("server")]:
        """Train both networks on the client's data and return the shared one's weights.

        Args:
            client: The client, whose own network is trained in place.
            w: The weights from which the shared network starts.
        """
        shared = companion(client, self.shared, w)
        fit_by(
            client,
            partial(fml_loss, client.model, shared, self.alpha, self.beta),
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=recipe_by_name(self.optimizer, self.lr, self.momentum, self.weight_decay),
            also=[shared],
        )
        return shared.state_dict()

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if self.alpha != 1:
            return []
        return [
            "alpha=1: the clients' own networks were trained locally only; with a lower alpha they also "
            "learn from the shared network"
        ]
