"""MHAT: Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning",
Information Sciences 2021.

One round:

1. Sampled clients train on their own data and upload their predictions on some labelled public
   images.
2. The server trains an auxiliary model on the labels and on the mean prediction.
3. The clients learn from the auxiliary model's predictions on the same images.

Differences from the paper:

- No code of the authors is public, and the paper's settings are not known here: all defaults are
  barter's.
- The auxiliary model continues from round to round. Its architecture is the first client's.
- Public data without labels, or with more classes than the task, are refused; `dsfl` needs no
  labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.algorithm import ServerModel
from barter.core.clients import Clients
from barter.core.evaluation import predict
from barter.core.nodes import Server
from barter.core.params import Count, NonNegative
from barter.ops.ensemble import public_images, require_labels, soft_loss

__all__ = ["MHAT", "auxiliary_loss"]


def auxiliary_loss(lam: float, logits: Tensor, mean: Tensor, labels: Tensor) -> Tensor:
    """Return cross entropy with labels plus λ times that with the mean prediction.

    Args:
        lam: λ.
        logits: The server's model's logits (images, classes).
        mean: The clients' mean probabilities (images, classes).
        labels: The public labels (images,).
    """
    return F.cross_entropy(logits, labels) + lam * soft_loss(logits, mean)


@dataclass(frozen=True, kw_only=True)
class MHAT(PublicDistillation):
    """Clients learn from a server model that was trained on their mean prediction."""

    server_model = ServerModel("own")

    lam: NonNegative = 1.0  # λ: weight of the clients' mean prediction, relative to the labels
    epochs: Count = 5  # passes over private data per round
    # passes over the round's public images, by the server and by the clients
    distil_epochs: Count = 5

    def setup(self, server: Server, clients: Clients) -> None:
        require_labels(
            public_images(server),
            "MHAT",
            "use public data of the task's classes, or dsfl, which needs no labels",
        )

    def compute_targets(self, server: Server, places: Tensor, mean: Tensor) -> Tensor:
        """Fit the server's model to the mean and public labels; return its probabilities.

        Args:
            server: The server, whose model is trained in place.
            places: Indices of the round's public images.
            mean: The clients' mean probabilities, not logits, a row per place; rows are rescaled
                to sum to 1.
        """
        images = public_images(server)
        targets = [mean / mean.sum(1, keepdim=True), images.labels[places]]
        loss = partial(auxiliary_loss, self.lam)
        track = partial(server.track, "auxiliary")
        self.distil_public(server.model, images, places, targets, loss, track)
        return self.to_predictions(predict(server.model.eval(), images.batch, places))
