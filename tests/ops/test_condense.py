from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter import Local
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.payload import nbytes
from barter.ops.condense import (
    Canvas,
    averaging_matrix,
    concatenate_lots,
    condense,
    first_and_last_terms,
    images_per_class,
    matching_loss,
    mean_images,
    pack_lot,
    quantise_images,
    reinitialise,
    sliced_wasserstein,
)
from barter.ops.fit import Trainer, sgd
from tests.conftest import federation

SPEC = Spec(1, 1, 2, 3, (0.5,), (0.25,))


class Linear(Classifier):
    """Features and logits by two matrices."""

    feature_dim = 2

    def __init__(self, a: list[list[float]], b: list[list[float]]) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.a.T

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.b.T


def test_class_means_by_hand() -> None:
    labels, rows = torch.tensor([2, 0, 2]), torch.tensor([[1.0, 0.0], [5.0, 5.0], [3.0, 4.0]])
    means = averaging_matrix(labels, torch.tensor([0, 1, 2])) @ rows
    assert means.tolist() == [[5, 5], [0, 0], [2, 2]]


@given(st.integers(1, 6), st.integers(2, 12), st.integers(0, 100))
def test_sliced_wasserstein_of_single_points_is_its_closed_form(
    sets: int, dimensions: int, seed: int
) -> None:
    torch.manual_seed(seed)
    u, v = torch.randn(sets, 1, dimensions), torch.randn(sets, 1, dimensions)
    closed = sliced_wasserstein(u, v, None)
    assert torch.allclose(closed, (u - v).square().sum((1, 2)) / dimensions, atol=1e-6)
    assert torch.allclose(sliced_wasserstein(u, v, 40_000), closed, rtol=0.1, atol=1e-3)


def test_sliced_wasserstein_of_sets_sorts_them() -> None:
    u, v = torch.tensor([[[3.0], [1.0]]]), torch.tensor([[[2.0], [5.0]]])
    assert sliced_wasserstein(u, v, 3).item() == pytest.approx(((1 - 2) ** 2 + (3 - 5) ** 2) / 2)
    assert sliced_wasserstein(u, u.flip(1), 3).item() == pytest.approx(0)
    cloud = torch.randn(1, 50, 4)
    shift = torch.tensor([1.0, -2.0, 0.5, 3.0])
    moved = sliced_wasserstein(cloud, cloud + shift, 40_000)
    assert moved.item() == pytest.approx(shift.square().sum().item() / 4, rel=0.05)
    with pytest.raises(ValueError, match="single points"):
        sliced_wasserstein(u, v, None)


def test_the_distance_has_a_gradient() -> None:
    u = torch.randn(1, 5, 3, requires_grad=True)
    sliced_wasserstein(u, torch.randn(1, 5, 3), 20).sum().backward()
    assert u.grad is not None
    assert u.grad.abs().sum() > 0


@given(st.integers(0, 255), st.integers(0, 255))
def test_bytes_come_back_as_they_were(a: int, b: int) -> None:
    pixels = torch.tensor([[[[a, b]]]], dtype=torch.uint8)
    assert torch.equal(quantise_images(prepare_batch(pixels, SPEC, Augment()), SPEC), pixels)
    assert quantise_images(torch.tensor([[[[99.0, -99.0]]]]), SPEC).tolist() == [[[[255, 0]]]]


def data(counts: dict[int, int]) -> Images:
    labels = torch.tensor([c for c, n in counts.items() for _ in range(n)])
    pixels = (labels[:, None, None, None] * 50 + torch.arange(2)).to(torch.uint8)
    return Images(pixels.view(-1, 1, 1, 2), labels, SPEC)


def test_who_is_condensed_into_how_many() -> None:
    images = data({0: 60, 1: 7, 2: 1})
    assert images_per_class(images, 50, 50) == {0: 50}
    assert images_per_class(images, 5, 1) == {0: 5, 1: 5, 2: 1}
    assert images_per_class(images, 5, 100) == {}


def test_images_start_as_means_of_their_class() -> None:
    start = mean_images(data({0: 4, 2: 9}), {0: 2, 2: 3}, of=5)
    assert quantise_images(start, SPEC)[:, 0, 0].tolist() == [[0, 1]] * 2 + [[100, 101]] * 3


