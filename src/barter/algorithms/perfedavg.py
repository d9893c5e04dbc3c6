"""Per-FedAvg: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1 (arXiv:2002.07948).

Clients look for one model that is a good start for all: one that a single step on a client's own images makes right for
that client. So they train it by how good it is after such a step, and it is averaged as FedAvg's is; each client then
takes the step and has a model of its own.

- `hessian_free` is the paper's Per-FedAvg (HF), with a difference of gradients in place of the Hessian, on a batch of
  its own. The default leaves the Hessian out, Per-FedAvg (FO), as other implementations do.
- β is 0.001 in the paper; 0.01 is FedFree's. An epoch is a pass over the data, each step of which takes two batches
  (HF: three); the paper counts steps.
- The average is weighted by numbers of examples, as FedAvg's; the paper's is not.
- Accuracies are those after the step, as in the paper; `unadapted_global` and `unadapted_local` are those of the
  average as it is, `before_global` and `before_local` those after the client's training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from barter.algorithms.broadcast import Broadcast, Caster
from barter.core.clients import Clients
from barter.core.evaluation import evaluate
from barter.core.images import Augment, Images, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import alternate, epoch_length, fit, index_batches, sgd

__all__ = ["Adapter", "PerFedAvg", "ahead"]


class Adapter(Client):
    """A client whose model is its own step away from everybody's."""

    start: State = {}  # everybody's


def slope(
    model: Classifier, w: State, spec: Spec, augment: Augment, pixels: Tensor, labels: Tensor
) -> State:
    """The gradient of the cross entropy on a batch, with these weights in place of the model's own."""
    at = {name: weight.detach().requires_grad_() for name, weight in w.items()}
    logits = functional_call(model, at, (prepared(pixels, spec, augment),))
    slopes = torch.autograd.grad(
        F.cross_entropy(logits, labels), list(at.values()), materialize_grads=True
    )
    return dict(zip(at, slopes, strict=True))


def moved(w: State, by: float, way: State) -> State:
    """The weights, some way on."""
    return {name: weight.detach() + by * way[name] for name, weight in w.items()}


def ahead(
    model: Classifier, alpha: float, delta: float, spec: Spec, augment: Augment, *batches: Tensor
) -> Tensor:
    """What has the gradient of the loss after a step ahead: the step on a first batch, the loss on a second.

    On a third batch, if there is one, the step's own dependence on the weights is found by differences.
    """
    w: State = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of = partial(slope, model, spec=spec, augment=augment)
    inner = of(w, pixels=batches[0], labels=batches[1])
    v = of(moved(w, -alpha, inner), pixels=batches[2], labels=batches[3])
    if batches[4:]:
        up, down = (
            of(moved(w, by, v), pixels=batches[4], labels=batches[5]) for by in (delta, -delta)
        )
        v = {name: v[name] - alpha * (up[name] - down[name]) / (2 * delta) for name in v}
    return torch.stack([(p * v[name]).sum() for name, p in w.items()]).sum()


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Broadcast[Caster, Adapter]):
    """One model for all to start from, and a step of one's own from there."""

    crosses = {
        "client_update": "down: the server's weights, to whom they did not reach; up: the client's weights",
        "receive": "down: the average",
    }

    epochs: Count = 5  # local epochs
    batch_size: Count = 10  # images in each batch of a step
    lr: Positive = 0.01  # β: learning rate of what is averaged
    alpha: NonNegative = 0.01  # α: learning rate of the step ahead, and of a client's own step
    steps: Count = 1  # a client's own steps
    hessian_free: bool = False  # whether the Hessian is estimated (HF) or left out (FO)
    delta: Positive = 1e-3  # δ: how far apart the gradients are that the Hessian is estimated from

    def setup(self, server: Caster, clients: Clients) -> None:
        server.average = isolate(server.model.state_dict())

    def round(self, server: Caster, clients: Clients, t: int) -> None:
        super().round(server, clients, t)
        server.model.load_state_dict(server.average)

    def begin(self, client: Adapter, w: State) -> None:
        client.model.load_state_dict(w or client.start)

    def train(self, client: Adapter) -> None:
        data, each = client.data, 3 if self.hessian_free else 2
        by = partial(ahead, client.model, self.alpha, self.delta, data.spec, data.augment)
        steps = self.epochs * -(-epoch_length(len(data), self.batch_size) // each)
        alternate(client, [(by, several(data, self.batch_size, each))], steps, sgd(self.lr))

    def receive(self, client: Adapter, w: State) -> None:
        client.start = w
        self.begin(client, w)
        client.report |= {f"unadapted_{name}": value for name, value in evaluate(client).items()}
        fit(client, epochs=1, steps=self.steps, batch_size=self.batch_size, recipe=sgd(self.alpha))


def several(data: Images, size: int, each: int) -> Iterator[list[Tensor]]:
    """Batches of pixels and labels, so many at a time, one behind the other."""
    index = index_batches(len(data), size, data.device)
    while True:
        yield [
            part
            for chosen in islice(index, each)
            for part in (data.pixels[chosen], data.labels[chosen])
        ]
