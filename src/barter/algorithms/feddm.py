"""FedDM: Xiong et al., "FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning", CVPR
2023 (arXiv:2207.09653).

The ancestor of FedAF: each client condenses its images by distribution matching, through networks near the global
model, and the server trains the one model on everybody's condensed images. Features and logits are matched. Networks
are drawn at distance ρ from the global model in a random direction. Left out: the server's ball around the last model,
and differential privacy: condensed images are none, a class of few images can show them. Gradients are clipped as
FedAF's comparison does. The defaults have fewer steps and epochs than the paper; preset "paper" has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.images import Augment
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.ops.condense import Lot, condense, gathered, lot, mean_images, portions
from barter.ops.fit import Trainer, classification, epoch_length, index_batches, sgd

__all__ = ["FedDM"]


@torch.no_grad()
def at_distance(rho: float, model: Classifier) -> None:
    """The parameters, moved by ρ in a random direction."""
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    length = torch.stack([direction.square().sum() for direction in directions]).sum().sqrt()
    for parameter, direction in zip(model.parameters(), directions, strict=True):
        parameter.add_(rho * direction / length)


@dataclass(frozen=True, kw_only=True)
class FedDM(Algorithm):
    """Condensed images go up, one model comes down."""

    one_architecture = True
    crosses = {
        "condense": "up: condensed images of the client's classes",
        "receive": "down: the server's weights",
    }
    presets = {"paper": {"steps": 1000, "server_epochs": 500}}

    fraction: Fraction = 1.0  # share of clients per round
    ipc: Count = 10  # IPC: condensed images per class, at most as many as there are originals
    min_samples: Count = 2  # classes with fewer images are left out: a single image would be sent as it is
    steps: Count = 200  # condensation steps per round; the paper has 1000
    batch_size: Count = 256  # real images of a class per step, and images per step of the server
    image_lr: Positive = 1.0  # learning rate of the images
    image_momentum: NonNegative = 0.5  # of the SGD for images
    clip: Positive = 2.0  # largest norm of the images' gradient; of FedAF's comparison
    rho: Positive = 5.0  # ρ: distance of a drawn network from the global model
    init_images: Count = 1  # originals whose mean a condensed image starts from
    server_epochs: Count = 200  # passes over all condensed images per round; the paper has 500
    server_lr: Positive = 0.01  # η: learning rate of the model
    momentum: NonNegative = 0.9  # of the SGD for the model
    weight_decay: NonNegative = 5e-4  # of the SGD for the model

    def round(self, server: Server, clients: Clients, t: int) -> None:
        lots = clients.sample(self.fraction).run(self.condense)
        self.train(server, lots)
        clients.run(self.receive, server.model.state_dict())

    def condense(self, client: Client) -> Lot:
        sizes = portions(client.data, self.ipc, self.min_samples)
        if not sizes:
            return lot(client.data, sizes, None)
        images = condense(
            client,
            mean_images(client.data, sizes, self.init_images),
            sizes,
            steps=self.steps,
            batch_size=self.batch_size,
            recipe=sgd(self.image_lr, self.image_momentum, clip=self.clip),
            sampled=partial(at_distance, self.rho),
            match_logits=True,
        )
        return lot(client.data, sizes, images)

    def train(self, server: Server, lots: Replies[Lot]) -> None:
        images, labels = gathered(lots.values())
        if not len(labels):
            return
        recipe = sgd(self.server_lr, self.momentum, self.weight_decay)
        trainer = Trainer.of(server.model.train(), recipe)
        loss = partial(classification, server.model, server.spec, Augment())
        batches = index_batches(len(labels), self.batch_size, labels.device)
        for _ in server.track("train", range(self.server_epochs * epoch_length(len(labels), self.batch_size))):
            index = next(batches)
            trainer.step(loss, images[index], labels[index])

    def receive(self, client: Client, w: State) -> None:
        client.model.load_state_dict(w)
