"""Divergences between a teacher's and a student's predictions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["kl"]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of two batches of logits: sum over classes, mean over the batch."""
    return F.kl_div(F.log_softmax(q, 1), F.log_softmax(p, 1), reduction="batchmean", log_target=True)
