"""Models of a client's embeddings: mixtures of a few images, and class Gaussians.

What a client offers in place of embeddings of single images. A mixture combines some images of a
class. A Gaussian describes a class by its mean and by fewer directions than it has images; anybody
can sample from it.

Embeddings after a ReLU are skewed. Both models are made of their square roots, which are closer to
normal (Tukey's ladder of powers; Yang et al. 2021, "Free Lunch for Few-shot Learning").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.contracts import Counts, Halves, Within
from barter.core.errors import ConfigError
from barter.core.resampling import sum_rows

__all__ = [
    "ClassGaussians",
    "count_directions",
    "fit_class_gaussians",
    "mix_embeddings",
    "noise_embeddings",
    "sample_embeddings",
    "sample_labels",
    "sample_labels_and_noise",
]

# Classes with fewer images are not described: a mean of few images resembles each of them.
LEAST_IMAGES = 5
# The mean of a class counts as if it had this many more images, at the mean of all classes.
MEAN_PRIOR = 2.0


class ClassGaussians(TypedDict):
    """A Gaussian per class for the square roots of embeddings, in half precision.

    Roots are described in principal components of the features, the same ones for all views.
    """

    counts: Annotated[Tensor, Counts("classes")]  # images of each class; 0 if it has no Gaussian
    nonnegative: Annotated[int, Within(0, 1)]  # whether all features are at least 0
    center: Annotated[Tensor, Halves("views", "features")]
    basis: Annotated[Tensor, Halves("rank", "features")]
    means: Annotated[Tensor, Halves("classes", "views", "rank")]
    # Directions of all classes, those of a class together, then zeros: their number depends on the
    # number of images alone. `sizes` counts those of each class. A sample is the class mean plus a
    # combination of the class's directions with standard normal weights.
    sizes: Annotated[Tensor, Counts("classes", most="directions")]
    directions: Annotated[Tensor, Halves("directions", "views", "rank")]


def count_directions(images: int, classes: int, compression: float) -> int:
    """Return the row count of `ClassGaussians["directions"]`, zero rows included.

    It is images / compression, rounded down, plus classes: enough for any distribution of the
    images over classes, which the number therefore does not reveal.

    Args:
        images: Number of images.
        classes: Number of classes, each of which may need one direction more.
        compression: Images per direction.
    """
    return int(images / compression) + classes


def mix_embeddings(embeddings: Tensor, labels: Tensor, members: int) -> Tensor:
    """Replace each embedding by a random combination of embeddings of its class.

    A combination is the class mean plus a sum of the differences of some images from it, with
    random weights of both signs whose squares sum to 1. So combinations vary as much as images do.
    Means and differences are those of the (signed) square roots of embeddings, and the combination
    is squared. Features stay non-negative if all are. Members and weights are drawn from torch's
    default generator of the device.

    Args:
        embeddings: The embeddings (images, views, features).
        labels: Their labels.
        members: Images in a combination, drawn from the class without repetition; fewer if the
            class has fewer. The image itself may be among them or not.

    Returns:
        One combination per image, in the order of `embeddings`. A class of one image keeps it.
    """
    n = len(embeddings)
    members = min(members, n)
    roots = _signed_root(embeddings)
    means = _class_means(roots, labels, int(labels.max()) + 1)
    differences = roots - means[labels]
    mixed = torch.empty_like(roots)
    for rows in torch.split(torch.arange(n, device=labels.device), 500):
        order = torch.rand(len(rows), n, device=labels.device)
        order.masked_fill_(labels[rows, None] != labels, -1.0)
        chosen = order.topk(members, 1)
        weights = torch.randn_like(chosen.values) * (chosen.values >= 0)
        weights = weights / weights.norm(dim=1, keepdim=True)
        shift = torch.einsum("nm,nm...->n...", weights, differences[chosen.indices])
        mixed[rows] = means[labels[rows]] + shift
    return _signed_square(mixed, nonnegative=bool((embeddings >= 0).all()))


def fit_class_gaussians(
    embeddings: Tensor, labels: Tensor, classes: int, rank: int, compression: float
) -> ClassGaussians:
    """Fit a Gaussian to the square roots of each class's embeddings.

    Classes with fewer than `LEAST_IMAGES` images get none: their count and size are 0. Class means
    are drawn towards the mean of all images, see `MEAN_PRIOR`.

    Args:
        embeddings: The embeddings (images, views, features).
        labels: Their labels.
        classes: Number of classes.
        rank: Number of principal components of the features.
        compression: Images of a class per direction that describes its covariance; a class has at
            least one direction. Directions are scaled so that the sum of all variances stays that
            of the class.

    Raises:
        ConfigError: If no class has `LEAST_IMAGES` images.
    """
    roots = _signed_root(embeddings).double()
    center = roots.mean(0)
    centred = roots - center
    basis = _principal_components(centred.flatten(0, 1), rank)
    scores = centred @ basis.T
    counts = torch.bincount(labels, minlength=classes)
    class_means = _class_means(scores, labels, classes)
    sizes = torch.zeros_like(counts)
    directions = []
    for label in range(classes):
        own = scores[labels == label]
        if len(own) < LEAST_IMAGES:
            counts[label] = 0
            continue
        sizes[label] = max(1, int(len(own) / compression))
        residuals = (own - class_means[label]).flatten(1)
        leading = _leading_directions(residuals, int(sizes[label]))
        directions.append(leading.view(-1, *scores.shape[1:]))
    if not directions:
        raise ConfigError(
            f"no class has {LEAST_IMAGES} images, which statistics of a class need at least; offer "
            "more images or something else"
        )
    found = torch.cat(directions)
    rows = count_directions(len(embeddings), classes, compression)
    return {
        "counts": counts,
        "nonnegative": int(bool((embeddings >= 0).all())),
        "center": center.half(),
        "basis": basis.half(),
        "means": ((counts / (counts + MEAN_PRIOR))[:, None, None] * class_means).half(),
        "sizes": sizes,
        "directions": F.pad(found, (0, 0, 0, 0, 0, rows - len(found))).half(),
    }


def _leading_directions(residuals: Tensor, size: int) -> Tensor:
    """Return the first principal directions, scaled by their standard deviations.

    They are then scaled to the total variance of the residuals. If that is 0, they are zero.

    Args:
        residuals: At least two rows with mean 0.
        size: The number of directions; at most the number of rows.
    """
    n = len(residuals)
    # The Gram matrix of the images is small, and has the eigenvalues of the covariance.
    values, vectors = torch.linalg.eigh(residuals @ residuals.T / (n - 1))
    rows = (vectors.T.flip(0)[:size] @ residuals) / (n - 1) ** 0.5
    explained = values.flip(0)[:size].sum()
    total = values.sum()
    return rows * (total / explained).sqrt() if explained > 0 else torch.zeros_like(rows)


def sample_labels(counts: Tensor, n: int) -> Tensor:
    """Return n labels, sorted, whose frequencies follow the counts as integers allow.

    Nothing is random. If all counts are 0, the result is empty.
    """
    total = int(counts.sum())
    if not total:
        return counts.new_zeros(0)
    ends = (counts.cumsum(0) * n / total).round().long()
    return torch.repeat_interleave(
        torch.arange(len(counts), device=counts.device), ends.diff(prepend=ends.new_zeros(1))
    )


def sample_embeddings(model: ClassGaussians, labels: Tensor, noise: Tensor) -> Tensor:
    """Return a sample per label of its class's Gaussian (labels, views, features).

    Args:
        model: The Gaussians.
        labels: The labels, of classes that have a Gaussian.
        noise: Standard normal numbers (labels, at least as many as a class has directions); equal
            numbers give equal embeddings.
    """
    sizes = model["sizes"]
    classes = torch.arange(len(sizes), device=sizes.device)
    # For each direction, its class and its place among the directions of this class.
    owner = torch.repeat_interleave(classes, sizes)
    place = torch.arange(len(owner), device=sizes.device) - (sizes.cumsum(0) - sizes)[owner]
    weights = noise[:, place] * (labels[:, None] == owner)
    scores = model["means"].float()[labels]
    directions = model["directions"][: len(owner)].float()
    scores = scores + torch.einsum("nd,dvr->nvr", weights, directions)
    roots = model["center"].float() + scores @ model["basis"].float()
    return _signed_square(roots, nonnegative=bool(model["nonnegative"]))


def sample_labels_and_noise(model: ClassGaussians, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return labels (n,) and standard normal noise (n, D) for `sample_embeddings`.

    Labels follow the model's counts and do not depend on the seed (`sample_labels`); D is the
    largest number of directions of a class. A seed gives the same numbers on every device, and the
    global random generator is not used.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, int(model["sizes"].max()), generator=generator)
    return sample_labels(model["counts"], n), noise.to(model["means"].device)


def noise_embeddings(
    shapes: Mapping[int, tuple[int, int, int]], deviation: float, classes: int, device: torch.device
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return, by client, normal noise as embeddings and uniformly random labels.

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


def _signed_square(roots: Tensor, nonnegative: bool) -> Tensor:
    """Undo `_signed_root`; if features are not negative, negative roots count as 0."""
    return roots.clamp_min(0).square() if nonnegative else roots.sign() * roots.square()


def _class_means(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean row of each class; zeros for classes without rows."""
    sums = sum_rows(rows, labels, classes)
    counts = torch.bincount(labels, minlength=classes).clamp_min(1)
    return sums / counts.view(-1, *[1] * (rows.ndim - 1))


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
    components[:found] = F.normalize(rows[:found], dim=1)
    return components
