"""FD: Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under
Non-IID Private Data", NeurIPS workshop 2018, Algorithm 1 (arXiv:1811.11479).

No weights are exchanged, and networks may have any architecture.

One round:

1. Each client receives, for every class, the mean prediction of the other clients.
2. It trains on its own data. Its loss is the cross entropy with the label plus γ times the cross
   entropy with the others' mean prediction for the image's class.
3. It uploads the mean prediction of its trained network for each of its classes.

Differences from the paper:

- The paper averages predictions during training; here they are those of the trained network on its
  own images, as in other implementations.
- Probabilities are averaged. HtFLlib uses raw logits as targets of a cross entropy, which has no
  minimum, so training diverges.
- `gamma`: the paper does not give γ; 1 is HtFLlib's.
- The paper's augmentation (FAug) is a separate method and not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm, Crossing
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.evaluation import predict
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.record import Round
from barter.ops.fit import Optimizer, fit_by, recipe_by_name
from barter.ops.prototypes import ByClass, class_means, lookup, mean_table

__all__ = ["FedDistill", "Register", "feddistill_loss"]


class Register(Server):
    """A server that stores every client's last mean predictions."""

    answers: dict[int, ByClass] = {}


def feddistill_loss(
    model: Classifier,
    gamma: float,
    x: Tensor,
    labels: Tensor,
    answers: Tensor,
    known: Tensor,
) -> Tensor:
    """Return cross entropy with labels plus γ times that with others' predictions.

    Args:
        model: The network to train.
        gamma: γ, the weight of the second term.
        x: Images.
        labels: Their classes.
        answers: The others' mean probabilities for images of each class (classes, classes).
        known: 1 for classes with such a prediction, otherwise 0; images of other classes count 0 in
            the second term.
    """
    logits = model(x)
    distilled = -(answers[labels] * F.log_softmax(logits, 1)).sum(1) * known[labels]
    return F.cross_entropy(logits, labels) + gamma * distilled.mean()


@dataclass(frozen=True, kw_only=True)
class FedDistill(Algorithm[Register]):
    """Exchange mean predictions by class; clients learn from each other's."""

    aggregates = ("prototypes",)
    crosses = {
        "learn": Crossing(down="the others' mean predictions by class", up="the client's own"),
    }

    gamma: NonNegative = 1.0  # γ: weight of the others' predictions; not given in the paper
    epochs: Count = 1  # local epochs
    batch_size: Count = 10  # images per step
    # the clients' optimizer; DFFKE's comparison uses adam with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate

    def round(self, server: Register, clients: Clients, t: int) -> None:
        payloads: dict[int, list[ByClass]] = {}
        for k in clients:
            others = [answer for i, answer in server.answers.items() if i != k]
            payloads[k] = [mean_table(others)] if others else []
        server.answers |= clients.scatter(self.learn, payloads)

    def learn(
        self, client: Client, others: list[ByClass]
    ) -> Annotated[ByClass, Named("vector", "classes")]:
        """Train with the others' mean predictions and return the client's own.

        Args:
            client: The client that trains.
            others: The others' mean predictions by class; empty if there are none yet.

        Returns:
            The trained network's mean probabilities on the client's images of each class it has.
        """
        data = client.data
        model = client.model
        classes = data.spec.classes
        answers, known = lookup(others, classes, classes, client.device)
        # The share of the client's images for whose class others have sent a prediction.
        client.report["heard"] = float(known[data.labels].mean())
        fit_by(
            client,
            partial(feddistill_loss, model, self.gamma),
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=recipe_by_name(self.optimizer, self.lr),
            extras=(answers, known),
        )
        index = torch.arange(len(data), device=client.device)
        probabilities = predict(model.eval(), data.batch, index).softmax(1)
        return class_means(probabilities, data.labels)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if not rounds or any(client.get("heard") for r in rounds for client in r.clients.values()):
            return []
        return super().remarks(rounds) or [
            f"no client received a prediction for one of its classes in {len(rounds)} rounds, so "
            "training was local only: no two of them have a class in common"
        ]
