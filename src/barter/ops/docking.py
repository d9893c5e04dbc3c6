"""Docking layers: embeddings of different widths brought into one space."""

from __future__ import annotations

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

__all__ = ["docking_loss", "unify"]


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """A client's term of DFFKE's Eq. 11."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def unify(
    server: Server,
    embeddings: Mapping[int, Tensor],
    labels: Mapping[int, Tensor],
    start: Mapping[int, State],
    width: int,
    epochs: int,
    recipe: Recipe,
    floor: float = 0.0,
) -> tuple[dict[int, nn.Linear], dict[int, Tensor], dict[int, State]]:
    """Linear layers z_k, so that one head tells the classes of all clients (DFFKE, Eqs. 10 and 11).

    An image has an embedding of the whole, from which its class is told, and perhaps more of its parts. Gives the
    layers, the codes that they make of all embeddings, and the layers' states to start from next time. With a floor,
    the first two are whitened (see `whitening`): the equations ask for classes alone, and left so, the codes of a class
    are all but equal, whatever the image was.
    """
    new = {k: nn.Linear(e.shape[2], width).to(server.device) for k, e in embeddings.items()}
    z = {k: lanes.keep(("docking", k), layer) for k, layer in new.items()}
    for k in z.keys() & start.keys():
        z[k].load_state_dict(start[k])
    head = lanes.keep("global head", nn.Linear(width, server.spec.classes).to(server.device))
    trainer, wholes = (
        Trainer.of([*z.values(), head], recipe),
        {k: e[:, 0] for k, e in embeddings.items()},
    )
    for _ in server.track("unify", range(epochs)):
        for k, z_k in z.items():
            trainer.step(partial(docking_loss, head, z_k), wholes[k], labels[k])
    states = isolate({k: dict(layer.requires_grad_(False).state_dict()) for k, layer in z.items()})
    if floor:
        whiten(
            z.values(),
            torch.cat([layer(embeddings[k]).flatten(0, 1) for k, layer in z.items()]),
            floor,
        )
    return z, {k: layer(embeddings[k]) for k, layer in z.items()}, states
