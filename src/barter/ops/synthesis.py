"""Training a generator on what networks see in its images."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.images import Spec, statistics

__all__ = ["Output", "diversity", "fidelity", "label_weights", "shown"]

Output: TypeAlias = Literal["matched", "tanh"]


def fidelity(ensemble: Tensor, y: Tensor) -> Tensor:
    """L_fid: the clients together should see in an image what it was made for."""
    return F.cross_entropy(ensemble, y)


def diversity(x: Tensor, h: Tensor, *, norm: int = 2) -> Tensor:
    """L_div: what is made of different origins should differ, by mean squares or (norm 1) by means.

    Not by norms: with those of the papers' equations the exponential underflows.
    """
    made, origins = x.flatten(1), h.flatten(1)
    apart = torch.cdist(made, made, p=norm).pow(norm) / made.shape[1]
    return torch.exp(-(apart * torch.cdist(origins, origins).square() / origins.shape[1]).mean())


def label_weights(counts: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """τ (clients, classes) and p (classes) from how often each client saw each class; zero for classes nobody saw."""
    total = counts.sum(0)
    smoothed = (counts + smoothing) * (total > 0)
    return smoothed / smoothed.sum(0).clamp_min(1e-12), total / total.sum()


def shown(drawn: Tensor, spec: Spec, output: Output) -> Tensor:
    """Images between -1 and 1 as networks get to see them: in the range of the data, or as they are."""
    if output == "tanh":
        return drawn
    mean, std = statistics(spec, drawn.device)
    return ((drawn + 1) / 2 - mean) / std
