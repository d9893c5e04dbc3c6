"""What mechanisms do to values: bounds by construction, and noise of the size that is accounted for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.nodes import Client
from barter.privacy import account
from barter.privacy.mechanisms import (
    ClassMeans,
    Gaussian,
    Laplace,
    Mechanism,
    ReleaseContext,
    Response,
    Withhold,
)
from barter.privacy.noise import Seeded, Source, System
from barter.privacy.registry import mechanism_of

CLASSES = 4
CLIENT = cast(Client, SimpleNamespace(data=SimpleNamespace(spec=SimpleNamespace(classes=CLASSES))))
TINY = 1e-300  # noise that is none
rows = st.integers(0, 10_000).map(
    lambda seed: 10 ** (seed % 5 - 2) * torch.randn(6, 3, 2, generator=at(seed))
)


def at(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apply(
    mechanism: Mechanism, values: list[Any], each: Any = "image", source: Source | None = None
) -> list[Any]:
    return mechanism.apply(values, ReleaseContext(CLIENT, each, source or Seeded(0)))


def replaced(values: Tensor, by: Tensor) -> Tensor:
    return torch.cat([by[:1], values[1:]])


@given(rows, rows)
def test_a_replaced_image_moves_rows_by_2_c_at_most(one: Tensor, other: Tensor) -> None:
    for kind, order in ((Gaussian, 2), (Laplace, 1)):
        before, after = (
            apply(kind(1.5, TINY), [x])[0].double() for x in (one, replaced(one, other))
        )
        assert float((before - after).flatten().norm(order)) <= 3.0 + 1e-5
        assert float(before.flatten(1).norm(order, dim=1).max()) <= 1.5 + 1e-5
        small = one / one.flatten(1).norm(order, dim=1).max()
        assert torch.allclose(apply(kind(1.5, TINY), [small])[0], small), (
            "what is short enough stays"
        )


@given(rows, rows)
def test_whatever_changes_an_answer_is_within_2_c(one: Tensor, other: Tensor) -> None:
    def flat(x: Tensor) -> Tensor:
        weights, number, flag, nothing = apply(
            Gaussian(1.5, TINY),
            [{"a": [x[:2], x[2:]], "b": {"n": 3}}, float(x.sum()), True, None],
            "answer",
        )
        assert weights["b"]["n"] == 0, "what is no decimal number is withheld"
        assert (flag, nothing) == (False, None)
        return torch.cat([*(part.flatten() for part in weights["a"]), torch.tensor([number])])

    assert float((flat(one) - flat(other)).norm()) <= 3.0 + 1e-5
    assert float(flat(one).norm()) <= 1.5 + 1e-5


@given(
    rows,
    rows,
    st.lists(st.integers(0, CLASSES - 1), min_size=6, max_size=6),
    st.integers(0, CLASSES - 1),
)
def test_a_replaced_image_moves_sums_and_sizes_of_classes_by_2_c(
    one: Tensor, other: Tensor, labels: list[int], label: int
) -> None:
    means = ClassMeans(1.5)
    y = torch.tensor(labels)
    before = means.sums(one.flatten(1).double(), y, CLASSES)
    after = means.sums(
        replaced(one, other).flatten(1).double(), replaced(y, torch.tensor([label])), CLASSES
    )
    assert float((before - after).norm()) <= 3.0 + 1e-9


@given(rows, rows)
def test_changes_are_bounded_too(one: Tensor, other: Tensor) -> None:
    down = {"weights": {"a": torch.ones(2, 3, 2), "b": torch.ones(4, 3, 2)}, "t": 3}
    change = Gaussian(1.5, TINY, of="change")

    def told(x: Tensor) -> Tensor:
        (weights,) = change.apply(
            [{"a": x[:2], "b": x[2:]}], ReleaseContext(CLIENT, "answer", Seeded(0), (7, down))
        )
        return torch.cat([weights["a"], weights["b"]])

    assert float((told(one) - 1).norm()) <= 1.5 + 1e-5
    assert float((told(one) - told(other)).norm()) <= 3.0 + 1e-5
    near = 1 + one / one.norm()
    assert torch.allclose(told(near), near), "what is near enough stays"
    with pytest.raises(ConfigError, match="the server sent nothing of the answer's structure"):
        change.apply([one], ReleaseContext(CLIENT, "answer", Seeded(0), (7, down)))


def test_noise_has_the_size_that_is_paid_for() -> None:
    nothing = torch.zeros(200, 50, 4)
    for source in (Seeded(3), System()):
        assert float(apply(Gaussian(3.0, 2.0), [nothing], source=source)[0].std()) == pytest.approx(
            6.0, rel=0.02
        )
        told = apply(Laplace(3.0, 2.0), [nothing], source=source)[0]
        assert float(told.abs().mean()) == pytest.approx(6.0, rel=0.02)
        assert abs(float(told.mean())) < 0.2
    assert Gaussian(3.0, 2.0).release() == account.GaussianRelease(2.0)
    assert Laplace(3.0, 0.5).release() == account.PureRelease(4.0)


def test_seeded_noise_comes_again_and_the_systems_does_not() -> None:
    value = torch.zeros(5, 2)
    assert torch.equal(apply(Gaussian(1.0, 1.0), [value])[0], apply(Gaussian(1.0, 1.0), [value])[0])
    one, other = (apply(Gaussian(1.0, 1.0), [value], source=System())[0] for _ in range(2))
    assert not torch.equal(one, other)


def test_randomised_response_keeps_labels_as_often_as_it_says() -> None:
    labels = torch.arange(40_000) % CLASSES
    response = Response(1.2)
    (told,) = apply(response, [labels])
    keep = math.exp(1.2) / (math.exp(1.2) + CLASSES - 1)
    assert response.keep(CLASSES) == pytest.approx(keep)
    assert float((told == labels).double().mean()) == pytest.approx(keep, abs=0.01)
    moved = torch.bincount((told - labels)[told != labels] % CLASSES, minlength=CLASSES)
    assert moved[0] == 0
    assert (moved[1:] / moved.sum() - 1 / (CLASSES - 1)).abs().max() < 0.02, "any other label alike"
    assert told.dtype == labels.dtype


def test_what_is_withheld_does_not_depend_on_the_data() -> None:
    for values in ([torch.rand(9, 3)], [torch.randint(4, (9,))], [{"a": 3, "b": [2.5, "x"]}]):
        other = [
            torch.ones_like(v) if isinstance(v, Tensor) else {"a": 7, "b": [0.1, "y"]}
            for v in values
        ]
        one, another = apply(Withhold(), values), apply(Withhold(), other)
        assert str(one) == str(another)
    assert len(set(apply(Withhold(), [torch.zeros(99, dtype=torch.long)])[0].tolist())) == CLASSES
    assert Withhold().release() is None


def test_rows_become_means_of_classes() -> None:
    x, y = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 1.0]]), torch.tensor([2, 2, 0])
    told, labels = apply(ClassMeans(1.0, TINY), [x, y])
    assert labels.tolist() == [0, 2, 2]
    assert torch.allclose(told, torch.tensor([[0.0, 1.0], [0.6, 0.8], [0.6, 0.8]])), (
        "the first was cut to length 1"
    )
    told, labels = apply(ClassMeans(1.0, 50.0), [x, y])
    assert told.isfinite().all()
    assert set(labels.tolist()) <= set(range(CLASSES))


def test_what_is_no_number_counts_as_zero() -> None:
    told = apply(Gaussian(1.0, TINY), [torch.tensor([[math.nan, math.inf], [0.3, 0.0]])])[0]
    assert torch.allclose(told, torch.tensor([[0.0, 0.0], [0.3, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_values_keep_their_kind(dtype: torch.dtype) -> None:
    value = (
        torch.rand(2, 3, 4, 4, dtype=torch.float64).to(dtype).to(memory_format=torch.channels_last)
    )
    (told,) = apply(Gaussian(1.0, 0.1), [value])
    assert (told.dtype, told.shape, told.stride()) == (value.dtype, value.shape, value.stride())
    assert apply(Gaussian(1.0, 0.1), [torch.rand(3)])[0].shape == (3,)


LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("mechanism", "values", "each", "message"),
    [
        (
            Gaussian(1.0, 1.0),
            [LABELS],
            "image",
            "a tensor of decimal numbers with a row for each image",
        ),
        (Gaussian(1.0, 1.0), [LABELS], "answer", "no decimal numbers in it"),
        (Response(1.0), [torch.rand(3)], "image", "a label for each image, whole numbers"),
        (
            Response(1.0),
            [torch.tensor([0, 4])],
            "image",
            "labels are from 0 to 3, these from 0 to 4",
        ),
        (ClassMeans(1.0, 1.0), [LABELS, LABELS], "image", "a tensor of decimal numbers"),
        (ClassMeans(1.0, 1.0), [torch.rand(2, 2), torch.rand(2)], "image", "whole numbers"),
    ],
)
def test_what_cannot_be_protected(
    mechanism: Mechanism, values: list[Any], each: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(mechanism, values, each)


@pytest.mark.parametrize(
    "text", ["gaussian clip=4 noise=2 each=answer of=change", "response epsilon=1", "withhold"]
)
def test_mechanisms_are_written_as_they_are_read(text: str) -> None:
    assert str(mechanism_of(text, "part")) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gausian clip=4", "did you mean 'gaussian'"),
        ("", "unknown mechanism"),
        ("gaussian", "gaussian needs clip=..."),
        ("gaussian 4", "write key=value, such as clip=4"),
        ("gaussian clip=-1", "clip=-1.0: must be float > 0"),
        ("gaussian clip=nan", "must be a finite number"),
        ("gaussian clip=1 each=row", "each='row': must be"),
        ("gaussian clip=1 sigma=2", "unknown key"),
        ("gaussian clip=1 each=image of=change", "it applies to answers as a whole"),
    ],
)
def test_mistakes_in_what_is_written(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        mechanism_of(text, "learn.embeddings")
