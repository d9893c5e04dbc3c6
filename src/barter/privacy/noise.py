"""Where noise comes from."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

__all__ = ["Seeded", "Source", "System"]


class Source(Protocol):
    """So many numbers, on the CPU, in double precision."""

    def normal(self, count: int) -> Tensor: ...

    def uniform(self, count: int) -> Tensor: ...


class Seeded:
    """Noise that comes again: whoever knows the run's seed can take it away."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self.generator, dtype=torch.float64)

    def uniform(self, count: int) -> Tensor:
        return (torch.rand(count, generator=self.generator, dtype=torch.float64) + 2.0**-54).clamp(
            max=1 - 2.0**-53
        )


class System:
    """Noise that nobody else knows: from the operating system's entropy."""

    def normal(self, count: int) -> Tensor:
        return torch.from_numpy(ndtri(self.uniform(count).numpy()))

    def uniform(self, count: int) -> Tensor:
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        return torch.from_numpy(((bits.astype(np.float64) + 0.5) * 2.0**-53).clip(max=1 - 2.0**-53))
