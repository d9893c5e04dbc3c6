"""A part of an npz data set, drawn at random with as many images of each class: for runs that must not take long.

    python benchmarks/subset.py fashion-mnist.npz fashion-10k.npz --train 10000 --test 2000
    python benchmarks/subset.py fashion-mnist.npz fashion-public.npz --train 2000 --test 10 --skip 10000

With --skip the first so many are left out, so that two parts have no image in common.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np


def chosen(labels: np.ndarray[Any, Any], images: int, skip: int) -> np.ndarray[Any, Any]:
    """The places of so many images, class by class in turn, after the first so many."""
    rng = np.random.default_rng(0)
    by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    longest = max(map(len, by_class))
    in_turn = np.array(
        [places[i] for i in range(longest) for places in by_class if i < len(places)]
    )
    return np.sort(in_turn[skip : skip + images])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=10000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=0)
    args = parser.parse_args()
    with np.load(args.source) as archive:
        arrays = dict(archive)
    for part, images, skip in (("train", args.train, args.skip), ("test", args.test, 0)):
        places = chosen(arrays[f"y_{part}"], images, skip)
        arrays |= {f"{name}_{part}": arrays[f"{name}_{part}"][places] for name in "xy"}
    np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
