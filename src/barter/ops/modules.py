"""Modules that a party trains in addition to its network and keeps over rounds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.nodes import Client, Server
from barter.core.payload import State, isolate

__all__ = ["copy_state", "restore_module", "stack_field"]

M = TypeVar("M", bound=nn.Module)


def restore_module(party: Server | Client, name: Hashable, module: M, state: State) -> M:
    """Return a module as the party left it, on the party's device.

    Args:
        party: The server or the client.
        name: The name under which a lane keeps the module for CUDA graphs. Without a lane, the new
            module itself is returned.
        module: A new module of this structure.
        state: What `copy_state` returned in an earlier round; if empty, the new module's state is
            used.
    """
    resident = lanes.keep(name, module.to(party.device))
    if state:
        resident.load_state_dict(state)
    return resident


def copy_state(module: nn.Module) -> State:
    """Return a copy of a module's state that further training does not change."""
    return isolate(dict(module.state_dict()))


def stack_field(answers: Mapping[int, Mapping[str, Any]], field: str) -> Tensor:
    """Stack one tensor of each client's answer (clients, ...), in the answers' order."""
    return torch.stack([answer[field] for answer in answers.values()])
