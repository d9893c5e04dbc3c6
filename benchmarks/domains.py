"""Digits as they look to four scanners, in folders that `domains:` reads: a small task with feature skew.

python benchmarks/domains.py digits-domains
barter compare benchmarks/suites/fedaf.toml --set data.source=domains:digits-domains --set clients=4 ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    digits = load_digits()
    rng = np.random.default_rng(0)
    for i, (image, label) in enumerate(zip(digits.images / 16, digits.target, strict=True)):
        looks = {
            "plain": image,
            "negative": 1 - image,
            "faint": 0.25 * image,
            "noisy": np.clip(image + rng.normal(0, 0.3, image.shape), 0, 1),
        }
        name = list(looks)[i % 4]  # every digit was seen by one scanner
        path = folder / name / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * looks[name]).round().astype(np.uint8)).save(path)


if __name__ == "__main__":
    main()
