"""FedAvg's relatives for one architecture: FedBN, MOON, FedDyn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from barter import ALGORITHMS, Experiment, FedAvg
from barter.algorithms import FedBN, FedDyn, moon
from barter.algorithms.broadcast import Caster
from barter.algorithms.feddyn import Cloud, Drifter
from barter.attacks.overheard import clients_of
from barter.core.errors import ConfigError
from barter.core.evaluation import accuracy
from barter.core.images import Augment, Spec
from barter.core.model import Classifier, split
from barter.core.params import describe_fields
from barter.core.payload import isolate, nbytes
from barter.models.pooled import add_projection_head
from barter.ops.average import ROBUST, entrywise_median
from barter.ops.fit import Anchor
from barter.ops.statistics import norm_names
from barter.setup.config import resolve, with_defaults
from tests.conftest import federation, same, small_federation, state, tiny

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.5,))


def plain(spec: Spec) -> nn.Module:
    """A network without normalisation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, spec.classes))


def tap(experiment: Experiment, listen: Callable[[Any, str, int, str], None]) -> None:
    """Have all that crosses the wire heard."""
    carry = experiment.engine.wire.carry

    def tapped(tree: Any, method: str, client: int, direction: Any, *rest: Any, **more: Any) -> Any:
        listen(tree, method, client, direction)
        return carry(tree, method, client, direction, *rest, **more)

    experiment.engine.wire.carry = tapped  # type: ignore[method-assign]


