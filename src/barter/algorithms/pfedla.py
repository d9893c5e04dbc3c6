"""pFedLA: Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, Algorithm 1
(arXiv:2205.03993).

Every client gets its own mix of all clients' models. For each layer of a client, the server
computes a weighted mean of all clients' layers. A small hypernetwork per client learns these mixing
weights from how the client's training changes the mix.

One round:

1. For each sampled client, its hypernetwork computes the mixing weights α of all clients' layers,
   and the client receives the models mixed with them.
2. The client trains the mix on its own data and uploads the result θ_i.
3. The server updates the client's hypernetwork with the change Δθ_i that training made, and stores
   θ_i.

Differences from the paper:

- A layer is a module with weights of its own; bias and normalisation statistics belong to it.
- The output of the hypernetwork's ReLU is divided by its sum. Where it is zero, the client's own
  layer is taken.
- `width`: a client's hypernetwork has an embedding, three hidden layers of 100 and a linear layer
  for each layer of the model, as in a third party's implementation; the paper has no code.
- The last bias is initialised to one, so that at first all clients have about the same weight: an
  output that the ReLU cuts off at the start would not be learned.
- A client's model is unknown until it has trained once. Until then it is not mixed, and the client
  starts from its own initial model.
- HeurpFedLA, in which layers that a client takes mostly from itself stay local, is not implemented.

A client is evaluated with its model after local training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.fit import Trainer, fit, sgd
from barter.ops.modules import copy_state, restore_module

__all__ = ["HyperNetwork", "Mixer", "PFedLA", "direction_loss", "group_by_layer", "mix_layers"]

MIN_WEIGHT = 1e-6  # smallest weight of a client's own layer


class Mixer(Server):
    """A server that stores all clients' models and a hypernetwork for each client."""

    models: dict[int, State] = {}  # θ: each client's model after its last training
    hyper: dict[int, State] = {}  # v and φ: each client's embedding and hypernetwork
    layers: list[list[str]] = []  # the names of a model's weights, grouped by layer
    trained: list[str] = []  # the names of weights that have gradients


class HyperNetwork(nn.Module):
    """The weights of all clients' layers in one client's mix.

    Args:
        clients: The number of clients.
        layers: The number of layers of a model.
        width: The width of embedding and hidden layers.
    """

    def __init__(self, clients: int, layers: int, width: int) -> None:
        super().__init__()
        self.shape = layers, clients
        self.embedding = nn.Parameter(torch.randn(width))
        hidden: list[nn.Module] = []
        for _ in range(3):
            hidden += [nn.Linear(width, width), nn.ReLU()]
        last = nn.Linear(width, layers * clients)
        nn.init.ones_(last.bias)
        self.body = nn.Sequential(*hidden, last, nn.ReLU())

    def forward(self, own: Tensor, known: Tensor) -> Tensor:
        """Return α (layers, clients), whose rows sum to 1.

        Args:
            own: 1 in the client's own column, otherwise 0.
            known: 1 in the columns of clients whose model is known, otherwise 0.
        """
        alpha = self.body(self.embedding).view(self.shape) * known + MIN_WEIGHT * own
        normalised: Tensor = alpha / alpha.sum(1, keepdim=True)
        return normalised


