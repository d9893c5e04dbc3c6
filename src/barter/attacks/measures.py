"""How near images are, and how well a score tells members from others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

__all__ = ["auc", "found", "psnr", "share_error", "ssim", "true_positives"]

WINDOW = 7  # pixels of a side over which structure is compared


def psnr(real: Tensor, made: Tensor) -> Tensor:
    """The peak signal-to-noise ratio of each image in decibels, pixels being between 0 and 1."""
    error: Tensor = (real - made).square().flatten(1).mean(1)
    return -10 * error.clamp(min=1e-10).log10()


def ssim(real: Tensor, made: Tensor) -> Tensor:
    """The structural similarity of each image (Wang et al. 2004), over windows of equal weight; 1 is the same."""
    real, made, side = real.double(), made.double(), min(WINDOW, *real.shape[-2:])
    unbiased = side**2 / max(1, side**2 - 1)

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, side, 1)

    a, b = mean(real), mean(made)
    vary_a, vary_b = (unbiased * (mean(x * x) - m * m) for x, m in ((real, a), (made, b)))
    together = unbiased * (mean(real * made) - a * b)
    alike = (2 * a * b + 0.01**2) * (2 * together + 0.03**2)
    each: Tensor = alike / ((a * a + b * b + 0.01**2) * (vary_a + vary_b + 0.03**2))
    return each.flatten(1).mean(1)


def found(every: Tensor, places: Tensor, made: Tensor) -> Tensor:
    """Whether, of every private image, the nearest to one that was made is the one that it was made of."""
    nearest: Tensor = torch.cdist(made.flatten(1), every.flatten(1)).argmin(1)
    return nearest == places


def auc(members: Tensor, others: Tensor) -> tuple[float, float]:
    """How often a member's score is above another's, equal ones counting half, and the standard error of that.

    The error is that of Hanley and McNeil 1982.
    """
    m, n = len(members), len(others)
    ranks = rankdata(torch.cat([members, others]).double().numpy())[:m]
    a = float((ranks.sum() - m * (m + 1) / 2) / (m * n))
    one, two = a / (2 - a), 2 * a * a / (1 + a)
    return a, math.sqrt(
        max(0.0, (a * (1 - a) + (m - 1) * (one - a * a) + (n - 1) * (two - a * a)) / (m * n))
    )


def true_positives(members: Tensor, others: Tensor, rate: float) -> float:
    """The largest share of members above a threshold that at most this share of the others is above."""
    allowed = math.floor(rate * len(others) + 1e-9)
    threshold = (
        others.double().sort(descending=True).values[allowed]
        if allowed < len(others)
        else -math.inf
    )
    return float((members.double() > threshold).double().mean())


def share_error(told: Tensor, true: Tensor) -> float:
    """The L1 distance of two vectors of counts, each as shares: 0 is the same, 2 is no class in common."""
    one, other = (
        counts.double() / counts.double().sum().clamp(min=1e-12) for counts in (told, true)
    )
    return float((one - other).abs().sum())
