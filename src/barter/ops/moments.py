"""Class moments of features: sums over images, and the Gaussians that follow from them.

All classes have one covariance. Then the sums of several clients' moments are the moments of all
their images, however these are divided among the clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.contracts import Content, Floats

__all__ = [
    "Moments",
    "SharedGaussian",
    "Whitening",
    "add_moments",
    "fit_whitening",
    "sample_features",
    "shared_gaussians",
    "sum_moments",
    "whiten_features",
]

# Weight of an image's class; its components and x xᵀ have 1.
COUNT_WEIGHT = 0.5
# Largest change of counts, sums and squares if an image is replaced by another. Of one class it is
# sqrt(|x - x'|² + |x xᵀ - x' x'ᵀ|²), the root of 4 - 2 c - 2 c² for components of norm 1 with the
# cosine c, which is largest at c = -1/2. Of two classes it is the root of 2 COUNT_WEIGHT² + 2 for
# counts and sums and of 2 - 2 c² for squares, which is as large at c = 0.
LARGEST_CHANGE = math.sqrt(4.5)
# Moments are divided by this, so that the change is at most 2.
UNIT = LARGEST_CHANGE / 2
# Relative error of a number in single precision, for each of the two sums that are compared.
SINGLE_PRECISION = 2.0**-23
WHITENING_FLOOR = 1e-2  # added to the variances of whitened features, relative to the largest
LEAST_VARIANCE = 1e-4  # of components of norm 1, in any direction
DESCRIBED_IMAGES = 5  # classes with fewer images are left out
# Classes are also left out if their count is less than this many standard deviations of its noise.
LEAST_SIGNAL = 3.0


class Whitening(TypedDict):
    """A map of features to components that are uncorrelated on some reference images."""

    center: Tensor  # mean of the features (features,)
    projection: Tensor  # (features, components)


class Moments(TypedDict):
    """Sums over a client's images: numbers of images and components x by class, and x xᵀ of all.

    They are weighted so that all numbers together change by a norm of at most 2 if an image is
    replaced by another one. `shared_gaussians` removes the weights.
    """

    counts: Annotated[Tensor, Floats("classes", compared=False), Content("exact")]
    sums: Annotated[Tensor, Floats("classes", "components", compared=False), Content("exact")]
    squares: Annotated[Tensor, Floats("components", "components", compared=False), Content("exact")]


class SharedGaussian(TypedDict):
    """A Gaussian for each class, with a common covariance, and their discriminant.

    Classes that are not known have zeros.
    """

    known: Tensor  # whether a class is described (classes,), bool
    means: Tensor  # (classes, components)
    factor: Tensor  # F of the covariance F Fᵀ (components, components)
    weights: Tensor  # the logits of x are weights x + bias, all classes as likely
    bias: Tensor


def fit_whitening(features: Tensor, components: int) -> Whitening:
    """Return the whitening to the first principal components of some features.

    Directions of little variance are amplified less, see `WHITENING_FLOOR`. If there are fewer
    directions than `components`, the others are zero.

    Args:
        features: Features of reference images (images, features).
        components: Number of components.
    """
    rows = features.double()
    # A single feature has a covariance without axes.
    covariance = torch.cov(rows.T).view(rows.shape[1], rows.shape[1])
    values, vectors = torch.linalg.eigh(covariance)
    found = min(components, len(values))
    leading = values.flip(0)[:found].clamp(min=0)
    # All variances are zero if all images are equal.
    scale = (leading + WHITENING_FLOOR * values.max()).clamp(min=1e-12).rsqrt()
    projection = vectors.flip(1)[:, :found] * scale
    return {
        "center": rows.mean(0).to(features),
        "projection": F.pad(projection, (0, components - found)).to(features),
    }


def whiten_features(features: Tensor, whitening: Whitening) -> Tensor:
    """Return the components of features, scaled to norm 1 (images, components)."""
    return F.normalize((features - whitening["center"]) @ whitening["projection"], dim=1)


def sum_moments(x: Tensor, labels: Tensor, classes: int) -> Moments:
    """Return the moments of images from their components.

    A replaced image changes them by a norm of 2 at most, whatever the components are: NaN and
    infinity count as 0, and rows of a norm above 1 are scaled down. Sums are made slightly smaller
    to make up for their rounding.

    Args:
        x: The components (images, components).
        labels: The classes of the images.
        classes: Number of classes.
    """
    rows = x.double().nan_to_num(0.0, 0.0, 0.0)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
    one_hot = F.one_hot(labels, classes).double()
    # The sums of n images have a norm of at most 1.5 n, and are off by this norm times the relative
    # error of their numbers.
    unit = UNIT * (1 + 1.5 * SINGLE_PRECISION * len(x))
    counts = COUNT_WEIGHT * one_hot.sum(0) / unit
    sums = one_hot.T @ rows / unit
    squares = rows.T @ rows / unit
    return {"counts": counts.to(x), "sums": sums.to(x), "squares": squares.to(x)}


def add_moments(parts: Iterable[Moments]) -> Moments:
    """Return the sum of moments, in double precision; there must be at least one."""
    every = list(parts)
    return {
        "counts": torch.stack([part["counts"].double() for part in every]).sum(0),
        "sums": torch.stack([part["sums"].double() for part in every]).sum(0),
        "squares": torch.stack([part["squares"].double() for part in every]).sum(0),
    }


def shared_gaussians(moments: Moments, images: int) -> SharedGaussian:
    """Return the Gaussians of classes with a common covariance, and their discriminant.

    Moments may hold noise of one deviation in all released numbers; where only some parts have
    noise, biases are not corrected for it properly. The sum of x xᵀ is symmetric, so the
    difference of its two halves measures this noise. Eigenvalues below its largest one are raised
    to that in the discriminant, and not sampled. Classes with hardly more images than the noise in
    counts are left out; without noise, these are classes with fewer than `DESCRIBED_IMAGES` images.
    The biases of the discriminant have no part of the noise in means, which would otherwise make
    classes of few images less likely.

    Args:
        moments: The moments of all clients together.
        images: The number of their images; of a client that claims far more than the others, less.
    """
    counts = moments["counts"].double() * UNIT / COUNT_WEIGHT
    sums = moments["sums"].double() * UNIT
    squares = moments["squares"].double() * UNIT
    size = len(squares)
    # The two entries of a pair have independent noise, so their difference has twice its variance.
    pairs = max(1, size * (size - 1))
    deviation = ((squares - squares.T).square().sum() / pairs / 2).sqrt()
    # Counts of 4.5 images and more are 5 without noise, but for rounding.
    least = (LEAST_SIGNAL * deviation / COUNT_WEIGHT).clamp(min=DESCRIBED_IMAGES - 0.5)
    known = counts > least
    sizes = counts.clamp(min=1) * known
    # Claimed numbers of images are capped, so that `images` can be too small.
    total = max(float(images), float(sizes.sum()))
    means = sums / counts.clamp(min=1)[:, None] * known[:, None]
    # Images of classes that are not known are part of the squares, around a mean of zero.
    between = (means.T * (sizes / total)) @ means
    values, vectors = torch.linalg.eigh((squares + squares.T) / 2 / total - between)
    # Such a matrix of noise alone, half the sum of two entries of this deviation at each place, has
    # eigenvalues up to deviation * sqrt(2 size).
    floor = (deviation * math.sqrt(2 * size) / total).clamp(min=LEAST_VARIANCE)
    sampled = values > floor
    values = torch.maximum(values, floor)
    weights = (means @ vectors / values) @ vectors.T
    # The noise in a mean adds this to its squared length, on average.
    added = (deviation / sizes.clamp(min=1)).square() * (1 / values).sum()
    bias = -0.5 * ((weights * means).sum(1) - added * known)
    return {
        "known": known,
        "means": means.float(),
        "factor": (vectors * (values * sampled).sqrt()).float(),
        "weights": weights.float(),
        "bias": bias.float(),
    }


def sample_features(model: SharedGaussian, labels: Tensor, noise: Tensor) -> Tensor:
    """Return a sample per label of its class's Gaussian, scaled to norm 1.

    Args:
        model: The Gaussians.
        labels: The labels, of classes that are known.
        noise: Standard normal numbers (labels, components).
    """
    return F.normalize(model["means"][labels] + noise @ model["factor"].T, dim=1)
