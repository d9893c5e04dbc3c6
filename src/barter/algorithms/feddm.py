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

from barter.algorithms.condensation import Condensation, Condenser
from barter.core.clients import Clients, Replies
from barter.core.images import Augment
from barter.core.model import Classifier
from barter.core.nodes import Server
from barter.core.params import NonNegative, Positive
from barter.ops.condense import Lot, gathered
from barter.ops.fit import classification

__all__ = ["FedDM"]


@torch.no_grad()
def at_distance(rho: float, model: Classifier) -> None:
    """The parameters, moved by ρ in a random direction."""
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    length = torch.stack([direction.square().sum() for direction in directions]).sum().sqrt()
    for parameter, direction in zip(model.parameters(), directions, strict=True):
        parameter.add_(rho * direction / length)


@dataclass(frozen=True, kw_only=True)
class FedDM(Condensation):
    """Condensed images go up, one model comes down."""

    crosses = {
        "condense": "up: condensed images of the client's classes",
        "receive": "down: the server's weights",
    }
    presets = {"paper": {"steps": 1000, "server_epochs": 500}}

    rho: Positive = 5.0  # ρ: distance of a drawn network from the global model
    image_momentum: NonNegative = 0.5  # of the SGD for images
    weight_decay: NonNegative = 5e-4  # of the SGD for the model

    def round(self, server: Server, clients: Clients, t: int) -> None:
        lots = clients.sample(self.fraction).run(self.condense)
        self.train(server, lots)
        clients.run(self.receive, server.model.state_dict())

    def condense(self, client: Condenser) -> Lot:
        return self.condensed(
            client, self.image_momentum, partial(at_distance, self.rho), match_logits=True
        )

    def train(self, server: Server, lots: Replies[Lot]) -> None:
        images, labels = gathered(lots.values())
        server.report["condensed"] = len(labels)
        if len(labels):
            loss = partial(classification, server.model, server.spec, Augment())
            self.learn(
                server, loss, images, labels, terms=["entropy"], weight_decay=self.weight_decay
            )
