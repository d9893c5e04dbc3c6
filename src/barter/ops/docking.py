"""Docking layers: linear layers from embeddings of different widths to one space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.trainer import Recipe
from barter.core.nodes import Server
from barter.core.payload import State
from barter.ops.fit import Trainer
from barter.ops.modules import copy_state
from barter.ops.statistics import whiten

__all__ = ["docking_loss", "largest_ratio", "typical_size", "unify"]

# The typical size of embeddings is at least this share of the root mean square of all.
LEAST_SHARE = 0.1


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return one client's term of DFFKE's Eq. 11, the cross entropy of head(z_k(e))."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def typical_size(embeddings: Tensor) -> float:
    """Return how large most of a client's embeddings (images, features) are.

    The size of an embedding is the root mean square of its features. The result is the median size,
    which the few far larger embeddings of some networks do not change. It is at least a tenth of
    the root mean square of all embeddings, so that a client cannot magnify some of its embeddings
    without limit by sending most of them near zero.
    """
    squares = embeddings.square().mean(-1)
    return max(float(squares.sqrt().median()), LEAST_SHARE * math.sqrt(float(squares.mean())))


def largest_ratio(numbers: Iterable[float]) -> float:
    """Return how many times larger the largest number is than the smallest; zeros are left out.

    It is 1 without a positive number.
    """
    positive = [number for number in numbers if number > 0]
    return max(positive) / min(positive) if positive else 1.0


def unify(
    server: Server,
    embeddings: Mapping[int, Tensor],
    labels: Mapping[int, Tensor],
    start: Mapping[int, State],
    width: int,
    epochs: int,
    recipe: Recipe,
    floor: float = 0.0,
    *,
    scales: Mapping[int, float] | None = None,
) -> tuple[dict[int, nn.Linear], dict[int, Tensor], dict[int, State]]:
    """Train docking layers z_k so that one head classifies all clients' codes.

    The training follows Eqs. 10-11 of DFFKE. A code is the output of a docking layer for an
    embedding. The equations ask for nothing but the class, so that without whitening the codes of a
    class are nearly equal, whatever the image. The head is new in every call and is not returned.

    How large a network's features are is arbitrary, as its head can undo any factor. Docking layers
    are trained at one rate and codes are whitened together, so that one client with large features
    can spoil the codes of all. So a layer can be trained on embeddings that are divided by one
    number, its client's of `scales`. The weight of the returned layer is divided by the same
    number, so that the layer takes the embeddings as they are.

    Args:
        server: The server, whose device and classes are used.
        embeddings: Each client's embeddings (images, views, features). The first view is the full
            image, from which the class is predicted; the others, if any, are its parts.
        labels: Each client's labels.
        start: States of docking layers to continue from; clients without one start anew.
        width: Dimensions of the common space.
        epochs: Number of optimizer steps for each client, each on all of its embeddings at once.
        recipe: Optimizer of the docking layers and the head; its learning rate stays constant.
        floor: Whiten layers and codes with this floor (see `whitening_transform`); 0 does not
            whiten.
        scales: What each client's embeddings are divided by in training, not 0; None for 1.

    Returns:
        By client, the docking layers (frozen, whitened if asked for), the codes (images, views,
        width) of all embeddings, and the layers' states to start from next time: as they were
        trained, before whitening and before the weight is divided.
    """
    layers = {k: nn.Linear(e.shape[2], width).to(server.device) for k, e in embeddings.items()}
    layers = {k: lanes.keep(("docking", k), layer) for k, layer in layers.items()}
    for k in layers.keys() & start.keys():
        layers[k].load_state_dict(start[k])
    head = lanes.keep("global head", nn.Linear(width, server.spec.classes).to(server.device))

    full_images = {
        k: e[:, 0] if scales is None else e[:, 0] / scales[k] for k, e in embeddings.items()
    }
    trainer = Trainer.of([*layers.values(), head], recipe)
    for _ in server.track("unify", range(epochs)):
        for k, layer in layers.items():
            trainer.step(partial(docking_loss, head, layer), full_images[k], labels[k])

    states = {k: copy_state(layer) for k, layer in layers.items()}
    for k, layer in layers.items():
        layer.requires_grad_(False)
        if scales is not None:
            layer.weight.div_(scales[k])
    if floor:
        outputs = [layer(embeddings[k]).flatten(0, 1) for k, layer in layers.items()]
        whiten(layers.values(), torch.cat(outputs), floor)
    codes = {k: layer(embeddings[k]) for k, layer in layers.items()}
    return layers, codes, states