class Misleading(nn.Module):
    """A layer that is called bn, and a normalisation that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.scale, self.out = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.scale(self.bn(x.flatten(1)))))
        return y


def test_what_normalisation_holds_is_told_by_the_kind_of_layer() -> None:
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert norm_names(split(Misleading())) == {f"body.scale.{name}" for name in names}
    assert norm_names(nn.BatchNorm2d(3)) == names
    assert norm_names(nn.BatchNorm2d(3, affine=False)) == names - {"weight", "bias"}
    assert norm_names(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3))) == set()
    sent = FedBN().outgoing(split(Misleading()))
    assert {name.removeprefix("body.") for name in sent} == {
        "bn.weight",
        "bn.bias",
        "head.weight",
        "head.bias",
    }


def test_fedbn_without_normalisation_is_fedavg() -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 50, "lr": 0.05, "fraction": 0.7}
    one, other = (small_federation(kind(**settings), models=[plain]) for kind in (FedAvg, FedBN))
    list(one.rounds(3))
    list(other.rounds(3))
    assert same(dict(one.server.model.state_dict()), cast(Caster, other.server).average)


def test_fedbn_averages_everything_but_normalisation() -> None:
    experiment = small_federation(tiny("fedbn"), models="small-cnn")
    sent: dict[int, dict[str, Tensor]] = {}

    def listen(tree: Any, method: str, client: int, direction: str) -> None:
        if (method, direction) == ("client_update", "up"):
            sent[client] = isolate(tree)

    tap(experiment, listen)
    records = list(experiment.rounds(2))
    clients = experiment.engine.clients
    models = [dict(client.model.state_dict()) for client in clients.values()]
    own = norm_names(clients[0].model)
    assert own
    assert not own & sent[0].keys()
    sizes = {k: len(client.data) for k, client in clients.items()}
    for name in models[0]:
        if name in own:
            assert name.endswith("tracked") or not torch.equal(models[0][name], models[1][name]), (
                name
            )
        else:
            mean = sum(sizes[k] * sent[k][name].double() for k in clients) / sum(sizes.values())
            assert all(torch.allclose(model[name].double(), mean, atol=1e-6) for model in models), (
                name
            )
    weights = nbytes(sent[0])
    assert [r.bytes["client_update"] for r in records] == [{"up": 3 * weights, "down": 0}] * 2
    assert [r.bytes["receive"] for r in records] == [{"up": 0, "down": 3 * weights}] * 2


def test_fedbn_judges_the_average_with_the_clients_own_normalisation() -> None:
    experiment = small_federation(tiny("fedbn"), models="small-cnn")
    (record,) = experiment.rounds(1)
    assert "global" not in record.server, "there is no model for all"
    for k, client in experiment.engine.clients.items():
        assert record.clients[k]["global"] == accuracy(client.model, client.tests["global"])
        assert {"before_global", "before_local"} <= record.clients[k].keys()
    assert any(
        record.clients[k]["before_global"] != record.clients[k]["global"] for k in record.clients
    )


def test_who_missed_an_average_gets_it_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small_federation(tiny("fedbn"), min_clients=2)
    server, starts = cast(Caster, experiment.server), dict[int, dict[str, Tensor]]()

    def interrupt(tree: Any, method: str, client: int, direction: str) -> None:
        if (method, client, experiment.engine.round) == ("receive", 1, 1):
            raise ConnectionError

    tap(experiment, interrupt)
    first = experiment.step()
    assert (len(first.failures), server.heard) == (1, [0, 2])
    train, before = FedBN.train, isolate(server.average)

    def watched(self: FedBN, client: Any) -> None:
        starts[client.id] = isolate(self.outgoing(client.model))
        train(self, client)

    monkeypatch.setattr(FedBN, "train", watched)
    second = experiment.step()
    assert len(starts) == 3
    assert all(same(start, before) for start in starts.values()), "also the one that did not hear"
    assert second.bytes["client_update"]["down"] == nbytes(before), (
        "and the others were not told twice"
    )


def test_fedbn_helps_where_clients_images_look_different() -> None:
    """Two clients, the same digits, for one of them pale: with statistics of their own one network serves both."""

    def last(name: str) -> float:
        experiment = federation(tiny(name, batch_size=32, lr=0.05), clients=2, partition="iid")
        clients = experiment.engine.clients
        for images in (clients[1].data, clients[1].tests["local"]):
            images.pixels.copy_(images.pixels // 4 + 128)
        *_, record = experiment.rounds(3)
        if name == "fedbn":
            return record.mean("local")
        return (
            sum(accuracy(experiment.server.model, c.tests["local"]) for c in clients.values()) / 2
        )

    assert last("fedbn") > last("fedavg") + 0.1


@dataclass(frozen=True, kw_only=True)
class Projected(FedAvg):
    """FedAvg on networks with a projection head."""

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        return add_projection_head(network, 16)


class Pixels(Classifier):
    """Its features are the pixels, scaled; its logits zero."""

    feature_dim = 2

    def __init__(self, scale: tuple[float, float]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.scale

    def logits(self, features: Tensor) -> Tensor:
        return 0 * features


def test_moons_contrast_by_hand() -> None:
    z, glob, prev = (
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[3.0, 3.0]]),
        torch.tensor([[0.0, 2.0]]),
    )
    near, far = math.exp(math.sqrt(0.5) / 0.5), math.exp(0)
    assert float(moon.contrast(z, glob, prev, 0.5)) == pytest.approx(-math.log(near / (near + far)))
    assert float(moon.contrast(z, prev, glob, 0.5)) == pytest.approx(-math.log(far / (near + far)))
    both = moon.contrast(torch.cat([z, z]), torch.cat([glob, prev]), torch.cat([prev, prev]), 0.5)
    assert float(both) == pytest.approx((-math.log(near / (near + far)) + math.log(2)) / 2), (
        "the mean over the batch"
    )


def test_moons_loss_by_hand() -> None:
    x = torch.ones(1, 1, 1, 2)
    model, glob, prev = Pixels((1.0, 0.0)), Pixels((1.0, 1.0)), Pixels((0.0, 1.0))
    value = moon.moon_loss(model, glob, prev, 3.0, 0.5, x, torch.tensor([0]))
    assert float(value.detach()) == pytest.approx(
        math.log(2) + 3 * math.log(1 + math.exp(-math.sqrt(0.5) / 0.5))
    )
    value.backward()
    assert glob.scale.grad is None
    assert prev.scale.grad is None
    assert model.scale.grad is not None
    # Across z, sim(z, z_glob) grows by 1/√2 and sim(z, z_prev) by 1.
    slope = 3 / (1 + math.exp(math.sqrt(0.5) / 0.5)) / 0.5 * (1 - math.sqrt(0.5))
    assert float(model.scale.grad[1]) == pytest.approx(slope)


def test_moon_without_its_term_is_fedavg_with_a_projection_head() -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 50, "lr": 0.05, "fraction": 0.7}
    without = tiny("moon", mu=0.0, momentum=0.0, weight_decay=0.0, **settings)
    one, other = (small_federation(algorithm) for algorithm in (Projected(**settings), without))
    list(one.rounds(2))
    list(other.rounds(2))
    assert same(state(one), state(other))


def test_moon_compares_with_the_servers_model_and_the_clients_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_federation(tiny("moon", fraction=0.4), clients=3)
    seen: dict[tuple[str, int], dict[str, Tensor]] = {}

    def spy(name: str, client: Any) -> Classifier:
        seen[name, client.id] = isolate(dict(client.model.state_dict()))
        return frozen(name, client)

    frozen = moon.frozen_copy
    monkeypatch.setattr(moon, "frozen_copy", spy)
    for _ in range(4):
        server = isolate(dict(experiment.server.model.state_dict()))
        last = {
            k: isolate(dict(c.model.state_dict())) for k, c in experiment.engine.clients.items()
        }
        seen.clear()
        experiment.step()
        assert len(seen) == 2, "one client trains"
        for (name, k), weights in seen.items():
            assert same(weights, server if name == "start" else last[k])
    assert not moon.frozen_copy("start", experiment.engine.clients[0]).training
    assert not any(
        p.requires_grad
        for p in moon.frozen_copy("start", experiment.engine.clients[0]).parameters()
    )


def test_moon_brings_features_nearer_to_the_servers() -> None:
    def nearer(mu: float) -> float:
        experiment = small_federation(tiny("moon", mu=mu, epochs=3, fraction=1.0), clients=2)
        experiment.step()
        client = experiment.engine.clients[0]
        x = client.data.batch(torch.arange(len(client.data)))
        glob, prev = (
            copy.deepcopy(experiment.server.model).eval(),
            copy.deepcopy(client.model).eval(),
        )
        experiment.step()
        z, z_glob, z_prev = (m.eval().features(x).detach() for m in (client.model, glob, prev))
        return float(
            (torch.cosine_similarity(z, z_glob) - torch.cosine_similarity(z, z_prev)).mean()
        )

    assert nearer(5.0) > nearer(0.0) + 0.02


def test_a_network_that_was_split_by_hand_gets_no_projection_head() -> None:
    with pytest.raises(
        ConfigError, match="Pixels was split by hand and cannot be given a projection head"
    ):
        add_projection_head(Pixels((1.0, 1.0)), 256)
    network = add_projection_head(split(plain(SPEC)), 7)
    assert network.feature_dim == network.features(torch.zeros(2, 1, 8, 8)).shape[1] == 7


def clouds(experiment: Experiment) -> tuple[Cloud, list[Drifter]]:
    return cast(Cloud, experiment.server), [
        cast(Drifter, client) for client in experiment.engine.clients.values()
    ]


def test_feddyns_state_is_the_sum_of_ways() -> None:
    experiment = small_federation(tiny("feddyn", fraction=0.6, epochs=1), clients=4)
    server, clients = clouds(experiment)
    total: dict[int, dict[str, Tensor]] = {k: {} for k in range(4)}
    for _ in range(4):
        w = isolate(dict(server.model.state_dict()))
        record = experiment.step()
        active = [k for k in range(4) if record.clients[k]["bytes_up"]]
        assert len(active) == 2
        for k in active:
            for at, weight in clients[k].model.named_parameters():
                total[k][at] = total[k].get(at, torch.zeros(())) + (weight.detach() - w[at])
        for at, weight in server.model.named_parameters():
            for k in range(4):
                assert (at in clients[k].h) == (at in total[k])
                assert at not in total[k] or torch.allclose(
                    clients[k].h[at], total[k][at], atol=1e-6
                )
            mean_h = sum(ways.get(at, torch.zeros(())) for ways in total.values()) / 4
            trained = sum(clients[k].model.state_dict()[at] for k in active) / len(active)
            assert torch.allclose(server.h[at], mean_h, atol=1e-5), (
                "the mean over all clients, also those at rest"
            )
            assert torch.allclose(weight, trained + mean_h, atol=1e-5), "models count alike"
        statistics = "body.2.running_mean"
        mean = sum(clients[k].model.state_dict()[statistics] for k in active) / len(active)
        assert torch.allclose(server.model.state_dict()[statistics], mean, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedftg", "fml"])
def test_weight_decay_shrinks_weights_in_the_first_step(name: str) -> None:
    """One step on all images: w - lr (gradient + decay w), so decay takes lr * decay * w away."""
    after: dict[float, list[Tensor]] = {}
    for decay in (0.0, 0.1):
        algorithm = tiny(name, epochs=1, batch_size=10_000, lr=0.5, weight_decay=decay)
        experiment = small_federation(algorithm, clients=1, models=[plain])
        (client,) = clients_of(experiment).values()
        initial = [p.detach().clone() for p in client.model.parameters()]
        experiment.step()
        after[decay] = [p.detach() for p in client.model.parameters()]
    for start, without, decayed in zip(initial, after[0.0], after[0.1], strict=True):
        torch.testing.assert_close(without - decayed, 0.5 * 0.1 * start, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedftg", "feddyn"])
def test_momentum_adds_a_share_of_the_previous_step(name: str) -> None:
    """Two steps on all images: the second one also takes 0.9 times the first, w2 + 0.9 (w1 - w0)."""

    def train(epochs: int, momentum: float) -> list[Tensor]:
        algorithm = tiny(name, epochs=epochs, batch_size=10_000, lr=0.1, momentum=momentum)
        experiment = small_federation(algorithm, clients=1, models=[plain])
        (client,) = clients_of(experiment).values()
        starts.append([p.detach().clone() for p in client.model.parameters()])
        experiment.step()
        return [p.detach() for p in client.model.parameters()]

    starts: list[list[Tensor]] = []
    first = train(1, 0.0)
    second = train(2, 0.0)
    with_momentum = train(2, 0.9)
    rows = zip(starts[0], first, second, with_momentum, strict=True)
    for w0, w1, w2, found in rows:
        torch.testing.assert_close(found, w2 + 0.9 * (w1 - w0), rtol=0, atol=1e-6)


def test_feddyns_first_steps_by_hand() -> None:
    """One client, two steps on all of its images: the gradient, then the gradient and α times how far it had gone."""
    settings: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 10_000,
        "lr": 0.5,
        "weight_decay": 0.1,
        "alpha": 0.4,
    }
    experiment = small_federation(FedDyn(**settings, clip=1e6), clients=1, models=[plain])
    _, (client,) = clouds(experiment)
    client.data.augment = Augment()
    x, y = client.data.batch(torch.arange(len(client.data))), client.data.labels
    model = copy.deepcopy(client.model)
    w = [p.detach().clone() for p in model.parameters()]
    h = [torch.zeros_like(p) for p in w]
    for _ in range(2):
        experiment.step()
        for p, value in zip(model.parameters(), w, strict=True):
            p.data.copy_(value)
        slopes = torch.autograd.grad(
            nn.functional.cross_entropy(model(x), y), list(model.parameters())
        )
        rows = zip(w, h, slopes, strict=True)
        after = [
            v - 0.5 * (slope + 0.1 * v + 0.4 * gone) for v, gone, slope in rows
        ]  # at w_cloud, so far
        assert all(
            torch.allclose(p, v, atol=1e-5)
            for p, v in zip(client.model.parameters(), after, strict=True)
        )
        h = [gone + new - old for gone, new, old in zip(h, after, w, strict=True)]
        w = [new + gone for new, gone in zip(after, h, strict=True)]
        assert all(
            torch.allclose(p, v, atol=1e-5)
            for p, v in zip(experiment.server.model.parameters(), w, strict=True)
        )


def test_feddyn_holds_clients_with_few_images_firmly(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, told = small_federation(tiny("feddyn", alpha=0.3)), dict[int, float]()

    def listen(tree: Any, method: str, client: int, direction: str) -> None:
        if (method, direction) == ("client_update", "down"):
            told[client] = tree[0]["alpha"]

    tap(experiment, listen)
    experiment.step()
    sizes = [len(client.data) for client in experiment.engine.clients.values()]
    assert len(set(sizes)) > 1
    assert told == pytest.approx({k: 0.3 * (sum(sizes) / 3) / n for k, n in enumerate(sizes)})


@dataclass(frozen=True, kw_only=True)
class Bowls(FedDyn):
    """Each client's loss is a_i/2 ‖w - c_i‖², which it minimises exactly."""

    held: bool = True  # by the regulariser

    def train(self, client: Drifter, anchor: Anchor) -> None:
        a, c = (1.0, 4.0)[client.id], (0.0, 1.0)[client.id]
        alpha = float(anchor.strength) if self.held else 0.0
        with torch.no_grad():
            for p, place in zip(client.model.parameters(), anchor.places, strict=True):
                p.copy_((a * c + alpha * place) / (a + alpha))


