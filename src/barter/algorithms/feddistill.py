"""FD: Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under
Non-IID Private Data", NeurIPS workshop 2018, Algorithm 1 (arXiv:1811.11479).

Every client tells what it answers to images of each class, on average; the others learn to answer alike. No weights
travel, and networks may be as different as they like.

- The paper averages predictions while it trains; here they are those of the trained network on its own images, as in
  other implementations.
- What is averaged are probabilities. HtFLlib takes raw logits as the targets of a cross entropy, which has no minimum:
  it diverges.
- The paper's weight γ is not given; 1 is HtFLlib's. The augmentation (FAug) is another method and not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.evaluation import predict
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.record import Round
from barter.ops.fit import Optimizer, by_name, fit_by
from barter.ops.prototypes import ByClass, class_means, lookup, mean_of

__all__ = ["FedDistill", "Register", "loss"]


class Register(Server):
    """What every client last answered."""

    answers: dict[int, ByClass] = {}


def loss(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    gamma: float,
    pixels: Tensor,
    labels: Tensor,
    answers: Tensor,
    known: Tensor,
) -> Tensor:
    """Cross entropy with the labels and, γ times, with what others answer to these classes."""
    logits = model(prepared(pixels, spec, augment))
    distilled = -(answers[labels] * F.log_softmax(logits, 1)).sum(1) * known[labels]
    return F.cross_entropy(logits, labels) + gamma * distilled.mean()


@dataclass(frozen=True, kw_only=True)
class FedDistill(Algorithm[Register]):
    """Mean predictions of classes go up, those of the others come down."""

    crosses = {"learn": "down: mean predictions of the others by class; up: the client's own"}

    gamma: NonNegative = 1.0  # γ: how much the others' answers count; not in the paper
    epochs: Count = 1  # local epochs
    batch_size: Count = 10  # images per step
    # of clients; adam where DFFKE compares, with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate

    def round(self, server: Register, clients: Clients, t: int) -> None:
        others = {k: [said for i, said in server.answers.items() if i != k] for k in clients}
        server.answers |= clients.scatter(
            self.learn, {k: [mean_of(said)] if said else [] for k, said in others.items()}
        )

    def learn(
        self, client: Client, others: list[ByClass]
    ) -> Annotated[ByClass, Named("vector", "classes")]:
        data, model, classes = client.data, client.model, client.data.spec.classes
        alike = partial(loss, model, data.spec, data.augment, self.gamma)
        answers = lookup(others, classes, classes, client.device)
        client.report["heard"] = float(
            answers[1][data.labels].mean()
        )  # share of its images of whose class others told
        recipe = by_name(self.optimizer, self.lr)
        fit_by(
            client,
            alike,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=recipe,
            beside=answers,
        )
        everything = torch.arange(len(data), device=client.device)
        return class_means(predict(model.eval(), data.batch, everything).softmax(1), data.labels)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if not rounds or any(client.get("heard") for r in rounds for client in r.clients.values()):
            return []
        apart = "so clients learned alone: no two of them have one in common"
        return super().remarks(rounds) or [
            f"no client heard of a class of its own in {len(rounds)} rounds, {apart}"
        ]
