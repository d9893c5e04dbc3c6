from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from barter.algorithms.fedzge import FedZGE, distillation, diversity, equilibrium, fidelity, transferability
from barter.core.clients import Replies
from barter.core.images import Spec
from barter.core.payload import leaves
from barter.core.wire import Wire
from barter.models.generators import LabelGenerator
from tests.conftest import federation, tiny


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


E, S = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]), np.array([[0.5, 0.5, 0.0], [1.0, -1.0, 2.0]])


def test_the_losses_by_hand() -> None:
    ensemble, student, y = torch.tensor(E), torch.tensor(S), torch.tensor([0, 1])
    assert fidelity(ensemble, y).item() == pytest.approx(-np.log(softmax(E)[[0, 1], [0, 1]]).mean())
    p, q = softmax(E / 5), softmax(S / 5)
    divergence = (p * np.log(p / q)).sum(1).mean()
    assert transferability(ensemble, student, 5.0).item() == pytest.approx(-divergence)
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


def test_bytes_are_those_of_table_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """T K (B 3072 4 (1 + q) + B C 4 (2 + q)) bytes: 67,824,000,000 for B = 500, K = 10, T = 100, q = 10, C = 10."""
    experiment = federation(tiny("fedzge"), clients=3)
    (record,) = experiment.rounds(1)
    algorithm: Any = experiment.algorithm
    spec, k, b, q = experiment.task.spec, 3, algorithm.samples, algorithm.queries
    pixels = spec.channels * spec.height * spec.width

    def formula(t: int, k: int, b: int, pixels: int, q: int, classes: int) -> int:
        return t * k * (b * pixels * 4 * (1 + q) + b * classes * 4 * (2 + q))

    measured = record.traffic("up") + record.traffic("down")
    assert measured == formula(1, k, b, pixels, q, spec.classes)
    assert formula(100, 10, 500, 3072, 10, 10) == 67_824_000_000


def test_the_server_never_sees_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    carry = Wire.carry

    def watched(self: Wire, tree: Any, method: str, client: int, direction: Any, device: Any = None) -> Any:
        if direction == "up" and method != "evaluate":
            seen.extend((method, tuple(leaf.shape)) for _, leaf in leaves(tree) if isinstance(leaf, Tensor))
        return carry(self, tree, method, client, direction, device)

    monkeypatch.setattr(Wire, "carry", watched)
    experiment = federation(tiny("fedzge"))
    list(experiment.rounds(2))
    algorithm: Any = experiment.algorithm
    assert set(seen) == {("answer", (1 + algorithm.queries, algorithm.samples, 10))}
    assert len(seen) == 2 * 3


def test_the_opinion_is_weighted_by_images() -> None:
    answers = {0: torch.full((1, 1, 2), 1.0), 1: torch.full((1, 1, 2), 5.0)}
    mean = FedZGE().opinion(Replies(answers, {0: 30, 1: 10}, {}))
    assert mean.tolist() == [[[2.0, 2.0]]]


def test_images_are_in_the_range_of_the_data_or_of_tanh() -> None:
    spec = Spec(1, 8, 8, 10, (0.25,), (0.5,))
    generator, z, y = LabelGenerator(spec), torch.randn(50, 100), torch.randint(10, (50,))
    matched = FedZGE().pictures(generator, spec, z, y)
    assert matched.min() >= (0 - 0.25) / 0.5
    assert matched.max() <= (1 - 0.25) / 0.5
    assert FedZGE(output="tanh").pictures(generator, spec, z, y).abs().max() <= 1


@pytest.mark.parametrize("estimator", ["logits", "loss"])
def test_the_estimate_points_down_the_true_gradient(estimator: str) -> None:
    """White-box: with the clients' networks at hand the gradient is autograd's, and the estimate comes near."""
    torch.manual_seed(0)
    experiment = federation(tiny("fedzge"), models="small-mlp")
    server: Any = experiment.server
    clients = [c.model.eval() for c in experiment.engine.clients.values()]
    algorithm = FedZGE(samples=6, queries=4000, noise=8, estimator=estimator, eps=1e-2)  # type: ignore[arg-type]
    generator, z, y = algorithm.prepare(server)
    x = algorithm.pictures(generator, server.spec, z, y)
    images = x.detach().requires_grad_()

    def ensemble(points: Tensor) -> Tensor:
        return torch.stack([model(points) for model in clients]).mean(0)

    model = server.model.eval()
    value = algorithm.loss(ensemble(images), model(images), images, z, y)
    (exact,) = torch.autograd.grad(value, images)
    u = torch.randn(algorithm.queries, *x.shape)
    u = u / u.flatten(2).norm(dim=2).view(algorithm.queries, -1, 1, 1, 1)
    with torch.no_grad():
        points = torch.cat([x[None], x + algorithm.eps * u])
        answers = torch.stack([ensemble(p) for p in points])
    estimate = algorithm.by_logits if estimator == "logits" else algorithm.by_loss
    slope = estimate(model, x, z, y, u, answers)
    cosine = torch.cosine_similarity(slope.flatten(), exact.flatten(), 0).item()
    assert cosine > (0.95 if estimator == "logits" else 0.6)


def test_the_optimizer_goes_on_or_begins_anew() -> None:
    for lasting in (True, False):
        experiment = federation(tiny("fedzge", lasting_optimizer=lasting))
        list(experiment.rounds(2))
        server: Any = experiment.server
        assert bool(server.moments) == lasting
        assert not lasting or {float(m["step"]) for m in server.moments} == {2.0}


def test_clients_keep_their_statistics_unless_told_otherwise() -> None:
    experiment = federation(tiny("fedzge"))
    client: Any = experiment.engine.clients[0]
    for statistics in ("own", "batch"):
        algorithm: Any = tiny("fedzge", statistics=statistics)
        before = [b.clone() for b in client.model.buffers()]
        client.batch = [torch.randn(20, *client.data.spec.shape)]
        algorithm.distil(client, torch.randn(20, 10))
        assert all(torch.equal(b, old) for b, old in zip(client.model.buffers(), before, strict=True)) == (
            statistics == "own"
        )