def test_feddyn_ends_where_the_sum_of_losses_is_least() -> None:
    def end(held: bool) -> float:
        experiment = small_federation(
            Bowls(alpha=2.0, held=held), clients=2, models=[plain], partition="iid"
        )
        list(experiment.rounds(60))
        found = torch.cat([p.detach().flatten() for p in experiment.server.model.parameters()])
        assert float(found.std()) < 1e-3
        return (
            float(found.mean())
            if held
            else float(cast(Cloud, experiment.server).average["head.bias"].mean())
        )

    assert end(True) == pytest.approx(4 / 5, abs=1e-3)
    assert end(False) == pytest.approx(1 / 2), "the mean of where each would go"


def test_feddyn_says_what_both_of_its_models_are_worth() -> None:
    experiment = small_federation(tiny("feddyn"))
    (record,) = experiment.rounds(1)
    server, _ = clouds(experiment)
    test = experiment.engine.clients[0].tests["global"]
    mean = copy.deepcopy(server.model)
    mean.load_state_dict(server.average)
    assert record.server["global"] == accuracy(server.model, test)
    assert record.server["average_global"] == accuracy(mean, test)
    assert not same(dict(mean.state_dict()), dict(server.model.state_dict()))


AVERAGING = [
    name
    for name, kind in ALGORITHMS.items()
    if "average" in {field.name for field in describe_fields(kind)}
]


