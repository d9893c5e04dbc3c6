"""FedRolex: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS
2022, Algorithm 1 (arXiv:2212.01548).

Every client trains a window of channels that moves on by one in each round, so that after as many rounds as a layer is
wide all of it was trained alike, also where no client can afford the whole network. The default local training is that
of `heterofl`; preset "paper" has FedRolex's own, which is made for thousands of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["FedRolex"]


@dataclass(frozen=True, kw_only=True)
class FedRolex(PartialTraining):
    """A window of channels that rolls on."""

    extraction = "rolling"
    presets = {"paper": {"lr": 2e-4, "epochs": 1}}
