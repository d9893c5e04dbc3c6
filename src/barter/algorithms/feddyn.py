"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1 (arXiv:2111.04263).

FedAvg whose clients remember how far they have drifted from the others. The accumulated drift
enters a client's next objective as a regulariser, so that all clients converge to the minimum of
the sum of their losses instead of each to its own.

One round:

1. Sampled clients receive the server's weights w_cloud and the weight α_i of their regulariser.
2. A client minimises F_i(w) + α_i/2 ‖w - (w_cloud - h_i)‖², where F_i is its loss and h_i its
   accumulated drift. This is the paper's objective with h_i = -∇F_i/α_i. Then the client adds w_i -
   w_cloud to h_i and uploads its trained weights w_i.
3. The server updates h, the mean of all clients' h_i, and sets w_cloud to the mean of the trained
   models plus h.

Differences from the paper:

- `alpha`: α_i = α n̄/n_i for a client with n_i images, where n̄ is the mean number of images, as in
  the authors' code; the paper has one α.
- As in the code, all trained models have the same weight, whatever their numbers of images.
- h covers parameters only. Statistics of batch normalisation are averaged; the code has networks
  without them.
- `clip`: the gradient's norm is clipped at 10, including the whole regulariser; the code leaves its
  quadratic part out.
- `lr`: constant; in the code it may decay from round to round.

The server's model is w_cloud, the result of Algorithm 1. `average_global` is the accuracy of the
mean of the models trained in the last round: the code reports both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from statistics import fmean
from typing import TypedDict

from torch import nn

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.evaluation import accuracy
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive
from barter.core.payload import State
from barter.ops.average import average
from barter.ops.fit import Anchor, fit, make_anchor, sgd

__all__ = ["Cloud", "Drifter", "FedDyn"]


class Cloud(Server):
    """A server that stores the mean drift of its clients."""

    sizes: dict[int, int] = {}  # n_i: number of images of each client
    h: State = {}  # the mean of all clients' h_i; empty means zero
    average: State = {}  # the mean of the models trained in the last round


class Drifter(Client):
    """A client that stores its accumulated drift."""

    h: State = {}  # h_i; empty means zero


class TrainingRequest(TypedDict):
    """The payload for a client's training."""

    weights: State  # w_cloud
    alpha: float  # α_i


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm[Cloud, Drifter]):
    """FedAvg with a regulariser that compensates the drift of each client."""

    primary = "server"
    server_model = ServerModel("shared")
    aggregates = ("states",)
    crosses = {
        "register": Crossing(),
        "client_update": Crossing(down="the server's weights, α_i", up="the client's weights"),
    }

    fraction: Fraction = 1.0  # fraction of clients sampled per round
    epochs: Count = 5  # local epochs
    batch_size: Count = 50  # images per step
    lr: Positive = 0.1  # η: learning rate of SGD
    momentum: Momentum = 0.0  # momentum of SGD; 0, as in the paper, is plain SGD
    weight_decay: NonNegative = 1e-3  # weight decay of SGD
    clip: Positive = 10.0  # largest norm of the gradient
    # α: weight of the regulariser, for a client with the mean number of images
    alpha: Positive = 0.01

    def round(self, server: Cloud, clients: Clients, t: int) -> None:
        new_clients = clients.only(k for k in clients if k not in server.sizes)
        server.sizes |= new_clients.run(self.register).num_examples
        active = clients.only(server.sizes).sample(self.fraction)
        mean_size = fmean(server.sizes.values())
        w = server.model.state_dict()
        tasks: dict[int, TrainingRequest] = {}
        for k in active:
            tasks[k] = {"weights": w, "alpha": self.alpha * mean_size / server.sizes[k]}
        updates = active.scatter(self.client_update, tasks)
        server.average = average(updates, alike=True, since=w)
        server.h = update_drift(
            server.model, server.h, w, server.average, len(updates) / len(clients)
        )
        shifted = {name: server.average[name] + h for name, h in server.h.items()}
        server.model.load_state_dict(server.average | shifted)

    def register(self, client: Drifter) -> None:
        """Return nothing; the server reads the number of images that every reply carries."""

    def client_update(self, client: Drifter, task: TrainingRequest) -> State:
        """Train the server's weights with the regulariser; return the client's weights.

        The change in training is added to the client's drift h_i.
        """
        w = task["weights"]
        model = client.model
        model.load_state_dict(w)
        centre = {name: w[name] - h for name, h in client.h.items()} or w
        self.train(client, make_anchor(client, centre, task["alpha"]))
        trained = model.state_dict()
        client.h = update_drift(model, client.h, w, trained)
        return trained

    def train(self, client: Drifter, anchor: Anchor) -> None:
        """Train the client's model on its data, with the anchor's penalty in the loss."""
        recipe = sgd(self.lr, self.momentum, self.weight_decay, self.clip)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=recipe, anchor=anchor)

    def evaluate_server(self, server: Cloud, test: Images) -> dict[str, float]:
        """Return the metrics of w_cloud, and the accuracy of the last round's mean model.

        That is the mean of the models trained in the last round; its accuracy is `average_global`.
        """
        model = copy.deepcopy(server.model)
        model.load_state_dict(server.average)
        return {**super().evaluate_server(server, test), "average_global": accuracy(model, test)}


def update_drift(
    model: nn.Module, h: State, before: State, after: State, share: float = 1.0
) -> State:
    """Return h + share * (after - before), for the parameters of a network.

    Args:
        model: The network; only its parameters have a drift.
        h: The drift so far; empty means zero.
        before: The weights before training.
        after: The weights after training.
        share: The factor of the change.
    """
    changes = {name: share * (after[name] - before[name]) for name, _ in model.named_parameters()}
    return {name: h[name] + change if h else change for name, change in changes.items()}
