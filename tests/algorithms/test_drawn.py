"""Methods whose server draws images: FedFTG, DENSE, FedZKT, FedIOD."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from barter import Experiment
from barter.algorithms import dense, fedftg, fediod, fedzkt
from barter.algorithms.dense import DENSE, Archive, Sketch
from barter.algorithms.fedftg import FedFTG
from barter.algorithms.fediod import Curator, DiscriminatorClient, FedIOD
from barter.algorithms.fedzkt import FedZKT
from barter.core import seeds
from barter.core.clients import Clients, Replies
from barter.core.images import Spec
from barter.core.payload import nbytes
from barter.data.partition import Classes
from barter.engines.local import LocalEngine
from barter.models.generators import Decoder
from barter.ops.ensemble import class_shares
from barter.ops.statistics import compare_statistics
from barter.ops.synthesis import Artist, Ensemble, diversity, generate_from_codes, label_codes
from tests.conftest import federation, same, small_federation, tiny

SPEC = Spec(1, 8, 8, 2, (0.0,), (1.0,))
TWO: dict[str, Any] = {
    "partition": Classes(per_client=5),
    "clients": 2,
}  # nobody has what the other has


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


def in_process(algorithm: Any, *, of: Any = small_federation, **options: Any) -> Experiment:
    experiment: Experiment = of(algorithm, **options)
    experiment.engine.cores = 1
    return experiment


def weights_of(experiment: Experiment) -> dict[str, Tensor]:
    return {at: w.clone() for at, w in experiment.server.model.state_dict().items()}


@pytest.mark.parametrize("name", ["fedftg", "dense", "fedzkt", "fediod"])
def test_the_experimenter_may_look_at_the_images(name: str) -> None:
    experiment = in_process(tiny(name))
    look = experiment.algorithm.creations
    assert look(experiment.server, lambda y: y[:0]) is None, "there are none yet"
    (record,) = experiment.rounds(1)
    labels, pictures = look(experiment.server, lambda y: torch.arange(len(y))[:4]) or (None, None)
    assert labels is not None
    assert pictures is not None
    assert (len(labels), pictures.shape) == (4, (4, 1, 8, 8))
    assert look(experiment.engine.clients[0], lambda y: y[:0]) is None
    assert {"variety", "contrast"} <= record.server.keys()


def test_fedftgs_generator_loss_by_hand() -> None:
    generator, z, y = decoder(5), torch.randn(2, 3), torch.tensor([0, 1])
    teachers, model = ensemble(Says(math.log(3), 0.0), Says(0.0, 2.0)), Says(1.0, 1.0)
    weights = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    loss = fedftg.hard_sample_loss(generator, teachers, model, SPEC, 3.0, 5.0, z, y, weights)  # type: ignore[arg-type]
    # Mean absolute gaps of logits: the first client's are log 3 - 1 and 1, the second's 1 and 1.
    first = (math.log(3) - 1 + 1) / 2
    gap = (0.75 * first + 0.25 * 1 + 1 * 1) / 2
    # Wrong about class 0: 1 - 3/4 and the second's; about class 1 only the second is asked, who knows it.
    second = math.log(1 + math.exp(2)), math.log(1 + math.exp(-2))
    faithful = (0.75 * -math.log(0.75) + 0.25 * second[0] + second[1]) / 2
    x = generate_from_codes(generator, label_codes(z, y, 2), SPEC)
    expected = 3 * faithful + 5 * diversity(x, z, norm=1).item() - gap
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_fedftg_seeks_where_the_average_moves_and_not_where_a_teacher_does() -> None:
    generator, z, y, weights = (
        decoder(5),
        torch.randn(4, 3),
        torch.tensor([0, 1, 0, 1]),
        torch.ones(1, 4),
    )

    def slope(teacher: float, student: float) -> float:
        given = ensemble(Says(0.0, 0.0, slope=teacher)), Says(9.0, 9.0, slope=student), SPEC
        loss = fedftg.hard_sample_loss(generator, *given, 0.0, 0.0, z, y, weights)  # type: ignore[arg-type]
        return sum(
            float(g.abs().sum())
            for g in torch.autograd.grad(loss, list(generator.start.parameters()))
        )

    assert slope(teacher=2.0, student=0.0) == 0
    assert slope(teacher=0.0, student=2.0) > 0


def test_fedftgs_model_learns_the_weighted_predictions() -> None:
    teachers, model = ensemble(Says(math.log(3), 0.0), Says(0.0, 0.0)), Says(0.0, math.log(4))
    weights, y = torch.tensor([[0.5, 0.0], [0.5, 1.0]]), torch.tensor([0, 1])
    loss = fedftg.ensemble_cross_entropy(
        decoder(5), teachers, model, SPEC, torch.randn(2, 3), y, weights
    )  # type: ignore[arg-type]
    # Predictions of class 0: 5/8 of the first image, 1/2 of the second; the model's is 1/5. Summed over classes.
    entropy = [-(p * math.log(0.2) + (1 - p) * math.log(0.8)) for p in (5 / 8, 1 / 2)]
    assert loss.item() == pytest.approx(sum(entropy) / 2, rel=1e-5)


def test_fedftg_that_does_not_tune_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    path = LocalEngine._path
    monkeypatch.setattr(LocalEngine, "_path", lambda self, method, k: path(self, "update", k))
    quiet = small_federation(
        tiny("fedftg", global_lr=1e-30, global_weight_decay=0.0), models="small-cnn"
    )
    fedavg = small_federation(tiny("fedavg"), models="small-cnn")
    for experiment in (quiet, fedavg):
        list(experiment.rounds(2))
    assert same(weights_of(quiet), weights_of(fedavg)), "statistics of normalisation too"


def test_fedftg_draws_classes_as_often_as_they_occur_and_asks_who_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert torch.equal(start, cast(Artist, quiet.server).generator["start.weight"]), (
        "not drawn anew"
    )
    list(experiment.rounds(2))
    assert not torch.equal(before["start.weight"], server.generator["start.weight"])


@pytest.mark.slow
def test_fedftgs_fine_tuning_mends_an_average_of_few_large_clients() -> None:
    def reached(rate: float) -> float:
        settings = {
            "batch_size": 20,
            "iterations": 12,
            "samples": 32,
            "generator_steps": 2,
            "global_lr": rate,
        }
        (record,) = federation(tiny("fedftg", **settings), models="small-cnn").rounds(1)
        return record.server["global"]

    assert reached(0.01) > reached(1e-30) + 0.05


def test_denses_loss_by_hand() -> None:
    sketch, y = Sketch(SPEC, 4, 3), torch.tensor([0, 1, 1])
    norm = nn.BatchNorm2d(1)
    norm.running_mean, norm.running_var = torch.tensor([1.0]), torch.tensor([4.0])
    teachers = ensemble(nn.Sequential(norm, Says(2.0, 0.0)), Says(0.0, 0.0))
    shares = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    # Together they say (1, 0): class 0 with 1 / (1 + 1/e).
    p = 1 / (1 + math.exp(-1))
    wrong = -(math.log(p) + 2 * math.log(1 - p)) / 3
    distance = 3 + 1  # what is drawn has mean 0 and variance 1

    def value(model: nn.Module, adv: float) -> float:
        loss, x = dense.sketch_loss(sketch, teachers, model, 0.5, adv, y, shares)  # type: ignore[arg-type]
        assert x.shape == (3, 1, 8, 8)
        return loss.item()

    assert value(Says(0.0, 1.0), 0.0) == pytest.approx(wrong + 0.5 * distance, rel=1e-3)
    divergence = p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p)
    assert value(Says(0.0, 1.0), 7.0) == pytest.approx(
        wrong + 0.5 * distance - 7 * divergence, rel=1e-3
    )
    assert value(Says(0.1, 0.0), 7.0) == value(Says(0.1, 0.0), 0.0), "they see the same class"
    by_class = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    loss, _ = dense.sketch_loss(sketch, teachers, Says(1.0, 0.0), 0.0, 0.0, y, by_class)  # type: ignore[arg-type]
    q = 1 / (1 + math.exp(-2))
    assert loss.item() == pytest.approx(-(math.log(q) + 2 * math.log(1 - q)) / 3, rel=1e-5), (
        "each for its own class"
    )


def test_dense_keeps_the_batch_with_the_least_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 1.0, 2.0])

    def counting(sketch: Sketch, *_: Any) -> tuple[Tensor, Tensor]:
        value = next(values)
        return sketch.z.sum() * 0 + value, torch.full((6, 1, 8, 8), value)

    monkeypatch.setattr(dense, "sketch_loss", counting)
    experiment = in_process(tiny("dense", passes=1, generator_steps=3))
    list(experiment.rounds(1))
    server = cast(Archive, experiment.server)
    mean, std = server.spec.mean[0], server.spec.std[0]
    assert (server.pixels[0] == round(255 * min(1.0, mean + std))).all(), (
        "one deviation above the mean, as bytes"
    )


def test_denses_clients_train_once_and_the_server_goes_on() -> None:
    experiment = in_process(tiny("dense"))
    first, second = experiment.rounds(2)
    assert (
        first.clients[1]["bytes_up"]
        == nbytes(dict(experiment.engine.clients[1].model.state_dict())) + 80
    )
    assert first.traffic("down") == second.traffic("down") == second.traffic("up") == 0
    assert [first.clients[k]["global"] for k in range(3)] == [
        second.clients[k]["global"] for k in range(3)
    ]
    before, pixels = weights_of(experiment), cast(Archive, experiment.server).pixels[0]
    list(experiment.rounds(3))
    assert not same(before, weights_of(experiment))
    later = cast(Archive, experiment.server).pixels[0]
    assert (len(pixels), len(later)) == (24, 30), (
        "six of a batch, two batches a round, no more than the pool holds"
    )
    assert torch.equal(later[:18], pixels[6:]), "the oldest went"


def test_dense_asks_who_has_not_handed_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, asked = DENSE.learn, []

    def moody(self: DENSE, client: Any) -> Any:
        asked.append(client.id)
        if asked.count(1) == 1 and client.id == 1:
            raise ValueError("no mood")
        return learn(self, client)

    moody.__annotations__, moody.__name__ = learn.__annotations__, "learn"
    monkeypatch.setattr(DENSE, "learn", moody)
    experiment = in_process(tiny("dense"), min_clients=1)
    list(experiment.rounds(3))
    assert asked == [0, 1, 2, 1]
    assert sorted(cast(Archive, experiment.server).teachers) == [0, 1, 2]


def test_denses_models_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Tensor] = []
    monkeypatch.setattr(DENSE, "distil", lambda self, server, teachers, shares: told.append(shares))
    list(in_process(tiny("dense", passes=1), **TWO).rounds(1))
    assert torch.equal(told[0], torch.full((2, 10), 0.5))


def test_dense_draws_what_somebody_has_for_a_network_of_its_own() -> None:
    experiment = in_process(
        tiny("dense", student="small-mlp"), partition=Classes(per_client=2), models="small-cnn"
    )
    list(experiment.rounds(2))
    held = sum((c.data.class_counts() for c in experiment.engine.clients.values()), torch.zeros(10))
    assert (held == 0).any()
    (labels,) = cast(Archive, experiment.server).labels
    assert (held[labels] > 0).all()
    assert len(labels.unique()) > 1  # type: ignore[no-untyped-call]
    assert experiment.server.model.feature_dim == 256, "an MLP's"


@pytest.mark.slow
def test_denses_images_look_inside_like_the_data() -> None:
    experiment = in_process(
        tiny("dense", epochs=3, student="small-mlp"), of=federation, models="small-cnn", clients=1
    )
    list(experiment.rounds(1))

    def distance(lam_bn: float) -> float:
        server = cast(Archive, experiment.server)
        server.pixels, server.labels = [], []
        algorithm = cast(
            DENSE, tiny("dense", samples=20, generator_steps=15, lam_bn=lam_bn, generator_lr=0.01)
        )
        teachers = ensemble(experiment.engine.clients[0].model)
        with seeds.scope(0, "draw"):
            algorithm.draw(server, teachers, torch.ones(1, 10), torch.arange(10))
        with compare_statistics(teachers) as found:
            teachers.logits_by_model(algorithm.images(server).batch(torch.arange(20)))
        return float(sum(found))

    assert distance(10.0) < 0.8 * distance(0.0)


@pytest.mark.slow
def test_denses_server_learns_from_images_that_it_draws() -> None:
    settings = {
        "epochs": 4,
        "passes": 8,
        "generator_steps": 5,
        "samples": 32,
        "distil_batch": 16,
        "pool": 1000,
    }
    (record,) = in_process(
        tiny("dense", **settings), of=federation, models="small-mlp", clients=2, partition="iid"
    ).rounds(1)
    assert record.server["global"] > 0.4
    assert record.server["variety"] > 0.1


def test_the_sl_loss_by_hand() -> None:
    one, other = (
        torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0], [math.log(4), 0.0]]),
    )
    assert fedzkt.sl_loss(one, other).item() == pytest.approx((2 * 0.25 + 2 * 0.3) / 2)
    assert fedzkt.sl_loss(one + 5, other).item() == pytest.approx((2 * 0.25 + 2 * 0.3) / 2), (
        "of predictions, not logits"
    )


def test_fedzkts_generator_wants_what_its_model_does_not() -> None:
    generator, z = decoder(3), torch.randn(4, 3)
    teachers, model = (
        ensemble(Says(4.0, 0.0), Says(0.0, 0.0, slope=1.0)),
        Says(0.0, math.log(3), slope=-1.0),
    )
    losses = [
        fedzkt.disagreement(generator, teachers, model, SPEC, sign, z) for sign in (-1.0, 1.0)
    ]  # type: ignore[arg-type]
    x = generate_from_codes(generator, z, SPEC)
    together = torch.stack([teacher(x) for teacher in teachers.models]).mean(0)
    assert losses[1].item() == pytest.approx(fedzkt.sl_loss(together, model(x)).item(), rel=1e-5), (
        "of mean logits"
    )
    assert losses[0].item() == -losses[1].item()
    losses[1].backward()
    assert all(parameter.grad is None for parameter in generator.parameters()), (
        "the model learns, the generator draws"
    )
    assert model.words.grad is not None
    losses[0].backward()
    assert all(parameter.grad is not None for parameter in generator.parameters())


def test_fedzkts_clients_get_back_what_they_sent_if_they_are_taught_nothing() -> None:
    experiment = in_process(
        tiny("fedzkt", global_lr=1e-30, momentum=0.0), models="small-cnn,small-mlp"
    )
    (record,) = experiment.rounds(1)
    for metrics in record.clients.values():
        assert metrics["global"] == metrics["before_global"]
        assert metrics["local"] == metrics["before_local"]
        assert metrics["bytes_up"] == metrics["bytes_down"]
    taught = in_process(tiny("fedzkt"), models="small-cnn,small-mlp")
    list(taught.rounds(1))
    for one, other in zip(
        experiment.engine.clients.values(), taught.engine.clients.values(), strict=True
    ):
        mine, theirs = (dict(client.model.state_dict()) for client in (one, other))
        statistics = [at for at in mine if "running" in at]
        assert statistics
        assert same({at: mine[at] for at in statistics}, {at: theirs[at] for at in statistics}), (
            "its own data's"
        )
        assert not same(mine, theirs)


def test_fedzkts_clients_are_taught_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, Any] = {}

    def receive(self: Any, client: Any, w: Any) -> None:
        sent[client.id] = w

    monkeypatch.setattr(FedZKT, "receive", receive)
    experiment = in_process(tiny("fedzkt", global_lr=1e-30, momentum=0.0), models="small-mlp")
    list(experiment.rounds(1))
    for k, client in experiment.engine.clients.items():
        assert same(sent[k], dict(client.model.state_dict())), (
            "not what a sibling of the same network got"
        )


def test_fedzkts_clients_are_held_near_what_they_received() -> None:
    def gone(mu: float) -> float:
        algorithm = cast(FedZKT, tiny("fedzkt", mu=mu, epochs=2))
        client = in_process(algorithm, models="small-mlp").engine.clients[0]
        start = nn.utils.parameters_to_vector(client.model.parameters()).detach().clone()
        with seeds.scope(0, "learn"):
            algorithm.learn(client)
        return float(
            (nn.utils.parameters_to_vector(client.model.parameters()).detach() - start).norm()
        )

    assert gone(10.0) < 0.7 * gone(0.0)


@pytest.mark.slow
def test_fedzkt_brings_a_client_with_few_images_what_the_others_know() -> None:
    settings = {
        "epochs": 4,
        "batch_size": 20,
        "iterations": 20,
        "client_steps": 40,
        "samples": 32,
        "noise": 32,
    }
    shares = [list(range(500)), list(range(500, 1000)), list(range(1000, 1015))]
    experiment = in_process(
        tiny("fedzkt", **settings), of=federation, models="small-mlp", partition=shares
    )
    (record,) = experiment.rounds(1)
    assert record.server["global"] > 0.3, "from generated images alone"
    assert record.clients[2]["global"] > record.clients[2]["before_global"] + 0.05
    assert record.server["variety"] > 0.1


class Finds(nn.Module):
    """The same doubt about all four parts of an image."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 1, 2, 2), self.logit) * (x.amax((1, 2, 3), keepdim=True) > 0)


