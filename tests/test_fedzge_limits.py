"""The measuring instrument of FedZGE's limits distils on private images, equally many of each class."""

from __future__ import annotations

from typing import Any

import torch

from barter.engines.local import LocalEngine
from benchmarks.fedzge_limits import RUNS, RealImages
from tests.conftest import TINY, small_federation


def test_images_are_private_ones_and_classes_are_balanced() -> None:
    fields: dict[str, Any] = {**TINY["fedzge"], "queries": 0, "generator_steps": 1, "samples": 20}
    experiment = small_federation(RealImages(**fields))
    list(experiment.rounds(1))
    server: Any = experiment.server
    images, _ = server.lessons[-1]
    assert len(images) == 20
    assert isinstance(experiment.engine, LocalEngine)
    private = []
    labels = []
    for client in experiment.engine.clients.values():
        index = torch.arange(len(client.data))
        private.append(client.data.batch(index).flatten(1))
        labels.append(client.data.labels)
    distances = torch.cdist(images.flatten(1).double(), torch.cat(private).double())
    nearest = distances.min(1)
    assert nearest.values.max() < 1e-5
    counts = torch.cat(labels)[nearest.indices].bincount(minlength=10)
    assert counts.tolist() == [2] * 10


def test_the_default_is_measured_as_it_is() -> None:
    kind, fields = RUNS["default"]
    assert kind.__name__ == "FedZGE"
    assert fields == {}
