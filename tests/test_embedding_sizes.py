"""What is measured of embeddings' sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from barter import DFFKE, Experiment
from barter.algorithms.dffke import DFFKEClient
from barter.attacks.overheard import clients_of
from barter.core.images import Spec
from barter.core.model import Classifier
from benchmarks.embedding_sizes import measure_sizes
from benchmarks.magnified import magnify


class Alarmed(Classifier):
    """A network whose features of a white image are 80, and 1 of all others."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.feature_dim = 4
        self.head = nn.Linear(4, spec.classes)
        self.white = (1 - spec.mean[0]) / spec.std[0]

    def features(self, x: Tensor) -> Tensor:
        is_white = x.flatten(1).amin(1, keepdim=True) > self.white - 1e-3
        return torch.where(is_white, 80.0, 1.0).expand(-1, 4)

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


def clients(factor: float) -> dict[int, DFFKEClient]:
    """Two clients of digits whose networks' features are multiplied by a factor."""
    network = partial(magnify, name="small-mlp", factor=factor)
    experiment = Experiment(DFFKE(), data="digits", models=[network], clients=2, seed=0)
    found = clients_of(experiment)
    return {k: client for k, client in found.items() if isinstance(client, DFFKEClient)}


def test_shares_do_not_depend_on_how_large_all_features_are() -> None:
    usual = measure_sizes(clients(1.0)[0], parts=2)
    larger = measure_sizes(clients(8.0)[0], parts=2)
    for name in ("median", "rms"):
        assert larger[name] == pytest.approx(8 * usual[name])
    for name in ("largest", "share_of_large"):
        assert larger[name] == pytest.approx(usual[name])
    assert usual["share_of_large"] == 0


def test_a_few_large_embeddings_are_counted() -> None:
    experiment = Experiment(DFFKE(), data="digits", models=[Alarmed], clients=2, seed=0)
    client = clients_of(experiment)[0]
    assert isinstance(client, DFFKEClient)
    client.data.pixels[:3] = 255
    found = measure_sizes(client, parts=0)
    assert found["median"] == 1
    assert found["largest"] == 80
    assert found["share_of_large"] == pytest.approx(3 / min(200, len(client.data)))
