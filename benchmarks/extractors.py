"""Compare extractors of class moments by the accuracy of the discriminant, with and without noise.

    python -m benchmarks.extractors cifar10.npz --patches 400 --components 200 400 800 --epsilon inf 8

The discriminant of `moments` needs no client and no round: sums over clients do not depend on how
images are divided among them, and only the noise depends on their number. `patches` is an extractor
that barter does not have: whitened patches of the two photographs as filters (Coates and Ng 2011,
"The Importance of Encoding Versus Training with Sparse Coding and Vector Quantization").

Prints the accuracy in % on the test images for each extractor, number of components and ε.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.moments import CROPS, discriminant_logits, photographs, public_format
from barter.core.evaluation import predict
from barter.core.images import Images, Spec, channel_statistics
from barter.core.seeds import stream_seed
from barter.data.sources import load_dataset
from barter.models.filters import FilterBank
from barter.models.generators import decoder_side
from barter.ops.moments import (
    add_moments,
    fit_whitening,
    shared_gaussians,
    sum_moments,
    whiten_features,
)
from barter.ops.photographs import photograph_images
from barter.privacy.account import calibrate_noise

DELTA = 1e-5
SAMPLED_PATCHES = 40_000  # by which patches are whitened
SIDE = 6  # of a patch, in pixels
THRESHOLD = 0.25  # responses below it count as zero
FLAT_VARIANCE = 0.01  # added to the variance of a patch before its contrast is normalised
FLOOR = 0.1  # added to the variances of normalised patches before they are whitened
QUADRANTS = 2  # responses are averaged over this many cells along each side


class Patches(nn.Module):
    """Responses of whitened patches of the photographs, averaged over four quadrants."""

    kernels: Tensor
    offsets: Tensor

    def __init__(self, spec: Spec, count: int) -> None:
        super().__init__()
        self.spec = spec
        self.side = decoder_side(spec)
        flat = sample_patches(spec, SAMPLED_PATCHES)
        flat = flat - flat.mean(1, keepdim=True)
        flat = flat / (flat.var(1, keepdim=True) + FLAT_VARIANCE).sqrt()
        mean = flat.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(flat.T.double()))
        whitening = ((vectors * (values.clamp(min=0) + FLOOR).rsqrt()) @ vectors.T).float()
        chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(1))[:count]
        kernels = F.normalize((flat[chosen] - mean) @ whitening, dim=1) @ whitening
        self.register_buffer("kernels", kernels.view(count, spec.channels, SIDE, SIDE))
        self.register_buffer("offsets", -(kernels @ mean))

    def forward(self, x: Tensor) -> Tensor:
        """Map images in the public format to features."""
        mean, std = channel_statistics(self.spec, x.device)
        pixels = (x * std + mean).clamp(0, 1)
        if pixels.shape[-1] != self.side:
            pixels = F.interpolate(pixels, (self.side,) * 2, mode="bilinear", antialias=True)
        means = F.avg_pool2d(pixels.mean(1, keepdim=True), SIDE, 1)
        squares = F.avg_pool2d(pixels.square().mean(1, keepdim=True), SIDE, 1)
        deviations = ((squares - means.square()).clamp(min=0) + FLAT_VARIANCE).sqrt()
        totals = self.kernels.flatten(1).sum(1)[:, None, None]
        responses = (F.conv2d(pixels, self.kernels) - totals * means) / deviations
        responses = responses + self.offsets[:, None, None]
        halves = [F.relu(responses - THRESHOLD), F.relu(-responses - THRESHOLD)]
        return torch.cat([F.adaptive_avg_pool2d(half, QUADRANTS).flatten(1) for half in halves], 1)


def sample_patches(spec: Spec, count: int) -> Tensor:
    """Return random patches of crops of the photographs, as rows of pixels from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    crops = photograph_images(spec, torch.arange(CROPS), CROPS, seed=1)
    mean, std = channel_statistics(spec, crops.device)
    crops = crops * std + mean
    images = torch.randint(CROPS, (count,), generator=generator).tolist()
    last = crops.shape[-1] - SIDE + 1
    rows = torch.randint(last, (count,), generator=generator).tolist()
    columns = torch.randint(last, (count,), generator=generator).tolist()
    patches = [
        crops[i, :, y : y + SIDE, x : x + SIDE].flatten()
        for i, y, x in zip(images, rows, columns, strict=True)
    ]
    return torch.stack(patches)


def measure(
    name: str,
    extractor: Callable[[Tensor], Tensor],
    train: Images,
    test: Images,
    args: argparse.Namespace,
) -> None:
    """Print the accuracies of an extractor's discriminant."""
    spec = train.spec
    began = time.perf_counter()
    with torch.no_grad():
        reference = predict(extractor, partial(photographs, spec), torch.arange(CROPS))
        features = predict(extractor, train.batch, torch.arange(len(train)))
        tested = predict(extractor, test.batch, torch.arange(len(test)))
    seconds = time.perf_counter() - began
    for components in args.components:
        whitening = fit_whitening(reference, components)
        exact = sum_moments(whiten_features(features, whitening), train.labels, spec.classes)
        inputs = whiten_features(tested, whitening)
        cells = []
        for epsilon in args.epsilon:
            deviation = 0.0 if math.isinf(epsilon) else calibrate_noise(epsilon, DELTA, 1)
            deviation *= math.sqrt(args.clients)
            rates = []
            for seed in args.seeds:
                generator = torch.Generator().manual_seed(stream_seed(seed, "noise"))
                moments = add_moments([exact])
                for value in (moments["counts"], moments["sums"], moments["squares"]):
                    value += deviation * torch.randn(value.shape, generator=generator).double()
                gaussians = shared_gaussians(moments, len(train))
                right = discriminant_logits(gaussians, inputs).argmax(1) == test.labels
                rates.append(100 * float(right.double().mean()))
            cells.append(f"ε = {epsilon:g}: {sum(rates) / len(rates):.1f}")
        sys.stdout.write(
            f"{name}, {components} components: {', '.join(cells)} ({seconds:.0f} s for features)\n"
        )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a data set's name, or an npz file")
    parser.add_argument("--patches", type=int, default=0, help="number of patches; 0 is without")
    parser.add_argument("--components", type=int, nargs="*", default=[200])
    parser.add_argument("--epsilon", type=float, nargs="*", default=[math.inf, 8.0])
    parser.add_argument("--clients", type=int, default=10, help="each adds noise of its own")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of the noise")
    args = parser.parse_args()
    source = f"npz:{args.source}" if args.source.endswith(".npz") else args.source
    dataset = load_dataset(source)
    channels, height, width = dataset.x_train.shape[1:]
    spec = Spec(channels, height, width, len(dataset.classes), mean=(0.5,), std=(0.5,))
    spec = public_format(spec)
    train = Images(dataset.x_train, dataset.y_train, spec)
    test = Images(dataset.x_test, dataset.y_test, spec)
    measure("filters", FilterBank(spec), train, test, args)
    if args.patches:
        measure(f"{args.patches} patches", Patches(spec, args.patches), train, test, args)


if __name__ == "__main__":
    main()
