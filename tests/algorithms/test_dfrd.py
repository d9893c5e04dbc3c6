from __future__ import annotations

from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from barter.algorithms import dfrd
from barter.algorithms.dfrd import (
    DFRD,
    Codes,
    Ensemble,
    embedding_excess,
    label_weights,
    moving_average,
    transferability_loss,
    use_average,
    usefulness,
)
from barter.core.evaluation import accuracy
from barter.core.images import Spec
from barter.core.payload import isolate, nbytes
from barter.core.record import Round
from barter.engines.local import LocalEngine
from barter.models.generators import Merge, MergeGenerator
from barter.ops.fit import Trainer, adam, fit, sgd
from barter.ops.synthesis import build_ensemble, diversity, fidelity, to_network_input
from tests.conftest import federation, same, small_federation, tiny


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


E, F = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]), np.array([[0.5, 0.7, 0.0], [1.0, -1.0, 2.0]])


def spec(side: int = 32, classes: int = 10, channels: int = 3) -> Spec:
    return Spec(channels, side, side, classes, (0.5,) * channels, (0.5,) * channels)


@pytest.mark.parametrize(("over", "size"), [("batch", 2), ("chosen", 1)])
def test_transferability_by_hand(over: str, size: int) -> None:
    p, q = (
        softmax(F / 10),
        softmax(E / 10),
    )  # KL(student ‖ ensemble): the direction of the authors' code
    divergence = (p * np.log(p / q)).sum(1)
    chosen = torch.tensor([1.0, 0.0])
    value = transferability_loss(torch.tensor(E), torch.tensor(F), chosen, 10.0, over)
    assert value.item() == pytest.approx(-divergence[0] / size)
    other = (q * np.log(q / p)).sum(1)
    assert value.item() != pytest.approx(-other[0] / size)


@pytest.mark.parametrize("over", ["batch", "chosen"])
def test_where_no_sample_satisfies_the_rule_transferability_is_zero(over: str) -> None:
    ensemble = torch.tensor(E, requires_grad=True)
    value = transferability_loss(ensemble, torch.tensor(F), torch.zeros(2), 10.0, over)
    value.backward()
    assert value.item() == 0
    assert ensemble.grad is not None
    assert ensemble.grad.abs().sum().item() == 0, "and so is its gradient, not NaN"


def test_the_rules_by_hand() -> None:
    # Argmax of ensemble and student: right/right, right/wrong, wrong/right, both wrong alike, both wrong, differently.
    ensemble = torch.eye(3)[[0, 0, 1, 1, 1]]
    student = torch.eye(3)[[0, 1, 0, 1, 2]]
    y = torch.zeros(5, dtype=torch.long)
    assert usefulness(ensemble, student, y, "student-wrong").tolist() == [0, 1, 0, 0, 0]
    assert usefulness(ensemble, student, y, "differ").tolist() == [0, 1, 1, 0, 1]
    assert usefulness(ensemble, student, y, "all").tolist() == [1] * 5


def test_fidelity_diversity_and_excess_by_hand() -> None:
    y = torch.tensor([0, 1])
    assert fidelity(torch.tensor(E), y).item() == pytest.approx(
        -np.log(softmax(E)[[0, 1], [0, 1]]).mean()
    )
    x, h = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0], [4.0]])
    assert diversity(x, h).item() == pytest.approx(np.exp(-(2 * 2 * 9) / 4), rel=1e-4)
    # Lengths 5 and 1 where γ √d is 2: only the first is in excess.
    names = torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert embedding_excess(names, 1.0).item() == pytest.approx((5 - 2) / 2)


def test_weights_and_labels_by_hand() -> None:
    counts = torch.tensor([[6.0, 0.0, 1.0, 0.0], [2.0, 4.0, 3.0, 0.0]])
    tau, p = label_weights(counts)
    assert torch.allclose(tau, torch.tensor([[0.75, 0.0, 0.25, 0.0], [0.25, 1.0, 0.75, 0.0]]))
    assert torch.allclose(p, torch.tensor([8.0, 4.0, 4.0, 0.0]) / 16)


