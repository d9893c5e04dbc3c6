"""Teach with class statistics under differential privacy, beside local training with the same ε.

    python benchmarks/private_statistics.py fashion-mnist.npz --epsilon 1 2 4 8 --seeds 0 1

The discriminant of `moments`, which is that method's server, with 5,000 images of each of ten
clients. Its features depend on no private image.

*statistics*: each client releases its moments once, by a Gaussian mechanism. One image changes
nothing else, so ε holds for the data and for the whole run. Everybody makes the same classifier of
all releases: the Gaussians of classes with a common covariance.

Local only, with the same ε for each client: *own statistics* (the same from one client's release),
*head* (a linear head on these features by DP-SGD) and, with --network, *small-cnn* by DP-SGD. Of the
learning rates tried for DP-SGD, the best on the test images counts, in favour of local training.

Accuracies are on all test images, the mean over clients. ε is for replacing one image with its label,
δ = 1e-5. Prints a Markdown table and writes one line of JSON per row to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.moments import CROPS, ClassMoments, photographs, public_format
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.seeds import stream_seed
from barter.data.partition import Dirichlet
from barter.models.grouped import use_group_norm
from barter.models.zoo import build_network
from barter.ops.moments import (
    Moments,
    add_moments,
    fit_whitening,
    shared_gaussians,
    sum_moments,
    whiten_features,
)
from barter.ops.private import clipped_sum
from barter.privacy.account import calibrate_noise, calibrate_step_noise

CLIENTS = 10
IMAGES = 5000  # images of a client
CLASSES = 10
DELTA = 1e-5
BATCH = 500  # mean number of images in a step of DP-SGD
STEPS = 100
HEAD_RATES = (2.0, 8.0, 32.0)  # learning rates of the head, of which the best counts


def public_features(pixels: Tensor) -> Tensor:
    """Return the components of images (n, 1, 28, 28) as bytes, of norm 1."""
    spec = public_format(Spec(1, 28, 28, CLASSES, (0.5,), (0.5,)))
    extractor = build_network("filters", spec).eval()
    crops = predict(extractor.features, partial(photographs, spec), torch.arange(CROPS))
    whitening = fit_whitening(crops.double(), ClassMoments().components)
    images = Images(pixels, torch.zeros(len(pixels), dtype=torch.long), spec)
    features = predict(extractor.features, images.batch, torch.arange(len(images)))
    return whiten_features(features.double(), whitening)


def release(x: Tensor, y: Tensor, epsilon: float, generator: torch.Generator) -> Moments:
    """Release a client's moments once, with this ε; infinity adds no noise."""
    moments = sum_moments(x, y, CLASSES)
    if math.isinf(epsilon):
        return moments
    deviation = calibrate_noise(epsilon, DELTA, 1)

    def protect(value: Tensor) -> Tensor:
        return value + deviation * torch.randn(value.shape, generator=generator, dtype=value.dtype)

    return {
        "counts": protect(moments["counts"]),
        "sums": protect(moments["sums"]),
        "squares": protect(moments["squares"]),
    }


def discriminant(
    moments: Moments, images: int, *, covariance: bool = True
) -> tuple[Tensor, Tensor]:
    """Return weights and bias of the discriminant of so many images; unknown classes have bias -inf.

    Without the covariance it is the nearest mean.
    """
    model = shared_gaussians(moments, images)
    if covariance:
        weights = model["weights"].double()
        bias = model["bias"].double()
    else:
        weights = model["means"].double()
        bias = -0.5 * weights.square().sum(1)
    return weights, bias.masked_fill(~model["known"], -math.inf)


