"""MHAT: Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning",
Information Sciences 2021.

Clients train on their own data and say their predictions on some labelled public images. The server trains a model of
its own on the labels and on the mean prediction, and tells what that model predicts; the clients learn from this.

- No code of the authors is public, and no settings are known here: those below are ours.
- The auxiliary model goes on from round to round. Its network is the first client's.
- Public data without labels, or of more classes than the task has, are refused: `dsfl` needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.public import PublicDistillation
from barter.core.clients import Clients
from barter.core.evaluation import predict
from barter.core.nodes import Server
from barter.core.params import Count, NonNegative
from barter.ops.ensemble import public_images, require_labels, soft_loss

__all__ = ["MHAT", "auxiliary_loss"]


def auxiliary_loss(lam: float, logits: Tensor, mean: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the labels and, λ times, with the clients' mean prediction."""
    return F.cross_entropy(logits, labels) + lam * soft_loss(logits, mean)


@dataclass(frozen=True, kw_only=True)
class MHAT(PublicDistillation):
    """Predictions on public images go up, those of a model that learned from them come down."""

    global_model = True

    lam: NonNegative = 1.0  # λ: how much the clients' predictions count beside the labels
    epochs: Count = 5  # passes over private data per round
    # passes over the round's public images, of the server and of the clients
    distil_epochs: Count = 5

    def setup(self, server: Server, clients: Clients) -> None:
        require_labels(
            public_images(server),
            "MHAT",
            "take data of the task's classes, or dsfl, which needs no labels",
        )

    def decided(self, server: Server, places: Tensor, mean: Tensor) -> Tensor:
        images, track = public_images(server), partial(server.track, "auxiliary")
        targets = [mean / mean.sum(1, keepdim=True), images.labels[places]]
        self.taught(server.model, images, places, targets, partial(auxiliary_loss, self.lam), track)
        return self.said(predict(server.model.eval(), images.batch, places))
