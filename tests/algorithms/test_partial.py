from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from barter.algorithms import FedDropout, FedRolex, HeteroFL
from barter.core.answers import largest_answer, require_valid_answer
from barter.core.errors import ConfigError, PayloadError
from barter.core.images import Spec
from barter.core.payload import nbytes
from barter.engines.local import LocalEngine
from tests.conftest import perceptrons, same, small_federation, tiny

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
        small_federation(algorithm, models="small-resnet")
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
    experiment = small_federation(tiny("fedrolex", rho=3), clients=3, models="small-cnn")
    assert experiment.architectures == ["small-cnn@0.5", "small-cnn@0.25", "small-cnn@0.125"]
    (record,) = experiment.rounds(1)
    sizes = [nbytes(dict(c.model.state_dict())) for c in experiment.engine.clients.values()]
    whole = nbytes(dict(experiment.server.model.state_dict()))
    normalised = 32 + 32  # channels of small-cnn
    measured = 2 * 4 * normalised
    assert [m["bytes_down"] for m in record.clients.values()] == [size + whole for size in sizes]
    assert [m["bytes_up"] for m in record.clients.values()] == [
        size + 10 * 8 + measured for size in sizes
    ]
    assert sizes[2] < sizes[0] / 4
    assert experiment.server.model.state_dict()["body.0.0.weight"].shape[0] == 32


def test_classes_are_counted_only_where_that_is_needed() -> None:
    (record,) = small_federation(tiny("heterofl", own_rows=False, norm="afterwards")).rounds(1)
    assert record.traffic("up") == record.traffic("down")


def test_batches_of_one_image_count_as_the_two_that_are_used() -> None:
    (record,) = perceptrons(tiny("heterofl", batch_size=1), clients=2).rounds(1)
    assert not record.failures, "honest counts are within their bound"


def test_statistics_are_those_of_everybodys_images_in_the_averaged_network() -> None:
    experiment = small_federation(tiny("fedrolex", batch_size=20), models="small-cnn")
    assert experiment.architectures[2] == "small-cnn@0.25"
    experiment.step()
    model = experiment.server.model
    found = {at: x.clone() for at, x in model.state_dict().items() if "running" in at}
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.train()
            hear = inputs.setdefault(name, []).append
            layer.register_forward_pre_hook(lambda _, x, hear=hear: hear(x[0]))
    for client in experiment.engine.clients.values():
        data = client.data
        count = len(data) // 20
        for i in range(count):
            start, end = (round(len(data) * j / count) for j in (i, i + 1))
            with torch.no_grad():
                model(data.batch(torch.arange(start, end)))
    assert len(inputs) == 2
    for name, batches in inputs.items():
        mean = torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0)
        var = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in batches]).mean(0)
        torch.testing.assert_close(found[f"{name}.running_mean"], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[f"{name}.running_var"], var, rtol=1e-4, atol=1e-5)


def plain(spec: Spec) -> nn.Module:
    """A network without normalisation."""
    pixels = spec.channels * spec.height * spec.width
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize(
    ("norm", "models"), [("afterwards", "small-mlp"), ("global", f"{__name__}:plain")]
)
def test_nothing_is_measured_where_no_statistics_are_wanted(norm: str, models: str) -> None:
    experiment = small_federation(tiny("heterofl", norm=norm), models=models)
    (record,) = experiment.rounds(1)
    sizes = [nbytes(dict(c.model.state_dict())) for c in experiment.engine.clients.values()]
    assert [m["bytes_down"] for m in record.clients.values()] == sizes


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("variances", torch.full((64,), -1.0), "the minimum of its values is -1, expected 0"),
        ("variances", torch.full((64,), 1e30), "the minimum of its values is 1e"),
        ("means", torch.full((64,), torch.nan), "NaN or infinity"),
        ("means", torch.zeros(63), r"float32 \(63,\), expected float32 \(64\)"),
    ],
)
def test_statistics_that_cannot_be_are_refused(key: str, wrong: torch.Tensor, message: str) -> None:
    experiment = small_federation(tiny("fedrolex"), models="small-cnn")
    engine, server = experiment.engine, experiment.server
    known = engine.knowledge_of(server, 1)  # type: ignore[attr-defined]
    state = server.model.state_dict()
    answer = {"means": torch.zeros(64), "variances": torch.ones(64)}
    require_valid_answer(answer, experiment.algorithm, "measure", (state,), known)
    assert largest_answer(experiment.algorithm, "measure", (state,), known) == 2 * 4 * 64
    with pytest.raises(PayloadError, match=f"measure.{key}.*{message}"):
        require_valid_answer(
            {**answer, key: wrong}, experiment.algorithm, "measure", (state,), known
        )


def moved(name: str, rounds: int) -> torch.Tensor:
    """Which channels of the first layer training has changed, where nobody has more than half of them."""
    experiment = small_federation(tiny(name, rho=3, weight_decay=0.0), models="small-cnn")
    before = experiment.server.model.state_dict()["body.0.0.weight"].clone()
    list(experiment.rounds(rounds))
    after = experiment.server.model.state_dict()["body.0.0.weight"]
    return (after != before).flatten(1).any(1)


def test_what_nobody_holds_stays_and_windows_and_draws_reach_further() -> None:
    assert moved("heterofl", 2).nonzero().flatten().tolist() == list(range(16))
    assert moved("fedrolex", 3).nonzero().flatten().tolist() == [*range(16), 30, 31]
    assert moved("feddropout", 2).sum() > 16


def test_every_client_draws_channels_of_its_own() -> None:
    experiment = small_federation(tiny("feddropout", rho=1, sigma=1), clients=3, models="small-cnn")
    clients = experiment.engine.client_ids
    algorithm: Any = experiment.algorithm
    where = algorithm.choose(experiment.server, clients, 1)
    assert algorithm.budget(2, 3) == 0.5
    dropped = where[2]["body.0.0.weight"][0]
    assert dropped.tolist() == where[2]["body.2.0.weight"][1].tolist(), "layers of one width agree"
    again = algorithm.choose(experiment.server, clients, 1)[2]["body.0.0.weight"][0]
    assert dropped.tolist() != again.tolist()


def test_a_class_that_a_client_lacks_does_not_touch_its_rows() -> None:
    experiment = small_federation(tiny("fedrolex", weight_decay=0.0), clients=2)
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
    experiment = small_federation(tiny("fedrolex", steps=3, batch_size=4), clients=2)
    algorithm: Any = experiment.algorithm
    counts = algorithm.train(experiment.engine.clients[0], {})["counts"]
    assert counts.sum().item() == 12
    held = experiment.engine.clients[0].data.class_counts() > 0
    assert (counts[~held] == 0).all()


def test_networks_that_cannot_be_cut_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="VisionTransformer cannot be cut by width"):
        small_federation(HeteroFL(), models="vit-tiny")
    with pytest.raises(
        ConfigError, match="FedRolex has one model for all and needs one architecture"
    ):
        small_federation(FedRolex(), models="small-5")


@pytest.mark.parametrize("norm", ["global", "afterwards", "batch", "running"])
def test_the_server_has_a_model_of_full_width_with_any_statistics(norm: Any) -> None:
    experiment = small_federation(FedDropout(norm=norm, epochs=3), models="small-cnn")
    *_, record = experiment.rounds(2)
    tracked = any("running" in at for at in experiment.server.model.state_dict())
    assert tracked == (norm != "batch")
    assert record.server["global"] > 0.15
    assert not same(
        dict(experiment.server.model.state_dict()),
        dict(experiment.engine.clients[0].model.state_dict()),
    )