@pytest.mark.parametrize("name", [name for name in AVERAGING if name != "fedzkt"])
def test_methods_that_average_can_name_a_robust_average(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return entrywise_median(rows)

    monkeypatch.setitem(ROBUST, "median", noted)
    small_federation(tiny(name, average="median"), clients=2, models="small-mlp").step()
    assert set(asked) == {2}


def test_what_averages_nothing_names_no_average() -> None:
    assert set(AVERAGING) == {
        *("fedavg", "fedprox", "moon", "fml", "fedftg", "fedbn", "perfedavg"),
        *("lgfedavg", "fedgen", "fedkd", "feddf"),
    }


@pytest.mark.parametrize(
    ("name", "field", "value", "other"),
    [
        ("fedzkt", "average", "mean", "median"),
        ("dffke", "docking_weight_decay", 1e-3, 0.0),
        ("fedaf", "warm_start", False, True),
        ("dfrd", "smoothing", 0.0, 1.0),
        ("dfrd", "student_norm", "kept", "trained"),
        ("fedfree", "steps", 1, 2),
        ("perfedavg", "steps", 1, 2),
        ("dense", "weighting", "clients", "classes"),
        ("dsfl", "weighting", "clients", "classes"),
    ],
)
def test_a_field_of_an_older_version_is_dropped_or_refused(
    name: str, field: str, value: object, other: object
) -> None:
    kind = ALGORITHMS[name]
    written: dict[str, Any] = {"algorithm": {"name": name, field: value, "fraction": 0.5}}
    assert resolve(written).algorithm == kind(fraction=0.5)  # type: ignore[call-arg]
    today = with_defaults(written)["algorithm"]
    assert field not in today
    assert (today["name"], today["fraction"]) == (name, 0.5)
    written["algorithm"][field] = other
    with pytest.raises(ConfigError, match=rf"algorithm.{field}={other!r}: \w+ has no field"):
        resolve(written)


def test_a_median_is_not_moved_by_one_client() -> None:
    """An adversarial client whose weights are as large as they may be."""
    honest, beside = (
        small_federation(tiny("fedavg", average="median"), models="small-mlp") for _ in range(2)
    )
    arrive = beside.engine.receive_answer

    def lying(answer: Any, method: str, client: int, sent: Any) -> Any:
        if client == 2 and method == "client_update":
            answer = {n: 9 * v if v.is_floating_point() else v for n, v in answer.items()}
        return arrive(answer, method, client, sent)

    beside.engine.receive_answer = lying  # type: ignore[method-assign]
    found = [run.step().server["global"] for run in (honest, beside)]
    before, after = (
        run.server.model.get_parameter("head.weight").norm() for run in (honest, beside)
    )
    assert after < 1.5 * before
    assert found[1] > found[0] / 2
