"""Mixtures and Gaussians of classes, by hand and by their moments."""

from __future__ import annotations

import pytest
import torch

from barter.core.errors import ConfigError
from barter.ops.embedding_models import (
    COVARIANCE_PRIOR,
    LEAST_IMAGES,
    MEAN_PRIOR,
    fit_class_gaussians,
    mix_embeddings,
    sample_embeddings,
    sample_labels,
)


def test_a_mixture_is_a_convex_combination_of_images_of_its_class() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1])
    corners = torch.eye(5)[:, None]  # The weight of image j stands in column j.
    mixed = mix_embeddings(corners, labels, 2)[:, 0]
    assert torch.allclose(mixed.sum(1), torch.ones(5))
    assert (mixed >= 0).all()
    assert (mixed[labels[:, None] != labels] == 0).all(), "no other class"
    assert ((mixed > 0).sum(1) == 2).all(), "as many images as asked for"
    alone = mix_embeddings(corners, torch.arange(5), 2)[:, 0]
    assert torch.equal(alone, torch.eye(5)), "a class of one image has nothing to mix"


def test_a_gaussian_has_the_shrunken_moments_of_its_class() -> None:
    # One feature, one view. Square roots: class 0 is 1, 1, 1, 3, 3, 3 and class 1 is 6 times 5.
    roots = torch.tensor([1.0, 1, 1, 3, 3, 3, 5, 5, 5, 5, 5, 5])
    labels = torch.tensor([0] * 6 + [1] * 6)
    model = fit_class_gaussians(roots.square()[:, None, None], labels, 3, 1)
    assert model["counts"].tolist() == [6, 6, 0]
    assert model["nonnegative"] == 1
    center = 3.5  # mean of all roots
    assert model["center"].item() == center
    assert abs(model["basis"].item()) == 1
    sign = model["basis"].item()
    keep = 6 / (6 + MEAN_PRIOR)
    means = (sign * model["means"][:, 0]).tolist()
    assert means == pytest.approx([keep * (2 - center), keep * (5 - center), 0], rel=1e-3)
    pooled = 6 / (12 - 2)  # sum of squared deviations over the degrees of freedom
    weight = 5 / (5 + COVARIANCE_PRIOR)
    variances = [weight * 6 / 5 + (1 - weight) * pooled, (1 - weight) * pooled, 0]
    assert model["factors"].float().square().flatten().tolist() == pytest.approx(
        variances, rel=2e-3
    )


def test_samples_follow_the_model() -> None:
    torch.manual_seed(0)
    data = torch.randn(400, 2, 3).abs() + 1
    labels = torch.arange(400) % 2
    model = fit_class_gaussians(data, labels, 2, 6)
    noise = torch.randn(20000, 6)
    sampled = sample_embeddings(model, torch.zeros(20000, dtype=torch.long), noise)
    roots, wanted = sampled.sqrt().flatten(1), data[labels == 0].sqrt().flatten(1)
    assert torch.allclose(roots.mean(0), wanted.mean(0), atol=0.02)
    assert torch.allclose(roots.T.cov(), wanted.T.cov(), atol=0.02)
    again = sample_embeddings(model, torch.zeros(20000, dtype=torch.long), noise)
    assert torch.equal(sampled, again)


def test_features_of_both_signs_keep_them() -> None:
    torch.manual_seed(0)
    data = 3 * torch.randn(50, 1, 4)
    model = fit_class_gaussians(data, torch.zeros(50, dtype=torch.long), 1, 4)
    sampled = sample_embeddings(model, torch.zeros(99, dtype=torch.long), torch.randn(99, 4))
    assert model["nonnegative"] == 0
    assert sampled.min() < -1
    assert sampled.max() > 1
    assert (
        sample_embeddings(
            {**model, "nonnegative": 1}, torch.zeros(99, dtype=torch.long), torch.randn(99, 4)
        ).min()
        == 0
    )


def test_classes_of_few_images_are_not_described() -> None:
    n = LEAST_IMAGES
    data = torch.rand(2 * n - 1, 1, 2)
    labels = torch.tensor([0] * n + [1] * (n - 1))
    model = fit_class_gaussians(data, labels, 2, 2)
    assert model["counts"].tolist() == [n, 0]
    assert (model["means"][1] == 0).all()
    assert (model["factors"][1] == 0).all()
    with pytest.raises(ConfigError, match=f"no class has {n} images"):
        fit_class_gaussians(data[1:n], labels[1:n], 2, 2)


def test_more_components_than_there_are_directions() -> None:
    data = torch.rand(6, 1, 2)
    model = fit_class_gaussians(data, torch.zeros(6, dtype=torch.long), 1, 5)
    assert (model["basis"][2:] == 0).all()
    assert model["basis"][:2].float().norm(dim=2).allclose(torch.ones(2, 1), atol=1e-3)


@pytest.mark.parametrize(
    ("counts", "n", "expected"),
    [([1, 1], 4, [0, 0, 1, 1]), ([3, 0, 1], 4, [0, 0, 0, 2]), ([2, 1], 1, [0]), ([0, 0], 3, [])],
)
def test_labels_follow_the_counts(counts: list[int], n: int, expected: list[int]) -> None:
    assert sample_labels(torch.tensor(counts), n).tolist() == expected
