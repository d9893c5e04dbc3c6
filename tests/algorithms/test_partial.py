from __future__ import annotations

from typing import Any

import pytest
import torch

from barter.algorithms import FedDropout, FedRolex, HeteroFL
from barter.core.errors import ConfigError
from barter.core.payload import nbytes
from barter.engines.local import LocalEngine
from tests.conftest import federation, same, tiny

FAMILY = ["heterofl", "feddropout", "fedrolex"]
AS_FEDAVG = {
    "rho": 0,
    "norm": "running",
    "masked_loss": False,
    "own_rows": False,
    "weighting": "examples",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr": 0.05,
}


@pytest.mark.parametrize("name", FAMILY)
def test_with_all_of_the_network_it_is_fedavg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = (
        LocalEngine._path
    )  # a turn's random stream has the method's name in it: here both have the same
    monkeypatch.setattr(LocalEngine, "_path", lambda self, method, k: path(self, "update", k))
    partial, fedavg = (
        federation(algorithm, models="small-resnet")
        for algorithm in (tiny(name, **AS_FEDAVG), tiny("fedavg"))
    )
    before = partial.server.model.state_dict()["head.weight"].clone()
    list(partial.rounds(2))
    list(fedavg.rounds(2))
    one, other = (e.server.model.state_dict() for e in (partial, fedavg))
    assert one.keys() == other.keys()
    assert all(
        torch.allclose(one[at].float(), other[at].float(), rtol=1e-5, atol=1e-6) for at in one
    )
    assert not torch.allclose(one["head.weight"], before, atol=1e-2)


def test_clients_hold_as_much_as_they_can_afford_and_only_that_travels() -> None:
    experiment = federation(tiny("fedrolex", rho=3), clients=3, models="small-cnn")
    assert experiment.architectures == ["small-cnn@0.5", "small-cnn@0.25", "small-cnn@0.125"]
    (record,) = experiment.rounds(1)
    sizes = [nbytes(dict(c.model.state_dict())) for c in experiment.engine.clients.values()]
    assert [m["bytes_down"] for m in record.clients.values()] == sizes
    assert [m["bytes_up"] for m in record.clients.values()] == [size + 10 * 8 for size in sizes]
    assert sizes[2] < sizes[0] / 4
    assert experiment.server.model.state_dict()["body.0.0.weight"].shape[0] == 32


def test_classes_are_counted_only_where_that_is_needed() -> None:
    (record,) = federation(tiny("heterofl", own_rows=False)).rounds(1)
    assert record.traffic("up") == record.traffic("down")


def moved(name: str, rounds: int) -> torch.Tensor:
    """Which channels of the first layer training has changed, where nobody has more than half of them."""
    experiment = federation(tiny(name, rho=3, weight_decay=0.0), models="small-cnn")
    before = experiment.server.model.state_dict()["body.0.0.weight"].clone()
    list(experiment.rounds(rounds))
    after = experiment.server.model.state_dict()["body.0.0.weight"]
    return (after != before).flatten(1).any(1)


def test_what_nobody_holds_stays_and_windows_and_draws_reach_further() -> None:
    assert moved("heterofl", 2).nonzero().flatten().tolist() == list(range(16))
    assert moved("fedrolex", 3).nonzero().flatten().tolist() == [*range(16), 30, 31]
    assert moved("feddropout", 2).sum() > 16


def test_every_client_draws_channels_of_its_own() -> None:
    experiment = federation(tiny("feddropout", rho=1, sigma=1), clients=3, models="small-cnn")
    clients = experiment.engine.client_ids
    algorithm: Any = experiment.algorithm
    where = algorithm.choose(experiment.server, clients, 1)
    assert algorithm.budget(2, 3) == 0.5
    dropped = where[2]["body.0.0.weight"][0]
    assert dropped.tolist() == where[2]["body.2.0.weight"][1].tolist(), "layers of one width agree"
    again = algorithm.choose(experiment.server, clients, 1)[2]["body.0.0.weight"][0]
    assert dropped.tolist() != again.tolist()


def test_a_class_that_a_client_lacks_does_not_touch_its_rows() -> None:
    experiment = federation(tiny("fedrolex", weight_decay=0.0), clients=2)
    client = experiment.engine.clients[0]
    (absent, *_) = (client.data.class_counts() == 0).nonzero().flatten().tolist()
    before = client.model.state_dict()["head.weight"][absent].clone()
    algorithm: Any = experiment.algorithm
    update = algorithm.train(client, {})
    assert torch.equal(update["weights"]["head.weight"][absent], before)
    assert (update["counts"] > 0).tolist() == (client.data.class_counts() > 0).tolist()
    plain: Any = tiny("fedrolex", weight_decay=0.0, masked_loss=False)
    assert not torch.equal(plain.train(client, {})["weights"]["head.weight"][absent], before)


def test_counts_are_of_the_images_trained_on() -> None:
    experiment = federation(tiny("fedrolex", steps=3, batch_size=4), clients=2)
    algorithm: Any = experiment.algorithm
    counts = algorithm.train(experiment.engine.clients[0], {})["counts"]
    assert counts.sum().item() == 12
    held = experiment.engine.clients[0].data.class_counts() > 0
    assert (counts[~held] == 0).all()


def test_networks_that_cannot_be_cut_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="VisionTransformer cannot be cut by width"):
        federation(HeteroFL(), models="vit-tiny")
    with pytest.raises(
        ConfigError, match="FedRolex has one model for all and needs one architecture"
    ):
        federation(FedRolex(), models="small-5")


@pytest.mark.parametrize("norm", ["afterwards", "batch", "running"])
def test_the_server_has_a_model_of_full_width_with_any_statistics(norm: Any) -> None:
    experiment = federation(FedDropout(norm=norm, epochs=3), models="small-cnn")
    *_, record = experiment.rounds(2)
    tracked = any("running" in at for at in experiment.server.model.state_dict())
    assert tracked == (norm != "batch")
    assert record.server["global"] > 0.15
    assert not same(
        dict(experiment.server.model.state_dict()),
        dict(experiment.engine.clients[0].model.state_dict()),
    )
