"""Condensation: the common base of FedDM and FedAF.

Clients condense their images into a few per class. The server trains one global model on all
clients' condensed images and sends it back. Initial images, the limit of a step and the length of
the server's training are the same for both, so that their results differ only by the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm, ServerModel
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Momentum, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.ops.condense import (
    Collaboration,
    Lot,
    condense,
    condensed_labels,
    first_and_last_terms,
    images_per_class,
    mean_images,
    pack_lot,
)
from barter.ops.fit import Trainer, epoch_length, index_batches, sgd
from barter.ops.synthesis import variety

__all__ = ["Condensation", "Condenser", "perturb_parameters"]

# Condensed images whose variety is below this share of the originals' are nearly identical.
ALIKE = 0.1


@torch.no_grad()
def perturb_parameters(rho: float, model: Classifier) -> None:
    """Move a model's parameters, as one vector, by distance ρ in a random direction.

    The parameters are changed in place.
    """
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    length = torch.stack([direction.square().sum() for direction in directions]).sum().sqrt()
    for parameter, direction in zip(model.parameters(), directions, strict=True):
        parameter.add_(rho * direction / length)


class Condenser(Client):
    """A client that condenses its images."""

    images: list[Tensor] = []  # the condensed images of its last round, or empty


@dataclass(frozen=True, kw_only=True)
class Condensation(Algorithm[Server, Condenser]):
    """Clients upload condensed images; the server trains one model on them.

    The clients receive the model.
    """

    primary = "server"
    server_model = ServerModel("shared")

    # -- Condensation and the server's training

    fraction: Fraction = 1.0  # share of clients per round
    # IPC: condensed images per class, at most the number of originals; FedAF's paper has 50
    ipc: Count = 10
    # classes with fewer images are not condensed; equal to ipc in FedAF's paper (Table 7)
    min_samples: Count = 2
    steps: Count = 200  # condensation steps per round; both papers have 1000
    batch_size: Count = 256  # real images of a class per step, and images per step of the server
    image_lr: Positive = 1.0  # learning rate of the images
    clip: Positive | None = 2.0  # largest norm of the images' gradient
    # m: a condensed image is initialised as the mean of m originals; FedAF's paper takes several
    init_images: Count = 1
    # epochs over all condensed images per round; both papers have 500
    server_epochs: Count = 200
    # η: learning rate of the model; FedAF's paper has 0.001 for both methods
    server_lr: Positive = 0.01
    momentum: Momentum = 0.9  # momentum of the SGD for the model; in FedAF for images too

    def condense_for_upload(
        self,
        client: Condenser,
        momentum: float,
        sampled: Callable[[Classifier], None],
        *,
        match_logits: bool = False,
        collaboration: Callable[[Tensor], Collaboration] | None = None,
    ) -> Lot:
        """Condense the client's images, report loss terms and variety; return the upload.

        Classes with fewer than `min_samples` images are left out; without any other, the upload is
        empty and nothing is reported.

        Args:
            client: Its condensed images are also kept in `client.images`; its model stays the same.
            momentum: Momentum of the SGD for images.
            sampled: Changes the network, a copy of the client's, in place before each step.
            match_logits: Match mean logits too, not only mean features.
            collaboration: Called with the condensed classes; returns FedAF's collaborative term.
        """
        data = client.data
        sizes = images_per_class(data, self.ipc, self.min_samples)
        images = None
        if sizes:
            classes = torch.tensor(list(sizes), device=client.device)
            images, terms = condense(
                client,
                mean_images(data, sizes, self.init_images),
                sizes,
                steps=self.steps,
                batch_size=self.batch_size,
                recipe=sgd(self.image_lr, momentum, clip=self.clip),
                sampled=sampled,
                match_logits=match_logits,
                collaboration=None if collaboration is None else collaboration(classes),
            )
            client.report |= terms
            self.report_variety(client, images, condensed_labels(sizes, client.device))
        client.images = [] if images is None else [images]
        return pack_lot(data, sizes, images)

    def report_variety(self, client: Condenser, images: Tensor, labels: Tensor) -> None:
        """Report the variety of condensed images and of originals of their classes.

        The originals are the first `batch_size` images of each class; their measures are named
        own_NAME. See `variety`.
        """
        members = [
            (client.data.labels == c).nonzero()[: self.batch_size, 0] for c in torch.unique(labels)
        ]
        own = torch.cat(members)
        client.report |= variety(images, labels)
        own_variety = variety(client.data.batch(own), client.data.labels[own])
        client.report |= {f"own_{name}": value for name, value in own_variety.items()}

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        remarks = []
        if rounds and not any(record.server.get("condensed") for record in rounds):
            remarks.append(
                f"min_samples={self.min_samples}: no class of any client has "
                f"{self.min_samples} images, so the model was not trained; lower min_samples"
            )
        last_reports = {}
        for record in rounds:
            for k, report in record.clients.items():
                if "own_variety" in report:
                    last_reports[k] = report
        alike = sorted(
            k
            for k, report in last_reports.items()
            if report["variety"] < ALIKE * report["own_variety"]
        )
        if alike and self.ipc > 1:
            names = ", ".join(map(str, alike))
            where = f"client {names}" if len(alike) == 1 else f"clients {names}"
            remarks.append(
                f"the condensed images of a class are nearly identical at {where}: start each "
                "from fewer originals (init_images) or use a smaller image_lr"
            )
        return remarks

    def creations(
        self, party: Server | Condenser, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Condenser) or not party.images:
            return None
        labels = condensed_labels(
            images_per_class(party.data, self.ipc, self.min_samples), party.device
        )
        chosen = wanted(labels)
        return labels[chosen], party.images[0][chosen]

    def learn(
        self,
        server: Server,
        loss: Callable[..., tuple[Tensor, ...]],
        images: Tensor,
        labels: Tensor,
        *extras: Tensor,
        terms: Sequence[str],
        weight_decay: float = 0.0,
    ) -> None:
        """Train the server's model on condensed images and report the terms of its loss.

        The terms at the first and the last step are reported as NAME_start and NAME_end.

        Args:
            server: The server, whose model is trained in place and left in training mode.
            loss: Called with a batch of images, their labels and `extras`; returns the loss to
                minimise, then other values, such as its terms.
            images: Condensed images as bytes, at least one.
            labels: Their classes (N,).
            extras: Tensors that are the same in every step.
            terms: Names of the values that `loss` returns, in order. Values without a name are not
                reported, and names without a value are ignored.
            weight_decay: Weight decay of the SGD.
        """
        trainer = Trainer.of(server.model.train(), sgd(self.server_lr, self.momentum, weight_decay))
        batches = index_batches(len(labels), self.batch_size, labels.device)
        steps = self.server_epochs * epoch_length(len(labels), self.batch_size)
        first_and_last: list[Tensor] = []
        for step in server.track("train", range(steps)):
            index = next(batches)
            values = trainer.step(loss, images[index], labels[index], *extras)
            if step in (0, steps - 1):
                first_and_last.append(torch.stack([value.float() for value in values]))
        server.report |= first_and_last_terms(terms, first_and_last)

    def receive(self, client: Condenser, w: State) -> None:
        """Load the server's weights."""
        client.model.load_state_dict(w)
