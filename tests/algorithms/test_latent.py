"""FedGen, whose generator makes features."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from barter.algorithms import FedGen, fedgen
from barter.algorithms.fedgen import GeneratorServer
from barter.algorithms.one_width import HeadServer
from barter.core import seeds
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import State
from barter.data.partition import Classes
from barter.models.generators import LatentGenerator
from barter.ops.synthesis import diversity
from tests.conftest import same, small_federation, state, tiny

SPEC = Spec(1, 1, 2, 2, (0.0,), (1.0,))  # two pixels, as they are


class Identity(Classifier):
    """Logits that are the pixels."""

    feature_dim = 2

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return features


class Table(LatentGenerator):
    """The same features for all noise."""

    def __init__(self, *rows: tuple[float, float]) -> None:
        super().__init__(2, 2, 1, 1)
        self.rows = torch.tensor(rows)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        return self.rows[y]


def test_the_generators_loss_by_hand() -> None:
    weight = torch.tensor(
        [[[math.log(3), 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    )  # 3/4 and 1/2 for class 0
    shares = torch.tensor([[0.25], [0.75]])
    y, noise = torch.tensor([0]), torch.zeros(1, 1)
    value = fedgen.generator_loss(
        Table((1.0, 0.0), (0.0, 0.0)), 0.0, noise, y, shares, weight, torch.zeros(2, 2)
    )
    assert float(value) == pytest.approx(0.25 * math.log(4 / 3) + 0.75 * math.log(2))
    diverse = fedgen.generator_loss(
        Table((1.0, 0.0), (0.0, 0.0)), 2.0, noise, y, shares, weight, torch.zeros(2, 2)
    )
    assert float(diverse - value) == pytest.approx(2.0), (
        "a single feature does not differ from itself"
    )


def test_diversity_by_means() -> None:
    z, noise = torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.tensor([[0.0], [2.0]])
    assert float(diversity(z, noise, norm=1)) == pytest.approx(math.exp(-2 * 3 * 4 / 4)), (
        "two of four pairs, 3 times 4"
    )
    assert float(diversity(z, noise)) == pytest.approx(math.exp(-2 * 10 * 4 / 4))


def test_the_clients_loss_by_hand() -> None:
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)  # logits (1, 0)
    generator, labels = Table((math.log(3), 0.0), (0.0, math.log(7))), torch.tensor([0])
    rest = x, labels, torch.tensor([1]), torch.tensor(0.5)
    value = fedgen.fedgen_loss(Identity(), generator, 3.0, 5.0, *rest)
    plain = math.log(1 + math.exp(-1))
    made = math.log(1 + 1 / 7)  # a feature of class 1, the only one that is known
    q = 1 / (1 + math.exp(-1))
    divergence = 0.75 * math.log(0.75 / q) + 0.25 * math.log(
        0.25 / (1 - q)
    )  # from the answer to a feature of class 0
    assert float(value) == pytest.approx(plain + 0.5 * (3 * made + 5 * divergence), rel=1e-5)


def test_answers_to_features_are_targets_and_do_not_move() -> None:
    class Tilted(Identity):
        def logits(self, features: Tensor) -> Tensor:
            return features + tilt

    tilt = torch.zeros(2, requires_grad=True)
    black = torch.zeros(1, 1, 1, 2)
    rest = black, torch.tensor([0]), torch.tensor([0]), torch.tensor(1.0)
    generator = Table((math.log(3), 0.0), (0.0, 0.0))
    with_it, without = (fedgen.fedgen_loss(Tilted(), generator, 0.0, b, *rest) for b in (1.0, 0.0))
    (slope,) = torch.autograd.grad(with_it - without, tilt)
    assert torch.allclose(slope, torch.tensor([0.5 - 0.75, 0.5 - 0.25]), atol=1e-6), (
        "its own prediction less the target"
    )


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[State, list[int], float]]:
    told, learn = [], FedGen.learn

    def watching(
        self: FedGen, client: Any, head: State, generator: State, known: list[int], strength: float
    ) -> Any:
        told.append((dict(generator), known, strength))
        return learn(self, client, head, generator, known, strength)

    watching.__annotations__ = learn.__annotations__
    watching.__name__ = "learn"
    monkeypatch.setattr(FedGen, "learn", watching)
    return told


def test_clients_are_told_the_generator_that_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    told = watched(monkeypatch)
    experiment = small_federation(tiny("fedgen"), partition=Classes(per_client=3))
    experiment.engine.cores = 1
    list(experiment.rounds(1))
    trained = {
        at: w.clone() for at, w in cast(GeneratorServer, experiment.server).generator.items()
    }
    list(experiment.rounds(2))
    assert [strength for _, _, strength in told] == [1.0] * 3 + [0.98] * 3
    assert told[0][:2] == ({}, []), "there is none in the first round"
    held = sorted({int(y) for c in experiment.engine.clients.values() for y in c.data.labels})
    assert len(held) < 10
    for generator, known, _ in told[3:]:
        assert known == held, "labels are of classes that somebody has"
        assert same(generator, trained)
    assert not same(trained, cast(GeneratorServer, experiment.server).generator), "it is trained on"


def test_clients_learn_from_the_generator_they_are_told() -> None:
    heads = []
    for shift in (0.0, 1.0):
        algorithm = cast(FedGen, tiny("fedgen"))
        client = small_federation(algorithm).engine.clients[0]
        with seeds.scope(0, "generator"):
            generator = dict(LatentGenerator(10, 48, 8, 16).state_dict())
        generator["end.bias"] = generator["end.bias"] + shift
        with seeds.scope(0, "learn"):
            heads.append(algorithm.learn(client, {}, generator, [0, 1], 1.0)["head"])
    assert not torch.allclose(heads[0]["weight"], heads[1]["weight"], atol=1e-3)


def test_without_its_terms_it_is_lgfedavg() -> None:
    ends = []
    for name, changes in (("lgfedavg", {}), ("fedgen", {"alpha": 0.0, "beta": 0.0})):
        experiment = small_federation(tiny(name, epochs=2, **changes))
        list(experiment.rounds(2))
        everything = {at: v for at, v in state(experiment).items() if ".clients." in at}
        ends.append(everything | cast(HeadServer, experiment.server).head)
    assert len(ends[0]) > 10
    assert same(*ends)


def test_the_generator_believes_those_who_know_a_class() -> None:
    server = GeneratorServer(SPEC, {}, None, torch.device("cpu"))
    right = torch.tensor([[4.0, 0.0], [-4.0, 0.0]])
    heads = {
        0: {"weight": right, "bias": torch.zeros(2)},
        1: {"weight": -right, "bias": torch.zeros(2)},
    }
    algorithm = FedGen(features=2, noise=4, hidden=16)
    with seeds.scope(0, "server"):
        algorithm.improve(
            server, heads, torch.tensor([[9, 0], [0, 9]])
        )  # each knows one class, and says so of x > 0
    assert server.known == [0, 1]
    assert server.report["generator_loss"] > 0
    generator = LatentGenerator.from_state(server.generator, 2)
    drawn = generator(torch.rand(20, 4), torch.arange(20) % 2)
    assert bool((drawn[:, 0] > 0).all()), (
        "the other's opinion of a class it never saw does not count"
    )


def test_heads_learn_classes_that_a_client_never_saw() -> None:
    def named(**weights: float) -> float:
        changes = {"batch_size": 10, "hidden": 64, "generator_steps": 50, **weights}
        experiment = small_federation(
            tiny("fedgen", **changes),
            clients=2,
            models="small-mlp",
            partition=Classes(per_client=5),
        )
        *_, last = experiment.rounds(3)
        return last.mean("global")

    assert named() > named(alpha=0.0, beta=0.0) + 0.05
