"""pFedLA: Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, Algorithm 1
(arXiv:2205.03993).

Every client gets a mix of all clients' models of its own: for each layer the server weighs whose to take, and a small
network for each client learns these weights from how the client's training then changes what it was given.

- A layer is a module with weights of its own; bias and statistics of normalisation go with them.
- What the hypernetwork's ReLU leaves is divided by its sum. Where it leaves nothing, the client's own layer is taken.
- The hypernetwork of a client: an embedding, three hidden layers of 100, a linear layer for each layer of the model, as
  in a third party's implementation; the paper has no code of its own.
- Its last bias starts at one, so that at first all count about alike: what a ReLU cuts off at the start is not learnt.
- Before a client has trained once, its model is not known and not mixed: it starts from its own.
- HeurpFedLA, which keeps the layers at home that a client takes from itself, is not here.
- A client is judged by its model after local training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import Trainer, fit, sgd

__all__ = ["HyperNetwork", "Mixer", "PFedLA", "by_layer", "gain", "mixed"]

TINY = 1e-6  # what a client's own layer weighs at least


class Mixer(Server):
    """A server that knows everybody's model, and how to mix them for each."""

    models: dict[int, State] = {}  # θ: each client's, as it last was trained
    hyper: dict[int, State] = {}  # v and φ: each client's embedding and hypernetwork
    layers: list[list[str]] = []  # the names of a model's weights by layer
    trained: list[str] = []  # those of them that have gradients


class HyperNetwork(nn.Module):
    """For one client: how much each layer of each client's model counts."""

    def __init__(self, clients: int, layers: int, width: int) -> None:
        super().__init__()
        self.shape = layers, clients
        self.embedding = nn.Parameter(torch.randn(width))
        hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())]
        last = nn.Linear(width, layers * clients)
        nn.init.ones_(last.bias)
        self.body = nn.Sequential(*hidden, last, nn.ReLU())

    def forward(self, own: Tensor, known: Tensor) -> Tensor:
        """α (layers, clients), whose rows have the sum 1: of clients that are `known`, one of which is its `own`."""
        alpha = self.body(self.embedding).view(self.shape) * known + TINY * own
        normalised: Tensor = alpha / alpha.sum(1, keepdim=True)
        return normalised


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """The names of a model's weights by the module that has them."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


def mixed(models: Sequence[State], alpha: Tensor, layers: Sequence[Sequence[str]]) -> State:
    """Every layer as the sum of the models' own, with weights α (layers, models)."""
    mix: State = {}
    for weights, layer in zip(alpha.double(), layers, strict=True):
        for name in layer:
            everybodys = torch.stack([model[name] for model in models])
            total = torch.tensordot(weights, everybodys.double(), 1)
            mix[name] = (total if everybodys.is_floating_point() else total.round()).to(
                everybodys.dtype
            )
    return mix


def gain(hyper: HyperNetwork, own: Tensor, known: Tensor, dots: Tensor) -> Tensor:
    """-⟨θ_i, Δθ_i⟩, which falls as the mix moves the way that the client's training went.

    The mix is a sum of models, so ⟨θ_j, Δθ_i⟩ by layer and client is all there is to know of them.
    """
    alpha: Tensor = hyper(own, known)
    return -(alpha * dots).sum()


@dataclass(frozen=True, kw_only=True)
class PFedLA(Algorithm[Mixer]):
    """Every client gets a mix of all models, weighed layer by layer."""

    one_architecture = True
    personal = True
    crosses = {
        "client_update": "down: a mix of everybody's weights; up: the client's weights, trained"
    }

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 10  # local epochs
    batch_size: Count = 10  # images per step
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    hyper_lr: Positive = 5e-3  # learning rate of the hypernetworks' SGD
    width: Count = 100  # of embeddings and hidden layers

    def setup(self, server: Mixer, clients: Clients) -> None:
        model = server.architectures[clients[0]]()
        server.layers = by_layer(model.state_dict())
        server.trained = [name for name, _ in model.named_parameters()]
        for k in clients:
            server.hyper[k] = HyperNetwork(
                len(clients), len(server.layers), self.width
            ).state_dict()

    def round(self, server: Mixer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        given = {k: self.mix(server, clients, k) if k in server.models else {} for k in active}
        updates = active.scatter(self.client_update, given)
        for k, w in updates.items():
            if given[k]:
                self.learn(
                    server, clients, k, {name: w[name] - given[k][name] for name in server.trained}
                )
        server.models |= updates

    def client_update(self, client: Client, w: State) -> State:
        client.model.load_state_dict(w or client.model.state_dict())
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        return client.model.state_dict()

    def mix(self, server: Mixer, clients: Clients, k: int) -> State:
        """Everybody's models as this client is to have them."""
        hyper, own, known = self.hypernetwork(server, clients, k)
        with torch.no_grad():
            alpha = hyper(own, known)
        return mixed(
            [server.models[j] for j in sorted(server.models)], alpha[:, known > 0], server.layers
        )

    def learn(self, server: Mixer, clients: Clients, k: int, change: State) -> None:
        """A step of this client's hypernetwork, along the way that its training went."""
        hyper, own, known = self.hypernetwork(server, clients, k)
        dots = torch.zeros(hyper.shape, device=server.device)
        for row, layer in zip(dots, server.layers, strict=True):
            for name in change.keys() & layer:
                everybodys = torch.stack(
                    [server.models[j][name].flatten() for j in sorted(server.models)]
                )
                row[known > 0] += everybodys @ change[name].flatten()
        Trainer.of(hyper, sgd(self.hyper_lr)).step(partial(gain, hyper), own, known, dots)
        server.hyper[k] = isolate(hyper.state_dict())

    def hypernetwork(
        self, server: Mixer, clients: Clients, k: int
    ) -> tuple[HyperNetwork, Tensor, Tensor]:
        """This client's; which column is its own, and of whom there is a model."""
        made = HyperNetwork(len(clients), len(server.layers), self.width).to(server.device)
        made.load_state_dict(server.hyper[k])
        own, known = ([float(j in which) for j in clients] for which in ([k], server.models))
        columns = torch.tensor([own, known], device=server.device)
        return lanes.keep("hypernetwork", made), columns[0], columns[1]
