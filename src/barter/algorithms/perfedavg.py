"""Per-FedAvg: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1 (arXiv:2002.07948).

Clients search for one model that is a good initialisation for all: a single step on a client's own
images should turn it into a good model for that client. So clients minimise the loss after such a
step.

One round:

1. Sampled clients train the server's model. In each step they take a step of size α on a first
   batch, compute the gradient on a second batch at the resulting weights, and apply that gradient,
   with learning rate β, to the weights before the step.
2. The server averages the trained weights as FedAvg does.
3. All clients receive the average, and each adapts it with one step on its own images.

Differences from the paper:

- `hessian_free`: true is the paper's Per-FedAvg (HF), in which a difference of gradients on a third
  batch replaces the Hessian. The default leaves the Hessian out, Per-FedAvg (FO), as other
  implementations do.
- `lr`: β is 0.001 in the paper; 0.01 is FedFree's.
- `epochs`: an epoch is a pass over the data, each step of which takes two batches (HF: three); the
  paper counts steps.
- The average is weighted by numbers of examples, as in FedAvg; the paper's is not weighted.

Accuracies are those after the adaptation step, as in the paper. `unadapted_global` and
`unadapted_local` are those of the average itself; `before_global` and `before_local` are those
after the client's training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from barter.algorithms.broadcast import Broadcast, Caster
from barter.core.algorithm import Crossing
from barter.core.clients import Clients
from barter.core.evaluation import evaluate_client
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.ops.fit import LabelledBatch, alternate, epoch_length, fit, index_batches, sgd

__all__ = ["Adapter", "PerFedAvg", "adaptation_loss"]


class Adapter(Client):
    """A client that remembers the average from which its own model was adapted."""

    start: State = {}  # the average, before adaptation


def loss_gradient(
    model: Classifier, w: State, batch: LabelledBatch, spec: Spec, augment: Augment
) -> State:
    """Return the gradient of the cross entropy on a batch at given weights, by name.

    Args:
        model: The network; its own values of the weights in `w` are not used.
        w: The weights at which the gradient is computed.
        batch: The images, as bytes, and their classes.
        spec: The format of the images.
        augment: The augmentation of the images.
    """
    leaves = {name: weight.detach().requires_grad_() for name, weight in w.items()}
    logits = functional_call(model, leaves, (prepare_batch(batch.pixels, spec, augment),))
    value = F.cross_entropy(logits, batch.labels)
    gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def add_multiple(w: State, by: float, way: State) -> State:
    """Return the weights w + by * way."""
    return {name: weight.detach() + by * way[name] for name, weight in w.items()}


def adaptation_loss(
    model: Classifier,
    alpha: float,
    delta: float,
    spec: Spec,
    augment: Augment,
    first: LabelledBatch,
    second: LabelledBatch,
    third: LabelledBatch | None = None,
) -> Tensor:
    """Return a surrogate with the parameter gradient of the loss after adaptation.

    Its value has no meaning.

    Args:
        model: The network to train.
        alpha: α, the size of the adaptation step.
        delta: δ, the step of the differences.
        spec: The format of the images.
        augment: The augmentation of the images.
        first: The batch of the adaptation step.
        second: The batch of the loss after it.
        third: The batch on which the Hessian in the gradient of the adaptation step is estimated by
            central differences (HF); with None, the Hessian is left out (FO).
    """
    w: State = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradient_at = partial(loss_gradient, model, spec=spec, augment=augment)
    adapted = add_multiple(w, -alpha, gradient_at(w, first))
    gradient = gradient_at(adapted, second)
    if third is not None:
        above = gradient_at(add_multiple(w, delta, gradient), third)
        below = gradient_at(add_multiple(w, -delta, gradient), third)
        gradient = {
            name: g - alpha * (above[name] - below[name]) / (2 * delta)
            for name, g in gradient.items()
        }
    # The gradient is constant here, so that this sum's derivative by the weights is the gradient.
    return torch.stack([(p * gradient[name]).sum() for name, p in w.items()]).sum()


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Broadcast[Caster, Adapter]):
    """Learn one initialisation, which each client adapts by a gradient step."""

    crosses = {
        "client_update": Crossing(
            down="the server's weights, if the client missed them",
            up="the client's weights",
        ),
        "receive": Crossing(down="the average"),
    }
    retired = {"steps": 1}

    epochs: Count = 5  # local epochs
    batch_size: Count = 10  # images in each batch of a step
    lr: Positive = 0.01  # β: learning rate of the averaged model
    alpha: NonNegative = 0.01  # α: learning rate of the adaptation step
    hessian_free: bool = False  # true: estimate the Hessian (HF); false: leave it out (FO)
    delta: Positive = 1e-3  # δ: step of the differences that estimate the Hessian

    def setup(self, server: Caster, clients: Clients) -> None:
        server.average = isolate(server.model.state_dict())

    def round(self, server: Caster, clients: Clients, t: int) -> None:
        super().round(server, clients, t)
        server.model.load_state_dict(server.average)

    def begin(self, client: Adapter, w: State) -> None:
        client.model.load_state_dict(w or client.start)

    def train(self, client: Adapter) -> None:
        data = client.data
        batches_per_step = 3 if self.hessian_free else 2
        steps_per_epoch = math.ceil(epoch_length(len(data), self.batch_size) / batches_per_step)
        loss = partial(
            adaptation_loss, client.model, self.alpha, self.delta, data.spec, data.augment
        )
        batches = batch_groups(data, self.batch_size, batches_per_step)
        alternate(client, [(loss, batches)], self.epochs * steps_per_epoch, sgd(self.lr))

    def receive(self, client: Adapter, w: State) -> None:
        client.start = w
        self.begin(client, w)
        client.report |= {
            f"unadapted_{name}": value for name, value in evaluate_client(client).items()
        }
        fit(client, epochs=1, steps=1, batch_size=self.batch_size, recipe=sgd(self.alpha))


def batch_groups(data: Images, size: int, each: int) -> Iterator[list[LabelledBatch]]:
    """Yield lists of several shuffled batches without end, see `index_batches`.

    Args:
        data: The images.
        size: Images per batch.
        each: Batches per list.
    """
    index_stream = index_batches(len(data), size, data.device)
    while True:
        yield [
            LabelledBatch(data.pixels[index], data.labels[index])
            for index in islice(index_stream, each)
        ]
