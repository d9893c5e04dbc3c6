"""HeteroFL: Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, Algorithm 1 (arXiv:2010.01264).

Every client trains the first channels of each layer, as many as it can afford. Weights that only
the widest clients have are averaged over these only; weights that no client has are never trained.
One round (Algorithm 1):

1. The server sends each client the weights of its first channels.
2. Clients train them on their own images and upload them.
3. The server averages each weight over the clients that trained it.
4. Clients measure normalisation statistics of the averaged network, each on its own images, and
   the server combines them.

Differences from the paper:

- `lr`: smaller than the paper's, which preset "paper" has. Local training is otherwise the paper's.
- `norm`: statistics of normalisation are those of all clients' data in the averaged network, as in
  the authors' code; here clients measure them, each on its own images.
- `rho`, `sigma`: the clients' budgets are DFRD's.
"""

from __future__ import annotations

from dataclasses import dataclass

from barter.algorithms.partial import PartialTraining

__all__ = ["HeteroFL"]


@dataclass(frozen=True, kw_only=True)
class HeteroFL(PartialTraining):
    """Each client trains the first channels of every layer, as many as it can afford."""

    extraction = "static"
    presets = {"paper": {"lr": 0.1}}
