"""Methods whose clients have a network of their own and a copy of a shared one: FML, FedKD."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from barter import load
from barter.algorithms import fedkd, fml
from barter.algorithms.fedkd import Broker, FedKD, Mentor
from barter.algorithms.fml import FML
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import nbytes
from barter.data.sources import load_dataset as source
from tests.conftest import federation, same, tiny

SPEC = Spec(1, 1, 2, 2, (0.0,), (1.0,))
IMAGES, LABELS = torch.zeros(1, 1, 1, 2), torch.tensor([0])


class Says(Classifier):
    """Predicts the same of everything, from features of its own."""

    def __init__(self, p: float, features: float = 0.0) -> None:
        super().__init__()
        self.said = nn.Parameter(torch.tensor([p, 1 - p]).log())
        self.seen = nn.Parameter(torch.full((2,), features))

    def features(self, x: Tensor) -> Tensor:
        return self.seen + 0 * x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return self.said + 0 * features


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_fmls_loss_by_hand_and_each_networks_part() -> None:
    own, shared = Says(0.9), Says(0.4)
    value = fml.fml_loss(own, shared, 0.25, 0.75, IMAGES, LABELS)
    mine = -0.25 * math.log(0.9) + 0.75 * kl(0.4, 0.9)
    theirs = -0.75 * math.log(0.4) + 0.25 * kl(0.9, 0.4)
    assert value.item() == pytest.approx(mine + theirs, abs=1e-5)
    value.backward()
    # The slope of cross entropy with a target is prediction - target; of what the other is taught, nothing.
    for network, p, target in (
        (own, 0.9, 0.25 * 1 + 0.75 * 0.4),
        (shared, 0.4, 0.75 * 1 + 0.25 * 0.9),
    ):
        assert network.said.grad is not None
        assert network.said.grad.tolist() == pytest.approx([p - target, target - p], abs=1e-5)


def test_in_fmls_defaults_predictions_count() -> None:
    assert FML().alpha < 1
    assert FML().beta < 1
    settings = {"shared": "small-mlp", "epochs": 1, "batch_size": 50}
    states = []
    for weights in ({}, {"alpha": 1.0, "beta": 1.0}):
        experiment = federation(FML(**settings, **weights))
        list(experiment.rounds(2))
        states.append(experiment)
    taught, alone = states
    for k in range(3):
        one, other = (dict(e.engine.clients[k].model.state_dict()) for e in (taught, alone))
        assert not same(one, other), "with weights of one everybody learns alone"


def test_fmls_shared_model_without_predictions_is_fedavg() -> None:
    settings = {"lr": 0.05, "epochs": 1, "batch_size": 50}
    fedavg = federation(tiny("fedavg", lr=0.05), models="small-mlp")
    mutual = federation(
        FML(shared="small-mlp", alpha=1.0, beta=1.0, momentum=0.0, **settings), models="small-5"
    )
    for experiment in (fedavg, mutual):
        list(experiment.rounds(2))
    assert same(dict(fedavg.server.model.state_dict()), dict(mutual.server.model.state_dict()))


def test_fml_sends_the_shared_model_only_and_reports_it_beside(tmp_path: Path) -> None:
    experiment = federation(tiny("fml"), out=tmp_path / "run")
    (record,) = experiment.rounds(1)
    weights = nbytes(experiment.server.model.state_dict())
    assert record.bytes == {"client_update": {"up": 3 * weights, "down": 3 * weights}}
    assert "global" in record.server
    kept = load(tmp_path / "run")
    assert (kept.architecture, kept.owner) == ("small-mlp", "server")
    assert same(dict(kept.network.state_dict()), dict(experiment.server.model.state_dict()))
    with pytest.raises(ConfigError, match="unknown model 'small-cn': did you mean 'small-cnn'"):
        federation(FML(shared="small-cn"))


@pytest.mark.parametrize("kind", [FML, FedKD])
def test_something_of_what_the_other_knows_arrives(kind: Any) -> None:
    labels = source("digits").y_train
    low, high = (
        torch.nonzero(labels < 5).flatten().tolist(),
        torch.nonzero(labels >= 5).flatten().tolist(),
    )

    def credence(other: list[int]) -> float:
        """What the first client, which has low digits only, gives to high ones by their name."""
        options: dict[str, Any] = {
            "partition": [low[:200], other[:200]],
            "clients": 2,
            "models": "small-cnn",
        }
        experiment = federation(kind(shared="small-mlp", epochs=1, batch_size=16), **options)
        list(experiment.rounds(4))
        client = experiment.engine.clients[0]
        test = client.tests["global"]
        with torch.no_grad():
            said = client.model.eval()(test.batch(torch.arange(len(test)))).log_softmax(1)
        return float(said.gather(1, test.labels[:, None])[test.labels >= 5].mean())

    assert credence(high) > credence(low[200:]) + 0.1, (
        "if the other has high digits, rather than more of the low"
    )


def test_fml_says_when_the_word_of_the_shared_network_counts_nothing() -> None:
    assert FML().remarks([]) == []
    assert "trained locally only" in FML(alpha=1.0).remarks([])[0]


def test_fedkds_loss_by_hand_and_where_its_gradients_end() -> None:
    own, shared, translation = Says(0.9, 1.0), Says(0.4, 2.0), nn.Linear(2, 2, bias=False)
    nn.init.eye_(translation.weight)
    value = fedkd.fedkd_loss(own, shared, translation, IMAGES, LABELS)
    task = -math.log(0.9) - math.log(0.4)
    apart = kl(0.4, 0.9) + kl(0.9, 0.4) + 1.0
    assert value.item() == pytest.approx(task + apart / task, abs=1e-5)
    value.backward()
    # Through the denominator, the slope would be that of being wrong: minus apart / task² times the cross entropy's.
    for network, p, other in ((own, 0.9, 0.4), (shared, 0.4, 0.9)):
        assert network.said.grad is not None
        assert network.said.grad[0].item() == pytest.approx((p - 1) + (p - other) / task, abs=1e-5)
    assert own.seen.grad is not None
    assert own.seen.grad.tolist() == pytest.approx([-1 / task] * 2, abs=1e-5)
    assert translation.weight.grad is not None


def test_fedkds_clients_have_the_servers_model_after_each_round() -> None:
    experiment = federation(tiny("fedkd"))
    for _ in experiment.rounds(2):
        shared = dict(experiment.server.model.state_dict())
        for client in experiment.engine.clients.values():
            assert same(cast(Mentor, client).shared, shared)
    assert cast(Broker, experiment.server).holders == [0, 1, 2]


def test_fedkds_changes_are_smaller_than_weights_both_ways() -> None:
    experiment = federation(tiny("fedkd"))
    first, second = experiment.rounds(2)
    weights = 3 * nbytes(experiment.server.model.state_dict())
    assert first.bytes["learn"]["down"] == weights + 3 * 8, (
        "once, with the share that is to be sent"
    )
    assert second.bytes["learn"]["down"] == 3 * 8
    for record in (first, second):
        assert 0 < record.bytes["learn"]["up"] < 0.8 * weights
        assert 0 < record.bytes["receive"]["down"] < 0.8 * weights


def test_at_full_energy_fedkd_averages_shared_models_as_fedavg_does() -> None:
    experiment = federation(tiny("fedkd", energy_start=1.0, energy_end=1.0))
    before = {at: w.clone() for at, w in experiment.server.model.state_dict().items()}
    trained: list[Any] = []
    original = fedkd.average

    def noted(updates: Any, by: Any) -> Any:
        trained.append(updates)
        return original(updates, by=by)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedkd, "average", noted)
        list(experiment.rounds(1))
    mean = original(trained[0])
    for at, w in experiment.server.model.state_dict().items():
        assert torch.allclose(w.double(), (before[at] + mean[at]).double(), atol=1e-5)


@pytest.mark.parametrize("average", ["mean", "median"])
def test_fedkds_heads_do_not_move_along_what_all_classes_share(average: str) -> None:
    experiment = federation(tiny("fedkd", optimizer="adam", lr=0.01, average=average))
    before = experiment.server.model.state_dict()["head.weight"].clone()
    list(experiment.rounds(1))
    change = experiment.server.model.state_dict()["head.weight"] - before
    assert float(change.mean(0).norm()) < 1e-3 * float(
        change.norm()
    )  # of Adam's steps a quarter is


def test_the_share_of_energy_grows() -> None:
    method = FedKD(energy_rounds=10)
    assert [method.energy(t) for t in (5, 10, 50)] == pytest.approx([0.965, 0.98, 0.98])


def test_who_missed_a_change_gets_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = federation(tiny("fedkd"), min_clients=1)
    experiment.engine.cores = 1
    original = FedKD.receive

    def receive(self: FedKD, client: Mentor, change: Any) -> None:
        if client.id == 1 and experiment.round == 0:
            raise OSError("the line is down")
        original(self, client, change)

    monkeypatch.setattr(FedKD, "receive", receive)
    first, second = experiment.rounds(2)
    assert len(first.failures) == 1
    weights = nbytes(experiment.server.model.state_dict())
    assert second.bytes["learn"]["down"] == weights + 3 * 8
    assert same(
        cast(Mentor, experiment.engine.clients[1]).shared,
        dict(experiment.server.model.state_dict()),
    )
