"""Group instead of batch normalisation, which makes images independent."""

from __future__ import annotations

from torch import nn

__all__ = ["use_group_norm"]

GROUPS = 32  # Most groups of a layer.
MIN_GROUP_CHANNELS = 4  # Least channels of a group.


def use_group_norm(network: nn.Module) -> None:
    """Replace every batch normalisation by group normalisation, in place.

    The number of groups is the largest divisor of the channels that is at most `GROUPS` and leaves
    at least `MIN_GROUP_CHANNELS` in a group, or 1. Weights start anew, at 1 and 0, on torch's
    default device.
    """
    for name, part in list(network.named_children()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            channels = part.num_features
            most = max(1, min(GROUPS, channels // MIN_GROUP_CHANNELS))
            groups = next(n for n in range(most, 0, -1) if channels % n == 0)
            setattr(network, name, nn.GroupNorm(groups, channels, part.eps, part.affine))
        else:
            use_group_norm(part)
