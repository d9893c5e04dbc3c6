"""A private and a shared network that learn side by side."""

from __future__ import annotations

import torch

from barter.compute import lanes
from barter.core import seeds
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import State
from barter.models import zoo

__all__ = ["companion"]


def companion(client: Client, name: str, weights: State) -> Classifier:
    """A client's copy of the shared network, with these weights."""

    def new() -> Classifier:
        with seeds.scope(
            0, "companion"
        ):  # what it draws is overwritten, and not taken from the client's stream
            network = zoo.build(name, client.data.spec)
        return network.to(client.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    network = lanes.kept(("companion", name), new)
    network.load_state_dict(weights)
    return network
