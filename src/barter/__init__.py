"""Heterogeneous federated learning: clients exchange knowledge, not data.

Their architectures may differ.

A method is a frozen dataclass of hyperparameters. `ALGORITHMS` maps names to methods, and an
`Experiment` runs one: pass an instance, or a name to use the defaults. Every method's class can be
imported from this package.

>>> from barter import ALGORITHMS, DFFKE, Experiment, FedAvg, FedProto, Local
>>> ALGORITHMS["dffke"] is DFFKE
True
>>> Experiment("fedproto", clients=2).algorithm == FedProto()
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

To write a method, use `barter.core` and `barter.ops`. `barter.data.task` describes the data, and
`barter.data.partition` how it is divided among clients.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from barter.version import __version__ as __version__

# Let waiting OpenMP threads sleep instead of spinning. With spinning, the default, two programs
# with two threads each on two cores take ten times as long, because waiting threads occupy the
# cores that working threads need. OpenMP reads these variables when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # GNU OpenMP only: spin for about ten microseconds first, so that a lone program is not slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from barter.algorithms import *  # noqa: F403  # every method, for type checkers
    from barter.core.algorithm import Algorithm
    from barter.core.algorithm import Crossing as Crossing
    from barter.core.clients import Clients, Replies
    from barter.core.errors import BarterError
    from barter.core.model import Classifier, split
    from barter.core.nodes import Client, Server
    from barter.core.record import Round
    from barter.experiment import Experiment
    from barter.trained.model import load

__all__ = [  # noqa: F405
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

# Names are imported on first use: the process that a site starts per message must not load torch.
_MODULES = {
    "core.algorithm": {"Algorithm", "Crossing"},
    "core.clients": {"Clients", "Replies"},
    "core.errors": {"BarterError"},
    "core.model": {"Classifier", "split"},
    "core.nodes": {"Client", "Server"},
    "experiment": {"Experiment"},
    "trained.model": {"load"},
    "core.record": {"Round"},
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"barter.{module}"), name)
    # The registry of algorithms loads torch. Other attributes that Python itself asks for, such as
    # submodules, are in lower case.
    if name[0].isupper() and name in _algorithms().__all__:
        return getattr(_algorithms(), name)
    raise AttributeError(f"module 'barter' has no attribute {name!r}")


def __dir__() -> list[str]:
    # All methods can be imported, but `from barter import *` imports those of __all__ only.
    return sorted({*__all__, *_algorithms().__all__, "Crossing", "__version__"})


def _algorithms() -> ModuleType:
    return importlib.import_module("barter.algorithms")
