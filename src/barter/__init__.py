"""Heterogeneous federated learning: clients that share neither data nor architecture trade knowledge."""

from __future__ import annotations

from barter.algorithms import ALGORITHMS, DFFKE, Central, FedAvg, Local
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.errors import BarterError
from barter.core.model import Classifier, split
from barter.core.nodes import Client, Server
from barter.experiment import Experiment
from barter.runs.record import Round
from barter.version import __version__ as __version__

__all__ = [
    "ALGORITHMS",
    "DFFKE",
    "Algorithm",
    "BarterError",
    "Central",
    "Classifier",
    "Client",
    "Clients",
    "Experiment",
    "FedAvg",
    "Local",
    "Replies",
    "Round",
    "Server",
    "split",
]
