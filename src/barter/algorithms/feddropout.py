"""Federated Dropout: Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018 (arXiv:1812.07210).

In every round each client gets channels of its own, drawn at random. Layers of the same width get the same draw, so
that what is added over a residual connection is of the same channel; DFRD's comparison draws for each layer. Local
training is that of `heterofl`. The paper's compression of what travels is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["FedDropout"]


@dataclass(frozen=True, kw_only=True)
class FedDropout(PartialTraining):
    """Random channels of every layer."""

    extraction = "random"
