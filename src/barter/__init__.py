"""Heterogeneous federated learning: clients share knowledge, but neither data nor architectures.

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
    from barter.algorithms import ALGORITHMS as ALGORITHMS
    from barter.algorithms import DENSE as DENSE
    from barter.algorithms import DFFKE as DFFKE
    from barter.algorithms import DFRD as DFRD
    from barter.algorithms import DSFL as DSFL
    from barter.algorithms import FML as FML
    from barter.algorithms import MHAT as MHAT
    from barter.algorithms import MOON as MOON
    from barter.algorithms import Central as Central
    from barter.algorithms import FedAF as FedAF
    from barter.algorithms import FedAvg as FedAvg
    from barter.algorithms import FedBN as FedBN
    from barter.algorithms import FedDF as FedDF
    from barter.algorithms import FedDistill as FedDistill
    from barter.algorithms import FedDM as FedDM
    from barter.algorithms import FedDropout as FedDropout
    from barter.algorithms import FedDyn as FedDyn
    from barter.algorithms import FedFree as FedFree
    from barter.algorithms import FedFTG as FedFTG
    from barter.algorithms import FedGen as FedGen
    from barter.algorithms import FedGH as FedGH
    from barter.algorithms import FedIOD as FedIOD
    from barter.algorithms import FedKD as FedKD
    from barter.algorithms import FedKTL as FedKTL
    from barter.algorithms import FedMD as FedMD
    from barter.algorithms import FedProto as FedProto
    from barter.algorithms import FedProx as FedProx
    from barter.algorithms import FedRolex as FedRolex
    from barter.algorithms import FedTGP as FedTGP
    from barter.algorithms import FedZGE as FedZGE
    from barter.algorithms import FedZKT as FedZKT
    from barter.algorithms import HeteroFL as HeteroFL
    from barter.algorithms import LGFedAvg as LGFedAvg
    from barter.algorithms import Local as Local
    from barter.algorithms import PerFedAvg as PerFedAvg
    from barter.algorithms import PFedLA as PFedLA
    from barter.core.algorithm import Algorithm
    from barter.core.algorithm import Crossing as Crossing
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

# The class names of all methods, which are not in __all__ so that `from barter import *` is small.
_METHODS = frozenset(
    {
        "DENSE",
        "DFFKE",
        "DFRD",
        "DSFL",
        "FML",
        "MHAT",
        "MOON",
        "Central",
        "FedAF",
        "FedAvg",
        "FedBN",
        "FedDF",
        "FedDM",
        "FedDistill",
        "FedDropout",
        "FedDyn",
        "FedFTG",
        "FedFree",
        "FedGH",
        "FedGen",
        "FedIOD",
        "FedKD",
        "FedKTL",
        "FedMD",
        "FedProto",
        "FedProx",
        "FedRolex",
        "FedTGP",
        "FedZGE",
        "FedZKT",
        "HeteroFL",
        "LGFedAvg",
        "Local",
        "PFedLA",
        "PerFedAvg",
    }
)

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
    "algorithms": {"ALGORITHMS", *_METHODS},
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"barter.{module}"), name)
    raise AttributeError(f"module 'barter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_METHODS, "__version__"})
