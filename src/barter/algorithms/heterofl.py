"""HeteroFL: Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, Algorithm 1 (arXiv:2010.01264).

Every client trains the first channels of each layer, as many as it can afford. What only the widest clients have is
averaged over them alone; what nobody has is never trained. Its clients' training is the paper's but for the learning
rate, which preset "paper" has. Statistics of normalisation are those of everybody's data in the averaged network, as in
the authors' code; clients measure them, each on its own images. Budgets are DFRD's.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["HeteroFL"]


@dataclass(frozen=True, kw_only=True)
class HeteroFL(PartialTraining):
    """The first channels of every layer."""

    extraction = "static"
    presets = {"paper": {"lr": 0.1}}
