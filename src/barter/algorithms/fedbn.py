"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1 (arXiv:2102.07623).

FedAvg for clients whose images look different, for example because they come from different
scanners or cameras. Every client keeps its own batch normalisation; all other weights are averaged.
So there is no global model: a client's model is the average with the client's own normalisation.

One round:

1. Sampled clients train on their own data and upload all weights except batch normalisation.
2. The server averages the uploads.
3. All clients receive the average and combine it with their own normalisation.

Differences from the paper:

- Normalisation layers are recognised by their type, and their weights, biases, statistics and
  counters stay local. The authors' code looks for "bn" in names.
- The average is weighted by numbers of examples, as in FedAvg; the authors' clients have equally
  many examples.

Accuracies are those of the average with the client's own normalisation, as in the paper;
`before_global` and `before_local` are those after local training. With a network that has no batch
normalisation, the method is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.broadcast import Broadcast
from barter.core.algorithm import Crossing, ServerModel
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import State
from barter.ops.fit import fit, sgd
from barter.ops.statistics import norm_names

__all__ = ["FedBN"]


@dataclass(frozen=True, kw_only=True)
class FedBN(Broadcast):
    """FedAvg in which every client keeps its own batch normalisation."""

    server_model = ServerModel("personal")
    crosses = {
        "client_update": Crossing(
            up="all weights except batch normalisation (a client that missed the last "
            "average receives it first)",
        ),
        "receive": Crossing(down="the average of these weights"),
    }

    def outgoing(self, network: Classifier) -> State:
        local_names = norm_names(network)
        return {
            name: weight for name, weight in network.state_dict().items() if name not in local_names
        }

    def train(self, client: Client) -> None:
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))

    def receive(self, client: Client, w: State) -> None:
        self.begin(client, w)
