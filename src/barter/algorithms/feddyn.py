"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1 (arXiv:2111.04263).

FedAvg, with clients that remember how far they have drifted from the others: what pulled a client away before is held
against it in its next training, so that all end where the sum of their losses is least, and not where each would go.

A client minimises F_i(w) + α_i/2 ‖w - (w_cloud - h_i)‖², which is the paper's objective with h_i = -∇F_i/α_i; then h_i
grows by w_i - w_cloud. The server's h is the mean of all clients' h_i, and w_cloud the mean of trained models plus h.

- α_i = α n̄/n_i, for clients with n_i images and n̄ on average, as in the authors' code; the paper has one α.
- As in the code, trained models count alike, whatever their numbers of images.
- h is for weights. Statistics of batch normalisation are averaged; the code has networks without.
- The gradient's norm is clipped at 10, here with all of the regulariser, in the code without its quadratic part.
- The code's learning rate may decay from round to round; this one stays.
- The server's model is w_cloud, Algorithm 1's result. `average_global` is that of the mean of the models that were just
  trained: the code reports both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from statistics import fmean
from typing import TypedDict

from torch import nn

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.evaluation import accuracy
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.ops.average import average
from barter.ops.fit import Anchor, anchored, fit, sgd

__all__ = ["Cloud", "Drifter", "FedDyn"]


class Cloud(Server):
    """A server that knows how far its clients drift."""

    sizes: dict[int, int] = {}  # n_i: images of each client
    h: State = {}  # the mean of all clients' h_i; nothing means zero
    average: State = {}  # the mean of the models that were trained in the last round


class Drifter(Client):
    """A client that knows how far it has drifted."""

    h: State = {}  # h_i; nothing means zero


class Task(TypedDict):
    """Where a client starts, and how firmly it is held."""

    weights: State
    alpha: float


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm[Cloud, Drifter]):
    """FedAvg whose clients are drawn back by as much as they have drifted."""

    primary = "server"
    one_architecture = True
    crosses = {
        "present": "nothing",
        "client_update": "down: the server's weights, α_i; up: the client's weights",
    }

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 5  # local epochs
    batch_size: Count = 50  # images per step
    lr: Positive = 0.1  # η: learning rate of SGD
    weight_decay: NonNegative = 1e-3  # of SGD
    clip: Positive = 10.0  # the largest norm of a gradient
    alpha: Positive = 0.01  # α: how firmly clients are held

    def round(self, server: Cloud, clients: Clients, t: int) -> None:
        strangers = clients.only(k for k in clients if k not in server.sizes)
        server.sizes |= strangers.run(self.present).num_examples
        active, mean = (
            clients.only(server.sizes).sample(self.fraction),
            fmean(server.sizes.values()),
        )
        w = server.model.state_dict()
        tasks: dict[int, Task] = {
            k: {"weights": w, "alpha": self.alpha * mean / server.sizes[k]} for k in active
        }
        updates = active.scatter(self.client_update, tasks)
        server.average = average(updates, alike=True)
        server.h = drifted(server.model, server.h, w, server.average, len(updates) / len(clients))
        server.model.load_state_dict(
            server.average | {at: server.average[at] + h for at, h in server.h.items()}
        )

    def present(self, client: Drifter) -> None:
        """An answer comes with the number of a client's images."""

    def client_update(self, client: Drifter, task: Task) -> State:
        w, model = task["weights"], client.model
        model.load_state_dict(w)
        self.train(
            client,
            anchored(client, {at: w[at] - h for at, h in client.h.items()} or w, task["alpha"]),
        )
        trained = model.state_dict()
        client.h = drifted(model, client.h, w, trained)
        return trained

    def train(self, client: Drifter, anchor: Anchor) -> None:
        recipe = sgd(self.lr, weight_decay=self.weight_decay, clip=self.clip)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=recipe, anchor=anchor)

    def evaluate_server(self, server: Cloud, test: Images) -> dict[str, float]:
        model = copy.deepcopy(server.model)
        model.load_state_dict(server.average)
        return {**super().evaluate_server(server, test), "average_global": accuracy(model, test)}


def drifted(model: nn.Module, h: State, before: State, after: State, share: float = 1.0) -> State:
    """h, and a share of the way that the weights have gone."""
    gone = {at: share * (after[at] - before[at]) for at, _ in model.named_parameters()}
    return {at: h[at] + way if h else way for at, way in gone.items()}
