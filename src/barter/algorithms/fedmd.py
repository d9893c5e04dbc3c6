"""FedMD: Li & Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS workshop 2019, Algorithm 1
(arXiv:1910.03581).

Before its first upload, every client trains on labelled public data and then on its own data.

One round:

1. Sampled clients upload their logits on some public images.
2. The server averages the logits.
3. The clients learn to predict the average (digest), and then train on their own data (revisit).

Differences from the paper:

- The paper does not name the loss of the digest; as in the authors' code, it is the mean absolute
  difference of logits.
- `public_epochs`, `private_epochs`: in the code the first training ends when a test accuracy stops
  rising; here it has a fixed number of epochs, fewer than the code's 20 and 25.
- `batch_size`: batches of private data have 32 images also in the revisit, not 5; the paper's
  clients have 18 images each.
- In the paper public and private classes differ, and networks have outputs for both. Here a network
  has the task's outputs only: public labels must be among the task's classes and are interpreted as
  these.
- Public data without labels, or with more classes than the task, are refused unless `public_epochs`
  is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.clients import Clients
from barter.core.contracts import Content
from barter.core.nodes import Client, Server
from barter.core.params import Count, Whole
from barter.ops.ensemble import public_images, require_labels
from barter.ops.fit import fit

__all__ = ["Beginner", "FedMD", "absolute_loss"]


class Beginner(Client):
    """A client that remembers whether its first training is done."""

    begun: bool = False


def absolute_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean absolute difference of logits, over images and classes."""
    return F.l1_loss(logits, target)


@dataclass(frozen=True, kw_only=True)
class FedMD(PublicDistillation[Server, Beginner]):
    """Clients learn the mean of their logits on public images."""

    loss = staticmethod(absolute_loss)

    # passes over labelled public data in the first training; up to 20 in the authors' code
    public_epochs: Whole = 10
    # passes over private data in the first training; up to 25 in the authors' code
    private_epochs: Count = 10
    samples: Count | None = 5000  # public images per round, sampled anew each time; none: all
    distil_batch: Count = 256  # public images per step of the digest
    epochs: Count = 4  # passes over private data in the revisit

    def setup(self, server: Server, clients: Clients) -> None:
        if self.public_epochs:
            remedy = "use public data of the task's classes, or set public_epochs to 0"
            require_labels(public_images(server), "FedMD", remedy)

    def train(self, client: Beginner) -> None:
        """Train on public and then on private data, at the first call only.

        Later rounds train in the revisit of private data.
        """
        if client.begun:
            return
        fit(
            client,
            data=public_images(client),
            epochs=self.public_epochs,
            batch_size=self.batch_size,
            recipe=self.recipe,
        )
        fit(
            client,
            data=client.data,
            epochs=self.private_epochs,
            batch_size=self.batch_size,
            recipe=self.recipe,
        )
        client.begun = True

    def to_predictions(self, logits: Tensor) -> Tensor:
        """Return the logits themselves."""
        return logits

    def learn(
        self, client: Beginner, places: Tensor, target: Annotated[Tensor, Content("logits")]
    ) -> None:
        """Learn the mean logits (digest), then train on private data (revisit)."""
        super().learn(client, places, target)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=self.recipe)
