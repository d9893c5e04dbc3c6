"""Federated Dropout: Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018 (arXiv:1812.07210).

Every client trains randomly selected channels of each layer. One round:

1. The server selects new random channels for each client and sends it their weights.
2. Clients train them on their own images and upload them.
3. The server averages each weight over the clients that trained it.

Differences from the paper:

- Layers of the same width use the same random selection, so that a residual connection adds equal
  channels. DFRD's comparison selects channels for each layer.
- Local training and normalisation are those of `heterofl`.
- The paper's compression of transmitted weights is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["FedDropout"]


@dataclass(frozen=True, kw_only=True)
class FedDropout(PartialTraining):
    """Each client trains random channels of every layer, selected anew in each round."""

    extraction = "random"
