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
    "ClassGaussian",
    "Moments",
    "Whitening",
    "add_moments",
    "fit_whitening",
    "sample_features",
    "shared_gaussians",
    "sum_moments",
    "whiten_features",
]

COUNT_WEIGHT = 0.3  # weight of an image's class in its term; its features have 1
SQUARE_WEIGHT = 1.0  # weight of x xᵀ
TERM_NORM = math.sqrt(COUNT_WEIGHT**2 + 1 + SQUARE_WEIGHT**2)
WHITENING_FLOOR = 1e-2  # added to the variances of whitened features, of the largest
LEAST_VARIANCE = 1e-4  # of features of norm 1, in any direction
DESCRIBED_IMAGES = 5.0  # classes with fewer images are left out
LEAST_SIGNAL = 5.0  # so are classes whose count is less than so many deviations of its noise


class Whitening(TypedDict):
    """A map of features to components that are uncorrelated on some reference images."""

    center: Tensor  # mean of the features (features,)
    projection: Tensor  # (features, components)


class Moments(TypedDict):
    """Sums over images: each adds its class, its components x in the row of its class, and x xᵀ.

    x has norm 1 at most, and the terms are weighted so that those of an image together have norm 1
    at most too.
    """

    counts: Annotated[Tensor, Floats("classes"), Content("exact")]
    sums: Annotated[Tensor, Floats("classes", "components"), Content("exact")]
    squares: Annotated[Tensor, Floats("components", "components"), Content("exact")]


class ClassGaussian(TypedDict):
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
    values, vectors = torch.linalg.eigh(torch.cov(rows.T))
    found = min(components, len(values))
    leading = values.flip(0)[:found].clamp(min=0)
    scale = (leading + WHITENING_FLOOR * values.max()).rsqrt()
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

    Args:
        x: The components (images, components), of norm 1 at most.
        labels: The classes of the images.
        classes: Number of classes.
    """
    rows = x.double()
    one_hot = F.one_hot(labels, classes).double()
    counts = COUNT_WEIGHT / TERM_NORM * one_hot.sum(0)
    sums = one_hot.T @ rows / TERM_NORM
    squares = SQUARE_WEIGHT / TERM_NORM * rows.T @ rows
    return {"counts": counts.to(x), "sums": sums.to(x), "squares": squares.to(x)}


def add_moments(parts: Iterable[Moments]) -> Moments:
    """Return the sum of moments, in double precision; there must be at least one."""
    every = list(parts)
    return {
        "counts": torch.stack([part["counts"].double() for part in every]).sum(0),
        "sums": torch.stack([part["sums"].double() for part in every]).sum(0),
        "squares": torch.stack([part["squares"].double() for part in every]).sum(0),
    }


def shared_gaussians(moments: Moments) -> ClassGaussian:
    """Return the Gaussians of classes with a common covariance.

    Moments may hold noise of one deviation in all numbers. The sum of x xᵀ is symmetric, so the
    difference of its two halves measures this noise. Eigenvalues below its largest one are raised
    to that in the discriminant, and not sampled. Classes with hardly more images than the noise in
    counts are left out; without noise, these are classes with fewer than `DESCRIBED_IMAGES` images.
    """
    counts = moments["counts"].double() * TERM_NORM / COUNT_WEIGHT
    sums = moments["sums"].double() * TERM_NORM
    squares = moments["squares"].double() * TERM_NORM / SQUARE_WEIGHT
    total = counts.sum().clamp(min=1)
    size = len(squares)
    # Each pair of entries differs by twice the variance of the noise.
    pairs = max(1, size * (size - 1))
    square_deviation = ((squares - squares.T).square().sum() / pairs / 2).sqrt()
    count_deviation = square_deviation * SQUARE_WEIGHT / COUNT_WEIGHT
    squares = (squares + squares.T) / 2
    # Entries are now means of two with deviation s; such noise has eigenvalues up to s sqrt(2 d).
    floor = (square_deviation * math.sqrt(2 * size) / total).clamp(min=LEAST_VARIANCE)
    known = counts > (LEAST_SIGNAL * count_deviation).clamp(min=DESCRIBED_IMAGES)
    sizes = counts.clamp(min=1) * known
    means = sums / counts.clamp(min=1)[:, None] * known[:, None]
    between = (means.T * (sizes / sizes.sum().clamp(min=1))) @ means
    values, vectors = torch.linalg.eigh(squares / total - between)
    sampled = values > floor
    values = torch.maximum(values, floor)
    weights = (means @ vectors / values) @ vectors.T
    bias = -0.5 * (weights * means).sum(1)
    return {
        "known": known,
        "means": means.float(),
        "factor": (vectors * (values * sampled).sqrt()).float(),
        "weights": weights.float(),
        "bias": bias.float(),
    }


def sample_features(model: ClassGaussian, labels: Tensor, noise: Tensor) -> Tensor:
    """Return a sample per label of its class's Gaussian, scaled to norm 1.

    Args:
        model: The Gaussians.
        labels: The labels, of classes that are known.
        noise: Standard normal numbers (labels, components).
    """
    return F.normalize(model["means"][labels] + noise @ model["factor"].T, dim=1)
