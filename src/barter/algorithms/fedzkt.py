"""FedZKT: Zhang et al., "FedZKT: Zero-Shot Knowledge Transfer towards Resource-Constrained Federated Learning with
Heterogeneous On-Device Models", ICDCS 2022 (arXiv:2109.03775).

All distillation is the server's work; clients may have any architectures.

One round:

1. Sampled clients train on their own data and upload their weights.
2. In turn, the server trains a generator to find images on which its model and the clients'
   ensemble disagree, and its model to agree with the ensemble on them.
3. Each client's model learns, on the server, from the server's model on generated images.
4. The clients receive their new weights.

Differences from the paper:

- `mu`: clients stay near the weights that they received while they train, as in FedProx; before
  they have received any, near their initial weights. The paper's value of μ was not available; the
  default is FedProx's.
- The paper's loss for the clients' models on the server was not available. Here it is the SL loss
  too, the L1 distance between two softmax outputs. These models keep the normalisation statistics
  of their own data; the server's model has those of generated images.
- No code of the authors was found. Generator and server's model continue from round to round;
  optimizers are new in each.
- `global_network`: the server's model may be any network; without a name it is the first client's.
  Only clients that took part receive weights.
- `global_steps`: the server's model takes five steps for one of the generator, as is usual in
  data-free distillation; the paper's number is not known here, and preset "paper" has one.
- `iterations`, `samples`: fewer steps on smaller batches than the paper's 200, for small images, on
  256; preset "paper" has these.
- `lr`, `batch_size`: the paper's clients train with SGD of rate 0.01 on batches of 256; the
  defaults are FedAvg's, 0.05 and 10.

Disagreement is the paper's SL loss: the sum of absolute differences between the softmax of the
server's logits and the softmax of the mean of the clients' logits. All clients have the same
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from barter.compute import lanes
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.evaluation import record_before_exchange
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import Decoder
from barter.ops.ensemble import mean_predictions
from barter.ops.fit import Trainer, adam, fit, make_anchor, sgd
from barter.ops.modules import copy_state
from barter.ops.synthesis import (
    Artist,
    Ensemble,
    Player,
    build_ensemble,
    collapse_remarks,
    generate_from_codes,
    images_for_display,
    server_generator,
    store_generator,
    train_alternately,
)

__all__ = ["FedZKT", "disagreement", "sl_loss"]


def sl_loss(one: Tensor, other: Tensor) -> Tensor:
    """Return the SL loss: the batch's mean L1 distance of two softmax predictions.

    Args:
        one: Logits (images, classes).
        other: Logits of the same shape.
    """
    return (one.softmax(1) - other.softmax(1)).abs().sum(1).mean()


def disagreement(
    generator: Decoder, ensemble: Ensemble, model: Classifier, spec: Spec, sign: float, z: Tensor
) -> Tensor:
    """Return the signed SL loss between the server's model and the clients' ensemble.

    The ensemble's logits are the mean of the clients', or their robust aggregate.

    Args:
        generator: The generator of images.
        ensemble: The clients' models.
        model: The server's model.
        spec: The format of the images.
        sign: 1 to train the model, which should agree; -1 to train the generator, whose images
            should cause disagreement.
        z: The noise.
    """
    with torch.set_grad_enabled(sign < 0):
        x = generate_from_codes(generator, z, spec)
        ensemble_logits = mean_predictions(list(ensemble.logits_by_model(x).float()))
    return sign * sl_loss(ensemble_logits, model(x).float())


def client_sl_loss(
    generator: Decoder, teacher: Classifier, model: Classifier, spec: Spec, z: Tensor
) -> Tensor:
    """Return the SL loss of a client's model against the server's model.

    Args:
        generator: The generator of images.
        teacher: The server's model.
        model: The client's model, which is trained.
        spec: The format of the images.
        z: The noise from which images are generated.
    """
    with torch.no_grad():
        x = generate_from_codes(generator, z, spec)
        teacher_logits = teacher(x).float()
    return sl_loss(teacher_logits, model(x).float())


@dataclass(frozen=True, kw_only=True)
class FedZKT(Algorithm[Artist, Client]):
    """Distil clients into the server's model and back, on generated images."""

    aggregates = ("logits",)
    crosses = {
        "learn": Crossing(up="the client's weights"),
        "receive": Crossing(down="the client's weights, after distillation on the server"),
    }
    presets = {
        "paper": {
            "batch_size": 256,
            "lr": 0.01,
            "iterations": 200,
            "global_steps": 1,
            "client_steps": 200,
            "samples": 256,
        }
    }

    retired = {"average": "mean"}

    fraction: Fraction = 1.0  # fraction of clients sampled per round
    epochs: Count = 5  # local epochs
    batch_size: Count = 10  # private images per step
    lr: Positive = 0.05  # learning rate of the clients' SGD
    mu: NonNegative = 0.01  # μ: weight of the proximal term of local training
    # the server's network: a name of the zoo, or package.module:function; none: the first client's
    global_network: str | None = None
    # steps of the generator in a round, in turn with the server's model; 200 to 500 in the paper
    iterations: Count = 20
    global_steps: Count = 5  # steps of the server's model for each step of the generator
    client_steps: Count = 20  # steps of each client's model on the server in a round
    samples: Count = 64  # generated images per step; 256 in the paper
    noise: Count = 100  # width of the noise
    generator_lr: Positive = 1e-3  # learning rate of the generator, with Adam
    global_lr: Positive = 0.01  # learning rate of all models on the server, with SGD
    momentum: Momentum = 0.9  # momentum of that SGD

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("own", self.global_network)

    def round(self, server: Artist, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        updates = active.run(self.learn)
        generator = self.gather(server, build_ensemble(server, updates))
        distilled = {k: self.distil_to_client(server, generator, k, w) for k, w in updates.items()}
        store_generator(server, generator, self.codes(server))
        active.only(distilled).scatter(self.receive, distilled)

    def learn(self, client: Client) -> State:
        """Train the client's network on its own data and return its weights.

        A penalty of strength μ holds them near those before. The metrics before the exchange are
        reported.
        """
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr),
            anchor=make_anchor(client, client.model.state_dict(), self.mu),
        )
        record_before_exchange(client)
        return client.model.state_dict()

    def codes(self, party: Artist | Client) -> Tensor:
        """Sample the noise of a batch of images (samples, noise), on the party's device."""
        return torch.randn(self.samples, self.noise, device=party.device)

    def gather(self, server: Artist, ensemble: Ensemble) -> Decoder:
        """Train the generator and the server's model in turn; return the generator.

        The server's model is trained in place; `server.generator` is read and not yet replaced.
        """
        generator = server_generator(server, self.noise)
        model = server.model
        seek = partial(disagreement, generator, ensemble, model, server.spec, -1.0)
        learn = partial(disagreement, generator, ensemble, model, server.spec, 1.0)

        def draw() -> list[Tensor]:
            return [self.codes(server)]

        artist = Player(generator, adam(self.generator_lr), seek, draw, 1)
        student = Player(model, sgd(self.global_lr, self.momentum), learn, draw, self.global_steps)
        train_alternately(server, artist, student, self.iterations, training=True)
        return generator

    def distil_to_client(self, server: Artist, generator: Decoder, k: int, w: State) -> State:
        """Distil the server's model into a client's and return the client's new weights.

        Both models are in evaluation mode, so that running statistics stay as uploaded.

        Args:
            server: The server.
            generator: The generator of images.
            k: The client.
            w: The weights that the client uploaded.
        """
        name = server.names[k]

        def build() -> Classifier:
            return server.architectures[k]().to(server.device)

        model = lanes.lane_module(("student", name), build)
        model.load_state_dict(w)
        learn = partial(client_sl_loss, generator, server.model.eval(), model.eval(), server.spec)
        trainer = Trainer.of(model, sgd(self.global_lr, self.momentum))
        for _ in server.track(f"teach {name}", range(self.client_steps)):
            trainer.step(learn, self.codes(server))
        return copy_state(model)

    def receive(self, client: Client, w: State) -> None:
        """Load the weights after distillation."""
        client.model.load_state_dict(w)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapse_remarks(rounds, "more rounds of fewer iterations may help")

    def creations(
        self, party: Artist | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        return images_for_display(party, self.codes(party), None, wanted)