def test_no_two_start_from_the_same_original() -> None:
    pixels = torch.arange(20, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    images = Images(pixels, torch.arange(20) % 2, SPEC)
    start = quantise_images(mean_images(images, {0: 10, 1: 4}, of=1), SPEC)[:, 0, 0, 0].tolist()
    assert sorted(start[:10]) == list(range(0, 20, 2)), "all that there are"
    assert len(set(start[10:])) == 4
    assert all(x % 2 for x in start[10:])


def test_the_bytes_of_a_lot_are_those_of_its_images() -> None:
    """Table 7 of FedAF counts one byte per pixel and channel: 50 images of a CIFAR class are 153,600 bytes."""
    spec = Spec(3, 32, 32, 10, (0.5,) * 3, (0.25,) * 3)
    cifar = Images(torch.zeros(130, 3, 32, 32, dtype=torch.uint8), torch.arange(130) % 2, spec)
    sizes = images_per_class(cifar, 50, 50)
    given_away = pack_lot(cifar, sizes, mean_images(cifar, sizes, 5))
    assert given_away["images"].dtype is torch.uint8
    assert nbytes(given_away) == 2 * 153_600 + 2 * (8 + 8)
    empty = pack_lot(cifar, {}, None)
    images, labels = concatenate_lots([given_away, empty])
    assert len(images) == len(labels) == 100
    assert labels.tolist() == [0] * 50 + [1] * 50


def test_a_network_is_redrawn_but_not_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    with torch.no_grad():
        norm.weight.fill_(7)
        norm.running_mean.fill_(5)  # type: ignore[union-attr]
    before = model[0].weight.clone()
    reinitialise(model)
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.abs().max() <= 1 / math.sqrt(4) + 1e-6, (
        "from the distribution it started from"
    )
    assert norm.weight.tolist() == [1, 1, 1]
    assert norm.running_mean.tolist() == [5, 5, 5]  # type: ignore[union-attr, operator]


def test_the_matching_loss_by_hand() -> None:
    seen_through = Linear([[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    model = Linear([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    canvas = Canvas(
        torch.tensor([[[[1.0, 1.0]]], [[[3.0, 1.0]]]])
    )  # two images of one class: mean (2, 1)
    pixels = torch.tensor([[[[255, 0]]]], dtype=torch.uint8)  # normalised (2, -2)
    one, half = torch.ones(1, 1), torch.full((1, 2), 0.5)
    v, known = torch.tensor([[1.0, 2.0, 0.0]]), torch.ones(1)

    def terms(logits: bool, weight: float, known: Tensor = known) -> list[float]:
        given = pixels, one, half, v, known
        return [
            x.item()
            for x in matching_loss(canvas, seen_through, model, SPEC, logits, weight, None, *given)
        ]

    # Features: condensed (2, 2), real (2, -4). Logits: condensed (4, 2, 0), real (-2, -4, 0).
    assert terms(False, 0.0) == pytest.approx([36, 36])
    assert terms(True, 0.0) == pytest.approx([36 + 36 + 36] * 2)
    # The model's own logits of the condensed, (2, 1, 4), beside (1, 2, 0).
    apart = (1 + 1 + 16) / 3
    assert terms(False, 0.5) == pytest.approx([36 + 0.5 * apart, 36, apart])
    assert terms(False, 0.5, 0 * known) == pytest.approx([36, 36, 0])


def test_the_terms_of_a_loss_at_both_ends() -> None:
    told = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])]
    assert first_and_last_terms(["a", "b"], told) == {
        "a_start": 3,
        "b_start": 4,
        "a_end": 1,
        "b_end": 2,
    }
    assert first_and_last_terms(["a", "b"], [torch.tensor([3.0])]) == {"a_start": 3, "a_end": 3}, (
        "one step, and a term that is off"
    )


def test_condensed_images_have_the_mean_features_of_the_originals() -> None:
    client = federation(Local(), models="small-cnn").engine.clients[0]
    sizes = images_per_class(client.data, 2, 1)
    start = mean_images(client.data, sizes, 1)

    def distance(images: Tensor) -> float:
        model = client.model.eval()
        classes = torch.tensor(list(sizes))
        labels = torch.tensor([c for c, n in sizes.items() for _ in range(n)])
        with torch.no_grad():
            real = averaging_matrix(client.data.labels, classes) @ model.features(
                client.data.batch(torch.arange(len(client.data)))
            )
            return float(
                (averaging_matrix(labels, classes) @ model.features(images) - real).square().sum()
            )

    options = {"steps": 40, "batch_size": 10**6, "recipe": sgd(0.5, 0.9)}
    made, terms = condense(client, start, sizes, **options, sampled=lambda model: None)  # type: ignore[arg-type]
    assert distance(made) < 0.2 * distance(start)
    assert made.shape == start.shape
    assert terms["matching_start"] == pytest.approx(distance(start), rel=1e-4)
    assert terms["matching_end"] < 0.2 * terms["matching_start"]
    assert terms.keys() == {"matching_start", "matching_end"}


def test_pixels_stay_between_black_and_white() -> None:
    """What is matched is what is sent: nothing is lost when images become bytes, but for rounding."""
    client = federation(Local(max_epochs=1)).engine.clients[0]
    sizes = images_per_class(client.data, 2, 1)
    start = mean_images(client.data, sizes, of=1)
    made, _ = condense(
        client, start, sizes, steps=5, batch_size=50, recipe=sgd(50.0), sampled=lambda model: None
    )
    sent = prepare_batch(quantise_images(made, client.data.spec), client.data.spec, Augment())
    assert not torch.allclose(made, start, atol=0.1), "they were moved"
    assert torch.allclose(made, sent, atol=0.51 / 255 / min(client.data.spec.std))


def test_gradients_are_clipped() -> None:
    weight = nn.Parameter(torch.zeros(2))
    trainer = Trainer.of(nn.ParameterList([weight]), sgd(1.0, clip=2.0))
    trainer.step(lambda: (weight * torch.tensor([30.0, 40.0])).sum())
    assert weight.tolist() == pytest.approx([-1.2, -1.6], abs=1e-4)
