"""Mixtures and Gaussians of classes, by hand and by their moments."""

from __future__ import annotations

import pytest
import torch

from barter.core.errors import ConfigError
from barter.ops.embedding_models import (
    LEAST_IMAGES,
    MEAN_PRIOR,
    fit_class_gaussians,
    mix_embeddings,
    sample_embeddings,
    sample_labels,
)


def test_a_mixture_is_made_of_images_of_its_class_and_varies_as_they_do() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0] * 4 + [1] * 3)
    roots = torch.randn(7, 1, 9).abs() + 5  # far from 0, so that no root changes its sign
    mixed = mix_embeddings(roots.square(), labels, 2).sqrt()
    for label in (0, 1):
        own = roots[labels == label][:, 0]
        differences = own - own.mean(0)
        shifts = mixed[labels == label][:, 0] - own.mean(0)
        # Images are linearly independent, but their differences from the mean sum to 0.
        weights = torch.linalg.lstsq(differences.T, shifts.T).solution
        assert torch.allclose(differences.T @ weights, shifts.T, atol=1e-4), "only its own class"
    many = mix_embeddings(roots[:4].repeat(2000, 1, 1).square(), labels[:4].repeat(2000), 2)
    spread = many.sqrt().var(0).sum() / roots[:4].var(0, unbiased=False).sum()
    assert spread.item() == pytest.approx(1, abs=0.05)
    alone = mix_embeddings(roots.square(), torch.arange(7), 2)
    assert torch.allclose(alone, roots.square(), rtol=1e-5), "a class of one image keeps it"


def test_a_gaussian_has_the_mean_and_the_variance_of_its_class() -> None:
    # One feature, one view. Square roots: class 0 is 1, 1, 1, 3, 3, 3 and class 1 is 6 times 5.
    roots = torch.tensor([1.0, 1, 1, 3, 3, 3, 5, 5, 5, 5, 5, 5])
    labels = torch.tensor([0] * 6 + [1] * 6)
    model = fit_class_gaussians(roots.square()[:, None, None], labels, 3, 1, 4.0)
    assert model["counts"].tolist() == [6, 6, 0]
    assert model["sizes"].tolist() == [1, 1, 0]
    assert len(model["directions"]) == 12 // 4 + 3, "whatever the classes are"
    assert (model["directions"][2:] == 0).all()
    assert model["nonnegative"] == 1
    center = 3.5  # mean of all roots
    assert model["center"].item() == center
    sign = model["basis"].item()
    assert abs(sign) == 1
    keep = 6 / (6 + MEAN_PRIOR)
    means = (sign * model["means"][:, 0, 0]).tolist()
    assert means == pytest.approx([keep * (2 - center), keep * (5 - center), 0], rel=1e-3)
    variances = model["directions"][:2].float().square().flatten().tolist()
    assert variances == pytest.approx([6 / 5, 0], rel=2e-3, abs=1e-9)


def test_few_directions_keep_the_sum_of_variances() -> None:
    torch.manual_seed(0)
    roots = torch.randn(40, 3, 5) * torch.tensor([3.0, 1, 1, 1, 1]) + 50
    labels = torch.zeros(40, dtype=torch.long)
    for compression, size in ((1.0, 40), (4.0, 10), (20.0, 2)):
        model = fit_class_gaussians(roots.square(), labels, 1, 5, compression)
        directions = model["directions"].float().flatten(1)
        assert model["sizes"].tolist() == [size]
        assert len(directions) == size + 1, "one more for a class of few images"
        assert directions.square().sum().item() == pytest.approx(
            float(roots.var(0).sum()), rel=1e-2
        )
    # Two directions cannot reproduce an image: all samples lie in a plane.
    noise = torch.randn(50, 2)
    samples = sample_embeddings(model, labels.new_zeros(50), noise).sqrt().flatten(1)
    assert torch.linalg.matrix_rank(samples - samples.mean(0), rtol=1e-3).item() == 2


def test_samples_follow_the_model() -> None:
    torch.manual_seed(0)
    data = torch.randn(400, 2, 3).abs() + 1
    labels = torch.arange(400) % 2
    model = fit_class_gaussians(data, labels, 2, 3, 1.0)
    noise = torch.randn(20000, 200)
    for label in (0, 1):
        sampled = sample_embeddings(model, torch.full((20000,), label), noise)
        roots, wanted = sampled.sqrt().flatten(1), data[labels == label].sqrt().flatten(1)
        assert torch.allclose(roots.mean(0), wanted.mean(0), atol=0.02)
        assert torch.allclose(roots.T.cov(), wanted.T.cov(), atol=0.02)
        again = sample_embeddings(model, torch.full((20000,), label), noise)
        assert torch.equal(sampled, again)


def test_features_of_both_signs_keep_them() -> None:
    torch.manual_seed(0)
    data = 3 * torch.randn(50, 1, 4)
    model = fit_class_gaussians(data, torch.zeros(50, dtype=torch.long), 1, 4, 4.0)
    sampled = sample_embeddings(model, torch.zeros(99, dtype=torch.long), torch.randn(99, 12))
    assert model["nonnegative"] == 0
    assert sampled.min() < -1
    assert sampled.max() > 1
    assert (
        sample_embeddings(
            {**model, "nonnegative": 1}, torch.zeros(99, dtype=torch.long), torch.randn(99, 12)
        ).min()
        == 0
    )


def test_classes_of_few_images_are_not_described() -> None:
    n = LEAST_IMAGES
    data = torch.rand(2 * n - 1, 1, 2)
    labels = torch.tensor([0] * n + [1] * (n - 1))
    model = fit_class_gaussians(data, labels, 2, 2, 4.0)
    assert model["counts"].tolist() == [n, 0]
    assert (model["means"][1] == 0).all()
    assert model["sizes"].tolist() == [1, 0]
    with pytest.raises(ConfigError, match=f"no class has {n} images"):
        fit_class_gaussians(data[1:n], labels[1:n], 2, 2, 4.0)


def test_more_components_than_there_are_directions() -> None:
    data = torch.rand(6, 1, 2)
    model = fit_class_gaussians(data, torch.zeros(6, dtype=torch.long), 1, 5, 4.0)
    assert (model["basis"][2:] == 0).all()
    assert model["basis"][:2].float().norm(dim=1).allclose(torch.ones(2), atol=1e-3)


@pytest.mark.parametrize(
    ("counts", "n", "expected"),
    [([1, 1], 4, [0, 0, 1, 1]), ([3, 0, 1], 4, [0, 0, 0, 2]), ([2, 1], 1, [0]), ([0, 0], 3, [])],
)
def test_labels_follow_the_counts(counts: list[int], n: int, expected: list[int]) -> None:
    assert sample_labels(torch.tensor(counts), n).tolist() == expected
