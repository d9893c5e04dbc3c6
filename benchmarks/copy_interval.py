"""Measure how far the rate of the copy test varies by chance, if images are blurred.

    python -m benchmarks.copy_interval cifar10.npz

2,000 images are averages of 1 to 32 images of a class, none of which is among the 5,000 private ones,
so that nothing is copied. For each, the nearest private image is found, as `barter attack` does. The
private images are then divided into two halves 2,000 times, of which one is called offered. Prints
for each number of averaged images how many private ones are a nearest one, the effective number of
observations, the standard deviation of the rate over divisions, and how often the 95 % interval of
`copy_rate` has chance in it, beside an interval that counts every image.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import torch
from torch import Tensor

from barter.attacks.copies import copy_rate, find_nearest, wilson_interval

PRIVATE = 5000
IMAGES = 2000
DIVISIONS = 2000


def average_images(x: Tensor, y: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return averages of n images of a class, drawn with replacement."""
    classes = int(y.max()) + 1
    pools = [x[y == c] for c in range(classes)]
    blends = []
    for _ in range(IMAGES):
        pool = pools[int(torch.randint(classes, (), generator=generator))]
        chosen = torch.randint(len(pool), (n,), generator=generator)
        blends.append(pool[chosen].mean(0))
    return torch.stack(blends)


def vary_halves(nearest: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Return how the rate of copies varies if the offered half is drawn again and again."""
    rates, covered, covered_by_images = [], [], []
    effective = 0.0
    for _ in range(DIVISIONS):
        offered = torch.randperm(PRIVATE, generator=generator)[: PRIVATE // 2]
        values = copy_rate(nearest, offered, PRIVATE)
        effective = values["effective"]  # the same for every division
        rates.append(values["copies"])
        covered.append(values["from"] <= 0.5 <= values["to"])
        low, high = wilson_interval(values["copies"], len(nearest))
        covered_by_images.append(low <= 0.5 <= high)
    return {
        "nearest": len(set(nearest.tolist())),
        "effective": round(effective, 1),
        "deviation": round(pstdev(rates), 4),
        "covered": round(fmean(covered), 3),
        "covered_by_images": round(fmean(covered_by_images), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--averaged", type=int, nargs="+", default=[1, 3, 8, 32])
    parser.add_argument("--out", type=Path, default=Path("copy-interval.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    with np.load(args.data) as data:
        x = torch.from_numpy(data["x_train"]).permute(0, 3, 1, 2).float()
        y = torch.from_numpy(data["y_train"])
    order = torch.randperm(len(x), generator=generator)
    private, others = order[:PRIVATE], order[PRIVATE:]
    rows = []
    for n in args.averaged:
        blends = average_images(x[others], y[others], n, generator)
        row = {"averaged": n, **vary_halves(find_nearest(blends, x[private]), generator)}
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
