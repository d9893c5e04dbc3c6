"""Heterogeneous federated learning: clients that share neither data nor architecture trade knowledge.

A method is a frozen dataclass of hyperparameters, `ALGORITHMS` has them all by name, and an `Experiment` runs one.

>>> from barter import ALGORITHMS, DFFKE, Experiment, FedAvg, Local
>>> ALGORITHMS["dffke"] is DFFKE
True
>>> DFFKE.preset("paper", {"memory": 5}).memory
5
>>> experiments = {
...     "local": Experiment(Local(max_epochs=1), clients=3, models="small-mlp"),
...     "fedavg": Experiment(FedAvg(epochs=1), clients=3, models="small-mlp"),
... }
>>> for name, experiment in experiments.items():
...     for r in experiment.rounds(1):
...         print(f"{name}, round {r.round}: {r.traffic('up')} bytes up")
local, round 1: 0 bytes up
fedavg, round 1: 242832 bytes up

Methods are written with what is in `barter.core` and `barter.ops`; `barter.data.task` describes data, and
`barter.data.partition` who gets which of them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from barter.version import __version__ as __version__

# Threads that wait for each other soon sleep. If they spin for long, as is usual, two programs with two threads each on
# two cores take ten times as long: those that wait keep those that work from the cores. Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # GNU's: some ten microseconds, with which nothing is lost alone
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from barter.algorithms import ALGORITHMS, DFFKE, FedAvg, Local
    from barter.core.algorithm import Algorithm
    from barter.core.clients import Clients, Replies
    from barter.core.errors import BarterError
    from barter.core.model import Classifier, split
    from barter.core.nodes import Client, Server
    from barter.core.record import Round
    from barter.experiment import Experiment
    from barter.trained.model import load

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
    "trained.model": {"load"},
    "core.record": {"Round"},
    "algorithms": {"ALGORITHMS", "DFFKE", "FedAvg", "Local"},
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"barter.{module}"), name)
    raise AttributeError(f"module 'barter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
