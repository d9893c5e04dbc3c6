"""Heads by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import SplitClassifier
from barter.ops.heads import head_state, put_on
from tests.conftest import federation, tiny


def test_a_head_goes_from_one_network_to_another() -> None:
    one, other = (SplitClassifier(body, nn.Linear(4, 3)) for body in (nn.Flatten(), nn.Sequential(nn.Linear(9, 4))))
    before = one.head.weight.clone()
    put_on(one, {})
    assert torch.equal(one.head.weight, before), "there was none yet"
    put_on(one, head_state(other))
    assert torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.head.bias, other.head.bias)
    assert sorted(head_state(other)) == ["bias", "weight"], "the head's, not the body's linear layer"


def test_networks_without_such_a_head_are_refused() -> None:
    def bare(spec: Spec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10, bias=False))

    with pytest.raises(ConfigError, match=r"nn.Linear\(48, classes\) with a bias.*use fedproto"):
        federation(tiny("lgfedavg"), models=[bare])
    federation(tiny("lgfedavg", features=32), models=[bare])  # pooled: it gets a new head
