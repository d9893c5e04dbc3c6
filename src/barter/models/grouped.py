"""Group normalisation instead of batch normalisation, which makes images independent."""

from __future__ import annotations

from torch import nn

__all__ = ["grouped"]

GROUPS = 32  # Most groups of a layer.
LEAST = 4  # Least channels of a group.


def grouped(network: nn.Module) -> None:
    """Replace every batch normalisation in place by group normalisation of the same name."""
    for name, part in list(network.named_children()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            channels = part.num_features
            most = max(1, min(GROUPS, channels // LEAST))
            groups = next(n for n in range(most, 0, -1) if channels % n == 0)
            setattr(network, name, nn.GroupNorm(groups, channels, part.eps, part.affine))
        else:
            grouped(part)
