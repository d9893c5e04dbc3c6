from __future__ import annotations

from typing import Any

import pytest
import torch

from barter import DFFKE, FedAvg, Local
from barter.algorithms import ALGORITHMS, Central
from barter.core.errors import ConfigError
from barter.core.payload import nbytes
from tests.conftest import perceptrons, same, small_federation, state, tiny


def test_fedavg_needs_one_architecture_and_says_so() -> None:
    with pytest.raises(
        ConfigError, match="needs one architecture, these clients have small-cnn, small-resnet"
    ):
        small_federation(FedAvg(), models="small-5")


def test_fedavg_of_one_client_is_that_clients_training() -> None:
    experiment = small_federation(tiny("fedavg"), clients=1)
    list(experiment.rounds(2))
    server, client = (
        experiment.server.model.state_dict(),
        experiment.engine.clients[0].model.state_dict(),
    )
    assert same(dict(server), dict(client))


def test_fedavg_bytes() -> None:
    experiment = small_federation(tiny("fedavg", fraction=0.5), clients=4)
    (record,) = experiment.rounds(1)
    weights = nbytes(experiment.server.model.state_dict())
    assert record.bytes == {"client_update": {"up": 2 * weights, "down": 2 * weights}}
    assert sum(m["bytes_up"] > 0 for m in record.clients.values()) == 2
    assert "global" in record.server


def test_clients_of_one_architecture_start_alike() -> None:
    experiment = small_federation(tiny("local"), models="small-mlp")
    first, second = (experiment.engine.clients[k].model.state_dict() for k in (0, 1))
    assert same(dict(first), dict(second))


def test_local_sends_nothing() -> None:
    (record,) = small_federation(tiny("local")).rounds(1)
    assert record.bytes == {"learn": {"up": 0, "down": 0}}


def test_the_local_training_of_dffke_is_that_of_local() -> None:
    local, dffke = (
        small_federation(tiny("local")),
        small_federation(tiny("dffke", collaboration=0.01, cosine=False, balanced=False)),
    )
    local_records, dffke_records = list(local.rounds(1)), list(dffke.rounds(1))
    # With one collaborator nobody exchanges; its own training runs as `learn`, as in `local`.
    one, other = (dict(e.engine.clients[0].model.state_dict()) for e in (local, dffke))
    assert same(one, other)
    assert dffke_records[0].clients[0]["before_global"] == local_records[0].clients[0]["global"]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(
    "name", [n for n, kind in ALGORITHMS.items() if "optimizer" in kind.__dataclass_fields__]
)
def test_clients_train_with_the_optimizer_that_is_asked_for(name: str, optimizer: str) -> None:
    once = {"max_epochs": 1} if name == "local" else {"epochs": 1}
    experiment = perceptrons(tiny(name, **once, optimizer=optimizer, lr=1e-3, batch_size=1000))
    layer = next(experiment.engine.clients[0].model.parameters())
    before = layer.detach().clone()
    experiment.step()
    moved = (layer.detach() - before).abs()
    # The first step of Adam is as long as its rate wherever there is a gradient; one of SGD follows the gradient.
    assert bool(((moved[moved > 0] - 1e-3).abs() < 2e-5).float().mean() > 0.9) == (
        optimizer == "adam"
    )


def test_central_gives_everything_to_everybody() -> None:
    experiment = small_federation(tiny("central"))
    (record,) = experiment.rounds(1)
    pixels = sum(len(images) * (64 + 8) for images in experiment.task.train)
    assert record.bytes["give"]["up"] == pixels
    assert record.bytes["learn"]["down"] == 3 * pixels


@pytest.mark.slow
def test_central_is_an_upper_bound() -> None:
    settings = {"max_epochs": 8, "batch_size": 32}
    (central,) = small_federation(Central(**settings)).rounds(1)
    (local,) = small_federation(Local(**settings)).rounds(1)
    assert central.mean("global") > local.mean("global") + 0.2


def test_fraction_changes_who_takes_part() -> None:
    experiment = small_federation(tiny("fedavg", fraction=0.25), clients=4)
    active = [{k for k, m in r.clients.items() if m["bytes_up"]} for r in experiment.rounds(6)]
    assert all(len(ids) == 1 for ids in active)
    assert len(set.union(*active)) > 1


def test_algorithms_are_frozen_and_checked() -> None:
    with pytest.raises(ConfigError, match="share=1.5"):
        DFFKE(share=1.5)
    with pytest.raises(AttributeError):
        FedAvg().epochs = 3  # type: ignore[misc]
    assert torch.is_tensor(next(iter(state(small_federation(tiny("local"))).values())))


def test_fedprox_without_its_term_is_fedavg_and_with_it_stays_nearer() -> None:
    def way(name: str, **changes: float) -> tuple[dict[str, Any], float]:
        experiment = small_federation(tiny(name, **changes), models="small-cnn")
        before = {at: w.clone() for at, w in experiment.server.model.named_parameters()}
        list(experiment.rounds(1))
        gone = sum(
            float((w - before[at]).square().sum())
            for at, w in experiment.server.model.named_parameters()
        )
        return state(experiment), gone

    (plain, far), (without, same_way), (_, near) = (
        way("fedavg"),
        way("fedprox", mu=0.0),
        way("fedprox", mu=1.0),
    )
    assert same(plain, without)
    assert far == same_way
    assert near < 0.9 * far
