"""Batched prediction, and the evaluation of models on test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from barter.compute import lanes, precision
from barter.compute.flops import add_flops, set_aside
from barter.compute.graphs import Forward
from barter.core.images import Images
from barter.core.metrics import Evaluation, measure
from barter.core.model import Classifier
from barter.core.nodes import Client

__all__ = [
    "accuracy",
    "add_offset",
    "evaluate_client",
    "predict",
    "record_before_exchange",
    "record_local_only",
    "score",
    "tests_due",
]

OfBatch: TypeAlias = Callable[[Tensor], Tensor]

# Images per forward pass. On a GPU small images go in larger chunks, and large images that a CUDA
# graph processes go in smaller ones.
PREDICT_CHUNK = 500


@torch.no_grad()
def predict(function: OfBatch, batch: OfBatch, index: Tensor) -> Tensor:
    """Apply a function to samples in chunks and concatenate the results in fp32.

    No gradients are recorded. The function runs under autocast of the run's precision. A model's
    mode is not changed: put it into evaluation mode first.

    Args:
        function: Maps a batch to one row per sample, which must not depend on the other samples.
            On a GPU it may be captured as a CUDA graph, see `compute.graphs`.
        batch: Maps indices to a batch of inputs.
        index: The indices of the samples, at least one.

    Returns:
        One row per sample, in the order of `index`.
    """
    forward = Forward.of(function) if len(index) else None
    if forward is not None:
        return _predict_by_graph(forward, function, batch, index)
    values = []
    size = PREDICT_CHUNK
    while len(index):
        inputs = batch(index[:size])
        index = index[size:]
        with precision.autocast(index.device):
            values.append(function(inputs).float())
        if index.is_cuda:
            size = max(PREDICT_CHUNK, min(8 * PREDICT_CHUNK, 2**25 // max(1, inputs[0].numel())))
        lanes.throttle()
    lanes.wait_for_device()
    return torch.cat(values)


def _predict_by_graph(forward: Forward, function: OfBatch, batch: OfBatch, index: Tensor) -> Tensor:
    """Predict with a CUDA graph in chunks of one size; the last one is padded.

    Padding repeats the first sample and is cut off the result.
    """
    size = max(PREDICT_CHUNK // 5, min(PREDICT_CHUNK, 2**24 // max(1, batch(index[:1]).numel())))
    padded = torch.cat([index, index[:1].expand(-len(index) % size)])
    with set_aside() as counted:
        values = [
            forward.take(function, [batch(part)]).to(torch.float32, copy=True)
            for part in torch.split(padded, size)
        ]
    # Padding is not part of the work.
    add_flops(counted.total * len(index) // len(padded))
    lanes.wait_for_device()
    return torch.cat(values)[: len(index)]


def add_offset(logits: Tensor, by_class: Tensor | None) -> Tensor:
    """Add a per-class offset to logits; None leaves them unchanged."""
    return logits if by_class is None else logits + by_class


def accuracy(model: Classifier, data: Images, by_class: Tensor | None = None) -> float:
    """Return the model's accuracy, a fraction of 1; it is put into evaluation mode.

    Args:
        model: The model.
        data: The labelled images.
        by_class: An offset that is added to each class's logit; None for no offset.
    """
    return score(model, data, "accuracy", Evaluation(), by_class)["accuracy"]


def score(
    model: Classifier,
    data: Images,
    test: str,
    evaluation: Evaluation,
    by_class: Tensor | None = None,
) -> dict[str, float]:
    """Compute a model's metrics on a test set; the model is put into evaluation mode.

    Args:
        model: The model.
        data: The test set.
        test: The name of the test set.
        evaluation: The metrics to compute.
        by_class: Offset added to the logits, one number per class; None for no offset.

    Returns:
        The accuracy under the test's name, and the further metrics of the evaluation as
        TEST_METRIC; see `measure`.
    """
    model.eval()
    logits = predict(model, data.batch, torch.arange(len(data), device=data.device))
    return measure(test, add_offset(logits, by_class), data.labels, evaluation.metrics)


def evaluate_client(client: Client, local_offset: Tensor | None = None) -> dict[str, float]:
    """Compute a client's metrics on its test sets, if it is evaluated in this round.

    Args:
        client: The client; its model is put into evaluation mode in any case.
        local_offset: Offset added to its logits on its local test and validation sets, one number
            per class; None for no offset.

    Returns:
        The metrics of all of `tests_due`, named as by `measure`; empty if none is due. The
        client's report is not changed.
    """
    metrics: dict[str, float] = {}
    # The mode is set even if no test is due, so that skipping tests has no other effect.
    client.model.eval()
    with set_aside():  # Evaluation serves the experimenter; it is not the method's work.
        for test, data in tests_due(client).items():
            by_class = local_offset if test in ("local", "val_local") else None
            metrics |= score(client.model, data, test, client.evaluation, by_class)
    return metrics


def tests_due(client: Client) -> dict[str, Images]:
    """Return the test and validation sets to evaluate a client on in this round.

    They are by name; there are none unless the round is due for the client (`client.tested`).
    """
    if not client.tested:
        return {}
    return {test: data for test, data in client.tests.items() if client.evaluation.runs(test)}


def record_before_exchange(client: Client, local_offset: Tensor | None = None) -> None:
    """Put the client's current metrics into its report, as before_METRIC.

    Nothing is added if no test is due. The model is put into evaluation mode, and `local_offset` is
    that of `evaluate_client`.
    """
    metrics = evaluate_client(client, local_offset)
    client.report |= {f"before_{name}": value for name, value in metrics.items()}


@contextmanager
def record_local_only(client: Client) -> Iterator[None]:
    """Record a client's local-only metrics if the block trains its network.

    For calls before any exchange, whose result cannot depend on other clients. The metrics go into
    the report as before_METRIC. Nothing is recorded if no parameter changed, or if the method has
    already recorded such metrics itself. The training modes are those of the block's end.
    """
    before = [parameter.detach().clone() for parameter in client.model.parameters()]
    yield
    if any(name.startswith("before_") for name in client.report):
        return
    pairs = zip(before, client.model.parameters(), strict=True)
    if all(torch.equal(old, new) for old, new in pairs):
        return
    modes = [part.training for part in client.model.modules()]
    record_before_exchange(client)
    for part, training in zip(client.model.modules(), modes, strict=True):
        part.training = training
