"""FedAF: Wang et al., "An Aggregation-Free Federated Learning for Tackling Data Heterogeneity", CVPR 2024
(arXiv:2404.18962).

Clients send no weights. Each condenses its images into a few per class that have the same mean features, held to what
all clients together think of the class; the server trains the one model on everybody's condensed images, and on the
soft labels that their originals had.

Where the paper is silent or at odds with itself:

- Eqs. 8 and 12 divide by K. Here the mean is over the clients that hold a class; one that nobody holds adds no term.
- The sliced Wasserstein distance of Eq. 10 compares single points, where it is ‖u - v‖² / C whatever the directions.
  That is the default; `projections = n` draws directions.
- Eq. 17 "in each step": a network drawn anew for each step; statistics of normalisation stay the global model's. The
  collaborative term asks the global model itself: the mean logits that it is compared with are that model's.
- Images start anew in each round, and pixels stay between black and white: others could not be sent as bytes.
- The temperature τ is nowhere given; 2 is what others use.
- Eq. 15 is the mean over the classes of a batch, from the means of their logits in it.
- Its byte counts (Table 7) come out if only classes with at least IPC images are condensed (`min_samples = ipc`).
- All clients are sent the trained model at the end of a round, not those that take part at the start of the next. With
  everybody taking part it is the same bytes, and the record of a round shows the model of that round.

Condensed images are no privacy mechanism: a class of few images can show them.

Preset "paper" is CIFAR-10's. The default has fewer images per class and fewer steps, for small data and a CPU, and
keeps small classes. Its images start as single originals: means of several, as in the paper, show less of them, and
cost a point of accuracy in the first round. Their gradient is clipped. Networks drawn by Eq. 17 stay close to the
global model, so that gradients are small in the first round and a hundred times larger once the model is trained: a
rate alone is too slow for the one or too fast for the others. The weights of both terms are
larger than the paper's for CIFAR-10, at which neither is felt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.condensation import Condensation, Condenser
from barter.core.clients import Clients, Replies
from barter.core.contracts import Classes, Floats
from barter.core.evaluation import predict
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.ops.condense import Collaboration, Lot, averaging, gathered, redrawn

__all__ = ["FedAF"]


class Means(TypedDict):
    """The mean logits of some classes."""

    classes: Annotated[Tensor, Classes("n")]
    logits: Annotated[Tensor, Floats("n", "classes")]


class Labelled(Lot):
    """Condensed images, and the soft labels of the originals, class by class."""

    soft: Annotated[Tensor, Floats("n", "classes")]


@torch.no_grad()
def interpolated(gamma: float, model: Classifier) -> None:
    """γ w + (1 - γ) w̃, with a network w̃ drawn anew (Eq. 17)."""
    w = [parameter.clone() for parameter in model.parameters()]
    redrawn(model)
    for parameter, old in zip(model.parameters(), w, strict=True):
        parameter.lerp_(old, gamma)


def symmetric_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ (KL(p ‖ q) + KL(q ‖ p)) row by row (Eq. 15)."""
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1)


def global_loss(
    model: Classifier,
    spec: Spec,
    weight: float,
    tau: float,
    pixels: Tensor,
    labels: Tensor,
    r: Tensor,
    known: Tensor,
) -> tuple[Tensor, ...]:
    """Cross entropy, and the distance from the soft labels of the originals (Eqs. 13 to 15): all, and each."""
    logits = model(prepared(pixels, spec, Augment())).float()
    entropy = F.cross_entropy(logits, labels)
    if not weight:
        return entropy, entropy
    means = averaging(labels, torch.arange(spec.classes, device=labels.device))
    present = (means.sum(1) > 0).float() * known
    apart = symmetric_kl(r.clamp_min(1e-12).log(), F.log_softmax(means @ logits / tau, 1))
    knowledge = (apart * present).sum() / present.sum().clamp_min(1)
    return entropy + weight * knowledge, entropy, knowledge


