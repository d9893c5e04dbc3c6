"""A network from predictions: whoever hears what a client says of public images can have another learn to say it.

So methods that send no weights do not hide them altogether (Tramèr et al., "Stealing Machine Learning Models via
Prediction APIs", USENIX Security 2016). The attacker knows the client's architecture, as the server does.
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

__all__ = ["extracted", "predictions"]

STEPS = 400
BATCH = 100


def predictions(
    answers: Mapping[str, Payload], sent: Mapping[str, Payload], classes: int
) -> tuple[Tensor, Tensor] | None:
    """Places of public images that a client was asked about, and what it said of each; none if it said nothing."""
    for method, answer in answers.items():
        asked = [x for x in _tensors(sent.get(method)) if x.ndim == 1 and x.dtype == torch.int64]
        said = [
            x
            for x in _tensors(answer)
            if x.ndim == 2 and x.shape[1] == classes and x.is_floating_point()
        ]
        pairs = [
            (places, values) for places in asked for values in said if len(places) == len(values)
        ]
        if pairs:
            return pairs[0]
    return None


def _tensors(tree: Payload) -> Iterator[Tensor]:
    yield from (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def extracted(like: Classifier, public: Images, places: Tensor, said: Tensor) -> Classifier:
    """A new network of the same architecture that learnt what was said of these public images."""
    network = copy.deepcopy(like).requires_grad_(True)
    for part in network.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    said = said.float()
    shares = bool((said >= 0).all()) and torch.allclose(
        said.sum(1), torch.ones(len(said)), atol=1e-3
    )
    target = said if shares else said.softmax(1)
    recipe = adam(1e-3, cosine=True)
    distil(
        network, public, places, [target], soft_loss, batch_size=BATCH, recipe=recipe, steps=STEPS
    )
    return network.eval().requires_grad_(False)
