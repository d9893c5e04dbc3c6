"""FedMD: Li & Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS workshop 2019, Algorithm 1
(arXiv:1910.03581).

Every client first learns from labelled public data, then from its own. In each round all of them say their logits on
some public images, learn to say what they all say on average (digest), and go back to their own data (revisit).

- The paper does not say how the consensus is approached; the authors' code takes mean absolute differences of logits.
- The first training ends when a test accuracy stops to rise, in the code; here after so many epochs, fewer than its 20
  and 25. Batches of private data have 32 images also in the revisit, not 5: the paper's clients have 18 images each.
- In the paper public and private classes differ and networks have outputs for both. Here a network has the task's
  outputs only: public labels must be among them and are taken for what they stand for there.
- Public data without labels, or of more classes than the task has, are refused unless `public_epochs` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Whole
from barter.ops.ensemble import public_images, require_labels
from barter.ops.fit import fit

__all__ = ["Beginner", "FedMD", "absolute_loss"]


class Beginner(Client):
    """A client that knows whether it has begun."""

    begun: bool = False


def absolute_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean absolute difference of logits."""
    return F.l1_loss(logits, target)


@dataclass(frozen=True, kw_only=True)
class FedMD(PublicDistillation[Server, Beginner]):
    """Logits on public images go up, their mean comes down."""

    loss = staticmethod(absolute_loss)

    # first training, passes over labelled public data; up to 20 in the authors' code
    public_epochs: Whole = 10
    private_epochs: Count = 10  # then passes over the client's own; up to 25 in the authors' code
    samples: Count | None = 5000  # public images per round, drawn anew in each; none is all
    distil_batch: Count = 256  # public images per step of the digest
    epochs: Count = 4  # passes over private data in the revisit

    def setup(self, server: Server, clients: Clients) -> None:
        if self.public_epochs:
            otherwise = "take data of the task's classes, or set public_epochs to 0"
            require_labels(public_images(server), "FedMD", otherwise)

    def train(self, client: Beginner) -> None:
        if client.begun:
            return
        for data, epochs in (
            (public_images(client), self.public_epochs),
            (client.data, self.private_epochs),
        ):
            fit(client, data=data, epochs=epochs, batch_size=self.batch_size, recipe=self.recipe)
        client.begun = True

    def said(self, logits: Tensor) -> Tensor:
        return logits

    def learn(self, client: Beginner, places: Tensor, target: Tensor) -> None:
        super().learn(client, places, target)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=self.recipe)