def test_fediods_discriminators_by_hand() -> None:
    judge: Any = Finds(math.log(3))  # 3/4 for what is bright, 1/2 for what is black
    bright, black = torch.ones(3, 1, 8, 8), torch.zeros(3, 1, 8, 8)
    assert fediod.realism(judge, bright).item() == pytest.approx(4 * -math.log(0.75)), (
        "summed over parts"
    )
    value = fediod.discrimination(judge, SPEC, (255 * bright).byte(), black)
    assert value.item() == pytest.approx(4 * (-math.log(0.75) + math.log(2)) / 2), (
        "the real ones come first"
    )


def test_what_fediods_generator_wishes_by_hand() -> None:
    said = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, math.log(7)]]])
    known, shares, sizes = (
        torch.zeros(2, 2),
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        torch.tensor([0.25, 0.75]),
    )

    def value(*weights: float) -> float:
        return fediod.generator_logit_loss(said, known, shares, sizes, 1.0, weights).item()

    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    sure = 0.25 * (entropy(0.75) + entropy(0.5)) / 2 + 0.75 * (entropy(0.5) + entropy(0.125)) / 2
    assert value(0, 1, 0, 0) == pytest.approx(sure, rel=1e-5)
    # Mean predictions of class 0: 5/8 of the first client, 5/16 of the second. In bits.
    uneven = -(0.25 * entropy(5 / 8) + 0.75 * entropy(5 / 16)) / math.log(2)
    assert value(0, 0, 1, 0) == pytest.approx(uneven, rel=1e-5)

    def divergence(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    # Means over clients: 5/8 and 5/16 of the two images.
    agree = (
        divergence(5 / 8, 0.75)
        + divergence(5 / 8, 0.5)
        + divergence(5 / 16, 0.5)
        + divergence(5 / 16, 0.125)
    )
    assert value(0, 0, 0, 1) == pytest.approx(agree / 4, rel=1e-5)
    # Together, each for its own class: (log 3, 0) and (0, log 7).
    assert value(1, 0, 0, 0) == pytest.approx(
        -(divergence(0.75, 0.5) + divergence(0.125, 0.5)) / 2, rel=1e-5
    )


def test_fediods_slopes_are_those_of_one_place() -> None:
    algorithm = cast(FedIOD, tiny("fediod", w_gan=0.7))
    experiment = in_process(algorithm, models="small-cnn,small-mlp")
    list(experiment.rounds(1))
    server, judges = (
        cast(Curator, experiment.server),
        cast("dict[int, DiscriminatorClient]", experiment.engine.clients),
    )
    generator = decoder_of(server, algorithm)
    with seeds.scope(0, "draw"):
        _, x = algorithm.draw(server, generator)
        answers = Replies(
            {k: algorithm.judge(judges[k], x) for k in judges}, dict.fromkeys(judges, 1), {}
        )
    images = x[0].clone().requires_grad_()
    said = torch.stack([judge.model.eval()(images) for judge in judges.values()])
    counts = torch.stack([judge.data.class_counts() for judge in judges.values()])
    sizes = counts.sum(1) / counts.sum()
    whole = fediod.generator_logit_loss(
        said, server.model.eval()(images), class_shares(counts), sizes, 1.0, (1.0, 1.0, 10.0, 1.0)
    )
    for size, judge in zip(sizes, judges.values(), strict=True):
        whole = whole + 0.7 * size * fediod.realism(algorithm.discriminator(judge).train(), images)
    (expected,) = torch.autograd.grad(whole, images)
    experiment.engine.round = 2
    slope = algorithm.image_gradient(server, Clients(experiment.engine, judges), x[0], answers)
    assert expected.abs().max() > 1e-4
    assert torch.allclose(slope, expected, atol=1e-6)


def decoder_of(server: Curator, algorithm: FedIOD) -> Decoder:
    generator = Decoder(algorithm.noise, server.spec)
    generator.load_state_dict(server.generator)
    return generator.train()


def test_fediods_generator_follows_the_slope() -> None:
    generator, z, slope = decoder(3), torch.randn(4, 3), torch.randn(4, 1, 8, 8)
    loss = fediod.imitation(generator, SPEC, z, slope)
    mine = torch.autograd.grad(loss, list(generator.parameters()))
    theirs = torch.autograd.grad(
        generate_from_codes(generator, z, SPEC), list(generator.parameters()), slope
    )
    assert all(
        torch.allclose(one, other, atol=1e-5) for one, other in zip(mine, theirs, strict=True)
    )


def test_fediods_clients_train_once_and_show_no_weights() -> None:
    experiment = in_process(tiny("fediod"))
    first, second = experiment.rounds(2)
    assert first.bytes["learn"] == {"up": 3 * 80, "down": 0}
    assert "learn" not in second.bytes
    for k, client in experiment.engine.clients.items():
        assert (
            first.clients[k]["global"]
            == second.clients[k]["global"]
            == first.clients[k]["before_global"]
        )
        # Logits of two batches of six, and six slopes.
        assert second.clients[k]["bytes_up"] == 4 * (2 * 6 * 10 + 6 * 64)
        assert cast(DiscriminatorClient, client).batch == []
    discriminators = [
        cast(DiscriminatorClient, client).discriminator
        for client in experiment.engine.clients.values()
    ]
    assert not same(discriminators[0], discriminators[1]), "each has its own"
    assert float(cast(DiscriminatorClient, experiment.engine.clients[0]).moments[0]["step"]) == 2, (
        "two rounds"
    )


def test_fediods_failed_clients_are_neither_heard_nor_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn, asked = FedIOD.learn, []

    def moody(self: FedIOD, client: Any) -> Tensor:
        asked.append(client.id)
        if asked == [0, 1]:
            raise ValueError("no mood")
        return learn(self, client)

    moody.__annotations__, moody.__name__ = learn.__annotations__, "learn"
    monkeypatch.setattr(FedIOD, "learn", moody)
    experiment = in_process(tiny("fediod"), min_clients=1)
    first, second = experiment.rounds(2)
    assert asked == [0, 1, 2, 1]
    assert first.clients[1]["bytes_up"] == 0
    assert second.clients[1]["bytes_up"] > 0


@pytest.mark.slow
def test_fediod_teaches_the_server_all_classes() -> None:
    def drawn(balance: float) -> tuple[float, float]:
        settings = {
            "epochs": 4,
            "iterations": 8,
            "global_steps": 4,
            "samples": 20,
            "noise": 16,
            "global_lr": 0.02,
        }
        algorithm = tiny("fediod", w_balance=balance, **settings)
        experiment = in_process(
            algorithm, of=federation, models="small-mlp", clients=2, partition="iid"
        )
        (record,) = experiment.rounds(1)
        server = cast(Curator, experiment.server)
        with torch.no_grad():
            z = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
            x = generate_from_codes(decoder_of(server, cast(FedIOD, algorithm)), z, server.spec)
            p = experiment.engine.clients[0].model.eval()(x).softmax(1).mean(0)
        return record.server["global"], float(-(p * p.log()).sum())

    accuracy, entropy = drawn(10.0)
    assert accuracy > 0.35
    assert entropy > drawn(0.0)[1]


def test_presets_have_the_numbers_of_the_papers() -> None:
    one_shot = DENSE.preset("paper")
    assert (one_shot.epochs, one_shot.batch_size, one_shot.lr) == (400, 128, 0.01)
    assert (one_shot.passes, one_shot.generator_steps, one_shot.samples) == (200, 30, 256)
    assert (one_shot.distil_batch, one_shot.distil_lr, one_shot.temperature) == (256, 0.005, 20.0)
    zero_shot = FedZKT.preset("paper")
    assert (zero_shot.lr, zero_shot.batch_size) == (0.01, 256), "of clients"
    assert (zero_shot.iterations, zero_shot.client_steps, zero_shot.samples) == (200, 200, 256)
