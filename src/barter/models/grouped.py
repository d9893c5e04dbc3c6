"""Networks without batch normalisation, in which what is computed of one image depends on no other."""

from __future__ import annotations

from torch import nn

__all__ = ["grouped"]

GROUPS, LEAST = 32, 4  # at most so many groups, of at least so many channels


def grouped(network: nn.Module) -> None:
    """Put group normalisation, of the same width and names, in the place of every batch normalisation."""
    for name, part in list(network.named_children()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            channels = part.num_features
            most = max(1, min(GROUPS, channels // LEAST))
            groups = next(n for n in range(most, 0, -1) if channels % n == 0)
            setattr(network, name, nn.GroupNorm(groups, channels, part.eps, part.affine))
        else:
            grouped(part)
