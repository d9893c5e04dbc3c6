"""Methods whose server draws images: FedFTG, DENSE, FedZKT, FedIOD."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from barter import Experiment
from barter.algorithms import fedftg
from barter.algorithms.fedftg import FedFTG
from barter.core import seeds
from barter.core.images import Spec
from barter.data.partition import Classes
from barter.engines.local import LocalEngine
from barter.models.generators import Decoder
from barter.ops.synthesis import Artist, Ensemble, diversity, named, painted
from tests.conftest import federation, same, tiny

SPEC = Spec(1, 8, 8, 2, (0.0,), (1.0,))
TWO: dict[str, Any] = {"partition": Classes(per_client=5), "clients": 2}  # nobody has what the other has


class Says(nn.Module):
    """The same logits of every image, and `slope` times what it is bright."""

    def __init__(self, *logits: float, slope: float = 0.0) -> None:
        super().__init__()
        self.words, self.slope = nn.Parameter(torch.tensor(logits)), slope

    def forward(self, x: Tensor) -> Tensor:
        return self.words + self.slope * x.mean((1, 2, 3))[:, None] * torch.tensor([1.0, 0.0])


def ensemble(*models: nn.Module) -> Ensemble:
    return Ensemble(models).eval().requires_grad_(False)  # type: ignore[arg-type]


def decoder(width: int) -> Decoder:
    with seeds.scope(0, "decoder"):
        return Decoder(width, SPEC).train()


def in_process(algorithm: Any, **options: Any) -> Experiment:
    experiment = federation(algorithm, **options)
    experiment.engine.cores = 1
    return experiment


def weights_of(experiment: Experiment) -> dict[str, Tensor]:
    return {at: w.clone() for at, w in experiment.server.model.state_dict().items()}


def test_fedftgs_generator_loss_by_hand() -> None:
    generator, z, y = decoder(5), torch.randn(2, 3), torch.tensor([0, 1])
    teachers, model = ensemble(Says(math.log(3), 0.0), Says(0.0, 2.0)), Says(1.0, 1.0)
    weights = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    loss = fedftg.hard_samples(generator, teachers, model, SPEC, 3.0, 5.0, z, y, weights)  # type: ignore[arg-type]
    # Mean absolute gaps of logits: the first client's are log 3 - 1 and 1, the second's 1 and 1.
    first = (math.log(3) - 1 + 1) / 2
    gap = (0.75 * first + 0.25 * 1 + 1 * 1) / 2
    # Wrong about class 0: 1 - 3/4 and the second's; about class 1 only the second is asked, who knows it.
    second = math.log(1 + math.exp(2)), math.log(1 + math.exp(-2))
    faithful = (0.75 * -math.log(0.75) + 0.25 * second[0] + second[1]) / 2
    x = painted(generator, named(z, y, 2), SPEC)
    expected = 3 * faithful + 5 * diversity(x, z, norm=1).item() - gap
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_fedftg_seeks_where_the_average_moves_and_not_where_a_teacher_does() -> None:
    generator, z, y, weights = decoder(5), torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.ones(1, 4)

    def slope(teacher: float, student: float) -> float:
        given = ensemble(Says(0.0, 0.0, slope=teacher)), Says(9.0, 9.0, slope=student), SPEC
        loss = fedftg.hard_samples(generator, *given, 0.0, 0.0, z, y, weights)  # type: ignore[arg-type]
        return sum(float(g.abs().sum()) for g in torch.autograd.grad(loss, list(generator.start.parameters())))

    assert slope(teacher=2.0, student=0.0) == 0
    assert slope(teacher=0.0, student=2.0) > 0


def test_fedftgs_model_learns_the_weighted_predictions() -> None:
    teachers, model = ensemble(Says(math.log(3), 0.0), Says(0.0, 0.0)), Says(0.0, math.log(4))
    weights, y = torch.tensor([[0.5, 0.0], [0.5, 1.0]]), torch.tensor([0, 1])
    loss = fedftg.global_loss(decoder(5), teachers, model, SPEC, torch.randn(2, 3), y, weights)  # type: ignore[arg-type]
    # Predictions of class 0: 5/8 of the first image, 1/2 of the second; the model's is 1/5. Summed over classes.
    entropy = [-(p * math.log(0.2) + (1 - p) * math.log(0.8)) for p in (5 / 8, 1 / 2)]
    assert loss.item() == pytest.approx(sum(entropy) / 2, rel=1e-5)


def test_fedftg_that_does_not_tune_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    path = LocalEngine._path
    monkeypatch.setattr(LocalEngine, "_path", lambda self, method, k: path(self, "update", k))
    quiet = federation(tiny("fedftg", global_lr=1e-30, global_weight_decay=0.0), models="small-cnn")
    fedavg = federation(tiny("fedavg"), models="small-cnn")
    for experiment in (quiet, fedavg):
        list(experiment.rounds(2))
    assert same(weights_of(quiet), weights_of(fedavg)), "statistics of normalisation too"


def test_fedftg_draws_classes_as_often_as_they_occur_and_asks_who_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, told = FedFTG.learn, []

    def moody(self: FedFTG, client: Any, w: Any) -> Any:
        if client.id == 1:
            raise ValueError("no mood")
        return learn(self, client, w)

    def noted(self: Any, server: Any, teachers: Ensemble, shares: Tensor, p: Tensor) -> None:
        told.append((len(teachers.models), shares, p))

    moody.__annotations__, moody.__name__ = learn.__annotations__, "learn"
    monkeypatch.setattr(FedFTG, "learn", moody)
    monkeypatch.setattr(FedFTG, "tune", noted)
    experiment = in_process(tiny("fedftg"), partition=Classes(per_client=3), min_clients=1)
    list(experiment.rounds(1))
    ((teachers, shares, p),) = told
    counts = torch.stack([experiment.engine.clients[k].data.class_counts() for k in (0, 2)]).float()
    assert teachers == 2
    assert torch.allclose(p, counts.sum(0) / counts.sum())
    assert torch.allclose(shares, torch.nan_to_num(counts / counts.sum(0)))
    assert (p == 0).any()


def test_fedftgs_generator_goes_on_and_its_variety_is_reported() -> None:
    experiment = in_process(tiny("fedftg"))
    (first,) = experiment.rounds(1)
    server = cast(Artist, experiment.server)
    before = dict(server.generator)
    assert first.server["variety"] > 0
    assert first.server["contrast"] > 0
    quiet = in_process(tiny("fedftg", generator_lr=1e-30))
    list(quiet.rounds(1))
    start = cast(Artist, quiet.server).generator["start.weight"].clone()
    list(quiet.rounds(2))
    assert torch.equal(start, cast(Artist, quiet.server).generator["start.weight"]), "not drawn anew"
    list(experiment.rounds(2))
    assert not torch.equal(before["start.weight"], server.generator["start.weight"])


def test_fedftgs_fine_tuning_mends_an_average_of_few_large_clients() -> None:
    def reached(rate: float) -> float:
        settings = {"batch_size": 20, "iterations": 12, "samples": 32, "generator_steps": 2, "global_lr": rate}
        (record,) = federation(tiny("fedftg", **settings), models="small-cnn").rounds(1)
        return record.server["global"]

    assert reached(0.01) > reached(1e-30) + 0.05
