"""One seed, an independent random stream per path such as (round, method, client)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["scope", "stream_seed"]


def stream_seed(seed: int, *path: object) -> int:
    """The seed of one stream: equal paths give equal streams, on any machine and in any order."""
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def scope(seed: int, *path: object, device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch draws from the stream of this path; outside, its state is as it was before.

    Every draw counts, also those that take no generator, such as dropout and the initialisation of a layer. Without a
    device it is the CPU's draws alone, and whatever is drawn on a GPU goes on as it was.
    """
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        value = stream_seed(seed, *path)
        torch.default_generator.manual_seed(value)
        for device in cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(value)
        yield
