"""Model extraction: distil a client's network from public predictions.

Predictions on public images are enough, so not sending weights does not hide the network (Tramèr et
al., "Stealing Machine Learning Models via Prediction APIs", USENIX Security 2016). The attacker
knows the client's architecture, as the server does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.payload import Payload, leaves
from barter.ops.ensemble import distil, soft_loss
from barter.ops.fit import adam

__all__ = ["extract_model", "find_predictions"]

STEPS = 400
EXTRACTION_BATCH = 100


def find_predictions(
    answers: Mapping[str, Payload], sent: Mapping[str, Payload], classes: int
) -> tuple[Tensor, Tensor] | None:
    """Find a client's predictions on public images.

    They are the first float matrix (N, classes) in an answer whose method received a vector of N
    integers (int64), which are taken for indices of public images.

    Args:
        answers: The client's answers by method.
        sent: The arguments that the server sent to each method.
        classes: The number of classes.

    Returns:
        Indices of public images and a row of predictions for each; None if there are none.
    """
    for method, answer in answers.items():
        indices = [x for x in _tensors(sent.get(method)) if x.ndim == 1 and x.dtype == torch.int64]
        tables = [
            x
            for x in _tensors(answer)
            if x.ndim == 2 and x.shape[1] == classes and x.is_floating_point()
        ]
        for index in indices:
            for table in tables:
                if len(index) == len(table):
                    return index, table
    return None


def _tensors(tree: Payload) -> Iterator[Tensor]:
    """Yield all tensors of a tree."""
    yield from (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def extract_model(
    like: Classifier, public: Images, places: Tensor, predictions: Tensor
) -> Classifier:
    """Train a new network of the same architecture on predictions for public images.

    Predictions that are no probabilities (non-negative, with sums of 1 within 1e-3) are taken for
    logits. The network is returned frozen and in evaluation mode.

    Args:
        like: A network of the client's architecture; its weights are not used.
        public: The public images.
        places: Indices of the public images that have predictions.
        predictions: A row of probabilities or logits for each of them.
    """
    network = copy.deepcopy(like).requires_grad_(True)
    for part in network.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    predicted = predictions.float()
    sums = predicted.sum(1)
    sums_to_one = torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    are_probabilities = bool((predicted >= 0).all()) and sums_to_one
    target = predicted if are_probabilities else predicted.softmax(1)
    distil(
        network,
        public,
        places,
        [target],
        soft_loss,
        batch_size=EXTRACTION_BATCH,
        recipe=adam(1e-3, cosine=True),
        steps=STEPS,
    )
    return network.eval().requires_grad_(False)
