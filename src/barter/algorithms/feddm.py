"""FedDM: Xiong et al., "FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning", CVPR
2023 (arXiv:2207.09653).

The predecessor of FedAF. One round:

1. Each client condenses its images by distribution matching: condensed images have the mean
   features and mean logits of the originals. Both are computed by networks sampled at distance ρ
   from the global model in a random direction. The client uploads its condensed images.
2. The server trains the global model on all clients' condensed images.
3. The server sends the global model to all clients.

Differences from the paper:

- The server's training is not restricted to a ball around the last model.
- Differential privacy is left out. Condensed images are not a privacy mechanism: those of a class
  with few images can show these.
- `clip`: the gradient of images is clipped, as in FedAF's comparison.
- `steps`, `server_epochs`: the default has fewer of both; preset "paper" has the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from barter.algorithms.condensation import Condensation, Condenser, perturb_parameters
from barter.core.algorithm import Crossing
from barter.core.clients import Clients, Replies
from barter.core.images import Augment
from barter.core.nodes import Server
from barter.core.params import Momentum, NonNegative, Positive
from barter.ops.condense import Lot, concatenate_lots
from barter.ops.fit import classification
from barter.ops.trust import trusted_sets

__all__ = ["FedDM"]


@dataclass(frozen=True, kw_only=True)
class FedDM(Condensation):
    """Clients upload condensed images; the server trains one model on them.

    The clients receive the model.
    """

    aggregates = ("sets",)
    crosses = {
        "condense": Crossing(up="condensed images of the client's classes"),
        "receive": Crossing(down="the server's weights"),
    }
    presets = {"paper": {"steps": 1000, "server_epochs": 500}}

    # -- FedDM's own fields

    rho: Positive = 5.0  # ρ: distance of a sampled network from the global model
    image_momentum: Momentum = 0.5  # momentum of the SGD for images
    weight_decay: NonNegative = 5e-4  # weight decay of the SGD for the model

    def round(self, server: Server, clients: Clients, t: int) -> None:
        lots = clients.sample(self.fraction).run(self.condense)
        self.train(server, lots)
        clients.run(self.receive, server.model.state_dict())

    def condense(self, client: Condenser) -> Lot:
        """Condense the client's images by matching mean features and logits.

        They are returned as bytes. See `condense_for_upload`.
        """
        return self.condense_for_upload(
            client, self.image_momentum, partial(perturb_parameters, self.rho), match_logits=True
        )

    def train(self, server: Server, lots: Replies[Lot]) -> None:
        """Train the server's model on all clients' condensed images.

        A defence may leave clients out (`trusted_sets`). The number of images is reported as
        `condensed`; without images nothing is trained.
        """
        images, labels = concatenate_lots(lots[k] for k in trusted_sets(server, lots))
        server.report["condensed"] = len(labels)
        if len(labels):
            loss = partial(classification, server.model, server.spec, Augment())
            self.learn(
                server, loss, images, labels, terms=["entropy"], weight_decay=self.weight_decay
            )
