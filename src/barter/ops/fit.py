"""The training loop behind every algorithm: local training, distillation, decoders, exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.images import Images
from barter.core.nodes import Client

__all__ = [
    "Fitted",
    "Recipe",
    "Trainer",
    "adam",
    "epoch_length",
    "fit",
    "index_batches",
    "sgd",
]

Recipe: TypeAlias = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adam(lr: float, weight_decay: float = 0.0) -> Recipe:
    """Adam with one fused kernel for all parameters."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Recipe:
    """Stochastic gradient descent."""
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True
    )


class Trainer:
    """Parameters and their optimizer; every step of every method is one call of `step`."""

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: Recipe) -> None:
        self.optimizer = recipe([p for p in parameters if p.requires_grad])

    def step(self, loss: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        """One step down the gradient of the loss on this batch; the loss before it."""
        self.optimizer.zero_grad()
        value = loss(*batch)
        torch.autograd.backward(value)
        self.optimizer.step()
        return value.detach()


def index_batches(n: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Shuffled index batches of one size, for ever; each run of ceil(n / size) of them is an epoch.

    A last batch that would be short is filled from the start of the epoch's order, so that every sample is seen and
    every batch has the same shape. Batch normalisation needs two values: a single sample is taken twice.
    """
    size = _batch_size(n, size)
    while True:
        order = torch.randperm(n, device=device)
        filled = torch.cat([order, order[: -n % size]])
        yield from torch.split(filled, size)


def epoch_length(n: int, size: int) -> int:
    """How many of these batches make an epoch."""
    return -(-n // _batch_size(n, size))


def _batch_size(n: int, size: int) -> int:
    return max(2, min(size, n))


@dataclass(frozen=True)
class Fitted:
    """How a training ended."""

    epochs: int
    loss: float
    accuracy: float


def fit(
    client: Client,
    *,
    epochs: int,
    batch_size: int,
    recipe: Recipe,
    goal: float | None = None,
    data: Images | None = None,
) -> Fitted:
    """Train the client's model by cross entropy for so many epochs, or until an epoch's accuracy reaches the goal."""
    model, data = client.model, data or client.data
    trainer = Trainer(model.parameters(), recipe)
    batches = index_batches(len(data), batch_size, data.device)
    per_epoch = epoch_length(len(data), batch_size)
    hits = torch.zeros((), device=data.device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        hits.add_((logits.detach().argmax(1) == y).sum())
        return F.cross_entropy(logits, y)

    model.train()
    fitted = Fitted(0, float("nan"), 0.0)
    for epoch in client.track(range(1, epochs + 1)):
        hits.zero_()
        seen, total = 0, torch.zeros((), device=data.device)
        for _, index in zip(range(per_epoch), batches, strict=False):
            total += trainer.step(loss, data.batch(index, augmented=True), data.labels[index])
            seen += len(index)
        fitted = Fitted(epoch, float(total) / per_epoch, float(hits) / seen)
        if goal is not None and fitted.accuracy >= goal:
            break
    return fitted
