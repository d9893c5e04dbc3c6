"""Numerical precision of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch

__all__ = ["Precision", "autocast", "current_precision", "full_precision", "use_precision"]

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]

_current: Precision = "fp32"


def current_precision() -> Precision:
    """Return the precision of the innermost `use_precision`."""
    return _current


@contextmanager
def use_precision(precision: Precision) -> Iterator[None]:
    """Compute with this precision and deterministic cuDNN kernels in the block.

    fp32 forbids TF32 in matrix products and convolutions, the others allow it. With bf16,
    `autocast` returns an enabled context. It applies to all threads.
    """
    global _current
    before = _current
    matmul_before = torch.backends.cuda.matmul.allow_tf32
    tf32 = precision != "fp32"
    _current = precision
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
        ):
            yield
    finally:
        _current = before
        torch.backends.cuda.matmul.allow_tf32 = matmul_before


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in full fp32 inside the block, as `use_precision("fp32")`.

    Differences between nearly equal numbers need it. An autocast context that surrounds the block
    stays in force.
    """
    with use_precision("fp32"):
        yield


def autocast(device: torch.device) -> torch.autocast:
    """Return the autocast context of a forward pass: bf16 or disabled.

    It is bf16 on CUDA if that is the run's precision. Weights, normalisation statistics and losses
    stay in fp32.
    """
    enabled = _current == "bf16" and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
