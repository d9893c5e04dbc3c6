"""Measure what encodings of images save, lose and take: sizes, errors and speed.

    python benchmarks/encodings.py cifar100.npz

The first 1,000 training images as normalised half floats, which is what synthetic images are on the
wire. Errors are those of pixel values from 0 to 255. Speed is in MB of half floats per CPU second
of one thread, the median of several repetitions. Prints a line for each encoding and writes
results/encodings.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from barter.core.encodings import IMAGE_ENCODINGS, encode_tensor

OUT = Path(__file__).parent / "results" / "encodings.json"
IMAGES = 1000
T = TypeVar("T")


def cpu_seconds(work: Callable[[], T], repetitions: int) -> tuple[T, float]:
    """Return the result of some work and the median of its CPU seconds."""
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return result, statistics.median(seconds)


def measure(images: Tensor, scale: Tensor, encoding: str, repetitions: int) -> dict[str, Any]:
    """Encode and decode images and return what that saves, loses and takes.

    Args:
        images: Normalised half floats, (N, C, H, W).
        scale: Pixel values from 0 to 255 per unit of each channel, (C, 1, 1).
        encoding: The name of an encoding.
        repetitions: How often both directions are timed.
    """
    coded, encode_seconds = cpu_seconds(lambda: encode_tensor(images, encoding), repetitions)
    assert coded is not None, f"{encoding} does not make these images smaller"
    decoded, decode_seconds = cpu_seconds(coded.decode, repetitions)
    error = (decoded.float() - images.float()) * scale
    rms = float(error.square().mean().sqrt())
    megabytes = images.numel() * images.element_size() / 1e6
    return {
        "encoding": encoding,
        "times_smaller": round(1e6 * megabytes / coded.nbytes, 3),
        "rms": float(f"{rms:.4g}"),
        "psnr": round(20 * math.log10(255 / rms), 2),
        "encode_mb_per_s": round(megabytes / encode_seconds, 1),
        "decode_mb_per_s": round(megabytes / decode_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("data", type=Path, help="images as npz, with x_train in (N, H, W, C)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(options.data) as file:
        pixels = torch.from_numpy(file["x_train"][:IMAGES]).permute(0, 3, 1, 2).float()
    mean = pixels.mean((0, 2, 3), keepdim=True)
    deviation = pixels.std((0, 2, 3), keepdim=True)
    images = ((pixels - mean) / deviation).half().contiguous()
    rows = []
    for encoding in IMAGE_ENCODINGS:
        rows.append(measure(images, deviation[0], encoding, options.repetitions))
        sys.stdout.write(f"{rows[-1]}\n")
    found = {
        "command": f"python benchmarks/encodings.py {options.data.name}",
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "data": options.data.stem,
        "images": len(images),
        "rows": rows,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
