"""Heterogeneous federated learning: clients that share neither data nor architecture trade knowledge."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from barter.version import __version__ as __version__

if TYPE_CHECKING:
    from barter.algorithms import ALGORITHMS, DFFKE, FedAvg, Local
    from barter.core.algorithm import Algorithm
    from barter.core.clients import Clients, Replies
    from barter.core.errors import BarterError
    from barter.core.model import Classifier, split
    from barter.core.nodes import Client, Server
    from barter.experiment import Experiment
    from barter.kept import load
    from barter.runs.record import Round

__all__ = [
    "ALGORITHMS",
    "DFFKE",
    "Algorithm",
    "BarterError",
    "Classifier",
    "Client",
    "Clients",
    "Experiment",
    "FedAvg",
    "Local",
    "Replies",
    "Round",
    "Server",
    "load",
    "split",
]

# Names come from their modules when they are first used: what a site starts for every message must not load torch.
_MODULES = {
    "core.algorithm": {"Algorithm"},
    "core.clients": {"Clients", "Replies"},
    "core.errors": {"BarterError"},
    "core.model": {"Classifier", "split"},
    "core.nodes": {"Client", "Server"},
    "experiment": {"Experiment"},
    "kept": {"load"},
    "runs.record": {"Round"},
    "algorithms": {"ALGORITHMS", "DFFKE", "FedAvg", "Local"},
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"barter.{module}"), name)
    raise AttributeError(f"module 'barter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
