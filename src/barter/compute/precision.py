"""In which precision a run computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch

__all__ = ["Precision", "autocast", "current", "exact", "using"]

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]

_current: Precision = "fp32"


def current() -> Precision:
    """The precision of the run that goes on."""
    return _current


@contextmanager
def using(precision: Precision) -> Iterator[None]:
    """Inside, training and prediction compute like this, in every thread, and cuDNN the same bits each time."""
    global _current
    before, matmul = _current, torch.backends.cuda.matmul.allow_tf32
    tf32 = precision != "fp32"
    _current, torch.backends.cuda.matmul.allow_tf32 = precision, tf32
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
        ):
            yield
    finally:
        _current, torch.backends.cuda.matmul.allow_tf32 = before, matmul


@contextmanager
def exact() -> Iterator[None]:
    """Inside, everything is computed in full fp32, for differences between numbers that are nearly the same."""
    with using("fp32"):
        yield


def autocast(device: torch.device) -> torch.autocast:
    """The context of a forward pass: weights stay fp32, and so do normalisation statistics and losses."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=_current == "bf16" and device.type == "cuda"
    )
