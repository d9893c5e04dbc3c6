"""FedKD: Wu et al., "Communication-Efficient Federated Learning via Knowledge Distillation", Nature Communications
2022, Algorithm 1 (arXiv:2108.13323).

Every client has a network of its own (the mentor), which never leaves it, and a copy of a small
shared network (the mentee).

One round:

1. Sampled clients that lack the current shared network receive it.
2. A client trains both networks on its data, by cross entropy, by the divergence between their
   predictions and by the distance of their features. The last two are divided by the sum of both
   cross entropies: the worse the networks still are, the less they learn from each other.
3. The client uploads the change of the shared network, in which each matrix is approximated by its
   largest singular values.
4. The server averages the changes, compresses the average in the same way and adds it to its model.
5. Clients that hold the shared network receive the compressed average and add it to their copy.

Differences from the paper:

- The sum of cross entropies by which the distillation terms are divided is a constant in the
  gradient. If gradients flowed through it, as in the authors' code and in HtFLlib, a network could
  lower its loss by predicting worse. Gradients do not flow into the other network's predictions
  either; features approach each other from both sides.
- Divergences are summed over classes and averaged over images. The authors and HtFLlib average over
  classes too, so that predictions have less weight there, by the number of classes.
- The mean square between features enters the loss once. In the authors' code and in HtFLlib it is
  in both networks' losses, which are added up, so that it enters twice.
- `energy_start`, `energy_end`: energy is the share of the sum of squared singular values, and at
  least one value is kept. In the authors' code and in HtFLlib, a matrix that needs all of its
  values is sent without any: a head can vanish.
- Kernels of convolutions are compressed as matrices of outputs by inputs. The paper has none;
  HtFLlib decomposes each small kernel by itself, which needs more bytes. A matrix whose factors
  would be larger than itself is sent uncompressed.
- The part of the head's change that all classes have in common, on which no prediction depends, is
  removed before compression. With SGD there is none. With Adam and a hundred classes it is nearly
  all of the change, and single classes would be lost next to it.
- The server adds to its model exactly the change that it sends, so that all copies are equal.
  HtFLlib compresses weights instead of changes.
- `clip`: gradients of all trained modules are clipped together at 10; HtFLlib clips each network's.
- `optimizer`, `lr`: the paper trains with Adam; SGD with 0.01 is HtFLlib's.
- Averages over clients are weighted by numbers of images, as in FedAvg.
- The paper's attention maps are left out, since networks may have none.
- `energy_rounds`: the paper raises the threshold over the whole run, whose length is not known in
  advance here.

The client's accuracy is that of its own network; that of the shared network is the server's,
`server.global` in the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.answers import Known
from barter.core.clients import Clients
from barter.core.contracts import Room
from barter.core.errors import PayloadError
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State, to_floats
from barter.ops.average import Average, average
from barter.ops.compress import Compressed, compress_update, decompress_update
from barter.ops.distill import kl
from barter.ops.fit import Optimizer, fit_by, recipe_by_name
from barter.ops.heads import remove_ineffective
from barter.ops.modules import copy_state, restore_module
from barter.ops.mutual import companion

__all__ = ["Broker", "FedKD", "Mentor", "fedkd_loss"]

VARIANCE_ROUNDING = 1e-6  # A change of a variance to zero may miss it by this much.


class Broker(Server):
    """A server that remembers which clients hold the current shared model."""

    holders: list[int] = []


class Mentor(Client):
    """A client with a copy of the shared model and a translation of its features."""

    shared: State = {}
    translation: State = {}


def fedkd_loss(
    own: Classifier,
    shared: Classifier,
    translation: nn.Module,
    x: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return both networks' cross entropies plus distillation divided by them.

    Distillation is KL(shared ‖ own) + KL(own ‖ shared), with the first of each constant, plus the
    mean squared distance of features. The divisor, the sum of both cross entropies, is constant
    too.

    Args:
        own: The client's network, the mentor.
        shared: The shared network, the mentee.
        translation: W^h, from the shared network's features to those of the client's network.
        x: Images.
        labels: Their classes.
    """
    own_features = own.features(x)
    shared_features = shared.features(x)
    own_logits = own.logits(own_features).float()
    shared_logits = shared.logits(shared_features).float()
    task = F.cross_entropy(own_logits, labels) + F.cross_entropy(shared_logits, labels)
    divergence = kl(shared_logits.detach(), own_logits) + kl(own_logits.detach(), shared_logits)
    distance = F.mse_loss(own_features.float(), translation(shared_features).float())
    return task + (divergence + distance) / task.detach()


