"""Predictions in chunks, and what a client's model is worth on its test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from barter.compute import lanes, precision
from barter.compute.graphs import Forward
from barter.core.images import Images
from barter.core.metrics import Evaluation, measure
from barter.core.model import Classifier
from barter.core.nodes import Client

__all__ = [
    "accuracy",
    "adjusted",
    "evaluate",
    "knowing_alone",
    "note_before",
    "predict",
    "score",
    "tests_due",
]

OfBatch: TypeAlias = Callable[[Tensor], Tensor]

CHUNK = 500  # images at a time; small ones on a GPU go in larger chunks, large ones that a graph sees in smaller


@torch.no_grad()
def predict(function: OfBatch, batch: OfBatch, index: Tensor) -> Tensor:
    """The function's values for the samples at these indices, computed in chunks, in fp32.

    What it gives for a sample must not depend on others. On a GPU it may be captured, see `compute.graphs`.
    """
    forward = Forward.of(function) if len(index) else None
    if forward is not None:
        return _replayed(forward, function, batch, index)
    values, size = [], CHUNK
    while len(index):
        part, index = index[:size], index[size:]
        inputs = batch(part)
        with precision.autocast(index.device):
            values.append(function(inputs).float())
        if index.is_cuda:
            size = max(CHUNK, min(8 * CHUNK, 2**25 // max(1, inputs[0].numel())))
        lanes.breathe()
    lanes.rest()
    return torch.cat(values)


def _replayed(forward: Forward, function: OfBatch, batch: OfBatch, index: Tensor) -> Tensor:
    """The same by a graph, which wants chunks of one size: the last one is filled up."""
    size = max(CHUNK // 5, min(CHUNK, 2**24 // max(1, batch(index[:1]).numel())))
    filled = torch.cat([index, index[:1].expand(-len(index) % size)])
    values = [
        forward.take(function, [batch(part)]).to(torch.float32, copy=True)
        for part in torch.split(filled, size)
    ]
    lanes.rest()
    return torch.cat(values)[: len(index)]


def adjusted(logits: Tensor, by_class: Tensor | None) -> Tensor:
    """Logits with a number for each class added, where there are such numbers."""
    return logits if by_class is None else logits + by_class


def accuracy(model: Classifier, data: Images, by_class: Tensor | None = None) -> float:
    """The share of images that the model names rightly, in evaluation mode, with logits adjusted by class."""
    return score(model, data, "accuracy", Evaluation(), by_class)["accuracy"]


def score(
    model: Classifier,
    data: Images,
    test: str,
    evaluation: Evaluation,
    by_class: Tensor | None = None,
) -> dict[str, float]:
    """Measure a model on a test set, in evaluation mode, with logits adjusted by class.

    Returns:
        The accuracy under the test's name, and further metrics that the evaluation asks for.
    """
    model.eval()
    logits = predict(model, data.batch, torch.arange(len(data), device=data.device))
    return measure(test, adjusted(logits, by_class), data.labels, evaluation.metrics)


def evaluate(client: Client, at_home: Tensor | None = None) -> dict[str, float]:
    """Measure a client's model on its test sets, if its tests are due in this round.

    Args:
        client: The client.
        at_home: Added to its logits on its local test and validation sets, a number for each class.
    """
    found: dict[str, float] = {}
    client.model.eval()  # whether tests are due or not, so that skipping them changes nothing else
    for test, data in tests_due(client).items():
        by_class = at_home if test in ("local", "val_local") else None
        found |= score(client.model, data, test, client.evaluation, by_class)
    return found


def tests_due(client: Client) -> dict[str, Images]:
    """Return the test and validation sets on which a client is evaluated in this round."""
    if not client.tested:
        return {}
    return {test: data for test, data in client.tests.items() if client.evaluation.runs(test)}


def note_before(client: Client, at_home: Tensor | None = None) -> None:
    """Put the client's current accuracies into its report, as those before an exchange."""
    found = evaluate(client, at_home)
    client.report |= {f"before_{name}": value for name, value in found.items()}


@contextmanager
def knowing_alone(client: Client) -> Iterator[None]:
    """Around a turn that nothing of others can reach: if it trains the client's network for the first time, the client
    notes what that is worth, unless the method does so itself."""
    before = [parameter.detach().clone() for parameter in client.model.parameters()]
    yield
    if any(name.startswith("before_") for name in client.report):
        return
    if all(
        torch.equal(old, new) for old, new in zip(before, client.model.parameters(), strict=True)
    ):
        return
    modes = [part.training for part in client.model.modules()]
    note_before(client)
    for part, training in zip(client.model.modules(), modes, strict=True):
        part.training = training
