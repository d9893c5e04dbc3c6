"""Measures of attacks: image similarity, membership and label inference."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "auc_with_error",
    "is_nearest_original",
    "psnr",
    "psnr_of_best_match",
    "share_error",
    "ssim",
    "true_positive_rate",
]

WINDOW = 7  # side of the windows of SSIM in pixels


def psnr(real: Tensor, made: Tensor) -> Tensor:
    """Return each image's peak signal-to-noise ratio in dB, for pixels in 0..1.

    It is -10 log10 of the mean squared error, and 100 for equal images.
    """
    error: Tensor = (real - made).square().flatten(1).mean(1)
    return -10 * error.clamp(min=1e-10).log10()


def psnr_of_best_match(real: Tensor, made: Tensor) -> Tensor:
    """Return each real image's largest PSNR in dB with any of the made ones (real,).

    Pixels are in 0..1; the numbers of images may differ.
    """
    rows = made.flatten(1)
    nearest = [torch.cdist(part, rows).argmin(1) for part in torch.split(real.flatten(1), 500)]
    return psnr(real, made[torch.cat(nearest)])


def ssim(real: Tensor, made: Tensor) -> Tensor:
    """Return the structural similarity (Wang et al. 2004) of each pair; 1 is equal.

    It is averaged over channels and windows, squares of 7 pixels a side (or of the image's shorter
    side if that is less) whose pixels have equal weights.

    Args:
        real: Images (N, C, H, W) with pixels in 0..1.
        made: The images to compare them with, in the same order.
    """
    real = real.double()
    made = made.double()
    side = min(WINDOW, *real.shape[-2:])
    unbiased = side**2 / max(1, side**2 - 1)

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, side, 1)

    a = mean(real)
    b = mean(made)
    var_a = unbiased * (mean(real * real) - a * a)
    var_b = unbiased * (mean(made * made) - b * b)
    covariance = unbiased * (mean(real * made) - a * b)
    numerator = (2 * a * b + 0.01**2) * (2 * covariance + 0.03**2)
    windows: Tensor = numerator / ((a * a + b * b + 0.01**2) * (var_a + var_b + 0.03**2))
    return windows.flatten(1).mean(1)


def is_nearest_original(every: Tensor, places: Tensor, made: Tensor) -> Tensor:
    """Return whether each reconstruction's nearest private image is its original.

    The distance is the Euclidean distance of pixels.

    Args:
        every: All private images of a client.
        places: The index of each reconstruction's original.
        made: The reconstructions.
    """
    nearest: Tensor = torch.cdist(made.flatten(1), every.flatten(1)).argmin(1)
    return nearest == places


def auc_with_error(members: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the area under the ROC curve and its standard error.

    The area is the probability that a member's score is above that of a non-member; ties count
    half. The error is that of Hanley and McNeil (1982).

    Args:
        members: Scores of members, at least one.
        others: Scores of non-members, at least one.
    """
    from scipy.stats import rankdata  # Loading takes a second, and most commands attack nothing.

    m = len(members)
    n = len(others)
    ranks = rankdata(torch.cat([members, others]).double().numpy())[:m]
    a = float((ranks.sum() - m * (m + 1) / 2) / (m * n))
    q1 = a / (2 - a)
    q2 = 2 * a * a / (1 + a)
    variance = (a * (1 - a) + (m - 1) * (q1 - a * a) + (n - 1) * (q2 - a * a)) / (m * n)
    return a, math.sqrt(max(0.0, variance))


def true_positive_rate(members: Tensor, others: Tensor, rate: float) -> float:
    """Return the true positive rate at a false positive rate of at most `rate`.

    Args:
        members: Scores of members; a score above the threshold is taken for a member.
        others: Scores of non-members, by which the lowest threshold is chosen that keeps the rate.
        rate: The largest false positive rate, a fraction of 1.
    """
    allowed = math.floor(rate * len(others) + 1e-9)
    if allowed >= len(others):
        return float((members.double() > -math.inf).double().mean())
    threshold = others.double().sort(descending=True).values[allowed]
    return float((members.double() > threshold).double().mean())


def share_error(inferred: Tensor, true: Tensor) -> float:
    """Return the L1 distance of two class distributions, from 0 (equal) to 2.

    Args:
        inferred: The inferred counts or weights of the classes, which are divided by their sum.
        true: The true class counts, likewise.
    """
    inferred_share, true_share = (
        counts.double() / counts.double().sum().clamp(min=1e-12) for counts in (inferred, true)
    )
    return float((inferred_share - true_share).abs().sum())
