"""Mutual learning of a client's private network and a shared one."""

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
    """Return a client's copy of the shared network, with these weights.

    On a lane all clients use the same module, one after the other; its training mode is as the last
    user left it.

    Args:
        client: The client.
        name: Architecture of the shared network.
        weights: State to load into it.
    """

    def new() -> Classifier:
        # The initial weights are overwritten; the scope keeps them out of the client's random stream.
        with seeds.scope(0, "companion"):
            network = zoo.build_network(name, client.data.spec)
        return network.to(client.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    network = lanes.lane_module(("companion", name), new)
    network.load_state_dict(weights)
    return network