def group_by_layer(names: Iterable[str]) -> list[list[str]]:
    """Return the names of a model's weights, grouped by their module, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.rpartition(".")[0]
        groups.setdefault(module, []).append(name)
    return list(groups.values())


def mix_layers(models: Sequence[State], alpha: Tensor, layers: Sequence[Sequence[str]]) -> State:
    """Return the models' weighted sum, layer by layer; integers are rounded.

    Args:
        models: The models to mix.
        alpha: α, the weight of each layer and model (layers, models).
        layers: The names of the weights of each layer.
    """
    mix: State = {}
    for weights, layer in zip(alpha.double(), layers, strict=True):
        for name in layer:
            stacked = torch.stack([model[name] for model in models])
            total = torch.tensordot(weights, stacked.double(), 1)
            if not stacked.is_floating_point():
                total = total.round()
            mix[name] = total.to(stacked.dtype)
    return mix


def direction_loss(hyper: HyperNetwork, own: Tensor, known: Tensor, dots: Tensor) -> Tensor:
    """Return -⟨θ_i, Δθ_i⟩, low if the mix of models moved as training does.

    The mix is a weighted sum of models, so the products ⟨θ_j, Δθ_i⟩ by layer and client suffice.

    Args:
        hyper: The client's hypernetwork.
        own: 1 in the client's own column, otherwise 0.
        known: 1 in the columns of clients whose model is known, otherwise 0.
        dots: ⟨θ_j, Δθ_i⟩ (layers, clients).
    """
    alpha: Tensor = hyper(own, known)
    return -(alpha * dots).sum()


@dataclass(frozen=True, kw_only=True)
class PFedLA(Algorithm[Mixer]):
    """Give every client its own mix of all models, weighted layer by layer."""

    server_model = ServerModel("personal")
    crosses = {
        "client_update": Crossing(
            down="a mix of all clients' weights",
            up="the client's trained weights",
        ),
    }

    fraction: Fraction = 1.0  # fraction of clients sampled per round
    epochs: Count = 10  # local epochs
    batch_size: Count = 10  # images per step
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    hyper_lr: Positive = 5e-3  # learning rate of the hypernetworks' SGD
    width: Count = 100  # width of the hypernetworks' embeddings and hidden layers

    def setup(self, server: Mixer, clients: Clients) -> None:
        model = server.architectures[clients[0]]()
        server.layers = group_by_layer(model.state_dict())
        server.trained = [name for name, _ in model.named_parameters()]
        for k in clients:
            hyper = HyperNetwork(len(clients), len(server.layers), self.width)
            server.hyper[k] = hyper.state_dict()

    def round(self, server: Mixer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        mixes = {k: self.mix(server, clients, k) if k in server.models else {} for k in active}
        updates = active.scatter(self.client_update, mixes)
        for k, w in updates.items():
            if mixes[k]:
                change = {name: w[name] - mixes[k][name] for name in server.trained}
                self.learn(server, clients, k, change)
        server.models |= updates

    def client_update(self, client: Client, w: State) -> State:
        """Train the client's mix, or at first its own model; return the trained weights.

        Args:
            client: The client.
            w: The weights of the client's mix of models; empty if there is none yet.
        """
        client.model.load_state_dict(w or client.model.state_dict())
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        return client.model.state_dict()

    def mix(self, server: Mixer, clients: Clients, k: int) -> State:
        """Return the known clients' models, mixed layer by layer for client k.

        A client is known once the server has a model of it.
        """
        hyper, own, known = self.hypernetwork(server, clients, k)
        with torch.no_grad():
            alpha = hyper(own, known)
        models = [server.models[j] for j in sorted(server.models)]
        return mix_layers(models, alpha[:, known > 0], server.layers)

    def learn(self, server: Mixer, clients: Clients, k: int, change: State) -> None:
        """Train client k's hypernetwork for a step by the change that training made.

        Args:
            server: The server, which stores the hypernetwork; its models are those that were mixed,
                without this round's updates.
            clients: All clients of the run.
            k: The client.
            change: The change of the client's parameters in training, from its mix.
        """
        hyper, own, known = self.hypernetwork(server, clients, k)
        dots = torch.zeros(hyper.shape, device=server.device)
        for row, layer in zip(dots, server.layers, strict=True):
            for name in change.keys() & layer:
                flat_weights = [server.models[j][name].flatten() for j in sorted(server.models)]
                row[known > 0] += torch.stack(flat_weights) @ change[name].flatten()
        Trainer.of(hyper, sgd(self.hyper_lr)).step(partial(direction_loss, hyper), own, known, dots)
        server.hyper[k] = copy_state(hyper)

    def hypernetwork(
        self, server: Mixer, clients: Clients, k: int
    ) -> tuple[HyperNetwork, Tensor, Tensor]:
        """Return client k's hypernetwork and its inputs, `own` and `known` (clients,).

        See `HyperNetwork.forward`. Columns are in the order of `clients`, all clients of the run.
        """
        new = HyperNetwork(len(clients), len(server.layers), self.width)
        hyper = restore_module(server, "hypernetwork", new, server.hyper[k])
        own = [float(j == k) for j in clients]
        known = [float(j in server.models) for j in clients]
        columns = torch.tensor([own, known], device=server.device)
        return hyper, columns[0], columns[1]