def test_the_opinion_is_weighted_by_label() -> None:
    class Says(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 2), self.value)

    ensemble = Ensemble([Says(1.0), Says(5.0)])  # type: ignore[list-item]
    opinion = ensemble(torch.zeros(2, 1), torch.tensor([[0.75, 0.0], [0.25, 1.0]]))
    assert opinion.tolist() == [[2.0, 2.0], [5.0, 5.0]]


def test_the_slow_generator_by_hand() -> None:
    slow, now = (
        {"w": torch.tensor([4.0]), "n": torch.tensor(1)},
        {"w": torch.tensor([8.0]), "n": torch.tensor(2)},
    )
    later = moving_average(slow, now, 0.75)
    assert later["w"].item() == 5.0
    assert later["n"].item() == 2


@pytest.mark.parametrize(("start", "factor"), [("copy", 1.0), ("scaled", 0.5)])
def test_how_the_slow_generator_starts(start: Any, factor: float) -> None:
    experiment = small_federation(tiny("dfrd", slow_start=start))
    list(experiment.rounds(1))
    server: Any = experiment.server
    now, slow = server.generator["body.0.weight"], server.slow["body.0.weight"]
    assert torch.allclose(slow, factor * now)
    list(experiment.rounds(2))
    expected = 0.5 * slow + 0.5 * server.generator["body.0.weight"]
    assert torch.allclose(server.slow["body.0.weight"], expected)


def test_the_generator_has_the_parameters_of_the_authors() -> None:
    for noise, parameters in ((64, 3_153_280), (100, 3_448_552)):
        assert sum(p.numel() for p in MergeGenerator(spec(), noise).parameters()) == parameters
    for side in (8, 16, 28, 64, 100):
        images = MergeGenerator(spec(side, channels=1), 8)(
            torch.randn(3, 8), torch.tensor([1, 2, 3])
        )
        assert images.shape == (3, 1, side, side)
        assert images.abs().max() <= 1


@pytest.mark.parametrize("side", [8, 16, 32])
def test_images_drawn_by_matrix_products_are_those_of_the_layers(side: int) -> None:
    generator = MergeGenerator(spec(side), 8)
    h = generator.merge_inputs(torch.randn(3, 8), torch.tensor([1, 2, 3]))
    assert torch.allclose(generator.generate(h), generator.body(h[:, :, None, None]), atol=1e-5)


@pytest.mark.parametrize("merge", get_args(Merge))
def test_the_merge_operators_by_hand(merge: Merge) -> None:
    generator = MergeGenerator(spec(8, classes=3), 2, merge)
    z, y = torch.tensor([[2.0, 3.0]]), torch.tensor([1])
    if generator.names is not None:
        generator.names.weight.data[1] = torch.tensor([10.0, 20.0])
    expected = {
        "mul": [20.0, 60.0],
        "add": [12.0, 23.0],
        "cat": [2.0, 3.0, 10.0, 20.0],
        "ncat": [2.0, 3.0, 0.0, 1.0, 0.0],
        "none": [2.0, 3.0],
    }
    assert generator.merge_inputs(z, y).tolist() == [expected[merge]]
    assert (generator.names is None) == (merge in ("ncat", "none"))


