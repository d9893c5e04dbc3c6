"""FedFTG: Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning",
CVPR 2022, Algorithm 1 (arXiv:2203.09249).

After FedAvg's averaging, the server fine-tunes the average.

One round:

1. Sampled clients train the server's weights and upload them, with their class counts.
2. The server averages the weights.
3. In turn, a generator learns to find images on which the average differs most from the clients'
   models (hard samples), and the average learns the clients' predictions on them. Labels are
   sampled by their frequency. For each image, a client's prediction is weighted by the client's
   share of all images with that label (class-level ensemble).

Differences from the paper:

- `global_lr`: the authors' code divides the average's loss by the number of classes, this does not;
  0.01 is the code's 0.1 over 10.
- The code multiplies the mean cross entropy by a client's mean weight, so that a client that never
  saw a label still influences it. Here each image is weighted, as in the paper.
- `generator_steps`: the generator's loss is summed over the clients in one step; the code takes a
  step for each client. Noise and labels are sampled anew in each step, in the code once for all
  steps of an iteration.
- The code's generator has separate linear layers for noise and label, here one for both; otherwise
  it is the same network.
- The average keeps its normalisation statistics during fine-tuning. In the code it adopts those of
  generated images.
- `batch_size`, `lr`: local training is FedAvg's (paper: batches of 50, rate 0.1 falling by 0.2 % a
  round, weight decay 0.001).

As in the code, the difference that the generator maximises is the mean absolute difference of
logits, with gradients through the average only, and the average learns by cross entropy with the
weighted mean of the clients' predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from barter.algorithms.fedavg import FedAvg
from barter.core.algorithm import Crossing
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
from barter.ops.modules import stack_field
from barter.ops.synthesis import (
    Artist,
    Ensemble,
    Player,
    Teacher,
    build_ensemble,
    collapse_remarks,
    diversity,
    fidelity_by_label,
    generate_from_codes,
    images_for_display,
    joint_prediction,
    label_codes,
    label_weights,
    server_generator,
    store_generator,
    train_alternately,
)

__all__ = ["FedFTG", "ensemble_cross_entropy", "hard_sample_loss"]


def hard_sample_loss(
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
    """Return the generator's loss: λ_cls fidelity + λ_dis diversity - gap.

    The gap is the absolute difference between the logits of the server's model and those of a
    client's, averaged over classes, summed over clients by weight, and averaged over images. Its
    gradient flows through the server's model only.

    Args:
        generator: The generator to train.
        ensemble: The clients' models.
        model: The server's model.
        spec: The format of the images.
        lam_cls: λ_cls.
        lam_dis: λ_dis.
        z: The noise.
        y: The labels for which images are generated.
        weights: The weight of each client for each image (clients, images).
    """
    x = generate_from_codes(generator, label_codes(z, y, spec.classes), spec)
    teacher_logits = ensemble.logits_by_model(x).float()
    student_logits = model(x).float()
    differences = (student_logits - teacher_logits.detach()).abs().mean(2)
    gap: Tensor = (weights * differences).sum(0).mean()
    return (
        lam_cls * fidelity_by_label(teacher_logits, y, weights)
        + lam_dis * diversity(x.float(), z, norm=1)
        - gap
    )


def ensemble_cross_entropy(
    generator: Decoder,
    ensemble: Ensemble,
    model: Classifier,
    spec: Spec,
    z: Tensor,
    y: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the model's cross entropy with the clients' joint prediction.

    Both predict the classes of generated images. The joint prediction is the weighted sum of the
    clients' probabilities, or their robust aggregate. Gradients flow through the server's model
    only.

    Args:
        generator: The generator of images.
        ensemble: The clients' models.
        model: The server's model, which is trained.
        spec: The format of the images.
        z: The noise.
        y: The labels for which images are generated.
        weights: The weight of each client for each image (clients, images).
    """
    with torch.no_grad():
        x = generate_from_codes(generator, label_codes(z, y, spec.classes), spec)
        predictions = ensemble.logits_by_model(x).float().softmax(2)
        target = joint_prediction(predictions, weights)
    return soft_loss(model(x).float(), target)


@dataclass(frozen=True, kw_only=True)
class FedFTG(FedAvg):
    """FedAvg whose server fine-tunes the average on hard generated images."""

    aggregates = ("states", "logits")
    crosses = {
        "learn": Crossing(
            down="the server's weights",
            up="the client's weights, the number of images of each class",
        ),
    }

    iterations: Count = 10  # I: times that generator and model take turns in a round
    # I_g: steps of the generator in a turn; one for each client in the authors' code
    generator_steps: Count = 5
    global_steps: Count = 5  # I_d: steps of the model in a turn
    samples: Count = 50  # B: generated images per step
    noise: Count = 100  # width of the noise; 256 for 100 classes in the authors' code
    generator_lr: Positive = 0.01  # η_g: learning rate of the generator, with Adam
    global_lr: Positive = 0.01  # η: learning rate of the model, with SGD
    global_weight_decay: NonNegative = 1e-3  # weight decay of that SGD
    lam_cls: NonNegative = 1.0  # λ_cls: weight of the clients recognising the label
    lam_dis: NonNegative = 1.0  # λ_dis: weight of the diversity of images

    @classmethod
    def parties(cls) -> tuple[type[Server], type[Client]]:
        return Artist, Client

    def round(self, server: Server, clients: Clients, t: int) -> None:
        updates = clients.sample(self.fraction).run(self.learn, server.model.state_dict())
        weights = updates.map(lambda _, update: update["weights"])
        server.model.load_state_dict(
            average(weights, by=self.average, since=server.model.state_dict())
        )
        counts = stack_field(updates, "counts")
        shares, frequencies = label_weights(counts.float())
        self.tune(server, build_ensemble(server, weights), shares, frequencies)

    def learn(self, client: Client, w: State) -> Teacher:
        """Train the server's weights; return them with the client's class counts."""
        return {"weights": self.client_update(client, w), "counts": client.data.class_counts()}

    def tune(self, server: Server, ensemble: Ensemble, shares: Tensor, p: Tensor) -> None:
        """Train the generator and the server's model in turn.

        Args:
            server: The server, which starts from its last generator and stores the trained one; its
                model is trained in place.
            ensemble: The clients' models.
            shares: The weight of each client for each class (clients, classes).
            p: The frequency of each class.
        """
        assert isinstance(server, Artist)
        model = server.model
        spec = server.spec
        generator = server_generator(server, self.noise + spec.classes)
        seek = partial(
            hard_sample_loss, generator, ensemble, model, spec, self.lam_cls, self.lam_dis
        )
        learn = partial(ensemble_cross_entropy, generator, ensemble, model, spec)

        def draw() -> list[Tensor]:
            z = torch.randn(self.samples, self.noise, device=server.device)
            y = torch.multinomial(p, self.samples, replacement=True)
            return [z, y, shares[:, y]]

        artist = Player(generator, adam(self.generator_lr), seek, draw, self.generator_steps)
        recipe = sgd(self.global_lr, weight_decay=self.global_weight_decay)
        student = Player(model, recipe, learn, draw, self.global_steps)
        train_alternately(server, artist, student, self.iterations, training=False)
        z, y, _ = draw()
        store_generator(server, generator, label_codes(z, y, spec.classes), y)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapse_remarks(rounds, "a higher lam_dis may help")

    def creations(
        self, party: Server | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        classes = party.spec.classes if isinstance(party, Server) else party.data.spec.classes
        y = torch.arange(self.samples, device=party.device) % classes
        z = torch.randn(self.samples, self.noise, device=party.device)
        return images_for_display(party, label_codes(z, y, classes), y, wanted)
