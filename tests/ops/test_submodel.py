from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier, SplitClassifier
from barter.models.width import narrow_network
from barter.models.zoo import build_network
from barter.ops.submodel import (
    Extraction,
    average_submodels,
    extract_submodel,
    head_names,
    kept_channels,
    submodel_indices,
    verify_submodel,
    width_budget,
)

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.5,))
RULES: list[Extraction] = ["static", "random", "rolling"]


@pytest.mark.parametrize(
    ("rho", "shares"),
    [
        (0, [0] * 10),
        (5, [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]),
        (10, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
        (40, [4] * 10),
    ],
)
def test_budgets_of_ten_clients(rho: int, shares: list[int]) -> None:
    assert [width_budget(k, 10, rho, 4) for k in range(10)] == [0.5**s for s in shares]


def test_channels_by_hand() -> None:
    assert kept_channels(5, 2, "static", 7).tolist() == [0, 1]
    assert [kept_channels(5, 2, "rolling", t).tolist() for t in (1, 2, 3, 6)] == [
        [0, 1],
        [4, 0],
        [3, 4],
        [0, 1],
    ]


@given(st.integers(1, 40), st.data(), st.sampled_from(RULES), st.integers(1, 100))
def test_channels_are_distinct_and_a_window_visits_all_alike(
    width: int, data: st.DataObject, rule: Extraction, t: int
) -> None:
    part = data.draw(st.integers(1, width))
    chosen = kept_channels(width, part, rule, t)
    assert len(set(chosen.tolist())) == part
    assert set(chosen.tolist()) <= set(range(width))
    rolled = torch.cat([kept_channels(width, part, "rolling", t + i) for i in range(width)])
    assert torch.bincount(rolled, minlength=width).tolist() == [part] * width


def tiny() -> Classifier:
    """Two channels, flattened over four positions, three classes."""
    body = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten())
    return SplitClassifier(body, nn.Linear(8, 3))


def test_all_positions_of_a_channel_go_together() -> None:
    full = tiny()
    part = narrow_network(full, 0.5)
    where = submodel_indices(full.state_dict(), part.state_dict(), "rolling", 2)
    assert where["body.0.weight"][0].tolist() == [1]
    assert where["head.weight"][0].tolist() == [0, 1, 2]
    assert where["head.weight"][1].tolist() == [4, 5, 6, 7]
    state = extract_submodel(full.state_dict(), where)
    assert torch.equal(state["head.weight"], full.state_dict()["head.weight"][:, 4:])
    assert torch.equal(state["head.bias"], full.state_dict()["head.bias"])


def test_the_average_over_those_that_have_it_by_hand() -> None:
    full = {
        "head.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        "steps": torch.tensor(7),
    }
    every, row = torch.arange(3), torch.arange(2)
    where = {
        0: {"head.weight": (row, every[:2]), "steps": ()},
        1: {"head.weight": (row, every[1:2]), "steps": ()},
    }
    parts = {
        0: {"head.weight": torch.tensor([[10.0, 20.0], [30.0, 40.0]]), "steps": torch.tensor(2)},
        1: {"head.weight": torch.tensor([[50.0], [60.0]]), "steps": torch.tensor(3)},
    }
    mean = average_submodels(full, parts, where, {0: 1.0, 1: 3.0})
    # Column 0 is client 0's alone; column 1 is (20 + 3 * 50) / 4 and (40 + 3 * 60) / 4; nobody has column 2.
    assert mean["head.weight"].tolist() == [[10.0, 42.5, 3.0], [30.0, 55.0, 6.0]]
    assert mean["steps"].item() == round((2 + 3 * 3) / 4)
    # Client 0 owns class 0 only, client 1 neither: row 1 stays as it was.
    owned = {0: torch.tensor([5, 0]), 1: torch.tensor([0, 0])}
    mean = average_submodels(
        full, parts, where, {0: 1.0, 1: 3.0}, owned, frozenset({"head.weight"})
    )
    assert mean["head.weight"].tolist() == [[10.0, 20.0, 3.0], [4.0, 5.0, 6.0]]


@given(st.sampled_from(RULES), st.sampled_from([0.5, 0.3, 1 / 16]), st.integers(1, 50))
def test_what_comes_back_unchanged_changes_nothing(rule: Extraction, rate: float, t: int) -> None:
    full = build_network("small-resnet", SPEC)
    w, part = full.state_dict(), narrow_network(full, rate).state_dict()
    where = {k: submodel_indices(w, part, rule, t) for k in range(2)}
    parts = {k: extract_submodel(w, where[k]) for k in where}
    assert all(parts[0][name].shape == tensor.shape for name, tensor in part.items())
    mean = average_submodels(w, parts, where, {0: 1.0, 1: 2.0})
    assert all(torch.equal(mean[name], tensor) for name, tensor in w.items())


def test_at_rate_one_every_rule_keeps_everything() -> None:
    full = build_network("small-vgg", SPEC)
    for rule in RULES:
        same = extract_submodel(
            full.state_dict(), submodel_indices(full.state_dict(), full.state_dict(), rule, 5)
        )
        assert all(torch.equal(same[name], tensor) for name, tensor in full.state_dict().items())


CUT = ["small-cnn", "small-vgg", "small-resnet", "small-separable", "small-mlp", "convnet"]


@pytest.mark.parametrize("rate", [0.5, 0.3])
@pytest.mark.parametrize("name", CUT)
def test_a_part_is_the_whole_with_the_rest_at_zero(name: str, rate: float) -> None:
    full = build_network(name, SPEC)
    verify_submodel(full, narrow_network(full, rate), SPEC)


def test_a_part_that_mixes_up_channels_is_refused() -> None:
    class Crossed(Classifier):
        feature_dim = 4

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Conv2d(1, 4, 8), nn.Conv2d(4, 4, 1), nn.Linear(4, 10)

        def features(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).flip(1)).flatten(1)

        def logits(self, features: Tensor) -> Tensor:
            return self.head(features)

    full = Crossed()
    with pytest.raises(
        ConfigError,
        match="Crossed cannot be cut by width: its parts mix up the channels; use a plain",
    ):
        verify_submodel(full, narrow_network(full, 0.5), SPEC)


def test_concatenations_and_transformers_are_refused() -> None:
    large = Spec(3, 32, 32, 10, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(
        ConfigError,
        match="GoogLeNet cannot be cut by width: .* has 256 inputs, and no layer before",
    ):
        narrow_network(build_network("googlenet", large), 0.5)
    transformer = build_network("vit-tiny", large)
    with pytest.raises(
        ConfigError, match=r"VisionTransformer cannot be cut by width \(.*use a plain or residual"
    ):
        verify_submodel(transformer, narrow_network(transformer, 0.5), large)


def test_the_head_is_the_last_linear_layer() -> None:
    assert head_names(build_network("small-cnn", SPEC)) == {"head.weight", "head.bias"}
