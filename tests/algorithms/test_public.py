"""Methods that distil on public data: FedMD, DS-FL, MHAT, FedDF."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from barter import Experiment
from barter.algorithms import feddf, fedmd
from barter.algorithms.dsfl import DSFL
from barter.algorithms.feddf import FedDF
from barter.algorithms.fedmd import FedMD, absolute_loss
from barter.algorithms.mhat import MHAT, auxiliary_loss
from barter.algorithms.public import PublicDistillation
from barter.core.clients import Replies
from barter.core.errors import ConfigError
from barter.data.partition import Classes
from barter.data.sources import load_dataset
from barter.data.task import Data
from barter.ops.average import average
from tests.conftest import federation, same, small_federation, tiny

TWO = {
    "partition": Classes(per_client=5),
    "clients": 2,
    "models": "small-mlp,small-cnn",
}  # nobody has what the other has


def in_process(algorithm: Any, **options: Any) -> Experiment:
    experiment = small_federation(algorithm, **options)
    experiment.engine.cores = 1
    return experiment


def heard(
    monkeypatch: pytest.MonkeyPatch, kind: type[PublicDistillation]
) -> list[tuple[Tensor, Tensor]]:
    """Have clients only hear, and not learn; the places and the targets that they are sent."""
    told: list[tuple[Tensor, Tensor]] = []

    def learn(self: Any, client: Any, places: Tensor, target: Tensor) -> None:
        told.append((places, target))

    monkeypatch.setattr(kind, "learn", learn)
    return told


def words(experiment: Experiment, places: Tensor) -> list[Tensor]:
    assert experiment.server.public is not None
    x = experiment.server.public.batch(places)
    return [client.model.eval()(x).detach() for client in experiment.engine.clients.values()]


def test_fedmds_consensus_is_the_mean_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = heard(monkeypatch, FedMD)
    experiment = in_process(tiny("fedmd"))
    list(experiment.rounds(2))
    (places, target), (later, _) = told[0], told[-1]
    assert len(places) == 60
    assert places.tolist() != later.tolist(), "drawn anew in each round"
    assert torch.allclose(target, torch.stack(words(experiment, places)).mean(0), atol=1e-5)


def test_fedmds_clients_begin_with_public_data_and_revisit_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    def noted(client: Any, *, data: Any = None, epochs: int, **_: Any) -> None:
        seen.append((len(data or client.data), epochs))

    monkeypatch.setattr(fedmd, "fit", noted)
    experiment = in_process(tiny("fedmd", public_epochs=5, private_epochs=3, epochs=2), clients=1)
    list(experiment.rounds(2))
    private, public = len(experiment.engine.clients[0].data), 1433
    assert seen == [(public, 5), (private, 3), (private, 2), (private, 2)]


def test_fedmds_loss_by_hand() -> None:
    assert absolute_loss(torch.tensor([[1.0, -2.0]]), torch.tensor([[0.0, 2.0]])).item() == 2.5


def test_fedmd_helps_clients_with_few_images() -> None:
    digits = load_dataset("digits")
    few = digits.x_train[:90], digits.y_train[:90], digits.x_test, digits.y_test

    def reached(samples: int) -> float:
        settings = {
            "public_epochs": 0,
            "private_epochs": 20,
            "distil_epochs": 5,
            "distil_batch": 100,
            "epochs": 1,
        }
        algorithm = FedMD(samples=samples, lr=3e-3, **settings)
        options = {
            "data": Data(source=few, public="digits"),
            "partition": "iid",
            "models": "small-mlp,small-cnn",
        }
        return list(small_federation(algorithm, **options).rounds(2))[-1].mean("global")

    assert reached(1000) > reached(2) + 0.02


def test_labels_of_other_classes_are_refused_where_they_are_needed() -> None:
    digits = load_dataset("digits")
    few = digits.y_train < 3
    data = Data(source=(digits.x_train[few], digits.y_train[few]), public="digits")
    for name in ("fedmd", "mhat"):
        with pytest.raises(ConfigError, match="go up to 9 and the task has 3 classes"):
            list(small_federation(tiny(name), data=data).rounds(1))
    for algorithm in (tiny("fedmd", public_epochs=0), tiny("dsfl")):
        list(small_federation(algorithm, data=data).rounds(1))
    with pytest.raises(ConfigError, match=r"data\.public"):
        small_federation(tiny("dsfl"), data=Data())


def test_dsfl_sharpens_the_mean_of_probabilities_for_clients_and_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = heard(monkeypatch, DSFL)
    experiment = in_process(tiny("dsfl"))
    before = {at: w.clone() for at, w in experiment.server.model.state_dict().items()}
    list(experiment.rounds(1))
    places, target = told[0]
    p = torch.stack([logits.softmax(1) for logits in words(experiment, places)]).mean(0)
    assert torch.allclose(target, (p / 0.1).softmax(1), atol=1e-5)
    assert not same(before, dict(experiment.server.model.state_dict()))


def test_without_a_temperature_dsfl_is_simple_aggregation(monkeypatch: pytest.MonkeyPatch) -> None:
    told = heard(monkeypatch, DSFL)
    experiment = in_process(tiny("dsfl", temperature=None))
    list(experiment.rounds(1))
    places, target = told[0]
    p = torch.stack([logits.softmax(1) for logits in words(experiment, places)]).mean(0)
    assert torch.allclose(target, p, atol=1e-5)


def test_dsfl_brings_what_others_know_and_more_of_it_if_the_mean_is_sharpened() -> None:
    settings = {"epochs": 3, "samples": 500, "distil_epochs": 3}
    (era,), (sa,) = (
        federation(DSFL(temperature=t, **settings), **TWO).rounds(1) for t in (0.1, None)
    )
    assert era.mean("global") > era.mean("before_global") + 0.15
    assert era.server["global"] > sa.server["global"]


def test_mhats_loss_by_hand() -> None:
    logits, mean, labels = (
        torch.tensor([[0.9, 0.1]]).log(),
        torch.tensor([[0.5, 0.5]]),
        torch.tensor([1]),
    )
    half = -0.5 * math.log(0.9) - 0.5 * math.log(0.1)
    assert auxiliary_loss(3.0, logits, mean, labels).item() == pytest.approx(
        -math.log(0.1) + 3 * half
    )


def test_mhats_clients_hear_what_the_auxiliary_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = heard(monkeypatch, MHAT)
    experiment = in_process(tiny("mhat"))
    list(experiment.rounds(1))
    places, target = told[0]
    assert experiment.server.public is not None
    said = experiment.server.model.eval()(experiment.server.public.batch(places)).softmax(1)
    assert torch.allclose(target, said, atol=1e-5)


def test_without_the_clients_mhats_auxiliary_model_learns_from_labels_alone() -> None:
    def server(**changes: Any) -> dict[str, Any]:
        experiment = small_federation(tiny("mhat", **changes))
        list(experiment.rounds(1))
        return dict(experiment.server.model.state_dict())

    assert same(server(lam=0.0), server(lam=0.0, epochs=2)), "whatever the clients have learned"
    assert not same(server(), server(epochs=2))


def test_mhat_brings_what_others_know() -> None:
    records = list(small_federation(MHAT(epochs=2, distil_epochs=4), **TWO).rounds(2))
    assert records[-1].mean("global") > records[0].mean("before_global") + 0.1
    assert records[-1].server["global"] > 0.6


def test_feddf_averages_each_architecture_and_gives_it_to_everybody_who_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feddf, "distil", lambda *args, **kwargs: None)
    updates: list[Replies[Any]] = []
    whole = FedDF.fuse_models

    def noted(self: FedDF, server: Any, all_of_them: Replies[Any], *rest: Any) -> Any:
        updates.append(all_of_them)
        return whole(self, server, all_of_them, *rest)

    monkeypatch.setattr(FedDF, "fuse_models", noted)
    experiment = in_process(tiny("feddf"), models="small-mlp,small-cnn,small-mlp")
    (record,) = experiment.rounds(1)
    (sent, _) = updates
    models = [dict(client.model.state_dict()) for client in experiment.engine.clients.values()]
    assert same(models[1], dict(sent[1])), "alone of its kind"
    both = average(Replies({k: sent[k] for k in (0, 2)}, sent.num_examples, {}))
    assert same(models[0], both)
    assert same(models[2], both)
    assert set(record.bytes) == {"learn", "receive"}


def test_feddf_lets_one_architecture_learn_what_only_the_other_knows() -> None:
    experiment = federation(FedDF(epochs=3, distil_steps=60), **TWO)
    (record,) = experiment.rounds(1)
    for client in experiment.engine.clients.values():
        test = client.tests["global"]
        foreign = (client.data.class_counts() == 0)[test.labels]
        said = client.model.eval()(test.batch(torch.arange(len(test)))).argmax(1)
        assert float((said == test.labels)[foreign].double().mean()) > 0.1, (
            "alone it would name none of them"
        )
    assert record.mean("global") > record.mean("before_global") + 0.1


def test_feddf_leaves_an_architecture_alone_that_nobody_trained() -> None:
    experiment = in_process(tiny("feddf", fraction=0.3), models="small-mlp,small-cnn,small-mlp")
    before = [
        {at: w.clone() for at, w in c.model.state_dict().items()}
        for c in experiment.engine.clients.values()
    ]
    (record,) = experiment.rounds(1)
    (active,) = [k for k, told in record.clients.items() if told["bytes_up"]]
    kinds = ["mlp", "cnn", "mlp"]
    for k, client in experiment.engine.clients.items():
        assert same(before[k], dict(client.model.state_dict())) == (kinds[k] != kinds[active])


def test_feddf_averages_the_models_whose_predictions_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    averaged: list[set[int]] = []

    def record(states: Replies[Any], **options: Any) -> Any:
        averaged.append(set(states))
        return average(states, **options)

    monkeypatch.setattr(feddf, "average", record)
    monkeypatch.setattr(feddf, "select_teachers", lambda predictions: [0])
    experiment = small_federation(tiny("feddf"), models="small-mlp,small-cnn", clients=4)
    experiment.step()
    # Clients 0 and 2 have one architecture; of the other one no client is trusted.
    assert averaged == [{0}, {1, 3}]
