"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1 (arXiv:2102.07623).

FedAvg for clients whose images look different, of other scanners or cameras: everybody keeps its batch normalisation to
itself, and all other weights are averaged. So there is no model for all, and a client's is the average with its own
normalisation.

- What stays at home is told by the kind of layer: weights, biases, statistics and counters of batch normalisation. The
  authors' code goes by names that hold "bn".
- The average is weighted by numbers of examples, as FedAvg's; the authors' clients have equally many.
- Accuracies are those of the average with the client's own normalisation, as in the paper; `before_global` and
  `before_local` are those after local training.
- A network without batch normalisation makes it FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.broadcast import Broadcast
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import State
from barter.ops.fit import fit, sgd
from barter.ops.statistics import norm_names

__all__ = ["FedBN"]


@dataclass(frozen=True, kw_only=True)
class FedBN(Broadcast):
    """One model for all but for its normalisation, which is everyone's own."""

    personal = True
    crosses = {
        "client_update": "up: all weights but normalisation's (whoever missed the last average gets it first)",
        "receive": "down: the average of them",
    }

    def outgoing(self, network: Classifier) -> State:
        own = norm_names(network)
        return {name: weight for name, weight in network.state_dict().items() if name not in own}

    def train(self, client: Client) -> None:
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))

    def receive(self, client: Client, w: State) -> None:
        self.begin(client, w)
