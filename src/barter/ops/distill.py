"""Divergences between a teacher's and a student's predictions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["kl", "kl_each", "tempered_kl"]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the batch mean of KL(p ‖ q) of two batches of logits (N, classes)."""
    log_q = F.log_softmax(q, 1)
    log_p = F.log_softmax(p, 1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def kl_each(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of two batches of logits (N, classes) for each sample (N,)."""
    log_q = F.log_softmax(q, 1)
    log_p = F.log_softmax(p, 1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)


def tempered_kl(temperature: float, student: Tensor, teacher: Tensor) -> Tensor:
    """Return T² KL(teacher ‖ student) of logits divided by T.

    It is averaged over the batch. The factor T² keeps gradients as large as at T = 1.
    """
    return temperature**2 * kl(teacher / temperature, student / temperature)
