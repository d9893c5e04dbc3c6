"""FedAvg's relatives for one architecture: FedBN, MOON, FedDyn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from barter import Experiment, FedAvg
from barter.algorithms import FedBN
from barter.algorithms.broadcast import Caster
from barter.core.evaluation import accuracy
from barter.core.images import Spec
from barter.core.model import split
from barter.core.payload import isolate, nbytes
from barter.ops.statistics import norm_names
from tests.conftest import federation, same, tiny

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.5,))


def plain(spec: Spec) -> nn.Module:
    """A network without normalisation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, spec.classes))


def tap(experiment: Experiment, listen: Callable[[Any, str, int, str], None]) -> None:
    """Have all that crosses the wire heard."""
    carry = experiment.engine.wire.carry

    def tapped(tree: Any, method: str, client: int, direction: Any, device: Any = None) -> Any:
        listen(tree, method, client, direction)
        return carry(tree, method, client, direction, device)

    experiment.engine.wire.carry = tapped  # type: ignore[method-assign]


class Misleading(nn.Module):
    """A layer that is called bn, and a normalisation that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.scale, self.out = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.scale(self.bn(x.flatten(1)))))
        return y


def test_what_normalisation_holds_is_told_by_the_kind_of_layer() -> None:
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert norm_names(split(Misleading())) == {f"body.scale.{name}" for name in names}
    assert norm_names(nn.BatchNorm2d(3)) == names
    assert norm_names(nn.BatchNorm2d(3, affine=False)) == names - {"weight", "bias"}
    assert norm_names(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3))) == set()
    sent = FedBN().shared(split(Misleading()))
    assert {name.removeprefix("body.") for name in sent} == {"bn.weight", "bn.bias", "head.weight", "head.bias"}


def test_fedbn_without_normalisation_is_fedavg() -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 50, "lr": 0.05, "fraction": 0.7}
    one, other = (federation(kind(**settings), models=[plain]) for kind in (FedAvg, FedBN))
    list(one.rounds(3))
    list(other.rounds(3))
    assert same(dict(one.server.model.state_dict()), cast(Caster, other.server).average)


def test_fedbn_averages_everything_but_normalisation() -> None:
    experiment = federation(tiny("fedbn"), models="small-cnn")
    sent: dict[int, dict[str, Tensor]] = {}

    def listen(tree: Any, method: str, client: int, direction: str) -> None:
        if (method, direction) == ("client_update", "up"):
            sent[client] = isolate(tree)

    tap(experiment, listen)
    records = list(experiment.rounds(2))
    clients = experiment.engine.clients
    models = [dict(client.model.state_dict()) for client in clients.values()]
    own = norm_names(clients[0].model)
    assert own
    assert not own & sent[0].keys()
    sizes = {k: len(client.data) for k, client in clients.items()}
    for name in models[0]:
        if name in own:
            assert name.endswith("tracked") or not torch.equal(models[0][name], models[1][name]), name
        else:
            mean = sum(sizes[k] * sent[k][name].double() for k in clients) / sum(sizes.values())
            assert all(torch.allclose(model[name].double(), mean, atol=1e-6) for model in models), name
    weights = nbytes(sent[0])
    assert [r.bytes["client_update"] for r in records] == [{"up": 3 * weights, "down": 0}] * 2
    assert [r.bytes["receive"] for r in records] == [{"up": 0, "down": 3 * weights}] * 2


def test_fedbn_judges_the_average_with_the_clients_own_normalisation() -> None:
    experiment = federation(tiny("fedbn"), models="small-cnn")
    (record,) = experiment.rounds(1)
    assert "global" not in record.server, "there is no model for all"
    for k, client in experiment.engine.clients.items():
        assert record.clients[k]["global"] == accuracy(client.model, client.tests["global"])
        assert {"before_global", "before_local"} <= record.clients[k].keys()
    assert any(record.clients[k]["before_global"] != record.clients[k]["global"] for k in record.clients)


def test_who_missed_an_average_gets_it_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = federation(tiny("fedbn"), min_clients=2)
    server, starts = cast(Caster, experiment.server), dict[int, dict[str, Tensor]]()

    def interrupt(tree: Any, method: str, client: int, direction: str) -> None:
        if (method, client, experiment.engine.round) == ("receive", 1, 1):
            raise ConnectionError

    tap(experiment, interrupt)
    first = experiment.step()
    assert (len(first.failures), server.heard) == (1, [0, 2])
    train, before = FedBN.train, isolate(server.average)

    def watched(self: FedBN, client: Any) -> None:
        starts[client.id] = isolate(self.shared(client.model))
        train(self, client)

    monkeypatch.setattr(FedBN, "train", watched)
    second = experiment.step()
    assert len(starts) == 3
    assert all(same(start, before) for start in starts.values()), "also the one that did not hear"
    assert second.bytes["client_update"]["down"] == nbytes(before), "and the others were not told twice"


def test_fedbn_helps_where_clients_images_look_different() -> None:
    """Two clients, the same digits, for one of them pale: with statistics of their own one network serves both."""

    def last(name: str) -> float:
        experiment = federation(tiny(name, batch_size=32, lr=0.05), clients=2, partition="iid")
        clients = experiment.engine.clients
        for images in (clients[1].data, clients[1].tests["local"]):
            images.pixels.copy_(images.pixels // 4 + 128)
        *_, record = experiment.rounds(3)
        if name == "fedbn":
            return record.mean("local")
        return sum(accuracy(experiment.server.model, c.tests["local"]) for c in clients.values()) / 2

    assert last("fedbn") > last("fedavg") + 0.1
