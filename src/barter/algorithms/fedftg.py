"""FedFTG: Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning",
CVPR 2022, Algorithm 1 (arXiv:2203.09249).

FedAvg, and then the server fine-tunes the average: a generator looks for images on which the average differs most from
the clients' models (hard samples), and the average learns what they say of them. Labels are drawn as often as they
occur, and a client counts for an image as much as it has of the label's images (class-level ensemble).

- The gap that the generator seeks is the mean absolute difference of logits, and gradients go through the average
  only; the average learns by cross entropy with the weighted mean of the clients' predictions. Both as in the authors'
  code, which also divides the latter by the number of classes: `global_lr` is the code's 0.1 over 10.
- The code multiplies the mean cross entropy by a client's mean weight, so that a client who never saw a label is asked
  about it all the same. Here each image is weighted, as the paper has it.
- The generator's loss sums over the clients in one step; the code takes a step for each of them, one turn after the
  other. Noise and labels are drawn anew in each step, in the code once for all steps of an iteration.
- The code's generator has a linear layer each for noise and label, here one for both; the rest is the same network.
- The average keeps its normalisation statistics while it is tuned. In the code it takes those of generated images.
- Local training is FedAvg's (paper: batches of 50, rate 0.1 falling by 0.2 % a round, weight decay 0.001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.core.clients import Clients
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import Decoder
from barter.ops.average import average
from barter.ops.ensemble import soft_loss
from barter.ops.fit import adam, sgd
from barter.ops.synthesis import (
    Artist,
    Ensemble,
    Player,
    Teacher,
    assembled,
    collapsed,
    diversity,
    duel,
    exhibited,
    fidelity_by_label,
    label_weights,
    named,
    painted,
    painter,
    put_away,
)

__all__ = ["FedFTG", "global_loss", "hard_samples"]


def hard_samples(
    generator: Decoder,
    ensemble: Ensemble,
    model: Classifier,
    spec: Spec,
    lam_cls: float,
    lam_dis: float,
    z: Tensor,
    y: Tensor,
    weights: Tensor,
) -> Tensor:
    """The generator's loss: minus the gap between model and clients, λ_cls times fidelity, λ_dis times diversity."""
    x = painted(generator, named(z, y, spec.classes), spec)
    said, known = ensemble.said(x).float(), model(x).float()
    gap: Tensor = (weights * (known - said.detach()).abs().mean(2)).sum(0).mean()
    return (
        lam_cls * fidelity_by_label(said, y, weights)
        + lam_dis * diversity(x.float(), z, norm=1)
        - gap
    )


def global_loss(
    generator: Decoder,
    ensemble: Ensemble,
    model: Classifier,
    spec: Spec,
    z: Tensor,
    y: Tensor,
    weights: Tensor,
) -> Tensor:
    """Cross entropy with the clients' predictions, each of whom counts by what it knows of the label."""
    with torch.no_grad():
        x = painted(generator, named(z, y, spec.classes), spec)
        target = (weights[:, :, None] * ensemble.said(x).float().softmax(2)).sum(0)
    return soft_loss(model(x).float(), target)


@dataclass(frozen=True, kw_only=True)
class FedFTG(FedAvg):
    """FedAvg whose server fine-tunes the average on images that it finds hard."""

    replicas = True
    crosses = {
        "learn": "down: the server's weights; up: the client's weights, how many images of each class"
    }

    iterations: Count = 10  # I: times that generator and model are trained in turn
    # I_g: steps of the generator in each; one for each client in the authors' code
    generator_steps: Count = 5
    global_steps: Count = 5  # I_d: steps of the model in each
    samples: Count = 50  # B: generated images per step
    noise: Count = 100  # width of the noise; 256 for 100 classes in the authors' code
    generator_lr: Positive = 0.01  # η_g: Adam's learning rate of the generator
    global_lr: Positive = 0.01  # η: SGD's learning rate of the model
    global_weight_decay: NonNegative = 1e-3  # of that SGD
    lam_cls: NonNegative = 1.0  # λ_cls: how much it counts that clients see the label
    lam_dis: NonNegative = 1.0  # λ_dis: how much diversity counts

    @classmethod
    def parties(cls) -> tuple[type[Server], type[Client]]:
        return Artist, Client

    def round(self, server: Server, clients: Clients, t: int) -> None:
        updates = clients.sample(self.fraction).run(self.learn, server.model.state_dict())
        weights = updates.each(lambda _, update: update["weights"])
        server.model.load_state_dict(average(weights, by=self.average))
        counts = torch.stack([update["counts"] for update in updates.values()])
        self.tune(server, assembled(server, weights), *label_weights(counts.float(), 0.0))

    def learn(self, client: Client, w: State) -> Teacher:
        return {"weights": self.client_update(client, w), "counts": client.data.class_counts()}

    def tune(self, server: Server, ensemble: Ensemble, shares: Tensor, p: Tensor) -> None:
        """Generator and model in turn, from what each client has of each class and how often classes occur."""
        assert isinstance(server, Artist)
        model, spec = server.model, server.spec
        generator = painter(server, self.noise + spec.classes)
        seek = partial(hard_samples, generator, ensemble, model, spec, self.lam_cls, self.lam_dis)
        learn = partial(global_loss, generator, ensemble, model, spec)

        def draw() -> list[Tensor]:
            z = torch.randn(self.samples, self.noise, device=server.device)
            y = torch.multinomial(p, self.samples, replacement=True)
            return [z, y, shares[:, y]]

        artist = Player(generator, adam(self.generator_lr), seek, draw, self.generator_steps)
        recipe = sgd(self.global_lr, weight_decay=self.global_weight_decay)
        duel(
            server,
            artist,
            Player(model, recipe, learn, draw, self.global_steps),
            self.iterations,
            training=False,
        )
        z, y, _ = draw()
        put_away(server, generator, named(z, y, spec.classes), y)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapsed(rounds, "a higher lam_dis may help")

    def creations(
        self, party: Server | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        classes = party.spec.classes if isinstance(party, Server) else party.data.spec.classes
        y = torch.arange(self.samples, device=party.device) % classes
        z = torch.randn(self.samples, self.noise, device=party.device)
        return exhibited(party, named(z, y, classes), y, wanted)
