from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter.core.images import Images, Spec
from barter.core.model import SplitClassifier
from barter.ops.statistics import (
    combine_statistics,
    read_statistics,
    renew_batches,
    renew_statistics,
    replace_statistics,
    whitening_transform,
)

SPEC = Spec(1, 2, 2, 2, (0.0,), (1.0 / 255,))


def normalising() -> tuple[SplitClassifier, nn.BatchNorm1d]:
    norm = nn.BatchNorm1d(4)
    return SplitClassifier(nn.Sequential(nn.Flatten(), norm), nn.Linear(4, 2)), norm


def numbers(n: int) -> Images:
    pixels = torch.randint(
        0, 255, (n, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Images(pixels, torch.zeros(n, dtype=torch.long), SPEC)


@pytest.mark.parametrize("batch_size", [4, 5])  # what is left over is spread over the batches
def test_statistics_afterwards_are_those_of_the_data(batch_size: int) -> None:
    (model, norm), data = normalising(), numbers(10)
    assert norm.running_mean is not None
    norm.running_mean.fill_(99.0)
    norm.momentum = 0.3
    model.train()
    renew_statistics(model, data, batch_size)
    x = data.pixels.float().view(2, 5, 4) / 255 * 255
    assert norm.running_mean.tolist() == pytest.approx(x.mean(1).mean(0).tolist(), rel=1e-5)
    assert norm.running_var is not None
    assert norm.running_var.tolist() == pytest.approx(x.var(1).mean(0).tolist(), rel=1e-5)
    assert norm.momentum == 0.3
    assert not any(part.training for part in model.modules())


def test_statistics_of_two_parties_make_those_of_one_pass_over_all_batches() -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm1d(3)]
    model = SplitClassifier(nn.Sequential(*layers), nn.Linear(3, 2))
    data = numbers(20)
    few, many = (
        Images(data.pixels[own], data.labels[own], SPEC) for own in (slice(5), slice(5, 20))
    )
    found = []
    for own in (few, many):
        renew_statistics(model, own, 5)
        found.append(read_statistics(model.state_dict()))
    batches = [renew_batches(len(own), 5) for own in (few, many)]
    assert batches == [1, 3]
    combined = replace_statistics(model.state_dict(), combine_statistics(found, batches))
    renew_statistics(model, data, 5)  # the same four batches
    torch.testing.assert_close(read_statistics(combined), read_statistics(model.state_dict()))
    assert combined.keys() == model.state_dict().keys()
    assert not torch.allclose(found[0]["means"], found[1]["means"], atol=0.1)


def test_a_single_image_counts_twice() -> None:
    (model, norm), data = normalising(), numbers(1)
    renew_statistics(model, data, 100)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.tolist() == pytest.approx(data.pixels.flatten().tolist())
    assert norm.running_var.tolist() == [0.0] * 4


def test_weights_stay_and_layers_without_statistics_too() -> None:
    plain = nn.BatchNorm1d(4, track_running_stats=False)
    model = SplitClassifier(nn.Sequential(nn.Flatten(), plain, nn.Dropout(0.5)), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    renew_statistics(model, numbers(6), 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert plain.momentum == 0.1


POINTS = torch.tensor(
    [[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64
)  # variances 2 and 1/2
SHIFT = torch.tensor([3.0, -1.0], dtype=torch.float64)


def test_whitening_by_hand() -> None:
    # A floor of a fifth of the mean variance 5/4 is 1/4: 1 / sqrt(2 + 1/4) = 2/3 and 1 / sqrt(1/2 + 1/4) = 2 / sqrt 3.
    mean, matrix = whitening_transform(POINTS + SHIFT, 0.2)
    assert mean.tolist() == pytest.approx([3.0, -1.0])
    assert matrix.numpy() == pytest.approx(np.diag([2 / 3, 2 / np.sqrt(3)]), abs=1e-12)
    # Turned by 45 degrees, a point (a, b) is (a - b, a + b) / sqrt 2; so is the matrix, R M R^T.
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / 2**0.5
    _, turned = whitening_transform(POINTS @ turn.T, 0.2)
    along, across = (2 / 3 + 2 / np.sqrt(3)) / 2, (2 / 3 - 2 / np.sqrt(3)) / 2
    assert turned.numpy() == pytest.approx(np.array([[along, across], [across, along]]), abs=1e-12)
    # What has next to no floor is white.
    mean, matrix = whitening_transform(POINTS @ turn.T + SHIFT, 1e-9)
    white = (POINTS @ turn.T + SHIFT - mean) @ matrix
    assert (white.T @ white / 4).numpy() == pytest.approx(np.eye(2), abs=1e-6)


def test_whitening_one_dimension_and_single_precision() -> None:
    mean, matrix = whitening_transform(torch.tensor([[1.0], [5.0]]), 1.0)
    assert mean.tolist() == [3.0]
    assert matrix.tolist() == [[pytest.approx(1 / np.sqrt(8))]]
    assert (mean.dtype, matrix.dtype) == (torch.float32, torch.float32)


@st.composite
def clouds(draw: st.DrawFn) -> Tensor:
    """Rows that vary very differently in different directions, some perhaps not at all."""
    n, d = draw(st.integers(2, 30)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(n, d, dtype=torch.float64, generator=generator)
    sizes = draw(
        st.lists(st.floats(0.0, 10.0), min_size=d, max_size=d).filter(
            lambda sizes: max(sizes) > 0.1
        )
    )
    mixing = torch.randn(d, d, dtype=torch.float64, generator=generator)
    return x * torch.tensor(sizes, dtype=torch.float64) @ mixing + draw(st.floats(-5, 5))


@given(clouds(), st.floats(1e-3, 2.0))
def test_whitened_rows_vary_alike_as_far_as_the_floor_lets_them(x: Tensor, floor: float) -> None:
    mean, matrix = whitening_transform(x, floor)
    assert torch.allclose(matrix, matrix.T, atol=1e-9)
    variances = np.linalg.eigvalsh(np.atleast_2d(np.cov(x.numpy().T, bias=True))).clip(0)
    white: Any = ((x - mean) @ matrix).numpy()
    assert white.mean(0) == pytest.approx(np.zeros(len(mean)), abs=1e-7)
    varied = np.linalg.eigvalsh(white.T @ white / len(white))
    assert varied == pytest.approx(variances / (variances + floor * variances.mean()), abs=1e-6)
    assert varied.max() < 1
    amplified = np.linalg.eigvalsh(matrix.numpy())
    assert amplified.min() > 0
    assert amplified.max() <= (floor * variances.mean()) ** -0.5 * (1 + 1e-6)


def test_rows_that_are_all_equal_stay_finite() -> None:
    mean, matrix = whitening_transform(torch.ones(5, 3), 0.1)
    assert torch.equal(mean, torch.ones(3))
    assert matrix.isfinite().all()
