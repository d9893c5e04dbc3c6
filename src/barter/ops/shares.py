"""Class shares at home: what an image shows, and what is likely where it comes from, are two things.

A network that learns by cross entropy on the images of one place also learns which classes are frequent there, and
takes that along to places where it is not so. With the logarithms of the shares added to its logits while it learns
(Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020, arXiv:2007.10740) the network
itself says what images show, and its logits with the shares added what they show at home.
"""

from __future__ import annotations

from torch import Tensor

from barter.core.images import Images

__all__ = ["log_shares"]


def log_shares(data: Images) -> Tensor:
    """The logarithm of each class's share of the images, as if there were one more of each, for there might be."""
    counts = data.class_counts() + 1
    return (counts / counts.sum()).log()
