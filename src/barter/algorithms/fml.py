"""FML: Shen et al., "Federated Mutual Learning: A Collaborative Machine Learning Method for Heterogeneous Data, Models,
and Objectives", Frontiers of Information Technology & Electronic Engineering 2023, Algorithm 1 (arXiv:2006.16765).

Every client has a network of its own, which never leaves it, and a copy of a small shared one (the meme model). Both
learn from the client's data and from each other's predictions; the copies are averaged as in FedAvg.

- α and β are 0.5, as in the authors' code. HtFLlib sets both to 1, with which the predictions count nothing and every
  client learns alone.
- Each network learns from the other's predictions, and not the other from it: gradients end there, as in the code.
- KL is summed over classes and averaged over images. HtFLlib's default also divides by the number of classes.
- Batches have 32 images, 128 in the code, whose clients have thousands. Its falling learning rate is not here.
- The client's accuracy is that of its own network; the shared one's is the server's, `server.global` in the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.core.contracts import Weights
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.ops.distill import kl
from barter.ops.fit import Optimizer, by_name, fit_by
from barter.ops.mutual import companion

__all__ = ["FML", "loss"]


def loss(
    own: Classifier,
    shared: Classifier,
    alpha: float,
    beta: float,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
) -> Tensor:
    """Of both networks together: a part cross entropy, the rest KL(the other ‖ itself)."""
    x = prepared(pixels, spec, augment)
    p, q = own(x).float(), shared(x).float()
    of_own = alpha * F.cross_entropy(p, labels) + (1 - alpha) * kl(q.detach(), p)
    return of_own + beta * F.cross_entropy(q, labels) + (1 - beta) * kl(p.detach(), q)


@dataclass(frozen=True, kw_only=True)
class FML(FedAvg):
    """A shared small model is averaged, and every client's own learns with it."""

    primary = "clients"
    one_architecture = False
    global_model = True
    crosses = {"client_update": "down: the shared model's weights; up: the same, trained"}

    shared: str = "small-cnn"  # the shared network: of the zoo, or package.module:function
    alpha: Fraction = 0.5  # α: how much labels count for the client's own network; the rest is the shared one's word
    beta: Fraction = 0.5  # β: the same for the shared network
    batch_size: Count = 32  # B: images per step
    # of clients; adam where DFFKE compares, with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate
    momentum: NonNegative = 0.9  # of SGD

    @property
    def server_network(self) -> str:
        return self.shared

    def client_update(self, client: Client, w: State) -> Annotated[State, Weights("server")]:
        data, shared = client.data, companion(client, self.shared, w)
        mutual = partial(loss, client.model, shared, self.alpha, self.beta, data.spec, data.augment)
        recipe = by_name(self.optimizer, self.lr, self.momentum)
        fit_by(
            client,
            mutual,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=recipe,
            also=[shared],
        )
        return shared.state_dict()

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        alone = "alpha=1: the clients' own networks learned alone; a lower one lets them hear the shared one"
        return [alone] if self.alpha == 1 else []
