"""FedRolex: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS
2022, Algorithm 1 (arXiv:2212.01548).

Every client trains a window of channels of each layer, which moves on by one channel per round.
After as many rounds as a layer is wide, all its channels have been trained equally, even if no
client can afford the full network. One round (Algorithm 1):

1. The server moves the window by one channel and sends each client the weights inside its window.
2. Clients train them on their own images and upload them.
3. The server averages each weight over the clients that trained it.

Differences from the paper:

- `lr`, `epochs`: local training and normalisation are those of `heterofl`. Preset "paper" has
  FedRolex's own local training, which is intended for thousands of rounds.
- The window begins one channel lower in each round, as in the authors' code; in the paper it begins
  one higher. Over as many rounds as a layer is wide, both train all its channels equally.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["FedRolex"]


@dataclass(frozen=True, kw_only=True)
class FedRolex(PartialTraining):
    """Clients train a window of each layer's channels that shifts by one per round."""

    extraction = "rolling"
    presets = {"paper": {"lr": 2e-4, "epochs": 1}}
