"""Models of a client's embeddings: mixtures of a few images, and Gaussians of classes.

What a client offers in place of embeddings of single images. A mixture combines some images of a
class. A Gaussian describes a class by mean and covariance, from which anybody can sample.

Embeddings after a ReLU are skewed, and a Gaussian fits their square roots better (Tukey's ladder of
powers; Yang et al. 2021, "Free Lunch for Few-shot Learning"). Covariances of classes with few images
are shrunk towards the covariance of all (Friedman 1989, "Regularized Discriminant Analysis").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict

import torch
from torch import Tensor

from barter.core.contracts import Counts, Halves, Within
from barter.core.errors import ConfigError

__all__ = [
    "ClassGaussians",
    "fit_class_gaussians",
    "mix_embeddings",
    "noise_embeddings",
    "sample_embeddings",
    "sample_labels",
    "sample_labels_and_noise",
]

# Classes with fewer images are not described: a mean of few images resembles each of them.
LEAST_IMAGES = 5
# Number of images of the other classes that count as much as a class's own in its mean and in its
# covariance.
MEAN_PRIOR = 2.0
COVARIANCE_PRIOR = 5.0


class ClassGaussians(TypedDict):
    """A Gaussian per class for the square roots of embeddings, in half precision.

    All classes share a subspace: the principal components of all the client's embeddings.
    """

    counts: Annotated[Tensor, Counts("classes")]  # images of each class; 0 if it has no Gaussian
    nonnegative: Annotated[int, Within(0, 1)]  # whether all features are at least 0
    center: Annotated[Tensor, Halves("views", "features")]
    basis: Annotated[Tensor, Halves("rank", "views", "features")]
    means: Annotated[Tensor, Halves("classes", "rank")]
    factors: Annotated[Tensor, Halves("classes", "rank", "rank")]  # L of each covariance L Lᵀ


def mix_embeddings(embeddings: Tensor, labels: Tensor, members: int) -> Tensor:
    """Replace each embedding by a random convex combination of embeddings of its class.

    Args:
        embeddings: The embeddings (images, views, features).
        labels: Their labels.
        members: Images in a combination; fewer if the class has fewer.

    Returns:
        One combination per image, with weights that are uniform on the simplex.
    """
    n = len(embeddings)
    members = min(members, n)
    mixed = torch.empty_like(embeddings)
    for rows in torch.split(torch.arange(n, device=labels.device), 500):
        order = torch.rand(len(rows), n, device=labels.device)
        order.masked_fill_(labels[rows, None] != labels, -1.0)
        chosen = order.topk(members, 1)
        weights = torch.empty_like(chosen.values).exponential_()
        weights = weights * (chosen.values >= 0)
        weights = weights / weights.sum(1, keepdim=True)
        mixed[rows] = torch.einsum("nm,nm...->n...", weights, embeddings[chosen.indices])
    return mixed


def fit_class_gaussians(
    embeddings: Tensor, labels: Tensor, classes: int, rank: int
) -> ClassGaussians:
    """Fit a Gaussian to the square roots of each class's embeddings.

    Args:
        embeddings: The embeddings (images, views, features).
        labels: Their labels.
        classes: Number of classes.
        rank: Number of principal components.
    """
    shape = embeddings.shape[1:]
    roots = _signed_root(embeddings.flatten(1)).double()
    n = len(roots)
    center = roots.mean(0)
    centred = roots - center
    basis = _principal_components(centred, rank)
    scores = centred @ basis.T

    counts = torch.bincount(labels, minlength=classes)
    sums = scores.new_zeros(classes, rank).index_add_(0, labels, scores)
    class_means = sums / counts.clamp_min(1)[:, None]
    residuals = scores - class_means[labels]
    pooled = residuals.T @ residuals / max(1, n - int((counts > 0).sum()))
    means = (counts / (counts + MEAN_PRIOR))[:, None] * class_means
    factors = scores.new_zeros(classes, rank, rank)
    for label in range(classes):
        own = residuals[labels == label]
        if len(own) < LEAST_IMAGES:
            counts[label] = 0
            means[label] = 0
            continue
        weight = (len(own) - 1) / (len(own) - 1 + COVARIANCE_PRIOR)
        covariance = weight * own.T @ own / (len(own) - 1) + (1 - weight) * pooled
        values, vectors = torch.linalg.eigh(covariance)
        factors[label] = vectors * values.clamp_min(0).sqrt()
    if not counts.any():
        raise ConfigError(
            f"no class has {LEAST_IMAGES} images, which statistics of a class need at least; offer "
            "more images or something else"
        )
    return {
        "counts": counts,
        "nonnegative": int(bool((embeddings >= 0).all())),
        "center": center.view(shape).half(),
        "basis": basis.view(rank, *shape).half(),
        "means": means.half(),
        "factors": factors.half(),
    }


def sample_labels(counts: Tensor, n: int) -> Tensor:
    """Return n labels whose frequencies follow the counts, as evenly as integers allow."""
    total = int(counts.sum())
    if not total:
        return counts.new_zeros(0)
    ends = (counts.cumsum(0) * n / total).round().long()
    return torch.repeat_interleave(
        torch.arange(len(counts), device=counts.device), ends.diff(prepend=ends.new_zeros(1))
    )


def sample_embeddings(model: ClassGaussians, labels: Tensor, noise: Tensor) -> Tensor:
    """Return one embedding (views, features) per label.

    Args:
        model: The Gaussians.
        labels: The labels.
        noise: Standard normal numbers (labels, rank); equal numbers give equal embeddings.
    """
    factors = model["factors"].float()[labels]
    scores = model["means"].float()[labels] + torch.einsum("nij,nj->ni", factors, noise)
    basis = model["basis"].float()
    roots = model["center"].float() + torch.einsum("nr,rvf->nvf", scores, basis)
    if model["nonnegative"]:
        return roots.clamp_min(0).square()
    return roots.sign() * roots.square()


def sample_labels_and_noise(model: ClassGaussians, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return labels and normal numbers for n samples; the seed gives the same on every device."""
    rank = model["means"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, rank, generator=generator)
    return sample_labels(model["counts"], n), noise.to(model["means"].device)


def noise_embeddings(
    shapes: Mapping[int, tuple[int, int, int]], deviation: float, classes: int, device: torch.device
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return normal noise in place of embeddings, and random labels, by client.

    Args:
        shapes: Each client's numbers of images, views and features.
        deviation: Standard deviation of the noise.
        classes: Number of classes.
        device: Device of the results.
    """
    embeddings = {k: deviation * torch.randn(shape, device=device) for k, shape in shapes.items()}
    labels = {k: torch.randint(classes, (n,), device=device) for k, (n, _, _) in shapes.items()}
    return embeddings, labels


def _signed_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().sqrt()


def _principal_components(centred: Tensor, rank: int) -> Tensor:
    """Return the first principal components as rows; zeros where there are fewer."""
    n, width = centred.shape
    components = centred.new_zeros(rank, width)
    # The smaller of the two Gram matrices has the same non-zero eigenvalues.
    if n <= width:
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        rows = vectors.T.flip(0)[:rank] @ centred
    else:
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        rows = vectors.T.flip(0)[:rank]
    found = min(rank, int((values > 1e-9 * values.max()).sum()))
    components[:found] = torch.nn.functional.normalize(rows[:found], dim=1)
    return components
