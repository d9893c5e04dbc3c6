from __future__ import annotations

from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from barter.algorithms.fedzge import (
    FedZGE,
    accuracy_by_batch,
    adversarial_loss,
    distillation,
    diversity,
    equilibrium,
    fidelity,
)
from barter.core.clients import Replies
from barter.core.evaluation import accuracy
from barter.core.images import Spec
from barter.core.payload import leaves
from barter.core.robust import Defence, using
from barter.core.wire import Wire
from barter.models.generators import LabelGenerator
from barter.ops.zeroth import sample_directions
from tests.conftest import TINY, perceptrons, same, small_federation, tiny


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


E, S = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]), np.array([[0.5, 0.5, 0.0], [1.0, -1.0, 2.0]])


def test_the_losses_by_hand() -> None:
    ensemble, student, y = torch.tensor(E), torch.tensor(S), torch.tensor([0, 1])
    assert fidelity(ensemble, y).item() == pytest.approx(-np.log(softmax(E)[[0, 1], [0, 1]]).mean())
    p, q = softmax(E / 5), softmax(S / 5)
    divergence = (p * np.log(p / q)).sum(1).mean()
    assert adversarial_loss(ensemble, student, 5.0).item() == pytest.approx(-divergence)
    mean = softmax(E).mean(0)
    assert equilibrium(ensemble).item() == pytest.approx((mean * np.log(mean)).sum(), abs=1e-6)
    even = torch.zeros(4, 3)
    assert equilibrium(even).item() == pytest.approx(-np.log(3), abs=1e-6)

    class Fixed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return student

    told: Any = distillation(Fixed(), 5.0, torch.zeros(2), ensemble)  # type: ignore[arg-type]
    assert told.item() == pytest.approx(25 * divergence)


def test_diversity_by_hand() -> None:
    x, z = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0], [4.0]])
    # Mean squares between the two: 2 and 9. Of four pairs two are a sample with itself.
    assert diversity(x, z).item() == pytest.approx(np.exp(-(2 * 2 * 9) / 4), rel=1e-4)


def test_the_generator_has_the_parameters_of_the_papers() -> None:
    for classes, parameters in ((10, 2_043_185), (100, 2_052_185)):
        generator = LabelGenerator(Spec(3, 32, 32, classes, (0.5,) * 3, (0.5,) * 3))
        assert sum(p.numel() for p in generator.parameters()) == parameters
    for side in (8, 28, 30):
        spec = Spec(1, side, side, 10, (0.5,), (0.5,))
        images = LabelGenerator(spec)(torch.randn(3, 100), torch.tensor([1, 2, 3]))
        assert images.shape == (3, 1, side, side)
        assert images.abs().max() <= 1


def formula(t: int, k: int, b: int, pixels: int, q: int, classes: int) -> int:
    return t * k * (b * pixels * 4 * (1 + q) + b * classes * 4 * (2 + q))


@pytest.mark.parametrize("preset", ["paper", "sound"])
def test_bytes_are_those_of_table_8(preset: str) -> None:
    """T K (B 3072 4 (1 + q) + B C 4 (2 + q)) bytes: 67,824,000,000 for B = 500, K = 10, T = 100, q = 10, C = 10.

    Several steps of the generator share the images; what clients tell of their data comes on top.
    """
    chosen = FedZGE.preset(
        preset, {**TINY["fedzge"], "generator_steps": 1 if preset == "paper" else 2}
    )
    experiment = small_federation(chosen, clients=3)
    (record,) = experiment.rounds(1)
    algorithm: Any = experiment.algorithm
    spec, k, b, q = experiment.task.spec, 3, algorithm.samples, algorithm.queries
    pixels = spec.channels * spec.height * spec.width
    told = k * (8 * spec.classes + 2 * 4 * pixels) if preset == "sound" else 0
    measured = record.traffic("up") + record.traffic("down")
    assert measured == formula(1, k, b, pixels, q, spec.classes) + told
    assert formula(100, 10, 500, 3072, 10, 10) == 67_824_000_000


