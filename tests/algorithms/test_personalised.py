"""Methods that end with a model for each client, of one architecture: Per-FedAvg, pFedLA."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter import Experiment
from barter.algorithms import PerFedAvg, PFedLA, perfedavg, pfedla
from barter.algorithms.broadcast import Caster
from barter.algorithms.perfedavg import Adapter
from barter.algorithms.pfedla import Mixer
from barter.core.clients import Clients
from barter.core.evaluation import accuracy
from barter.core.images import Augment, Spec
from barter.core.model import Classifier, split
from barter.core.payload import isolate, nbytes
from barter.ops.fit import LabelledBatch, Trainer, sgd
from tests.conftest import federation, same, tiny

TWO = Spec(1, 1, 1, 2, (0.0,), (1.0,))  # one pixel, two classes


class OneWeight(Classifier):
    """Logits (w x, 0)."""

    feature_dim = 1

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return torch.cat([self.w * features, 0 * features], 1)


def plain(spec: Spec) -> nn.Module:
    """A network without normalisation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, spec.classes))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def white(label: int) -> LabelledBatch:
    return LabelledBatch(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), torch.tensor([label]))


def test_the_gradient_after_a_step_ahead_by_hand() -> None:
    w, alpha = 0.3, 0.5
    v = sigmoid(
        w + alpha * sigmoid(-w)
    )  # the step is on an image of class 0, the gradient on one of class 1
    for batches, expected in (
        ((white(0), white(1)), v),
        ((white(0), white(1), white(0)), v - alpha * v * sigmoid(w) * sigmoid(-w)),
    ):
        model = OneWeight(w)
        value = perfedavg.adaptation_loss(model, alpha, 1e-2, TWO, Augment(), *batches)
        (slope,) = torch.autograd.grad(value, [model.w])
        assert float(slope) == pytest.approx(expected, rel=1e-3)


def test_the_hessian_is_estimated_rightly() -> None:
    torch.manual_seed(0)
    spec = Spec(1, 8, 8, 10, (0.5,), (0.5,))
    model = split(plain(spec)).double()
    images = [torch.randint(256, (20, 1, 8, 8), dtype=torch.uint8) for _ in range(2)]
    batches = [LabelledBatch(pixels, torch.randint(10, (20,))) for pixels in images]
    x1, x2 = (perfedavg.prepare_batch(pixels, spec, Augment()).double() for pixels in images)
    w = dict(model.named_parameters())
    inner = torch.autograd.grad(
        F.cross_entropy(model(x1), batches[0].labels), list(w.values()), create_graph=True
    )
    there = {name: p - 0.5 * slope for (name, p), slope in zip(w.items(), inner, strict=True)}
    after = F.cross_entropy(torch.func.functional_call(model, there, (x2,)), batches[1].labels)
    exact = torch.cat([slope.flatten() for slope in torch.autograd.grad(after, list(w.values()))])
    found = []
    for given in ([*batches, batches[0]], batches):
        value = perfedavg.adaptation_loss(model.float(), 0.5, 1e-2, spec, Augment(), *given)
        found.append(
            torch.cat(
                [slope.flatten() for slope in torch.autograd.grad(value, list(model.parameters()))]
            )
        )
    hf, fo = (float((part - exact).norm() / exact.norm()) for part in found)
    assert hf < 0.02
    assert fo > 5 * hf, "without the Hessian it is another gradient"


def client_of(algorithm: PerFedAvg, **options: Any) -> tuple[Experiment, list[Adapter]]:
    experiment = federation(algorithm, models=[plain], **options)
    clients = [cast(Adapter, client) for client in experiment.engine.clients.values()]
    for client in clients:
        client.data.augment = Augment()
    return experiment, clients


