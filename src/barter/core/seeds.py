"""Independent random streams from one seed and a path (round, method, client)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["scope", "stream_seed"]


def stream_seed(seed: int, *path: object) -> int:
    """Return the seed of a path's random stream, from 0 to 2**63 - 1.

    It is a hash of the texts of seed and path, so it is the same in every process.

    >>> from barter.core.seeds import stream_seed
    >>> stream_seed(0, 1, "learn", 2) == stream_seed(0, 1, "learn", 2)
    True
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def scope(seed: int, *path: object, device: torch.device | None = None) -> Iterator[None]:
    """Let torch draw from a path's stream inside the block, then restore its state.

    This covers all draws from torch's default generators, such as dropout and the initialisation
    of layers.

    Args:
        seed: The run's seed.
        *path: Identifies the stream.
        device: A CUDA device whose generator is seeded too. Otherwise the block affects the CPU's
            generator only.
    """
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        value = stream_seed(seed, *path)
        torch.default_generator.manual_seed(value)
        for device in cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(value)
        yield
