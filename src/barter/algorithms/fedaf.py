"""FedAF: Wang et al., "An Aggregation-Free Federated Learning for Tackling Data Heterogeneity", CVPR 2024
(arXiv:2404.18962).

Clients send no weights. Each condenses its images into a few per class that have the same mean features, held to what
all clients together think of the class; the server trains the one model on everybody's condensed images, and on the
soft labels that their originals had.

Where the paper is silent or at odds with itself:

- Eqs. 8 and 12 divide by K. Here the mean is over the clients that hold a class; one that nobody holds adds no term.
- The sliced Wasserstein distance of Eq. 10 compares single points, where it is ‖u - v‖² / C whatever the directions.
  That is the default; `projections = n` draws directions.
- Eq. 17 "in each step": a network drawn anew for each step; statistics of normalisation stay the global model's.
- Images start as means of m = 5 originals, anew in each round. Neither number nor renewal is in the paper.
- The temperature τ is nowhere given; 2 is what others use.
- Eq. 15 is the mean over the classes of a batch, from the means of their logits in it.
- Its byte counts (Table 7) come out if only classes with at least IPC images are condensed (`min_samples = ipc`).
- All clients are sent the trained model at the end of a round, not those that take part at the start of the next. With
  everybody taking part it is the same bytes, and the record of a round shows the model of that round.

Condensed images are no privacy mechanism: a class of few images can show them.

Preset "paper" is CIFAR-10's. The default has fewer images per class and fewer steps, for small data and a CPU, keeps
small classes, and has CIFAR-100's learning rate of images: with CIFAR-10's the images diverge on digits once the model
is trained (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.evaluation import predict
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.ops.condense import (
    Collaboration,
    Lot,
    averaging,
    condense,
    gathered,
    labels_of,
    lot,
    mean_images,
    portions,
    redrawn,
)
from barter.ops.fit import Trainer, epoch_length, index_batches, sgd

__all__ = ["Condenser", "FedAF"]


class Means(TypedDict):
    """The mean logits of some classes."""

    classes: Tensor
    logits: Tensor


class Labelled(Lot):
    """Condensed images, and the soft labels of the originals, class by class."""

    soft: Tensor


class Condenser(Client):
    """A client that condenses its images."""

    images: list[Tensor] = []  # its last condensed ones, where a warm start begins


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
    model: Classifier, spec: Spec, weight: float, tau: float, pixels: Tensor, labels: Tensor, r: Tensor, known: Tensor
) -> Tensor:
    """Cross entropy, and the distance from the soft labels of the originals (Eqs. 13 to 15)."""
    logits = model(prepared(pixels, spec, Augment())).float()
    loss = F.cross_entropy(logits, labels)
    if not weight:
        return loss
    means = averaging(labels, torch.arange(spec.classes, device=labels.device))
    present = (means.sum(1) > 0).float() * known
    apart = symmetric_kl(r.clamp_min(1e-12).log(), F.log_softmax(means @ logits / tau, 1))
    return loss + weight * (apart * present).sum() / present.sum().clamp_min(1)


def mean_by_class(classes: int, parts: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """For every class the mean over the clients that hold it, and 1 where somebody does."""
    rows = torch.cat([rows for _, rows in parts.values()])
    held = torch.cat([held for held, _ in parts.values()])
    mean = averaging(held, torch.arange(classes, device=held.device))
    return mean @ rows, (mean.sum(1) > 0).float()


@dataclass(frozen=True, kw_only=True)
class FedAF(Algorithm[Server, Condenser]):
    """Condensed images go up, one model comes down; nothing is averaged."""

    one_architecture = True
    crosses = {
        "summarise": "up: the mean logits of the client's classes",
        "condense": "down: everybody's mean logits; up: condensed images of the client's classes, and soft labels",
        "receive": "down: the server's weights",
    }
    presets = {
        "paper": {"ipc": 50, "min_samples": 50, "steps": 1000, "image_lr": 1.0},
    }

    fraction: Fraction = 1.0  # share of clients per round
    ipc: Count = 10  # IPC: condensed images per class, at most as many as there are originals; the paper has 50
    min_samples: Count = 2  # classes with fewer images are left out; as many as ipc in the paper, by its byte counts
    steps: Count = 200  # condensation steps per round; the paper has 1000
    batch_size: Count = 256  # real images of a class per step, and images per step of the server
    image_lr: Positive = 0.1  # learning rate of the images; the paper has 1.0, CIFAR-100 0.1, Fashion-MNIST 0.2
    momentum: NonNegative = 0.9  # of the SGD for images and for the model
    lambda_loc: NonNegative = 1e-4  # λ_loc: weight of the collaborative term; 1e-3 for Fashion-MNIST, 0 is without CDC
    lambda_glob: NonNegative = 0.01  # λ_glob: weight of knowledge matching; 2.0 for Fashion-MNIST, 0 is without LGKM
    gamma: Fraction = 0.9  # γ: share of the global model in the re-sampled one
    tau: Positive = 2.0  # τ: temperature of the soft labels; not in the paper
    projections: Count | None = None  # directions of the sliced Wasserstein distance; none is its closed form
    init_images: Count = 5  # m: originals whose mean a condensed image starts from; not in the paper
    warm_start: bool = False  # start from the last round's condensed images; not in the paper
    server_epochs: Count = 500  # passes over all condensed images per round
    server_lr: Positive = 1e-3  # η: learning rate of the model

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
        data, own = client.data, self.summarise(client)
        sizes = portions(data, self.ipc, self.min_samples)
        images = None
        if sizes:
            start = mean_images(data, sizes, self.init_images)
            images = condense(
                client,
                client.images[0] if self.warm_start and client.images else start,
                sizes,
                steps=self.steps,
                batch_size=self.batch_size,
                recipe=sgd(self.image_lr, self.momentum),
                sampled=partial(interpolated, self.gamma),
                collaboration=self.collaboration(client, torch.tensor(list(sizes), device=client.device), shared),
            )
        client.images = [] if images is None else [images]
        given = lot(data, sizes, images)
        soft = F.softmax(own["logits"] / self.tau, 1)  # r_k,c of Eq. 11, of the model as it was sent
        return {**given, "soft": soft[torch.isin(own["classes"], given["classes"])]}

    def creations(self, party: Server | Condenser, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Condenser) or not party.images:
            return None
        labels = labels_of(portions(party.data, self.ipc, self.min_samples), party.device)
        chosen = wanted(labels)
        return labels[chosen], party.images[0][chosen]

    def collaboration(self, client: Condenser, classes: Tensor, shared: Means) -> Collaboration:
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
        r, known = mean_by_class(
            server.spec.classes, {k: (given["classes"], given["soft"]) for k, given in lots.items()}
        )
        trainer = Trainer.of(server.model.train(), sgd(self.server_lr, self.momentum))
        loss = partial(global_loss, server.model, server.spec, self.lambda_glob, self.tau)
        batches = index_batches(len(labels), self.batch_size, labels.device)
        for _ in server.track("train", range(self.server_epochs * epoch_length(len(labels), self.batch_size))):
            index = next(batches)
            trainer.step(loss, images[index], labels[index], r, known)

    def receive(self, client: Condenser, w: State) -> None:
        client.model.load_state_dict(w)
