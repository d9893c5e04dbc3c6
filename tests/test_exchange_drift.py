"""What the study of DFFKE's fall measures, and that its variants differ from DFFKE as they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from barter.experiment import Experiment
from barter.setup.config import resolve
from benchmarks.exchange_drift import (
    COLUMNS,
    correlate,
    measure_exchange,
    share_of_own,
    show_bridged,
)

SMALL = {
    "max_epochs": 1,
    "decoder_steps": 2,
    "decoder_epochs": 1,
    "exchange_steps": 2,
    "docking_epochs": 2,
    "share": 0.2,
}


def small(name: str = "dffke", **settings: Any) -> Experiment:
    """Return an experiment of two clients with few steps."""
    config = {
        "algorithm": {"name": name, **SMALL, **settings},
        "data": {"source": "digits"},
        "models": "small-mlp",
        "clients": 2,
        "device": "cpu",
    }
    return Experiment.from_config(resolve(config))


def test_the_share_of_own_classes_counts_images_of_other_classes_alone() -> None:
    own = torch.tensor([True, False, False, True])
    labels = torch.tensor([0, 1, 1, 2, 2, 3])
    taken_for = torch.tensor([0, 0, 1, 3, 3, 1])
    logits = torch.eye(4)[taken_for]
    # Of the four images of classes 1 and 2, three are taken for class 0 or 3.
    assert share_of_own(logits, labels, own) == 0.75


def test_the_correlation_ignores_brightness_and_contrast() -> None:
    image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
    assert correlate(image, 5 * image - 2) == pytest.approx(1)
    assert correlate(image, 4 - image) == pytest.approx(-1)


def test_all_columns_are_measured_after_every_round_and_change_nothing() -> None:
    experiment = small(memory=1)
    other = small(memory=1)
    for record, unmeasured in zip(
        experiment.rounds(2, progress=False), other.rounds(2, progress=False), strict=True
    ):
        columns = measure_exchange(experiment, record)
        assert columns.keys() == {*COLUMNS, "likeness"}
        assert all(0 <= columns[name] <= 1 for name in COLUMNS), columns
        assert -1 <= columns["likeness"] <= 1
        assert record.clients == unmeasured.clients


def test_clients_without_memory_have_no_decoded_images_to_measure() -> None:
    experiment = small(memory=0)
    (record,) = experiment.rounds(1, progress=False)
    assert measure_exchange(experiment, record).keys() == {"own-natural", "renormalised"}


def test_the_annealed_exchange_is_dffke_in_the_first_round_and_slower_later() -> None:
    runs = {
        decay: list(
            small("benchmarks.exchange_drift:AnnealedExchange", decay=decay).rounds(
                2, progress=False
            )
        )
        for decay in (1.0, 0.5)
    }
    plain = list(small().rounds(2, progress=False))
    assert [r.clients for r in runs[1.0]] == [r.clients for r in plain]
    assert runs[0.5][0].clients == plain[0].clients
    assert runs[0.5][1].clients != plain[1].clients


def test_bridged_images_are_blends_of_both_kinds() -> None:
    shown = show_bridged(
        lambda x: x + 1, lambda x: x * 10, torch.full((3, 1, 1, 1), 2.0), torch.zeros(50, 1, 1, 1)
    )
    # Each is w * 1 + (1 - w) * 20 with a weight w from 0.5 to 1.
    assert 1 <= float(shown.min()) < 3, "some are nearly the first image"
    assert 8 < float(shown.max()) <= 10.5, "others have nearly equal parts"