def accuracy(weights: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> float:
    return float(((x @ weights.T + bias).argmax(1) == y).double().mean())


def head_by_sgd(
    x: Tensor, y: Tensor, noise: float, lr: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Train a linear head by DP-SGD with gradients clipped to 1; noise 0 is without privacy."""
    inputs = F.pad(x, (0, 1), value=1.0)
    weights = torch.zeros(CLASSES, inputs.shape[1], dtype=x.dtype)
    one_hot = F.one_hot(y, CLASSES).to(x.dtype)
    # As DFFKE does it: the log class prior is added, so that frequent classes are not preferred.
    # It is taken without noise, in favour of local training.
    prior = ((one_hot.sum(0) + 1) / (len(y) + CLASSES)).log()
    rate = min(1.0, BATCH / len(x))
    for _ in range(STEPS):
        chosen = torch.rand(len(x), generator=generator) < rate
        rows = inputs[chosen]
        errors = (rows @ weights.T + prior).softmax(1) - one_hot[chosen]
        norms = errors.norm(dim=1) * rows.norm(dim=1)
        gradient = (errors / norms.clamp(min=1.0)[:, None]).T @ rows
        gradient += noise * torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        weights -= lr * gradient / (rate * len(x))
    return weights[:, :-1], weights[:, -1]


def network_by_sgd(
    data: Images, test: Images, noise: float, lr: float, generator: torch.Generator
) -> float:
    """Train small-cnn by DP-SGD and return its accuracy on all test images."""
    torch.manual_seed(0)
    model = build_network("small-cnn", data.spec)
    use_group_norm(model)
    trained = dict(model.named_parameters())
    prior = ((data.class_counts() + 1) / (len(data) + CLASSES)).log()
    rate = min(1.0, BATCH / len(data))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits + prior, labels)

    for _ in range(STEPS):
        chosen = (torch.rand(len(data), generator=generator) < rate).nonzero()[:, 0]
        gradients = clipped_sum(model, trained, loss, data, chosen, 1.0)
        with torch.no_grad():
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                noisy = gradient + noise * torch.randn(gradient.shape, generator=generator)
                parameter.sub_(lr * noisy / (rate * len(data)))
    model.eval()
    with torch.no_grad():
        parts = torch.split(torch.arange(len(test)), 1000)
        predicted = torch.cat([model(test.batch(part)).argmax(1) for part in parts])
    return float((predicted == test.labels).double().mean())


def split(labels: Tensor, alpha: float, seed: int) -> list[Tensor]:
    """Return the indices of each client's 5,000 images."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(labels))[: CLIENTS * IMAGES]
    parts = Dirichlet(alpha=alpha, balanced=True).split(
        labels.numpy()[chosen], np.zeros(len(chosen), dtype=np.int64), CLIENTS, rng
    )
    return [torch.from_numpy(chosen[part]) for part in parts]


def measure(
    args: argparse.Namespace, alpha: float, seed: int, data: dict[str, Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Yield method, ε and accuracy of all comparisons on one split."""
    x, y, x_test, y_test = (data[name] for name in ("x", "y", "x_test", "y_test"))
    parts = split(y, alpha, seed)
    for epsilon in [*args.epsilon, math.inf]:
        generator = torch.Generator().manual_seed(stream_seed(seed, alpha, epsilon))
        releases = [release(x[p], y[p], epsilon, generator) for p in parts]
        total = add_moments(releases)
        yield (
            "statistics",
            epsilon,
            accuracy(*discriminant(total, CLIENTS * IMAGES), x_test, y_test),
        )
        means_only = discriminant(total, CLIENTS * IMAGES, covariance=False)
        yield "statistics, means alone", epsilon, accuracy(*means_only, x_test, y_test)
        own = [accuracy(*discriminant(moments, IMAGES), x_test, y_test) for moments in releases]
        yield "local: own statistics", epsilon, float(np.mean(own))
        rate = BATCH / IMAGES
        noise = 0.0 if math.isinf(epsilon) else calibrate_step_noise(epsilon, DELTA, rate, STEPS)
        by_rate = []
        for lr in HEAD_RATES:
            heads = [head_by_sgd(x[p], y[p], noise, lr, generator) for p in parts]
            by_rate.append(np.mean([accuracy(*head, x_test, y_test) for head in heads]))
        sys.stderr.write(f"heads by learning rate: {np.round(by_rate, 4)}\n")
        yield "local: head by DP-SGD", epsilon, float(max(by_rate))
        if args.network:
            spec = Spec(1, 28, 28, CLASSES, (0.5,), (0.25,))
            test = Images(data["test_pixels"], y_test, spec)
            found = []
            for lr in args.network_lr:
                own = []
                for p in parts[: args.network]:
                    private = Images(data["pixels"][p], y[p], spec)
                    own.append(network_by_sgd(private, test, noise, lr, generator))
                found.append(np.mean(own))
            yield f"local: small-cnn by DP-SGD ({args.network} clients)", epsilon, float(max(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="Fashion-MNIST as npz")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--network", type=int, default=0, help="clients that train small-cnn")
    parser.add_argument("--network-lr", type=float, nargs="+", default=[0.5])
    parser.add_argument("--out", type=Path, help="a file for lines of JSON")
    args = parser.parse_args()

    start = time.process_time()
    data: dict[str, Tensor] = {}
    with np.load(args.data) as file:
        for part, suffix in (("train", ""), ("test", "_test")):
            images = torch.from_numpy(file[f"x_{part}"]).reshape(-1, 1, 28, 28)
            data["pixels" if part == "train" else "test_pixels"] = images
            data[f"x{suffix}"] = public_features(images)
            data[f"y{suffix}"] = torch.from_numpy(file[f"y_{part}"]).long().flatten()
    sys.stderr.write(f"features after {time.process_time() - start:.0f} s of CPU\n")

    found: dict[tuple[str, float, float], list[float]] = {}
    for alpha in args.alpha:
        for seed in args.seeds:
            for method, epsilon, value in measure(args, alpha, seed, data):
                found.setdefault((method, alpha, epsilon), []).append(value)
                sys.stderr.write(f"alpha {alpha} seed {seed} ε {epsilon} {method} {value:.4f}\n")
    if args.out is not None:
        with args.out.open("a") as out:
            for (method, alpha, epsilon), values in found.items():
                line = {"method": method, "alpha": alpha, "epsilon": epsilon, "accuracy": values}
                if math.isinf(epsilon):
                    line["epsilon"] = None
                out.write(json.dumps({**line, "seeds": args.seeds}) + "\n")
    epsilons = [*args.epsilon, math.inf]
    sys.stdout.write("| alpha, method | " + " | ".join(f"ε = {e:g}" for e in epsilons) + " |\n")
    sys.stdout.write("|---" * (len(epsilons) + 1) + "|\n")
    for alpha in args.alpha:
        for method in dict.fromkeys(name for name, at, _ in found if at == alpha):
            cells = [100 * float(np.mean(found[method, alpha, e])) for e in epsilons]
            row = " | ".join(f"{value:.1f}" for value in cells)
            sys.stdout.write(f"| {alpha:g}: {method} | {row} |\n")


if __name__ == "__main__":
    main()