def add_change(w: State, change: State) -> State:
    """Return the weights with a change added; the change must have all names of `w`."""
    return {name: tensor + change[name] for name, tensor in w.items()}


@dataclass(frozen=True, kw_only=True)
class FedKD(Algorithm[Broker, Mentor]):
    """Average compressed changes of a small model that each client co-trains."""

    aggregates = ("states",)
    sizes = ("whole",)
    crosses = {
        "learn": Crossing(
            down="the shared model's weights, if the client lacks them",
            up="their change, of low rank",
        ),
        "receive": Crossing(down="the mean change, of low rank"),
    }

    shared: str = "small-cnn"  # the shared network: a name of the zoo, or package.module:function
    fraction: Fraction = 1.0  # fraction of clients sampled per round
    epochs: Count = 1  # local epochs
    batch_size: Count = 10  # images per step
    # the clients' optimizer; DFFKE's comparison uses adam with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate
    clip: Positive = 10.0  # largest norm of the gradient of all trained modules
    # T_start: share of the sum of squared singular values that is sent in the beginning
    energy_start: Fraction = 0.95
    energy_end: Fraction = 0.98  # T_end: the same after energy_rounds
    energy_rounds: Count = 100  # rounds over which the share rises; in the paper the whole run
    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("own", self.shared)

    def energy(self, t: int) -> float:
        """Return the share of the sum of squared singular values that is sent in round t.

        It rises linearly from `energy_start`, at t = 0, to `energy_end`, from round `energy_rounds`
        on.
        """
        progress = min(1.0, t / self.energy_rounds)
        return self.energy_start + progress * (self.energy_end - self.energy_start)

    def whole(self, known: Known) -> int | None:
        """Return the bytes of an uncompressed change, which no compressed change exceeds.

        None means that the shared network is not known.
        """
        return known.nbytes("server")

    def round(self, server: Broker, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        w = dict(server.model.state_dict())
        energy = self.energy(t)
        tasks: dict[int, tuple[State, float]] = {}
        for k in active:
            missing_weights = {} if k in server.holders else w
            tasks[k] = (missing_weights, energy)
        updates = active.scatter(self.learn, tasks)
        changes = updates.map(lambda _, update: _sound_change(update, w))
        mean_change = average(changes, by=self.average)
        sent_change = compress_update(remove_ineffective(mean_change, server.model), energy)
        # The server applies the change as clients restore it, so that all copies stay equal.
        server.model.load_state_dict(add_change(w, decompress_update(sent_change, w)))
        receivers = clients.only({*server.holders, *updates})
        server.holders = list(receivers.run(self.receive, sent_change))

    def learn(
        self, client: Mentor, news: tuple[State, float]
    ) -> Annotated[Compressed, Room("whole")]:
        """Train both networks and return the compressed change of the shared one.

        Args:
            client: The client that trains.
            news: The shared model's weights, empty if the client has them, and the share of the
                squared singular values to keep.
        """
        w, energy = news
        client.shared = w or client.shared
        shared = companion(client, self.shared, client.shared)
        translation = self.translation(client, shared)
        fit_by(
            client,
            partial(fedkd_loss, client.model, shared, translation),
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=recipe_by_name(self.optimizer, self.lr, clip=self.clip),
            also=[shared, translation],
        )
        client.translation = copy_state(translation)
        trained = shared.state_dict()
        change = {name: tensor - client.shared[name] for name, tensor in trained.items()}
        return compress_update(remove_ineffective(change, shared), energy)

    def translation(self, client: Mentor, shared: Classifier) -> nn.Module:
        """Return W^h, the layer from the shared network's features to the client's."""
        layer = nn.Linear(shared.feature_dim, client.model.feature_dim, bias=False)
        name = ("translation", client.architecture)
        return restore_module(client, name, layer, client.translation)

    def receive(self, client: Mentor, change: Compressed) -> None:
        """Add the average change to the client's copy of the shared model."""
        client.shared = add_change(client.shared, decompress_update(change, client.shared))


def _sound_change(update: Compressed, w: State) -> State:
    """Decompress a client's change of the shared network's weights.

    Raises:
        PayloadError: If the change does not fit the network, or leads to a negative variance.
    """
    change = decompress_update(update, w)
    least = [
        (w[name] + value).amin() for name, value in change.items() if name.endswith(".running_var")
    ]
    if min(to_floats(least), default=0.0) < -VARIANCE_ROUNDING:
        raise PayloadError("the change leads to a negative variance of batch normalisation")
    return change
