"""FedZKT: Zhang et al., "FedZKT: Zero-Shot Knowledge Transfer towards Resource-Constrained Federated Learning with
Heterogeneous On-Device Models", ICDCS 2022 (arXiv:2109.03775).

Clients with any networks train and send their weights. On the server a generator looks for images about which the
server's model and the clients' together disagree, and the server's model learns to agree; then every client's model
learns from the server's on such images, and its weights go back to it. All distillation is the server's work.

- Disagreement is the paper's SL loss: the sum of absolute differences between the softmax of the server's logits and
  of the mean of the clients' logits. Clients count alike.
- Clients are held near the weights they received while they train, as in FedProx; before they have received any, near
  those they began with. The paper's weight of that is not known here: μ is FedProx's.
- With which loss clients' models learn on the server is not known here: it is the same one. They keep the normalisation
  statistics of their own data meanwhile; the server's model has those of generated images.
- No code of the authors was found. Generator and server's model go on from round to round; optimizers are new in each.
- The server's model may be any network; without a name it is the first client's. Only who took part gets weights back.
- For one step of the generator the server's model takes five, as is usual in data-free distillation; the paper's
  number is not known here, and preset "paper" has one.
- The defaults have fewer steps on smaller batches than the paper's 200, for small images, on 256: preset "paper".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from barter.algorithms.fedprox import FedProx
from barter.compute import lanes
from barter.core.clients import Clients
from barter.core.errors import ConfigError
from barter.core.evaluation import note_before
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.core.record import Round
from barter.models.generators import Decoder
from barter.ops.fit import Trainer, adam, sgd
from barter.ops.synthesis import (
    Artist,
    Ensemble,
    Player,
    assembled,
    collapsed,
    duel,
    exhibited,
    painted,
    painter,
    put_away,
)

__all__ = ["FedZKT", "disagreement", "sl_loss"]


def sl_loss(one: Tensor, other: Tensor) -> Tensor:
    """SL: sum over classes of the absolute differences of two predictions, mean over the batch."""
    return (one.softmax(1) - other.softmax(1)).abs().sum(1).mean()


def disagreement(
    generator: Decoder, ensemble: Ensemble, model: Classifier, spec: Spec, sign: float, z: Tensor
) -> Tensor:
    """What the model wants little of and, with the other sign, the generator much."""
    with torch.set_grad_enabled(sign < 0):
        x = painted(generator, z, spec)
        said = ensemble.said(x).float().mean(0)
    return sign * sl_loss(said, model(x).float())


def lesson(
    generator: Decoder, teacher: Classifier, model: Classifier, spec: Spec, z: Tensor
) -> Tensor:
    """How far a client's model is from the server's on generated images."""
    with torch.no_grad():
        x = painted(generator, z, spec)
        said = teacher(x).float()
    return sl_loss(said, model(x).float())


@dataclass(frozen=True, kw_only=True)
class FedZKT(FedProx):
    """The server's model learns from the clients' on images that it draws, and then theirs from its."""

    primary = "clients"
    one_architecture = False
    global_model = True
    replicas = True
    crosses = {
        "learn": "up: the client's weights",
        "receive": "down: the client's weights, taught by the server's model",
    }
    presets = {"paper": {"iterations": 200, "global_steps": 1, "client_steps": 200, "samples": 256}}

    # the server's: of the zoo, or package.module:function; none: the first client's
    global_network: str | None = None
    # steps of the generator, in turn with the server's model; 200 to 500 in the paper
    iterations: Count = 20
    global_steps: Count = 5  # steps of the server's model for one of the generator's
    client_steps: Count = 20  # steps of each client's model on the server
    samples: Count = 64  # generated images per step; 256 in the paper
    noise: Count = 100  # width of the noise
    generator_lr: Positive = 1e-3  # Adam's learning rate of the generator
    # SGD's learning rate of the server's model, and of clients' models there
    global_lr: Positive = 0.01
    momentum: NonNegative = 0.9  # of that SGD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average != "mean":
            raise ConfigError(
                f"average={self.average!r}: FedZKT averages nothing, its server learns from all models"
            )

    @classmethod
    def parties(cls) -> tuple[type[Server], type[Client]]:
        return Artist, Client

    @property
    def server_network(self) -> str | None:
        return self.global_network

    def round(self, server: Server, clients: Clients, t: int) -> None:
        assert isinstance(server, Artist)
        active = clients.sample(self.fraction)
        updates = active.run(self.learn)
        generator = self.gather(server, assembled(server, updates))
        taught = {k: self.taught(server, generator, k, w) for k, w in updates.items()}
        put_away(server, generator, self.codes(server))
        active.only(taught).scatter(self.receive, taught)

    def learn(self, client: Client) -> State:
        self.train(client)
        note_before(client)
        return client.model.state_dict()

    def codes(self, party: Server | Client) -> Tensor:
        """What images can be drawn from."""
        return torch.randn(self.samples, self.noise, device=party.device)

    def gather(self, server: Artist, ensemble: Ensemble) -> Decoder:
        """Server's model and generator in turn; the generator."""
        generator, model = painter(server, self.noise), server.model
        seek, learn = (
            partial(disagreement, generator, ensemble, model, server.spec, sign)
            for sign in (-1.0, 1.0)
        )

        def draw() -> list[Tensor]:
            return [self.codes(server)]

        artist = Player(generator, adam(self.generator_lr), seek, draw, 1)
        student = Player(model, sgd(self.global_lr, self.momentum), learn, draw, self.global_steps)
        duel(server, artist, student, self.iterations, training=True)
        return generator

    def taught(self, server: Artist, generator: Decoder, k: int, w: State) -> State:
        """A client's weights, after its model has learned from the server's."""
        name = server.names[k]
        model = lanes.kept(("student", name), lambda: server.architectures[k]().to(server.device))
        model.load_state_dict(w)
        learn = partial(lesson, generator, server.model.eval(), model.eval(), server.spec)
        trainer = Trainer.of(model, sgd(self.global_lr, self.momentum))
        for _ in server.track(f"teach {name}", range(self.client_steps)):
            trainer.step(learn, self.codes(server))
        return isolate(dict(model.state_dict()))

    def receive(self, client: Client, w: State) -> None:
        client.model.load_state_dict(w)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapsed(rounds, "more rounds of fewer iterations may help")

    def creations(
        self, party: Server | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        return exhibited(party, self.codes(party), None, wanted)
