"""Logit adjustment by the class frequencies of a client.

A network that is trained by cross entropy on one client's images also learns that client's class
prior, and applies it to other clients, where it is wrong. The log prior is therefore added to the
logits in training (Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS
2020, arXiv:2007.10740). The network's logits are then free of the prior; with the log prior added
they predict for the client's own distribution.
"""

from __future__ import annotations

from torch import Tensor

from barter.core.images import Images

__all__ = ["log_class_prior"]


def log_class_prior(data: Images) -> Tensor:
    """Return the log frequency of each class, with one image added per class.

    It is log((n_c + 1) / sum(n + 1)), natural, of shape (classes,). The additional image keeps
    classes that the client lacks finite.
    """
    counts = data.class_counts() + 1
    return (counts / counts.sum()).log()