def mean_by_class(
    classes: int, parts: Mapping[int, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """For every class the mean over the clients that hold it, and 1 where somebody does."""
    rows = torch.cat([rows for _, rows in parts.values()])
    held = torch.cat([held for held, _ in parts.values()])
    mean = averaging(held, torch.arange(classes, device=held.device))
    return mean @ rows, (mean.sum(1) > 0).float()


@dataclass(frozen=True, kw_only=True)
class FedAF(Condensation):
    """Condensed images go up, one model comes down; nothing is averaged."""

    crosses = {
        "summarise": "up: the mean logits of the client's classes",
        "condense": "down: everybody's mean logits; up: condensed images of the client's classes, and soft labels",
        "receive": "down: the server's weights",
    }
    presets = {
        "paper": {
            "ipc": 50,
            "min_samples": 50,
            "steps": 1000,
            "image_lr": 1.0,
            "clip": None,
            "init_images": 5,
            "lambda_loc": 1e-4,
            "lambda_glob": 0.01,
            "server_epochs": 500,
            "server_lr": 1e-3,
        },
    }

    clip: Positive | None = 0.4  # largest norm of the images' gradient; the paper has none
    # λ_loc: weight of the collaborative term, 0 is without CDC; the paper has 0.0001
    lambda_loc: NonNegative = 10.0
    # λ_glob: weight of knowledge matching, 0 is without LGKM; the paper has 0.01, or 2
    lambda_glob: NonNegative = 1.0
    gamma: Fraction = 0.9  # γ: share of the global model in the re-sampled one
    tau: Positive = 2.0  # τ: temperature of the soft labels; not in the paper
    # directions of the sliced Wasserstein distance; none is its closed form
    projections: Count | None = None
    warm_start: bool = False  # start from the last round's condensed images; not in the paper

    def round(self, server: Server, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        local = active.run(self.summarise)  # Eq. 5
        shared = self.merge(server, local)  # Eq. 8
        lots = active.only(local).run(self.condense, shared)  # Eqs. 10 and 17
        self.train(server, lots)  # Eqs. 12-15
        clients.run(self.receive, server.model.state_dict())

    def summarise(self, client: Condenser) -> Means:
        """V_k."""
        every = torch.arange(len(client.data), device=client.device)
        logits = predict(client.model.eval(), client.data.batch, every)
        classes = client.data.class_counts().nonzero()[:, 0]
        return {"classes": classes, "logits": averaging(client.data.labels, classes) @ logits}

    def merge(self, server: Server, local: Replies[Means]) -> Means:
        """V, for the classes that somebody holds."""
        parts = {k: (means["classes"], means["logits"]) for k, means in local.items()}
        logits, known = mean_by_class(server.spec.classes, parts)
        classes = known.nonzero()[:, 0]
        return {"classes": classes, "logits": logits[classes]}

    def condense(self, client: Condenser, shared: Means) -> Labelled:
        """S_k, as bytes, and R_k."""
        own = self.summarise(client)
        given = self.condensed(
            client,
            self.momentum,
            partial(interpolated, self.gamma),
            start=client.images[0] if self.warm_start and client.images else None,
            collaboration=partial(self.collaboration, client, shared),
        )
        soft = F.softmax(
            own["logits"] / self.tau, 1
        )  # r_k,c of Eq. 11, of the model as it was sent
        return {**given, "soft": soft[torch.isin(own["classes"], given["classes"])]}

    def collaboration(self, client: Condenser, shared: Means, classes: Tensor) -> Collaboration:
        """The collaborative term of Eq. 10 for these classes."""
        v = torch.zeros(client.data.spec.classes, shared["logits"].shape[1], device=client.device)
        v[shared["classes"]] = shared["logits"]
        known = torch.isin(classes, shared["classes"]).float()
        return Collaboration(v[classes], known, self.lambda_loc, self.projections)

    def train(self, server: Server, lots: Replies[Labelled]) -> None:
        """The global model learns from all condensed images, held to the soft labels of the originals."""
        images, labels = gathered(lots.values())
        server.report["condensed"] = len(labels)
        if not len(labels):
            return
        held = {k: (given["classes"], given["soft"]) for k, given in lots.items()}
        loss = partial(global_loss, server.model, server.spec, self.lambda_glob, self.tau)
        terms = ["loss", "entropy", "knowledge"]
        self.learn(
            server, loss, images, labels, *mean_by_class(server.spec.classes, held), terms=terms
        )
