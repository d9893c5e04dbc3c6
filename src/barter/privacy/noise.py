"""Sources of random numbers for noise."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

__all__ = ["Seeded", "Source", "System"]


class Source(Protocol):
    """A source of random numbers, on the CPU and in double precision."""

    def normal(self, count: int) -> Tensor:
        """Draw from the standard normal distribution."""

    def uniform(self, count: int) -> Tensor:
        """Draw uniformly between 0 and 1, both excluded."""


class Seeded:
    """Reproducible noise; a party that knows the seed can subtract it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self.generator, dtype=torch.float64)

    def uniform(self, count: int) -> Tensor:
        numbers = torch.rand(count, generator=self.generator, dtype=torch.float64)
        return (numbers + 2.0**-54).clamp(max=1 - 2.0**-53)


class System:
    """Secret noise, from the entropy of the operating system."""

    def normal(self, count: int) -> Tensor:
        return torch.from_numpy(ndtri(self.uniform(count).numpy()))

    def uniform(self, count: int) -> Tensor:
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        numbers = (bits.astype(np.float64) + 0.5) * 2.0**-53
        return torch.from_numpy(numbers.clip(max=1 - 2.0**-53))
