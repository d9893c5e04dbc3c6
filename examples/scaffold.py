"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1, option II (arXiv:1910.06378).

Clients answer weights and control variates. A control variate has a tensor for each parameter of the network and none
for buffers. It is no whole state, and the return type says so. Run it here, or by the command line from this folder:

    barter run --algorithm scaffold:Scaffold --set rounds=2
"""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter import Algorithm, Client, Clients, Crossing, Experiment, Server
from barter.core.algorithm import ServerModel
from barter.core.contracts import Weights
from barter.core.params import Count, Positive
from barter.core.payload import State
from barter.ops.average import average
from barter.ops.fit import epoch_length, index_batches


class Update(TypedDict):
    """What a client answers; anything else is refused, and the client has failed."""

    weights: State  # of the client's network, whole
    control: Annotated[State, Weights(parameters_only=True)]  # the change of its variate


class Coordinator(Server):
    """The server remembers its control variate c; none before the first round, which is zero."""

    control: State = {}


class Participant(Client):
    """A client remembers its own, c_i."""

    control: State = {}


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm[Coordinator, Participant]):
    """Averaging of weights, with local steps corrected for the drift that clients' different data cause."""

    server_model = ServerModel("shared")
    crosses = {
        "learn": Crossing(
            down="the server's weights and control variate",
            up="the client's weights and the change of its own",
        ),
    }

    epochs: Count = 1  # E: local epochs
    batch_size: Count = 50  # B: images per step
    lr: Positive = 0.05  # η_l: learning rate

    def round(self, server: Coordinator, clients: Clients, t: int) -> None:
        updates = clients.run(self.learn, server.model.state_dict(), server.control)
        server.model.load_state_dict(average(updates.map(lambda _, update: update["weights"])))
        changes = average(updates.map(lambda _, update: update["control"]), alike=True)
        server.control = {
            name: server.control.get(name, 0.0) + change for name, change in changes.items()
        }

    def learn(self, client: Participant, weights: State, control: State) -> Update:
        data, model = client.data, client.model.train()
        model.load_state_dict(weights)
        parameters = dict(model.named_parameters())
        zero = {name: torch.zeros_like(p) for name, p in parameters.items()}
        ours, theirs = client.control or zero, control or zero
        steps = self.epochs * epoch_length(len(data), self.batch_size)
        batches = index_batches(len(data), self.batch_size, client.device)
        for _ in client.track(range(steps)):
            index = next(batches)
            loss = F.cross_entropy(model(data.batch(index, augmented=True)), data.labels[index])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            with torch.no_grad():
                for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
                    p -= self.lr * (gradient - ours[name] + theirs[name])
        change: dict[str, Tensor] = {}
        for name, p in parameters.items():
            moved = (weights[name] - p.detach()) / (steps * self.lr)
            change[name] = moved - theirs[name]
        client.control = {name: ours[name] + change[name] for name in change}
        return {"weights": model.state_dict(), "control": change}


if __name__ == "__main__":
    for r in Experiment(Scaffold(), clients=3, models="small-mlp").rounds(2):
        print(f"round {r.round}: {r.server['global']:.1%} server, {r.traffic('up')} bytes up")
