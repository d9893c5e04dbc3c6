"""Features of one width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.models.pooled import Pool, pool_features
from barter.models.zoo import build_network

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.25,))


@given(st.integers(1, 70), st.integers(1, 70))
def test_pooling_is_torchs(before: int, after: int) -> None:
    x = torch.linspace(-1, 2, 3 * before).reshape(3, before).double()
    assert torch.allclose(
        Pool(before, after).double()(x), nn.AdaptiveAvgPool1d(after)(x), atol=1e-6
    )


def test_a_network_gets_the_width_and_a_head_for_it() -> None:
    network = build_network("small-cnn", SPEC)
    before, images = network.feature_dim, torch.randn(4, 1, 8, 8)
    wide = pool_features(network, 3 * before)
    assert (wide.feature_dim, wide.features(images).shape, wide(images).shape) == (
        3 * before,
        (4, 3 * before),
        (4, 10),
    )
    wide.eval()
    assert torch.allclose(wide.features(images)[:, ::3], network.eval().features(images)), (
        "three times each"
    )
    assert not any("matrix" in name for name in wide.state_dict()), (
        "nothing but weights is kept or sent"
    )
    assert pool_features(network, before) is network


def test_a_network_that_was_split_by_hand_says_what_to_do() -> None:
    class Mine(Classifier):
        feature_dim = 7

        def features(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :7]

    with pytest.raises(
        ConfigError,
        match="Mine has 7 .* a Linear layer.* or with feature_dim = 9, or give the method features=7",
    ):
        pool_features(Mine(), 9)
