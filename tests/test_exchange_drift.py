"""What the study of DFFKE's fall measures, and that its variants differ from DFFKE as they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from barter.algorithms.dffke import DFFKE, DFFKEServer, Offer
from barter.attacks.overheard import clients_of
from barter.core.clients import Replies
from barter.core.errors import ConfigError
from barter.core.evaluation import predict
from barter.experiment import Experiment
from barter.ops.statistics import renew_statistics
from barter.ops.transfer import Entry
from barter.setup.config import resolve
from benchmarks.exchange_drift import (
    COLUMNS,
    PER_CLIENT,
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


def test_an_oracle_decodes_its_own_private_images() -> None:
    experiment = small("benchmarks.oracle:OracleExchange", share=0.5)
    (record,) = experiment.rounds(1, progress=False)
    columns = measure_exchange(experiment, record)
    assert columns["likeness"] == pytest.approx(1, abs=1e-3)
    assert columns["peers-natural"] == pytest.approx(columns["peers-decoded"], abs=0.02)
    # Two clients, each the other's only peer.
    clients = clients_of(experiment)
    expected = []
    for k, client in clients.items():
        peer = clients[1 - k]
        offered = peer.offered[1][:PER_CLIENT]
        answers = client.model.eval()(peer.data.batch(offered)).argmax(1)
        expected.append(float((answers == peer.data.labels[offered]).double().mean()))
    assert columns["peers-natural"] == pytest.approx(sum(expected) / 2)


def test_decoded_samples_of_statistics_belong_to_no_image() -> None:
    experiment = small(reveal="statistics")
    (record,) = experiment.rounds(1, progress=False)
    assert measure_exchange(experiment, record).keys() == {"own-natural", "renormalised"}


def test_renormalised_is_the_accuracy_with_statistics_of_private_images() -> None:
    experiment = small()
    experiment = Experiment.from_config(replace(experiment.config, models="small-resnet"))
    (record,) = experiment.rounds(1, progress=False)
    renormalised = measure_exchange(experiment, record)["renormalised"]
    assert renormalised != record.mean("global")
    for client in clients_of(experiment).values():
        renew_statistics(client.model, client.data, 100)
    assert experiment.test is not None
    labels = experiment.test.labels
    every = torch.arange(len(labels))
    found = [
        float((predict(c.model, experiment.test.batch, every).argmax(1) == labels).double().mean())
        for c in clients_of(experiment).values()
    ]
    assert renormalised == pytest.approx(sum(found) / 2)


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


@pytest.mark.parametrize(
    ("averaged", "settings"), [("AveragedExchange", {}), ("SettlingAverage", {"decay": 1.0})]
)
def test_the_averaged_exchange_is_midway_between_the_networks_around_an_exchange(
    averaged: str, settings: dict[str, Any]
) -> None:
    name = f"benchmarks.exchange_drift:{averaged}"
    states = []
    for run in (small(), small(name, **settings), small(name, keep=1.0, **settings)):
        model = clients_of(run)[0].model
        found = []
        for _ in run.rounds(2, progress=False):
            found.append({name: w.clone() for name, w in model.state_dict().items()})
        states.append(found)
    plain, half, all_kept = states
    for name, start in plain[0].items():
        if not start.is_floating_point():
            continue  # a counter of batches
        assert torch.equal(half[0][name], start), "the first exchange is left as it is"
        assert torch.equal(all_kept[1][name], start)
        torch.testing.assert_close(half[1][name], (start + plain[1][name]) / 2)


def test_a_frozen_exchange_decodes_through_the_network_of_an_early_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offers: list[dict[str, torch.Tensor]] = []
    make_transfer_data = DFFKE.make_transfer_data

    def record(self: DFFKE, server: DFFKEServer, received: Replies[Offer], t: int) -> Entry:
        offers.append({name: w.clone() for name, w in received[0]["weights"].items()})
        return make_transfer_data(self, server, received, t)

    monkeypatch.setattr(DFFKE, "make_transfer_data", record)
    run = small("benchmarks.exchange_drift:FrozenExchange", after=1)
    ends = []
    for _ in run.rounds(3, progress=False):
        model = clients_of(run)[0].model
        ends.append({name: w.clone() for name, w in model.state_dict().items()})

    def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    assert equal(offers[1], ends[0])
    assert equal(offers[2], ends[0])
    assert not equal(ends[1], ends[0]), "the network itself learns on"
    assert not equal(ends[2], ends[1])
    with pytest.raises(ConfigError, match="it needs later_epochs=0"):
        small("benchmarks.exchange_drift:FrozenExchange", later_epochs=1)


@pytest.mark.parametrize("name", ["SettlingDecoder", "SettlingAverage"])
def test_the_settling_decoder_is_dffke_in_the_first_round_and_changes_less_later(name: str) -> None:
    def decoders(run: Experiment) -> list[dict[str, torch.Tensor]]:
        server = run.engine.server
        assert isinstance(server, DFFKEServer)
        return [
            {n: w.clone() for n, w in server.decoder.items() if n.endswith("weight")}
            for _ in run.rounds(2, progress=False)
        ]

    def largest_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
        return max(float((after[name] - w).abs().max()) for name, w in before.items())

    plain = decoders(small())
    settled = decoders(small(f"benchmarks.exchange_drift:{name}", decay=1e-6))
    assert largest_change(plain[0], settled[0]) == 0
    assert largest_change(*plain) > 1e-4
    assert largest_change(*settled) < 1e-7
    with pytest.raises(ConfigError, match="it needs warm_decoder=true"):
        small(f"benchmarks.exchange_drift:{name}", warm_decoder=False)


def test_a_bridged_exchange_trains_and_differs_from_dffke() -> None:
    name = "benchmarks.exchange_drift:BridgedExchange"
    (bridged,) = small(name).rounds(1, progress=False)
    (plain,) = small().rounds(1, progress=False)
    assert bridged.clients != plain.clients
    with pytest.raises(ConfigError, match="it needs local_review=true and mixed=true"):
        small(name, local_review=False)
    with pytest.raises(ConfigError, match="it needs local_review=true and mixed=true"):
        small(name, mixed=False)


def test_bridged_images_are_blends_of_both_kinds() -> None:
    shown = show_bridged(
        lambda x: x + 1, lambda x: x * 10, torch.full((3, 1, 1, 1), 2.0), torch.zeros(50, 1, 1, 1)
    )
    # Each is w * 1 + (1 - w) * 20 with a weight w from 0.5 to 1.
    assert 1 <= float(shown.min()) < 3, "some are nearly the first image"
    assert 8 < float(shown.max()) <= 10.5, "others have nearly equal parts"
