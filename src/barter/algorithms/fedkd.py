"""FedKD: Wu et al., "Communication-Efficient Federated Learning via Knowledge Distillation", Nature Communications
2022, Algorithm 1 (arXiv:2108.13323).

Every client has a network of its own (the mentor), which never leaves it, and a copy of a small shared one (the
mentee). They learn from the data, from each other's predictions and from each other's features, the less the worse
they both still are. What travels is the change of the shared one, by the largest singular values of its matrices.

- The distillation terms are divided by the sum of both cross entropies. Here that is a mere number: if gradients
  flowed through it, as in the authors' code and in HtFLlib, a network would gain by being wrong. Gradients end at the
  other network's predictions too; features meet half way.
- Divergences are summed over classes and averaged over images. The authors and HtFLlib average over classes too, so
  that predictions count less there, by the number of classes.
- The mean square between features counts once. In the authors' code and in HtFLlib it is in both networks' losses,
  which are added up, and so counts twice.
- Energy is the share of the sum of squared singular values, and at least one value is kept. In the authors' code a
  matrix that needs all of its values is sent without any, and so it is in HtFLlib: a head can vanish.
- Kernels of convolutions are compressed as matrices of outputs by inputs; the paper has none, HtFLlib decomposes each
  small kernel by itself, which is more to send. A matrix whose factors would be larger travels as it is.
- What all classes of the head have in common in a change, and no prediction depends on, is taken off before that. SGD
  makes none, but with Adam and a hundred classes it is nearly all of the change, and classes would be lost beside it.
- The server adds to its model what it tells the clients, so that all have the same. HtFLlib compresses weights.
- Gradients of all that learns are clipped together (10), in HtFLlib each network's. The paper trains with Adam; SGD
  with 0.01 is HtFLlib's.
- Means over clients count images, as in FedAvg. The paper's attention maps are not here: networks may have none.
- The paper's rounds are not known in advance here: the threshold has risen after `energy_rounds`.
- The client's accuracy is that of its own network; the shared one's is the server's, `server.global` in the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.algorithm import Algorithm
from barter.core.answers import Known
from barter.core.clients import Clients
from barter.core.contracts import Room
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State, isolate
from barter.ops.average import Average, average
from barter.ops.compress import Compressed, compressed, restored
from barter.ops.distill import kl
from barter.ops.fit import Optimizer, by_name, fit_by
from barter.ops.heads import felt
from barter.ops.mutual import companion

__all__ = ["Broker", "FedKD", "Mentor", "loss"]


class Broker(Server):
    """A server that knows who has the shared model as it is now."""

    holders: list[int] = []


class Mentor(Client):
    """A client with a copy of the shared model, and the layer that translates its features."""

    shared: State = {}
    translation: State = {}


def loss(
    own: Classifier,
    shared: Classifier,
    translation: nn.Module,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
) -> Tensor:
    """Both networks' cross entropies; divided by these, their divergences and the distance of their features."""
    x = prepared(pixels, spec, augment)
    h, g = own.features(x), shared.features(x)
    p, q = own.logits(h).float(), shared.logits(g).float()
    task = F.cross_entropy(p, labels) + F.cross_entropy(q, labels)
    apart = kl(q.detach(), p) + kl(p.detach(), q) + F.mse_loss(h.float(), translation(g).float())
    return task + apart / task.detach()


def moved(w: State, change: State) -> State:
    """The weights after a change."""
    return {name: tensor + change[name] for name, tensor in w.items()}


@dataclass(frozen=True, kw_only=True)
class FedKD(Algorithm[Broker, Mentor]):
    """Compressed changes of a shared small model are averaged, and every client's own learns with it."""

    global_model = True
    crosses = {
        "learn": "down: the shared model's weights, to who lacks them; up: their change, of low rank",
        "receive": "down: the mean change, of low rank",
    }

    shared: str = "small-cnn"  # the shared network: of the zoo, or package.module:function
    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 1  # local epochs
    batch_size: Count = 10  # images per step
    # of clients; adam where DFFKE compares, with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate
    clip: Positive = 10.0  # largest norm of the gradient
    # T_start: share of the squared singular values that is sent at first
    energy_start: Fraction = 0.95
    energy_end: Fraction = 0.98  # T_end: and in the end
    energy_rounds: Count = 100  # rounds until then; in the paper the whole run
    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    @property
    def server_network(self) -> str:
        return self.shared

    def energy(self, t: int) -> float:
        """The share of the squared singular values that is sent in round t."""
        return self.energy_start + min(1.0, t / self.energy_rounds) * (
            self.energy_end - self.energy_start
        )

    def whole(self, known: Known) -> int | None:
        """Bytes of a change of which nothing is left out: factors travel only where they are less."""
        return known.nbytes("server")

    def round(self, server: Broker, clients: Clients, t: int) -> None:
        active, w = clients.sample(self.fraction), dict(server.model.state_dict())
        news: dict[int, tuple[State, float]] = {
            k: ({} if k in server.holders else w, self.energy(t)) for k in active
        }
        updates = active.scatter(self.learn, news)
        mean = average(updates.each(lambda _, update: restored(update, w)), by=self.average)
        change = compressed(felt(mean, server.model), self.energy(t))
        server.model.load_state_dict(moved(w, restored(change, w)))
        server.holders = list(clients.only({*server.holders, *updates}).run(self.receive, change))

    def learn(
        self, client: Mentor, news: tuple[State, float]
    ) -> Annotated[Compressed, Room("whole")]:
        w, energy = news
        client.shared = w or client.shared
        data, shared = client.data, companion(client, self.shared, client.shared)
        translation = self.translation(client, shared)
        mutual = partial(loss, client.model, shared, translation, data.spec, data.augment)
        recipe, also = by_name(self.optimizer, self.lr, clip=self.clip), [shared, translation]
        fit_by(
            client, mutual, epochs=self.epochs, batch_size=self.batch_size, recipe=recipe, also=also
        )
        client.translation = isolate(dict(translation.state_dict()))
        change = {name: v - client.shared[name] for name, v in shared.state_dict().items()}
        return compressed(felt(change, shared), energy)

    def translation(self, client: Mentor, shared: Classifier) -> nn.Module:
        """W^h: from the shared network's features to the client's."""
        new = nn.Linear(shared.feature_dim, client.model.feature_dim, bias=False).to(client.device)
        if client.translation:
            new.load_state_dict(client.translation)
        return lanes.keep(("translation", client.architecture), new)

    def receive(self, client: Mentor, change: Compressed) -> None:
        client.shared = moved(client.shared, restored(change, client.shared))