def test_without_a_step_ahead_it_trains_as_fedavg_does_on_every_second_batch() -> None:
    _, (client,) = client_of(PerFedAvg(alpha=0.0, epochs=1, batch_size=100, lr=0.1), clients=1)
    model = copy.deepcopy(client.model)
    torch.manual_seed(3)
    PerFedAvg(alpha=0.0, epochs=1, batch_size=100, lr=0.1).train(client)
    torch.manual_seed(3)
    batches = perfedavg.batch_groups(client.data, 100, 2)
    for _ in range(8):  # 15 batches, two at a time
        _, (pixels, labels) = next(batches)
        loss = F.cross_entropy(
            model(perfedavg.prepare_batch(pixels, client.data.spec, Augment())), labels
        )
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, slope in zip(model.parameters(), slopes, strict=True):
                p -= 0.1 * slope
    pairs = zip(model.parameters(), client.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


@pytest.mark.parametrize("hessian_free", [False, True])
def test_an_epoch_is_a_pass_over_the_data(
    hessian_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        perfedavg, "alternate", lambda client, courses, steps, recipe: taken.append(steps)
    )
    algorithm = PerFedAvg(epochs=2, batch_size=100, hessian_free=hessian_free)
    _, (client,) = client_of(algorithm, clients=1)
    algorithm.train(client)
    assert len(client.data) == 1433
    assert taken == [2 * 5 if hessian_free else 2 * 8]


def test_a_clients_model_is_one_step_from_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = PerFedAvg(epochs=1, batch_size=10_000, alpha=0.3, lr=0.1, fraction=0.7)
    experiment, clients = client_of(algorithm)
    starts: list[dict[str, Tensor]] = []
    train = PerFedAvg.train

    def watched(self: PerFedAvg, client: Adapter) -> None:
        starts.append(isolate(dict(client.model.state_dict())))
        train(self, client)

    monkeypatch.setattr(PerFedAvg, "train", watched)
    for t in (1, 2):
        before = isolate(dict(experiment.server.model.state_dict()))
        starts.clear()
        record = experiment.step()
        assert len(starts) == 2
        assert all(same(start, before) for start in starts), (
            "training starts from everybody's model, not the own"
        )
        server = experiment.server.model
        assert same(dict(server.state_dict()), cast(Caster, experiment.server).average)
        for k, client in enumerate(clients):
            assert same(client.start, dict(server.state_dict()))
            model = copy.deepcopy(server)
            x = client.data.batch(torch.arange(len(client.data)))
            slopes = torch.autograd.grad(
                F.cross_entropy(model(x), client.data.labels), list(model.parameters())
            )
            rows = zip(client.model.parameters(), model.parameters(), slopes, strict=True)
            assert all(torch.allclose(own, w - 0.3 * slope, atol=1e-5) for own, w, slope in rows)
            assert record.clients[k]["local"] == accuracy(client.model, client.tests["local"])
            assert record.clients[k]["unadapted_global"] == record.server["global"]
        weights = nbytes(before)
        assert record.bytes["client_update"] == {
            "up": 2 * weights,
            "down": 2 * weights if t == 1 else 0,
        }
        assert record.bytes["receive"] == {"up": 0, "down": 3 * weights}


def test_perfedavg_finds_a_better_start_than_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients with losses a_i/2 (w - c_i)²: the start from which one step of each, of rate 0.2, leaves least."""
    a, c = torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0])

    def bowl(logits: Tensor, client: Tensor) -> Tensor:
        return (a[client] / 2 * (logits[:, 0] - c[client]).square()).mean()

    monkeypatch.setattr(F, "cross_entropy", bowl)

    def end(alpha: float) -> float:
        model = OneWeight(0.0)
        for _ in range(300):
            values = [
                perfedavg.adaptation_loss(model, alpha, 1e-2, TWO, Augment(), white(k), white(k))
                for k in (0, 1)
            ]
            (slope,) = torch.autograd.grad(torch.stack(values).mean(), [model.w])
            model.w.data -= 0.1 * slope
        return float(model.w.detach())

    def left(w: float) -> float:
        return sum(
            float(a[k]) / 2 * ((1 - 0.2 * float(a[k])) * (w - float(c[k]))) ** 2 for k in (0, 1)
        )

    fedavg, ours = end(0.0), end(0.2)
    assert fedavg == pytest.approx(4 / 5, abs=1e-3)
    assert ours == pytest.approx(1 / 2, abs=1e-3)  # 1 (1 - 0.2) w = 4 (1 - 0.8) (1 - w)
    assert left(ours) < 0.5 * left(fedavg)


def test_a_step_of_its_own_makes_the_common_model_a_clients() -> None:
    """Two clients that call the same digits by different names."""
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 50, "lr": 0.1, "alpha": 0.2}
    experiment = federation(
        tiny("perfedavg", **settings), clients=2, partition="iid", models=[plain]
    )
    for images in (experiment.engine.clients[1].data, experiment.engine.clients[1].tests["local"]):
        images.labels.copy_(9 - images.labels)
    *_, record = experiment.rounds(6)
    assert record.mean("local") > record.mean("unadapted_local") + 0.1


def test_layers_are_modules_with_weights() -> None:
    names = [
        "body.1.weight",
        "body.1.bias",
        "body.2.weight",
        "body.2.running_mean",
        "head.weight",
        "head.bias",
    ]
    assert pfedla.group_by_layer(names) == [names[:2], names[2:4], names[4:]]


def test_models_are_mixed_layer_by_layer() -> None:
    models = [
        {"a.w": torch.tensor([x, 0.0]), "a.n": torch.tensor(n), "b.w": torch.tensor([10 * x])}
        for x, n in ((1.0, 3), (3.0, 6))
    ]
    alpha = torch.tensor([[0.75, 0.25], [0.0, 1.0]])
    mix = pfedla.mix_layers(models, alpha, [["a.w", "a.n"], ["b.w"]])
    assert torch.equal(mix["a.w"], torch.tensor([1.5, 0.0]))
    assert torch.equal(mix["a.n"], torch.tensor(4)), "counters are rounded"
    assert torch.equal(mix["b.w"], torch.tensor([30.0]))


def hyper_by_hand(last: list[float]) -> pfedla.HyperNetwork:
    """An embedding of 2 that comes through three hidden layers as it is."""
    hyper = pfedla.HyperNetwork(clients=2, layers=1, width=1)
    with torch.no_grad():
        for name, p in hyper.named_parameters():
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        hyper.embedding.fill_(2.0)
        hyper.body[6].weight.copy_(torch.tensor(last)[:, None])
    return hyper


def test_a_step_of_a_hypernetwork_by_hand() -> None:
    hyper, own, known = hyper_by_hand([1.0, 0.5]), torch.tensor([1.0, 0.0]), torch.ones(2)
    assert torch.allclose(
        hyper(own, known), torch.tensor([[2 / 3, 1 / 3]]), atol=1e-6
    )  # of 2 and 1
    dots = torch.tensor([[3.0, 0.0]])  # ⟨θ_j, Δθ⟩: the first model lies where the training went
    assert float(pfedla.direction_loss(hyper, own, known, dots).detach()) == pytest.approx(
        -2.0, abs=1e-5
    )
    Trainer.of(hyper, sgd(0.3)).step(partial(pfedla.direction_loss, hyper), own, known, dots)
    # ∂(3 a / (a + b)) at (2, 1) is (3 · 1, -3 · 2) / 3², and each times the last hidden 2 for the weights.
    moved = torch.tensor([[1.0], [0.5]]) + 0.3 * 2 * torch.tensor([[1 / 3], [-2 / 3]])
    assert torch.allclose(hyper.body[6].weight.detach(), moved, atol=1e-5)
    assert torch.allclose(
        hyper.body[6].bias.detach(), 0.3 * torch.tensor([1 / 3, -2 / 3]), atol=1e-5
    )
    assert torch.allclose(
        hyper.embedding.detach(), torch.tensor([2.0]), atol=1e-4
    )  # 1/3 · 1 - 2/3 · 1/2 = 0


def test_where_nothing_is_left_the_clients_own_layer_is_taken() -> None:
    own, known = torch.tensor([0.0, 1.0]), torch.ones(2)
    assert torch.equal(hyper_by_hand([-1.0, -1.0])(own, known), torch.tensor([[0.0, 1.0]]))
    missing = hyper_by_hand([1.0, 1.0])(own, torch.tensor([0.0, 1.0]))
    assert torch.equal(missing, torch.tensor([[0.0, 1.0]])), "who has not trained yet is not mixed"


def test_pfedla_sends_mixes_and_learns_along_what_training_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = federation(tiny("pfedla", fraction=0.7))
    server = cast(Mixer, experiment.server)
    down: dict[int, Any] = {}
    up: dict[int, Any] = {}
    carry = experiment.engine.wire.carry

    def tapped(tree: Any, method: str, client: int, direction: Any, *rest: Any, **more: Any) -> Any:
        if method == "client_update":
            (up if direction == "up" else down)[client] = isolate(
                tree if direction == "up" else tree[0]
            )
        return carry(tree, method, client, direction, *rest, **more)

    experiment.engine.wire.carry = tapped  # type: ignore[method-assign]
    told: dict[int, Tensor] = {}
    step, current = Trainer.step, []

    def watched(self: Trainer, loss: Any, *batch: Tensor) -> Any:
        if isinstance(self.modules[0], pfedla.HyperNetwork):
            told[int(batch[0].argmax())] = batch[2].clone()
        return step(self, loss, *batch)

    monkeypatch.setattr(Trainer, "step", watched)
    for _ in range(3):
        before, hyper = isolate(server.models), isolate(server.hyper)
        for seen in (down, up, told):
            seen.clear()
        record = experiment.step()
        assert "global" not in record.server
        assert len(up) == 2
        for k in up:
            assert same(server.models[k], up[k])
            assert (k in told) == (k in before), "who was given nothing teaches nothing"
            if k not in before:
                assert down[k] == {}
                continue
            network = pfedla.HyperNetwork(3, len(server.layers), 100)
            network.load_state_dict(hyper[k])
            known = torch.tensor([float(j in before) for j in range(3)])
            alpha = network(torch.eye(3)[k], known).detach()
            assert torch.allclose(alpha.sum(1), torch.ones(len(alpha)))
            for i, layer in enumerate(server.layers):
                for name in layer:
                    mix = sum(alpha[i, j].double() * before[j][name].double() for j in before)
                    wanted = (
                        mix if before[k][name].is_floating_point() else cast(Tensor, mix).round()
                    )
                    assert torch.allclose(down[k][name].double(), cast(Tensor, wanted), atol=1e-5)
                for j in before:
                    names = [name for name in layer if name.endswith(("weight", "bias"))]
                    dot = sum(float((before[j][n] * (up[k][n] - down[k][n])).sum()) for n in names)
                    assert float(told[k][i, j]) == pytest.approx(dot, abs=1e-3)
            assert not same(hyper[k], server.hyper[k])
        assert all(same(hyper[k], server.hyper[k]) for k in hyper if k not in up)
        current.append(len(told))
    assert sum(current) >= 3


def test_pfedla_of_one_client_is_its_own_training() -> None:
    experiment, alone = (
        federation(tiny("pfedla"), clients=1),
        federation(tiny("fedavg", lr=0.01), clients=1),
    )
    list(experiment.rounds(2))
    list(alone.rounds(2))
    assert same(*(dict(e.engine.clients[0].model.state_dict()) for e in (experiment, alone)))


def test_pfedla_takes_from_those_that_learn_the_same() -> None:
    """Clients 0 and 1 call digits alike, client 2 otherwise: whose models the first one mixes in."""
    experiment = federation(
        tiny("pfedla", epochs=2, lr=0.1, hyper_lr=0.2), partition="iid", models=[plain]
    )
    for images in (experiment.engine.clients[2].data, experiment.engine.clients[2].tests["local"]):
        images.labels.copy_(9 - images.labels)
    server, clients = cast(Mixer, experiment.server), Clients(experiment.engine, range(3))
    experiment.step()

    def weights() -> Tensor:
        hyper, own, known = cast(PFedLA, experiment.algorithm).hypernetwork(server, clients, 0)
        return hyper(own, known).detach().mean(0)

    first = weights()
    list(experiment.rounds(8))
    last = weights()
    assert last[1] - first[1] > last[2] - first[2] + 0.05
