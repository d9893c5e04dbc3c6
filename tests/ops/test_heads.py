"""Heads by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier, SplitClassifier
from barter.ops.compress import compress_update, decompress_update
from barter.ops.heads import head_state, load_head, remove_ineffective
from tests.conftest import federation, tiny


def test_a_head_goes_from_one_network_to_another() -> None:
    one, other = (
        SplitClassifier(body, nn.Linear(4, 3))
        for body in (nn.Flatten(), nn.Sequential(nn.Linear(9, 4)))
    )
    before = one.head.weight.clone()
    load_head(one, {})
    assert torch.equal(one.head.weight, before), "there was none yet"
    load_head(one, head_state(other))
    assert torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.head.bias, other.head.bias)
    assert sorted(head_state(other)) == ["bias", "weight"], (
        "the head's, not the body's linear layer"
    )


def test_networks_without_such_a_head_are_refused() -> None:
    def bare(spec: Spec) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10, bias=False)
        )

    with pytest.raises(ConfigError, match=r"nn.Linear\(48, classes\) with a bias.*use fedproto"):
        federation(tiny("lgfedavg"), models=[bare])
    federation(tiny("lgfedavg", features=32), models=[bare])  # pooled: it gets a new head


class Handmade(Classifier):
    """Looks at directions alone."""

    feature_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return features @ F.normalize(self.head.weight).T


def test_what_all_classes_share_is_taken_off_a_change_and_no_prediction_notices() -> None:
    torch.manual_seed(0)
    network, x = SplitClassifier(nn.Linear(6, 8), nn.Linear(8, 10)), torch.randn(50, 6)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    # All ten rows go down along one direction, and each a little along one of its own.
    own = 0.3 * torch.randn(10, 8)
    change = {name: torch.zeros_like(tensor) for name, tensor in before.items()} | {
        "head.weight": own - 20.0
    }

    def told(moved: dict[str, torch.Tensor]) -> torch.Tensor:
        network.load_state_dict({name: tensor + moved[name] for name, tensor in before.items()})
        return network(x).softmax(1)

    with torch.no_grad():
        assert torch.allclose(told(remove_ineffective(change, network)), told(change), atol=1e-4)
        assert torch.allclose(
            remove_ineffective(change, network)["head.weight"], own - own.mean(0), atol=1e-5
        )
        by_hand = Handmade()
        assert remove_ineffective(change, by_hand) is change, (
            "who knows what it does with its weights"
        )
        plain, better = (
            decompress_update(compress_update(c, 0.95), change)
            for c in (change, remove_ineffective(change, network))
        )
        assert torch.linalg.matrix_rank(plain["head.weight"]) == 1, (
            "what is common drowns what is not"
        )
        assert (
            float((told(better) - told(change)).abs().max())
            < 0.1
            < float((told(plain) - told(change)).abs().max())
        )