def test_the_server_never_sees_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    carry = Wire.carry

    def watched(
        self: Wire, tree: Any, method: str, client: int, direction: Any, *rest: Any, **more: Any
    ) -> Any:
        if direction == "up" and method != "evaluate":
            seen.extend(
                (method, tuple(leaf.shape)) for _, leaf in leaves(tree) if isinstance(leaf, Tensor)
            )
        return carry(self, tree, method, client, direction, *rest, **more)

    monkeypatch.setattr(Wire, "carry", watched)
    experiment = small_federation(tiny("fedzge"))
    list(experiment.rounds(2))
    algorithm: Any = experiment.algorithm
    answer = (1 + algorithm.queries, algorithm.samples // algorithm.generator_steps, 10)
    assert set(seen) == {("answer", answer), ("learn", (10,)), ("learn", (2, 1, 8, 8))}
    assert len(seen) == 2 * 3 * (algorithm.generator_steps + 2)


def test_the_opinion_is_weighted_by_images_or_by_who_knows_a_class() -> None:
    answers = Replies({0: torch.zeros(1, 1, 2), 1: torch.zeros(1, 1, 2)}, {0: 30, 1: 10}, {})
    told: Any = {0: {"counts": torch.tensor([30, 0])}, 1: {"counts": torch.tensor([5, 5])}}
    said = torch.tensor([[[1.0, 1.0]], [[5.0, 5.0]]])
    paper = FedZGE.preset("paper")
    assert paper.ensemble_logits(said, paper.shares(answers, told)).tolist() == [[2.0, 2.0]]
    sure = torch.tensor(
        [[[np.log(9.0), 0.0]], [[0.0, np.log(3.0)]]]
    )  # probabilities 0.9, 0.1 and 0.25, 0.75
    own = FedZGE()
    mixture = [
        30 / 35 * 0.9 + 5 / 35 * 0.25,
        0.75,
    ]  # of the second class nobody but the second client knows
    assert own.ensemble_logits(sure, own.shares(answers, told)).exp()[0].tolist() == pytest.approx(
        mixture, abs=1e-5
    )


def test_one_client_cannot_decide_a_robust_opinion_that_is_weighted_by_images() -> None:
    honest = torch.tensor([[[2.0, 0.0]]]).repeat(4, 1, 1)
    said = torch.cat([honest, torch.tensor([[[-1000.0, 1000.0]]])])
    paper = FedZGE.preset("paper")
    shares = torch.full((5, 1), 0.2)
    assert paper.ensemble_logits(said, shares).argmax(1).item() == 1
    with using(Defence("median", 0.3)):
        assert paper.ensemble_logits(said, shares).argmax(1).item() == 0


def test_images_are_in_the_range_of_the_data_or_of_tanh() -> None:
    experiment = small_federation(tiny("fedzge"))
    server: Any = experiment.server
    server.spec = Spec(1, 8, 8, 10, (0.25,), (0.5,))
    server.spectrum = [torch.full((2, 1, 8, 8), 3.0)]
    for algorithm, least, most in (
        (FedZGE(), -0.5, 1.5),
        (FedZGE(canvas=False), -0.5, 1.5),
        (FedZGE.preset("paper"), -1.0, 1.0),
    ):
        x, _, _ = algorithm.generate_images(server, algorithm.load_generator(server), 50)
        assert x.min() >= least
        assert x.max() <= most


@pytest.mark.parametrize("estimator", ["logits", "loss"])
def test_the_estimate_points_down_the_true_gradient(estimator: str) -> None:
    """White-box: with the clients' networks at hand the gradient is autograd's, and the estimate comes near."""
    torch.manual_seed(0)
    experiment = small_federation(tiny("fedzge"), models="small-mlp")
    server: Any = experiment.server
    clients = [c.model.eval() for c in experiment.engine.clients.values()]
    algorithm: Any = FedZGE(
        queries=1500, noise=8, estimator=estimator, frequencies=None, canvas=False
    )  # type: ignore[arg-type]
    x, z, y = algorithm.generate_images(server, algorithm.load_generator(server), 6)
    x, shares = x.detach(), torch.full((len(clients), 10), 1 / len(clients))
    loss = partial(algorithm.loss, shares, z, y)

    def said(points: Tensor) -> Tensor:
        return torch.stack([model(points) for model in clients])

    model, images = server.model.eval(), x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(loss(said(images), model(images), images), images)
    u = sample_directions(x, algorithm.queries, "sphere")
    with torch.no_grad():
        points = torch.cat([x[None], x + algorithm.eps * u])
        answers = said(points.flatten(0, 1)).unflatten(1, points.shape[:2]).transpose(0, 1)
    estimate = algorithm.by_logits if estimator == "logits" else algorithm.by_loss
    slope = estimate(model, loss, x, u, answers)
    cosine = torch.cosine_similarity(slope.flatten(), exact.flatten(), 0).item()
    assert cosine > (0.95 if estimator == "logits" else 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["logits", "loss"])
def test_what_clients_say_makes_the_generator_better(estimator: str) -> None:
    """Clients that were trained stay as they are; their answers alone take the generator down its loss."""
    experiment = small_federation(tiny("local", max_epochs=20), models="small-mlp")
    experiment.step()
    clients = [client.model.eval() for client in experiment.engine.clients.values()]
    algorithm: Any = FedZGE(
        queries=20, noise=8, estimator=estimator, canvas=False, generator_lr=0.01
    )  # type: ignore[arg-type]
    server: Any = small_federation(algorithm, models="small-mlp").server
    shares, generator = (
        torch.full((len(clients), 10), 1 / len(clients)),
        algorithm.load_generator(server),
    )
    optimizer, found = algorithm.optimizer(server, generator), []
    torch.manual_seed(0)
    for _ in range(30):
        x, z, y = algorithm.generate_images(server, generator, 40)
        u = sample_directions(x, algorithm.queries, algorithm.direction, algorithm.frequencies)
        with torch.no_grad():
            points = (x, *(x + algorithm.eps * u))
            said = torch.stack([torch.stack([model(p) for model in clients]) for p in points])
            found.append(float(algorithm.loss(shares, z, y, said[0], server.model.eval()(x), x)))
        algorithm.improve(server, optimizer, (x, z, y), u, said, shares)
    assert sum(found[-5:]) / 5 < sum(found[:5]) / 5 - 0.2


def trial(**fields: Any) -> tuple[float, float, float]:
    """Accuracies after two rounds: clients on all classes and on their own, the server's model."""
    few = {
        "epochs": 3,
        "batch_size": 64,
        "samples": 200,
        "generator_steps": 1,
        "queries": 1,
        "local_steps": 20,
    }
    experiment = small_federation(FedZGE(**{**few, **fields}), models="small-mlp")  # type: ignore[arg-type]
    *_, last = experiment.rounds(2)
    return last.mean("global"), last.mean("local"), last.server["global"]


@pytest.mark.slow
def test_clients_learn_of_classes_that_they_lack_and_forget_nothing() -> None:
    """The method as a whole, beside each of its parts switched off."""
    everywhere, own, server = trial()
    drawn = trial(canvas=False)
    assert server > drawn[2] + 0.05
    assert everywhere > drawn[0] + 0.05
    careless = trial(rehearse=False)
    assert everywhere > careless[0] + 0.05
    assert own > careless[1]
    assert server > trial(weighting="examples")[2] + 0.05
    assert everywhere > trial(balanced=False)[0] + 0.05


def test_the_optimizer_goes_on_or_begins_anew() -> None:
    for lasting in (True, False):
        experiment = small_federation(tiny("fedzge", lasting_optimizer=lasting))
        list(experiment.rounds(2))
        server: Any = experiment.server
        assert bool(server.moments) == lasting
        assert not lasting or {float(m["step"]) for m in server.moments} == {4.0}


def test_without_queries_canvases_stay_as_they_are() -> None:
    experiment = small_federation(tiny("fedzge", queries=0))
    list(experiment.rounds(1))
    server: Any = experiment.server
    algorithm: Any = experiment.algorithm
    made, _, _ = algorithm.generate_images(server, algorithm.load_generator(server), 20)
    assert not server.generator["body.8.weight"].any()
    assert made.std() > 0.5


def test_a_client_whose_logits_are_far_larger_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = FedZGE.answer

    @wraps(answer)
    def confident(self: FedZGE, client: Any, *args: Any) -> Tensor:
        return answer(self, client, *args) * (10_000 if client.id == 1 else 1)

    monkeypatch.setattr(FedZGE, "answer", confident)
    experiment = small_federation(tiny("fedzge"))
    for record in experiment.rounds(2):
        assert sorted(record.clients) == [0, 1, 2]
    server: Any = experiment.server
    assert all(value.isfinite().all() for value in server.model.state_dict().values())
    assert all(value.isfinite().all() for value in server.generator.values())


def test_images_of_the_last_rounds_are_kept_and_no_more() -> None:
    experiment = small_federation(tiny("fedzge", memory=2))
    list(experiment.rounds(3))
    server: Any = experiment.server
    client: Any = experiment.engine.clients[0]
    for party in (server, client):
        assert [x.shape for x, _ in party.lessons] == [(20, 1, 8, 8)] * 2
    for mine, theirs in zip(client.lessons, server.lessons, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert client.batch == []


def test_a_client_that_answers_by_batch_statistics_keeps_its_own() -> None:
    experiment = perceptrons(tiny("fedzge", statistics="batch"))
    client: Any = experiment.engine.clients[0]
    algorithm: Any = experiment.algorithm
    before = {at: tensor.clone() for at, tensor in client.model.state_dict().items()}
    x, changed = torch.randn(20, 1, 8, 8), torch.randn(2, 20, 1, 8, 8)
    found = algorithm.answer(client, x, changed)
    assert same(dict(client.model.state_dict()), before)
    client.model.train()
    with torch.no_grad():
        torch.testing.assert_close(found, torch.stack([client.model(b) for b in (x, *changed)]))
    assert not same(dict(client.model.state_dict()), before), "as training mode does otherwise"


def test_clients_are_judged_by_the_statistics_of_their_own_images() -> None:
    paper = FedZGE.preset("paper", {**TINY["fedzge"], "generator_steps": 1})
    experiment = small_federation(paper, models="small-cnn")
    experiment.step()
    for client in experiment.engine.clients.values():
        inputs: list[Tensor] = []
        first = next(m for m in client.model.modules() if isinstance(m, torch.nn.BatchNorm2d))
        hook = first.register_forward_pre_hook(lambda _, x, hear=inputs.append: hear(x[0]))
        with torch.no_grad():
            client.model.eval()(client.data.batch(torch.arange(len(client.data))))
        hook.remove()
        (seen,) = inputs
        torch.testing.assert_close(first.running_mean, seen.mean((0, 2, 3)))
        torch.testing.assert_close(first.running_var, seen.transpose(0, 1).flatten(1).var(1))


def test_the_server_is_judged_by_running_and_by_batch_statistics() -> None:
    paper = FedZGE.preset("paper", {**TINY["fedzge"], "generator_steps": 1})
    record = perceptrons(paper).step()
    assert 0 < record.server["global_by_batch"] <= 1
    assert "global_by_batch" not in perceptrons(tiny("fedzge", epochs=1)).step().server


def test_an_accuracy_by_batch_depends_on_no_running_statistics() -> None:
    client = perceptrons(tiny("local")).engine.clients[0]  # type: ignore[attr-defined]
    model, test = client.model, client.tests["global"]
    norm = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d))
    assert norm.running_mean is not None
    norm.running_mean += 5.0 * torch.randn(256)
    before = {at: tensor.clone() for at, tensor in model.state_dict().items()}
    found = accuracy_by_batch(model, test)
    assert same(dict(model.state_dict()), before)
    with torch.no_grad():
        x = test.batch(torch.arange(len(test)))
        hidden = model.body[1](x.flatten(1))
        features = (
            (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + norm.eps).sqrt()
        ).relu()
        expected = (model.head(features).argmax(1) == test.labels).double().mean().item()
    assert found == pytest.approx(expected, abs=1 / len(test))
    assert found != pytest.approx(accuracy(model, test), abs=1 / len(test))


def test_clients_keep_their_statistics_unless_told_otherwise() -> None:
    experiment = small_federation(tiny("fedzge"))
    client: Any = experiment.engine.clients[0]
    for statistics in ("own", "batch"):
        algorithm: Any = tiny("fedzge", statistics=statistics, rehearse=False)
        before = [b.clone() for b in client.model.buffers()]
        client.batch = [torch.randn(20, *client.data.spec.shape)]
        algorithm.distil(client, torch.randn(20, 10))
        assert all(
            torch.equal(b, old) for b, old in zip(client.model.buffers(), before, strict=True)
        ) == (statistics == "own")
