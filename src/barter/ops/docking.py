"""Docking layers: linear layers from embeddings of different widths to one space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.trainer import Recipe
from barter.core.nodes import Server
from barter.core.payload import State, isolate
from barter.ops.fit import Trainer
from barter.ops.statistics import whiten

__all__ = ["compare_sizes", "docking_loss", "embedding_size", "unify"]


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return one client's term of DFFKE's Eq. 11, the cross entropy of head(z_k(e))."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def embedding_size(embeddings: Tensor) -> float:
    """Return the root mean square of a client's embeddings; 1 if they are all zero."""
    norm = float(torch.linalg.vector_norm(embeddings, dtype=torch.float64))
    return norm / math.sqrt(embeddings.numel()) or 1.0


def compare_sizes(embeddings: Mapping[int, Tensor]) -> float:
    """Return how many times larger the largest client's embeddings are than the smallest's.

    Each client's are measured by their `embedding_size`.
    """
    sizes = [embedding_size(e) for e in embeddings.values()]
    return max(sizes) / min(sizes)


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
    standardise: bool = False,
) -> tuple[dict[int, nn.Linear], dict[int, Tensor], dict[int, State]]:
    """Train docking layers z_k so that one head classifies all clients' codes.

    The training follows Eqs. 10-11 of DFFKE. A code is the output of a docking layer for an
    embedding. The equations ask for nothing but the class, so that without whitening the codes of a
    class are nearly equal, whatever the image. The head is new in every call and is not returned.

    How large a network's features are is arbitrary, as its head can undo any factor. Docking layers
    are trained at one rate and codes are whitened together, so that one client with large features
    can spoil the codes of all. With `standardise`, layers are trained on embeddings that are
    divided by their root mean square, and are divided by it afterwards: layers and codes are of the
    embeddings as they are.

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
        standardise: Whether to train on embeddings that are divided by their `embedding_size`.

    Returns:
        By client, the docking layers (frozen, whitened if asked for), the codes (images, views,
        width) of all embeddings, and the layers' states before whitening, to start from next time.
    """
    layers = {k: nn.Linear(e.shape[2], width).to(server.device) for k, e in embeddings.items()}
    layers = {k: lanes.keep(("docking", k), layer) for k, layer in layers.items()}
    sizes = {k: embedding_size(e) if standardise else 1.0 for k, e in embeddings.items()}
    for k in layers.keys() & start.keys():
        layers[k].load_state_dict(start[k])
        with torch.no_grad():
            layers[k].weight.mul_(sizes[k])
    head = lanes.keep("global head", nn.Linear(width, server.spec.classes).to(server.device))

    # Without a change no copy is needed.
    full_images = {
        k: e[:, 0] if sizes[k] == 1 else e[:, 0] / sizes[k] for k, e in embeddings.items()
    }
    trainer = Trainer.of([*layers.values(), head], recipe)
    for _ in server.track("unify", range(epochs)):
        for k, layer in layers.items():
            trainer.step(partial(docking_loss, head, layer), full_images[k], labels[k])

    for k, layer in layers.items():
        layer.requires_grad_(False)
        layer.weight.div_(sizes[k])
    states = isolate({k: dict(layer.state_dict()) for k, layer in layers.items()})
    if floor:
        outputs = [layer(embeddings[k]).flatten(0, 1) for k, layer in layers.items()]
        whiten(layers.values(), torch.cat(outputs), floor)
    codes = {k: layer(embeddings[k]) for k, layer in layers.items()}
    return layers, codes, states