class Fixed(nn.Module):
    """A model that sees the same in every image."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits + 0 * x.sum()


class Halves(nn.Module):
    """A network that sees how bright the two halves of an image are, and is used to some brightness of each."""

    def __init__(self, axis: int, mean: Any, var: float, rows: Any) -> None:
        super().__init__()
        self.axis, self.rows, self.norm = axis, rows, nn.BatchNorm1d(2, affine=False).eval()
        self.norm.running_mean, self.norm.running_var = torch.tensor(mean), torch.full((2,), var)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (half.mean((1, 2, 3)) for half in x.chunk(2, self.axis))
        self.norm(torch.stack([first, second], 1))
        return torch.tensor(self.rows[0]) + (first - second)[:, None] * torch.tensor(self.rows[1])


@pytest.mark.parametrize(("weight", "bright"), [(DFRD().beta_bn, True), (0.0, False)])
def test_images_are_what_a_client_was_trained_on_though_it_sees_its_class_in_everything(
    weight: float, bright: bool
) -> None:
    """One client has only class 0, bright above and dark below, and says 0 of any image. The other has the rest."""
    torch.manual_seed(0)
    task = spec(8, classes=3, channels=1)
    narrow = Halves(2, [0.6, -0.6], 0.01, [[5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    other = Halves(3, [0.0, 0.0], 0.36, [[-5.0, 0.0, 0.0], [0.0, 2.0, -2.0]])
    ensemble, tau = Ensemble([narrow, other]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])  # type: ignore[list-item]
    algorithm, generator = DFRD(beta_bn=weight, noise=8), MergeGenerator(task, 8)
    trainer, y = (
        Trainer.of(generator, adam(algorithm.generator_lr, beta1=0.5)),
        torch.arange(3).repeat(10),
    )
    loss = partial(algorithm.generator_loss, generator, ensemble, other, task)  # type: ignore[arg-type]
    for _ in range(60):
        trainer.step(loss, torch.randn(30, 8), y, tau[:, y])
    x = to_network_input(generator(torch.randn(30, 8), y), task, "matched")
    assert (ensemble(x, tau[:, y]).argmax(1) == y).float().mean() > 0.9, (
        "the clients see the labels either way"
    )
    above, below = (half.mean((1, 2, 3)) for half in x[y == 0].chunk(2, 2))
    assert ((above - below).mean() > 0.4) == bright


def test_the_generators_loss_is_the_sum_of_its_terms() -> None:
    torch.manual_seed(0)
    task = spec(8, classes=3)
    algorithm = DFRD(beta_tran=0.5, beta_div=2.0, beta_bn=0.2, beta_ey=3.0, gamma=0.1, noise=4)
    generator = MergeGenerator(task, 4).eval()
    z, y = torch.randn(2, 4), torch.tensor([0, 2])
    told = Halves(2, [0.5, -0.5], 0.1, [[0.0] * 3, [0.0] * 3])  # has no opinion, but statistics
    ensemble = Ensemble([Fixed(E), told])  # type: ignore[list-item]
    value = algorithm.generator_loss(generator, ensemble, Fixed(F), task, z, y, torch.ones(2, 2))  # type: ignore[arg-type]
    h = generator.merge_inputs(z, y)
    s = to_network_input(generator.generate(h), task, "matched")
    names = generator.names(y) if generator.names is not None else torch.zeros(2, 4)
    # The ensemble names both rightly, the student only the second.
    chosen = torch.tensor([1.0, 0.0])
    parts = [
        fidelity(torch.tensor(E).float(), y),
        0.5
        * transferability_loss(
            torch.tensor(E).float(), torch.tensor(F).float(), chosen, 10.0, "batch"
        ),
        2.0 * diversity(s, h),
        0.2 * ensemble.logits_and_distance(s, torch.ones(2, 2))[1],
        3.0 * embedding_excess(names, 0.1),
    ]
    assert value.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
    assert all(part.item() != 0 for part in parts)


@pytest.mark.parametrize(("squared", "factor"), [(True, 100.0), (False, 1.0)])
def test_the_global_loss_by_hand(squared: bool, factor: float) -> None:
    task = spec(8, classes=3)
    algorithm = DFRD(square_temperature=squared, alpha=0.5, noise=4)
    generator = MergeGenerator(task, 4)
    codes = Codes(torch.randn(2, 4), torch.tensor([0, 2]), torch.ones(1, 2))
    given: Any = (Ensemble([Fixed(E)]), Fixed(F), task)  # type: ignore[list-item]
    p, q = softmax(E / 10), softmax(F / 10)  # KL(ensemble ‖ global model)
    divergence = (p * np.log(p / q)).sum(1).mean()
    first = algorithm.global_loss(generator, None, *given, codes, None)
    assert first.item() == pytest.approx(factor * divergence, rel=1e-4)
    later = algorithm.global_loss(generator, generator, *given, codes, codes)
    assert later.item() == pytest.approx(factor * 1.5 * divergence, rel=1e-4)
    student = given[1]
    later.backward()
    assert student.logits.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in generator.parameters()), (
        "the generator only draws here"
    )


def test_a_class_nobody_holds_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small_federation(tiny("dfrd"), partition="classes")
    held = sum((c.data.class_counts() for c in experiment.engine.clients.values()), torch.zeros(10))
    assert (held == 0).any()
    drawn: list[Tensor] = []
    multinomial = torch.multinomial

    def watched(p: Tensor, size: int, replacement: bool) -> Tensor:
        drawn.append(multinomial(p, size, replacement=replacement))
        return drawn[-1]

    monkeypatch.setattr(torch, "multinomial", watched)
    list(experiment.rounds(2))
    labels = torch.cat(drawn)
    assert len(labels) > 20
    assert (held[labels] > 0).all()
    assert all(torch.isfinite(w).all() for w in experiment.server.model.state_dict().values())


def test_without_steps_that_move_it_it_is_its_base() -> None:
    """With a learning rate near zero the global model is what the base method averaged."""
    settings = {"epochs": 1, "batch_size": 50, "masked_loss": False}
    quiet = small_federation(
        tiny("dfrd", global_lr=1e-30, global_weight_decay=0.0), models="small-cnn"
    )
    base = small_federation(tiny("fedrolex", **settings), models="small-cnn")
    list(quiet.rounds(2))
    list(base.rounds(2))
    assert same(*(dict(e.server.model.state_dict()) for e in (quiet, base)))


def test_after_fedavg_it_starts_from_fedavgs_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    path = LocalEngine._path
    monkeypatch.setattr(LocalEngine, "_path", lambda self, method, k: path(self, "update", k))
    plain = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.05, "norm": "running"}
    quiet = small_federation(
        tiny("dfrd", base="fedavg", global_lr=1e-30, global_weight_decay=0.0, **plain)
    )
    fedavg = small_federation(tiny("fedavg"))
    list(quiet.rounds(2))
    list(fedavg.rounds(2))
    assert same(*(dict(e.server.model.state_dict()) for e in (quiet, fedavg)))


def test_alone_it_needs_no_common_architecture_and_sends_nothing_down() -> None:
    experiment = small_federation(tiny("dfrd", base="none"), models="small-cnn,small-mlp")
    assert experiment.architectures == ["small-cnn", "small-mlp", "small-cnn"]
    before = experiment.server.model.state_dict()["head.weight"].clone()
    *_, record = experiment.rounds(2)
    assert record.traffic("down") == 0
    assert (
        record.clients[1]["bytes_up"]
        == nbytes(dict(experiment.engine.clients[1].model.state_dict())) + 80
    )
    assert not torch.equal(experiment.server.model.state_dict()["head.weight"], before)


def test_a_client_that_fails_is_no_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DFRD.train

    def train(self: DFRD, client: Any, w: Any) -> Any:
        if client.id == 1:
            raise ValueError("no mood")
        return original(self, client, w)

    monkeypatch.setattr(DFRD, "train", train)
    seen: list[int] = []
    forward = Ensemble.forward

    def watched(self: Ensemble, x: Tensor, weights: Tensor) -> Tensor:
        seen.append(len(self.models))
        assert torch.allclose(weights.sum(0), torch.ones(len(x)))
        return forward(self, x, weights)

    monkeypatch.setattr(Ensemble, "forward", watched)
    (record,) = small_federation(tiny("dfrd"), min_clients=1).rounds(1)
    assert [f for f in record.failures if "client 1" in f and "no mood" in f]
    assert set(seen) == {2}


def test_the_published_settings_run_and_keep_no_statistics() -> None:
    changes = {"iterations": 2, "samples": 4, "noise": 8}
    experiment = small_federation(DFRD.preset("paper", changes))
    (record,) = experiment.rounds(1)
    assert record.server["global_loss"] >= 0
    assert not [at for at in experiment.server.model.state_dict() if "running" in at]


@pytest.mark.slow
def test_the_server_learns_from_the_clients_on_generated_images_alone() -> None:
    settings = {"epochs": 5, "iterations": 15, "global_steps": 5, "samples": 32, "noise": 16}
    experiment = federation(DFRD(base="none", **settings), models="small-mlp", partition="iid")
    first, *_, last = [r.server["global"] for r in experiment.rounds(3)]
    assert last > max(0.3, first)


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 0.0025),
        ({"base": "none"}, 0.01),
        ({"global_lr": 0.5}, 0.5),
        (dict(DFRD.presets["paper"]), 0.01),
    ],
)
def test_the_rate_of_the_global_model(
    changes: Any, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    monkeypatch.setattr(dfrd, "sgd", lambda lr, **settings: used.append(lr) or sgd(lr, **settings))
    list(small_federation(tiny("dfrd", **{**changes, "iterations": 2})).rounds(1))
    assert used == [rate]


@pytest.mark.slow
def test_fine_tuning_mends_what_averaging_broke() -> None:
    """Two networks that started from different weights know the digits; their mean does not."""
    algorithm = DFRD(base="fedavg", iterations=10, samples=32, noise=16)
    experiment = federation(algorithm, models="small-cnn", partition="iid", clients=2)
    server: Any = experiment.server
    torch.manual_seed(0)
    weights = {}
    for k, client in experiment.engine.clients.items():
        for part in client.model.modules():
            if isinstance(part, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                part.reset_parameters()
        fit(client, epochs=3, batch_size=10, recipe=sgd(0.02, 0.9))
        weights[k] = isolate(dict(client.model.state_dict()))
    server.model.load_state_dict({at: (w + weights[1][at]) / 2 for at, w in weights[0].items()})
    server.averaged = isolate(dict(server.model.state_dict()))
    tau, p = label_weights(torch.ones(2, 10))
    ensemble, (generator, _) = build_ensemble(server, weights), algorithm.load_generators(server)
    algorithm.play(server, generator, None, ensemble, tau, p)
    algorithm.report_quality(server, generator, ensemble, tau, p)
    assert experiment.test is not None
    told = algorithm.evaluate_server(server, experiment.test)
    assert (
        min(accuracy(c.model, experiment.test) for c in experiment.engine.clients.values()) > 0.85
    )
    assert told["averaged"] < 0.5
    assert told["global"] > told["averaged"] + 0.15
    assert server.report["agreement"] > server.report["agreement_before"] + 0.15
    assert server.report["recognised"] > 0.2


def test_the_record_has_the_average_beside_what_was_made_of_it() -> None:
    experiment = federation(tiny("dfrd"), models="small-cnn")
    first, last = experiment.rounds(2)
    assert first.server["averaged"] != first.server["global"]
    server: Any = experiment.server
    before = isolate(dict(server.model.state_dict()))
    with use_average(server):
        assert experiment.test is not None
        assert accuracy(server.model, experiment.test) == last.server["averaged"]
        assert not same(before, dict(server.model.state_dict()))
    assert same(before, dict(server.model.state_dict()))
    with pytest.raises(MemoryError), use_average(server):
        raise MemoryError
    assert same(before, dict(server.model.state_dict())), "also if the block raises"
    (alone,) = federation(tiny("dfrd", base="none")).rounds(1)
    assert "averaged" not in alone.server
    assert {"recognised", "agreement", "variety", "contrast", "strangeness"} <= alone.server.keys()


def test_remarks_on_images_that_are_alike_and_on_a_rate_too_high() -> None:
    def rounds(variety: float, *pairs: tuple[float, float]) -> list[Round]:
        told = [{"averaged": a, "global": g, "variety": variety} for a, g in pairs]
        return [
            Round(round=t, server=s, clients={}, bytes={}, seconds={}, failures=[])
            for t, s in enumerate(told, 1)
        ]

    assert DFRD().remarks([]) == []
    assert DFRD().remarks(rounds(0.8, (0.9, 0.8), (0.8, 0.9))) == []
    (rate,) = DFRD().remarks(rounds(0.8, (0.9, 0.8), (0.8, 0.9), (0.9, 0.7)))
    assert "in 2 of 3 rounds" in rate
    assert "global_lr" in rate
    (alike,) = DFRD().remarks(rounds(0.04, (0.8, 0.9)))
    assert "beta_div" in alike
