"""Training a generator on what networks see in its images."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.images import Spec, statistics

__all__ = ["Output", "diversity", "fidelity", "shown"]

Output: TypeAlias = Literal["matched", "tanh"]


def fidelity(ensemble: Tensor, y: Tensor) -> Tensor:
    """L_fid: the clients together should see in an image what it was made for."""
    return F.cross_entropy(ensemble, y)


def diversity(x: Tensor, h: Tensor) -> Tensor:
    """L_div: images of different origins should differ.

    Mean squares, not norms: with those of the papers' equations the exponential underflows.
    """
    pairs = [torch.cdist(part.flatten(1), part.flatten(1)).square() / part[0].numel() for part in (x, h)]
    return torch.exp(-(pairs[0] * pairs[1]).mean())


def shown(drawn: Tensor, spec: Spec, output: Output) -> Tensor:
    """Images between -1 and 1 as networks get to see them: in the range of the data, or as they are."""
    if output == "tanh":
        return drawn
    mean, std = statistics(spec, drawn.device)
    return ((drawn + 1) / 2 - mean) / std
