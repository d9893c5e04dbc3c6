"""Methods that trade one vector for each class, or one head: FedProto, FD, LG-FedAvg, FedGH, FedTGP."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter import Experiment
from barter.algorithms import FedGH, FedTGP, LGFedAvg, fedproto, fedtgp
from barter.algorithms.feddistill import Register
from barter.algorithms.feddistill import feddistill_loss as distilled
from barter.algorithms.fedproto import Follower
from barter.algorithms.one_width import HeadClient, HeadServer
from barter.core import seeds
from barter.core.clients import Replies
from barter.core.evaluation import accuracy
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.data.partition import Classes
from barter.data.task import Data
from barter.ops.heads import head_state, load_head
from barter.ops.prototypes import ByClass, class_means, concatenate_tables, mean_table
from barter.testing.conformance import few_digits
from tests.conftest import federation, perceptrons, same, small_federation, tiny

SPEC = Spec(1, 1, 2, 2, (0.0,), (1.0,))  # two pixels, as they are


class Pixels(Classifier):
    """Its features are the pixels, its logits zero."""

    feature_dim = 2

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return 0 * features


def test_fedprotos_loss_by_hand() -> None:
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)  # features (1, 0)
    prototypes, known = torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0])
    rest = prototypes, known
    of = [float(fedproto.fedproto_loss(Pixels(), 3.0, x, torch.tensor([y]), *rest)) for y in (0, 1)]
    assert of[0] == pytest.approx(math.log(2) + 3 * (1 + 4) / 2)
    assert of[1] == pytest.approx(math.log(2)), "a class without a prototype pulls nowhere"


def test_fds_loss_by_hand() -> None:
    x, labels = torch.zeros(2, 1, 1, 2), torch.tensor([0, 1])
    answers, known = torch.tensor([[0.75, 0.25], [0.0, 0.0]]), torch.tensor([1.0, 0.0])
    value = distilled(Pixels(), 2.0, x, labels, answers, known)
    assert float(value) == pytest.approx(math.log(2) + 2 * math.log(2) / 2), (
        "half the batch has somebody's answer"
    )


def test_fds_targets_are_probabilities() -> None:
    experiment = small_federation(tiny("feddistill"))
    list(experiment.rounds(1))
    for table in cast(Register, experiment.server).answers.values():
        assert torch.allclose(table["vectors"].sum(1), torch.ones(len(table["classes"])), atol=1e-5)
        assert float(table["vectors"].min()) >= 0


def test_fds_loss_is_least_where_the_prediction_is_the_target() -> None:
    class Says(Pixels):
        def logits(self, features: Tensor) -> Tensor:
            return said + 0 * features

    def apart() -> Tensor:
        one, none = (distilled(Says(), g, x, labels, answers, known) for g in (1.0, 0.0))
        return one - none

    x, labels = torch.zeros(1, 1, 1, 2), torch.tensor([0])
    answers, known = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.ones(2)
    said = answers[0].log().requires_grad_()
    (slope,) = torch.autograd.grad(apart(), said)
    assert torch.allclose(slope, torch.zeros(2), atol=1e-6), (
        "raw logits as targets would pull for ever"
    )


def test_fd_learns_from_the_others_and_not_from_itself() -> None:
    experiment = small_federation(tiny("feddistill"), clients=1)
    list(experiment.rounds(2))
    alone = small_federation(tiny("feddistill", gamma=0.0), clients=1)
    list(alone.rounds(2))
    models = (dict(e.engine.clients[0].model.state_dict()) for e in (experiment, alone))
    assert same(*models)


def test_fedproto_names_the_class_of_the_nearest_prototype() -> None:
    experiment = small_federation(tiny("fedproto"))
    (record,) = experiment.rounds(1)
    client = cast(Follower, experiment.engine.clients[1])
    assert client.model.feature_dim == 48
    features = client.model.eval().features(
        client.tests["global"].batch(torch.arange(len(client.tests["global"])))
    )
    table = client.prototypes[0]
    distances = (features[:, None] - table["vectors"][None]).square().sum(2)
    said = table["classes"][distances.argmin(1)]
    right = float((said == client.tests["global"].labels).double().mean())
    assert record.clients[1]["global"] == pytest.approx(right)
    assert {"head_global", "head_local"} <= record.clients[1].keys()


def mean_features(client: Client) -> ByClass:
    features = (
        client.model.eval().features(client.data.batch(torch.arange(len(client.data)))).detach()
    )
    return class_means(features, client.data.labels)


@pytest.mark.parametrize(("name", "args"), [("fedproto", ()), ("fedtgp", ()), ("fedgh", ({},))])
def test_prototypes_are_sent_of_after_training(name: str, args: tuple[Any, ...]) -> None:
    algorithm = tiny(name)
    client = small_federation(algorithm).engine.clients[0]
    before = mean_features(client)
    sent, after = algorithm.learn(client, *args), mean_features(client)  # type: ignore[attr-defined]
    assert torch.equal(sent["classes"], client.data.labels.unique())
    assert torch.allclose(sent["vectors"], after["vectors"], atol=1e-5)
    assert not torch.allclose(sent["vectors"], before["vectors"], atol=1e-2)


def test_fedprotos_clients_get_the_mean_of_all() -> None:
    experiment = small_federation(tiny("fedproto"))
    (_,) = experiment.rounds(1)
    clients = [cast(Follower, c) for c in experiment.engine.clients.values()]
    whole = mean_table([mean_features(client) for client in clients])
    for client in clients:
        assert torch.equal(client.prototypes[0]["classes"], whole["classes"])
        assert torch.allclose(client.prototypes[0]["vectors"], whole["vectors"], atol=1e-5)


def test_where_few_take_part_classes_keep_their_prototypes() -> None:
    experiment = small_federation(tiny("fedproto", fraction=0.34), partition=Classes(per_client=3))
    held = [set[int]()]
    for record in experiment.rounds(4):
        assert sum(metrics["bytes_up"] > 0 for metrics in record.clients.values()) == 1
        tables = [
            cast(Follower, client).prototypes[0] for client in experiment.engine.clients.values()
        ]
        assert all(torch.equal(table["vectors"], tables[0]["vectors"]) for table in tables), (
            "all are told"
        )
        held.append(set(tables[0]["classes"].tolist()))
        assert held[-1] >= held[-2]
    assert len(held[-1]) > 3, "two clients were asked at least"


def test_lgfedavg_averages_heads_and_nothing_else() -> None:
    experiment = small_federation(tiny("lgfedavg"))
    records = list(experiment.rounds(2))
    head = 4 * (48 * 10 + 10)
    assert [r.bytes["learn"] for r in records] == [
        {"up": 3 * head, "down": 3 * head},
        {"up": 3 * head, "down": 0},
    ], "the first head comes with the question, the averaged one after it"
    assert [r.bytes["receive"] for r in records] == 2 * [{"up": 0, "down": 3 * head}]
    sizes = [len(c.data) for c in experiment.engine.clients.values()]
    heads = [
        c.model.state_dict()["head.weight"].double() for c in experiment.engine.clients.values()
    ]
    mean = sum(n * w for n, w in zip(sizes, heads, strict=True)) / sum(sizes)
    assert torch.allclose(
        cast(HeadServer, experiment.server).head["weight"].double(), mean, atol=1e-6
    )


def wide(spec: Spec) -> nn.Module:
    """A network whose weights, and not only their distribution, are known."""
    return with_weights(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)), 1
    )


def deep(spec: Spec) -> nn.Module:
    layers = nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10)
    return with_weights(nn.Sequential(*layers), 2)


def with_weights(network: nn.Module, seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return network


def run_network(kind: Any, weights: list[Tensor], x: Tensor) -> Tensor:
    """The logits of one of these networks, from nothing but its weights."""
    x = x.flatten(1) @ weights[0].T + weights[1]
    if kind is deep:
        x = torch.tanh(x) @ weights[2].T + weights[3]
    return x.clamp(min=0) @ weights[-2].T + weights[-1]


def test_lgfedavg_is_what_plain_torch_computes() -> None:
    """Full batches from one start: nothing is random, and every number can be computed beside it."""
    x, y, x_test, y_test = few_digits(120)
    by_label = y.argsort().tolist()
    lists = [by_label[:40], by_label[40:]]  # other classes, and one client counts twice as much
    algorithm = LGFedAvg(features=8, epochs=2, batch_size=1000, lr=0.5)
    kinds = [wide, deep]
    data = Data(source=(x, y, x_test, y_test), augment=False)  # type: ignore[arg-type]
    experiment = Experiment(algorithm, data=data, partition=lists, models=kinds, device="cpu")
    records = list(experiment.rounds(3))

    mean, std = x.double().div(255).mean(), x.double().div(255).std(correction=0)

    def normalised(pixels: Tensor) -> Tensor:
        return (pixels.double() / 255 - mean) / std

    spec = experiment.task.spec
    assert spec.mean == pytest.approx((float(mean),), rel=1e-5)
    assert spec.std == pytest.approx((float(std),), rel=1e-5)
    networks = [[p.detach().double() for p in kind(SPEC).parameters()] for kind in kinds]
    head = networks[0][-2:]
    for record in records:
        for k, kind in enumerate(kinds):
            weights = networks[k][:-2] + head
            for _ in range(2):
                weights = [w.requires_grad_() for w in weights]
                said = run_network(kind, weights, normalised(x[lists[k]]))
                right = said.log_softmax(1)[torch.arange(len(lists[k])), y[lists[k]]]
                slopes = torch.autograd.grad(-right.mean(), weights)
                weights = [(w - 0.5 * s).detach() for w, s in zip(weights, slopes, strict=True)]
            networks[k] = weights
        head = [(networks[0][at] + 2 * networks[1][at]) / 3 for at in (-2, -1)]
        for k, kind in enumerate(kinds):
            for name, weights in (("", networks[k]), ("shared_", networks[k][:-2] + head)):
                said = run_network(kind, weights, normalised(x_test)).argmax(1)
                expected = float((said == y_test).double().mean())
                assert record.clients[k][f"{name}global"] == pytest.approx(expected), (name, k)
    shared = cast(HeadServer, experiment.server).head
    assert torch.allclose(shared["weight"].double(), head[0], atol=1e-5)
    assert torch.allclose(shared["bias"].double(), head[1], atol=1e-5)
    for k, client in experiment.engine.clients.items():
        for parameter, expected_weights in zip(client.model.parameters(), networks[k], strict=True):
            assert torch.allclose(parameter.double(), expected_weights, atol=1e-5)
    first = records[0].clients[0]
    assert first["global"] != first["shared_global"], "two moments, two numbers"


@pytest.mark.parametrize("name", ["lgfedavg", "fedgen"])
def test_networks_that_share_a_head_start_from_one(name: str) -> None:
    experiment = small_federation(tiny(name, lr=1e-12))
    clients = experiment.engine.clients
    first = {at: w.clone() for at, w in head_state(clients[0].model).items()}
    assert not torch.allclose(head_state(clients[1].model)["weight"], first["weight"], atol=1e-3)
    (record,) = experiment.rounds(1)
    for client in clients.values():
        assert torch.allclose(head_state(client.model)["weight"], first["weight"], atol=1e-6)
    assert "before_global" in record.clients[0], "the first head tells nothing of others"


def test_fedghs_clients_start_from_their_own_heads() -> None:
    experiment = small_federation(tiny("fedgh", lr=1e-12))
    clients = experiment.engine.clients
    own = {k: head_state(c.model)["weight"].clone() for k, c in clients.items()}
    experiment.step()
    for k, client in clients.items():
        assert torch.allclose(head_state(client.model)["weight"], own[k], atol=1e-6)


def test_networks_of_another_run_keep_their_heads(tmp_path: Path) -> None:
    small_federation(tiny("fedgh", lr=0.1), out=tmp_path / "run").step()
    experiment = small_federation(tiny("lgfedavg", lr=1e-12), start=tmp_path / "run")
    heads = {k: head_state(c.model)["weight"].clone() for k, c in experiment.engine.clients.items()}
    record = experiment.step()
    assert record.bytes["learn"]["down"] == 0
    for k, client in experiment.engine.clients.items():
        assert torch.allclose(head_state(client.model)["weight"], heads[k], atol=1e-6)


@pytest.mark.parametrize("name", ["lgfedavg", "fedgen", "fedgh"])
def test_networks_are_judged_with_their_own_head_and_with_the_shared_one(name: str) -> None:
    experiment = small_federation(tiny(name, batch_size=10, lr=0.1, fraction=0.34))
    *_, record = experiment.rounds(2)
    shared = cast(HeadServer, experiment.server).head
    for k, client in experiment.engine.clients.items():
        assert same(cast(HeadClient, client).head, shared), "who did not take part has it too"
        by_shared = copy.deepcopy(client.model)
        load_head(by_shared, shared)
        for test, data in client.tests.items():
            assert record.clients[k][test] == accuracy(client.model, data)
            assert record.clients[k][f"shared_{test}"] == accuracy(by_shared, data)
    metrics = record.clients.values()
    assert any(m["global"] != m["shared_global"] for m in metrics)


def test_an_evaluation_looks_at_each_image_once_and_changes_nothing() -> None:
    experiment = small_federation(tiny("lgfedavg"))
    experiment.step()
    client = cast(HeadClient, experiment.engine.clients[1])
    before = {at: w.clone() for at, w in client.model.state_dict().items()}
    seen: list[int] = []
    client.model.features, features = (  # type: ignore[method-assign]
        lambda x: (seen.append(len(x)), features(x))[1],
        client.model.features,
    )
    random = torch.get_rng_state()
    experiment.algorithm.evaluate(client)
    assert sum(seen) == sum(len(data) for data in client.tests.values())
    assert torch.equal(torch.get_rng_state(), random)
    assert same(dict(client.model.state_dict()), before)


def test_who_missed_the_head_is_sent_it_with_the_next_question() -> None:
    experiment = small_federation(tiny("lgfedavg", lr=1e-12))
    experiment.step()
    server, client = cast(HeadServer, experiment.server), experiment.engine.clients[1]
    assert server.holders == [0, 1, 2]
    # What a checkpoint of an older version lacks, and a client whose `receive` failed.
    server.recall({at: value for at, value in server.memory().items() if at != "holders"})
    client.recall({at: value for at, value in client.memory().items() if at != "head"})
    assert (server.holders, cast(HeadClient, client).head) == ([], {})
    head = {at: w.clone() for at, w in server.head.items()}
    record = experiment.step()
    assert record.bytes["learn"]["down"] == 3 * 4 * (48 * 10 + 10)
    assert torch.allclose(head_state(client.model)["weight"], head["weight"], atol=1e-6)
    assert server.holders == [0, 1, 2]


def test_fedghs_head_by_hand() -> None:
    zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    server = HeadServer(SPEC, {}, None, torch.device("cpu"))
    server.head = zero
    table: ByClass = {
        "classes": torch.tensor([0, 1]),
        "vectors": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
    }
    head = FedGH(features=2, server_epochs=1, server_lr=0.5).train_head(server, table)
    # Both classes are thought equally likely, so that the slope of a row is the mean of ±1/2 times the vectors.
    assert head["weight"].tolist() == [[0.125, -0.25], [-0.125, 0.25]]
    assert head["bias"].tolist() == [0.0, 0.0]
    assert zero["weight"].abs().sum() == 0, "what it had is not overwritten"


def test_fedghs_clients_train_on_with_the_servers_head() -> None:
    algorithm = tiny("fedgh", lr=1e-12)
    experiment = small_federation(algorithm)
    first, second = experiment.rounds(1), experiment.rounds(2)
    (told,) = first
    head = cast(HeadServer, experiment.server).head
    prototypes = sum(
        4 * 48 + 8 for c in experiment.engine.clients.values() for _ in c.data.labels.unique()
    )
    down = 3 * 4 * (48 * 10 + 10)
    assert told.bytes == {
        "learn": {"up": prototypes, "down": 0},
        "receive": {"up": 0, "down": down},
    }, "clients begin with heads of their own"
    (again,) = second
    assert again.bytes == told.bytes
    for client in experiment.engine.clients.values():
        assert torch.allclose(head_state(client.model)["weight"], head["weight"], atol=1e-6)
    assert not torch.allclose(head["weight"], cast(HeadServer, experiment.server).head["weight"]), (
        "it goes on"
    )


def test_fedghs_head_knows_what_an_average_of_heads_does_not() -> None:
    experiment = federation(
        tiny("fedgh", lr=0.1, server_epochs=100, server_lr=5.0), partition=Classes(per_client=4)
    )
    (_,) = experiment.rounds(1)
    clients = list(experiment.engine.clients.values())
    prototypes, heads = (
        concatenate_tables(mean_features(client) for client in clients),
        [head_state(c.model) for c in clients],
    )

    def right(weight: Tensor, bias: Tensor) -> float:
        said = F.linear(prototypes["vectors"], weight, bias).argmax(1)
        return float((said == prototypes["classes"]).double().mean())

    mean = {at: torch.stack([head[at] for head in heads]).mean(0) for at in ("weight", "bias")}
    assert right(**cast(HeadServer, experiment.server).head) > right(**mean) + 0.5


def on_a_line(*places: float) -> ByClass:
    return {
        "classes": torch.arange(len(places)),
        "vectors": F.pad(torch.tensor(places)[:, None], (0, 7)),
    }


def test_fedtgps_margin_by_hand() -> None:
    assert float(fedtgp.prototype_margin(on_a_line(0.0, 3.0, 4.0), 100.0)) == 3.0, (
        "the loneliest class has a neighbour at 3"
    )
    assert float(fedtgp.prototype_margin(on_a_line(0.0, 3.0, 4.0), 2.0)) == 2.0
    assert float(fedtgp.prototype_margin(on_a_line(5.0), 100.0)) == 0.0, (
        "a single class has no neighbour"
    )


def test_fedtgps_loss_by_hand() -> None:
    class Fixed(fedtgp.TrainablePrototypes):
        def forward(self) -> Tensor:
            return torch.tensor([[0.0, 0.0], [3.0, 4.0]])

    value = fedtgp.fedtgp_loss(Fixed(2, 2), torch.zeros(1, 2), torch.tensor([0]), torch.tensor(1.5))
    assert float(value) == pytest.approx(math.log(1 + math.exp(1.5 - 5.0)), rel=1e-5), (
        "0 + 1.5 against 5"
    )


def separation(server: fedtgp.Prototypist, **changes: Any) -> float:
    tables = {0: on_a_line(0.0, 2.0), 1: on_a_line(1.0, 3.0)}  # means at 1/2 and 5/2
    algorithm = FedTGP(features=8, server_epochs=300, server_lr=0.03, **changes)
    with seeds.scope(0, "learnt"):
        one, other = algorithm.merge_prototypes(server, Replies(tables, {0: 1, 1: 1}, {}))[
            "vectors"
        ]
    return float((one - other).norm())


def test_fedtgps_prototypes_are_further_apart_than_means_and_with_a_margin_more_so() -> None:
    new = [fedtgp.Prototypist(SPEC, {}, None, torch.device("cpu")) for _ in range(2)]
    with_margin, without = separation(new[0]), separation(new[1], tau=0.0)
    assert new[0].report["margin"] == 2.0
    assert with_margin > without > 2.0
    assert separation(new[0]) > with_margin, "it goes on from where it was"


def test_without_lambda_fedtgps_clients_are_fedprotos() -> None:
    networks = []
    for name in ("fedproto", "fedtgp"):
        experiment = small_federation(tiny(name, lam=0.0))
        records = list(experiment.rounds(2))
        networks.append(
            {
                f"{k}.{at}": w
                for k, c in experiment.engine.clients.items()
                for at, w in c.model.state_dict().items()
            }
        )
    assert same(*networks)
    assert "head_global" in records[-1].clients[0], "and predicts by the nearest prototype"
    assert cast(Follower, experiment.engine.clients[0]).prototypes[0]["classes"].tolist() == list(
        range(10)
    )


def test_feddistill_says_when_nobody_heard_of_its_own_classes() -> None:
    algorithm = tiny("feddistill")

    def told(per_client: int) -> tuple[list[float], list[str]]:
        """The share of images that others told of, by round, and what the run says in the end."""
        rounds = list(
            perceptrons(algorithm, clients=3, partition=Classes(per_client=per_client)).rounds(2)
        )
        return [r.mean("heard") for r in rounds], algorithm.remarks(rounds)

    assert told(10) == ([0.0, 1.0], []), "the first round has nothing to tell yet"
    heard, (said,) = told(2)
    assert heard == [0.0, 0.0]
    assert (
        "no client received a prediction for one of its classes in 2 rounds, so training was local only"
        in said
    )
    assert algorithm.remarks([]) == []
