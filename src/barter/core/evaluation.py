"""Predictions in chunks, and what a client's model is worth on its test sets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from barter.core import lanes, precision
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client

__all__ = ["accuracy", "evaluate", "predict"]

CHUNK = 500  # images at a time on the CPU and of large images; small ones on a GPU go in larger chunks


@torch.no_grad()
def predict(function: Callable[[Tensor], Tensor], batch: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
    """The function's values for the samples at these indices, computed in chunks, in fp32."""
    values, size = [], CHUNK
    while len(index):
        part, index = index[:size], index[size:]
        inputs = batch(part)
        with precision.autocast(index.device):
            values.append(function(inputs).float())
        if index.is_cuda:
            size = max(CHUNK, min(4 * CHUNK, 2**25 // max(1, inputs[0].numel())))
        lanes.breathe()
    lanes.rest()
    return torch.cat(values)


def accuracy(model: Classifier, data: Images) -> float:
    """The share of images that the model names rightly, in evaluation mode."""
    model.eval()
    predicted = predict(model, data.batch, torch.arange(len(data), device=data.device)).argmax(1)
    return float((predicted == data.labels).double().mean())


def evaluate(client: Client) -> dict[str, float]:
    """The accuracy of a client's model on each of its test sets."""
    return {name: accuracy(client.model, data) for name, data in client.tests.items()}
