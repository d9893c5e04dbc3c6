"""Divergences between a teacher's and a student's predictions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["kl", "kl_each", "tempered"]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of two batches of logits: sum over classes, mean over the batch."""
    return F.kl_div(
        F.log_softmax(q, 1), F.log_softmax(p, 1), reduction="batchmean", log_target=True
    )


def kl_each(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of two batches of logits, for each of them."""
    return F.kl_div(
        F.log_softmax(q, 1), F.log_softmax(p, 1), reduction="none", log_target=True
    ).sum(1)


def tempered(temperature: float, student: Tensor, teacher: Tensor) -> Tensor:
    """T² KL(teacher ‖ student) of logits divided by T: as large a gradient as at T = 1."""
    return temperature**2 * kl(teacher / temperature, student / temperature)
