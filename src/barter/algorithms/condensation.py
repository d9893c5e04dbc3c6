"""Condensation: what FedDM and FedAF have in common.

Clients condense their images into a few per class, the server trains the one model on everybody's and sends it back.
Where images start, how far they may go in a step and how long the server trains is the same for both, so that what
differs between their results is what differs between the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.ops.condense import (
    Collaboration,
    Lot,
    condense,
    ends,
    labels_of,
    lot,
    mean_images,
    portions,
)
from barter.ops.fit import Trainer, epoch_length, index_batches, sgd
from barter.ops.synthesis import variety

__all__ = ["Condensation", "Condenser"]

ALIKE = 0.1  # of the originals' variety: condensed images with less show one image of a class again and again


class Condenser(Client):
    """A client that condenses its images."""

    images: list[Tensor] = []  # its last condensed ones


@dataclass(frozen=True, kw_only=True)
class Condensation(Algorithm[Server, Condenser]):
    """Condensed images go up, one model comes down."""

    primary = "server"
    one_architecture = True

    fraction: Fraction = 1.0  # share of clients per round
    ipc: Count = 10  # IPC: condensed images per class, at most as many as there are originals; FedAF's paper has 50
    # classes with fewer images are left out; FedAF's paper has as many as ipc (Table 7)
    min_samples: Count = 2
    steps: Count = 200  # condensation steps per round; both papers have 1000
    batch_size: Count = 256  # real images of a class per step, and images per step of the server
    image_lr: Positive = 1.0  # learning rate of the images
    clip: Positive | None = 2.0  # largest norm of the images' gradient
    # m: originals whose mean a condensed image starts from; FedAF's paper takes several
    init_images: Count = 1
    server_epochs: Count = 200  # passes over all condensed images per round; both papers have 500
    # η: learning rate of the model; FedAF's paper has 0.001 for both methods
    server_lr: Positive = 0.01
    momentum: NonNegative = 0.9  # of the SGD for the model; FedAF has it for images too

    def condensed(
        self,
        client: Condenser,
        momentum: float,
        sampled: Callable[[Classifier], None],
        *,
        start: Tensor | None = None,
        match_logits: bool = False,
        collaboration: Callable[[Tensor], Collaboration] | None = None,
    ) -> Lot:
        """What the client gives away, seen through networks as `sampled` makes them; what the record says of it."""
        data = client.data
        sizes, images = portions(data, self.ipc, self.min_samples), None
        if sizes:
            classes = torch.tensor(list(sizes), device=client.device)
            images, terms = condense(
                client,
                mean_images(data, sizes, self.init_images) if start is None else start,
                sizes,
                steps=self.steps,
                batch_size=self.batch_size,
                recipe=sgd(self.image_lr, momentum, clip=self.clip),
                sampled=sampled,
                match_logits=match_logits,
                collaboration=None if collaboration is None else collaboration(classes),
            )
            client.report |= terms
            self.look(client, images, labels_of(sizes, client.device))
        client.images = [] if images is None else [images]
        return lot(data, sizes, images)

    def look(self, client: Condenser, images: Tensor, labels: Tensor) -> None:
        """Note how varied the condensed images are, and the client's own of the same classes."""
        members = [
            (client.data.labels == c).nonzero()[: self.batch_size, 0] for c in torch.unique(labels)
        ]
        own = torch.cat(members)
        client.report |= variety(images, labels)
        told = variety(client.data.batch(own), client.data.labels[own])
        client.report |= {f"own_{name}": value for name, value in told.items()}

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        remarks = []
        if rounds and not any(record.server.get("condensed") for record in rounds):
            way_out = f"no class of a client has {self.min_samples} images, and the model stayed as it was: lower it"
            remarks.append(f"min_samples={self.min_samples}: {way_out}")
        last = {
            k: told
            for record in rounds
            for k, told in record.clients.items()
            if "own_variety" in told
        }
        alike = [k for k, told in last.items() if told["variety"] < ALIKE * told["own_variety"]]
        if alike and self.ipc > 1:
            who = f"client{'s' * (len(alike) > 1)} {', '.join(map(str, sorted(alike)))}"
            way_out = "start each from fewer originals (init_images) or take a smaller image_lr"
            remarks.append(
                f"the condensed images of a class are all but the same at {who}: {way_out}"
            )
        return remarks

    def creations(
        self, party: Server | Condenser, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Condenser) or not party.images:
            return None
        labels = labels_of(portions(party.data, self.ipc, self.min_samples), party.device)
        chosen = wanted(labels)
        return labels[chosen], party.images[0][chosen]

    def learn(
        self,
        server: Server,
        loss: Callable[..., tuple[Tensor, ...]],
        images: Tensor,
        labels: Tensor,
        *beside: Tensor,
        terms: Sequence[str],
        weight_decay: float = 0.0,
    ) -> None:
        """The server's model learns from condensed images, and notes the terms of its loss."""
        trainer = Trainer.of(server.model.train(), sgd(self.server_lr, self.momentum, weight_decay))
        batches = index_batches(len(labels), self.batch_size, labels.device)
        steps, told = (
            self.server_epochs * epoch_length(len(labels), self.batch_size),
            list[Tensor](),
        )
        for step in server.track("train", range(steps)):
            index = next(batches)
            values = trainer.step(loss, images[index], labels[index], *beside)
            if step in (0, steps - 1):
                told.append(torch.stack([value.float() for value in values]))
        server.report |= ends(terms, told)

    def receive(self, client: Condenser, w: State) -> None:
        client.model.load_state_dict(w)
