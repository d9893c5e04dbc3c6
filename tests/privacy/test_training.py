"""Private training: gradients of single images, noise, accounts, and what may not look at images any more."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute.trainer import Trainer
from barter.core.errors import ClientError, ConfigError, PrivacyError
from barter.core.images import Augment, Images, PrivateTraining, Sealed, Spec, prepare_batch
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.models.grouped import use_group_norm
from barter.ops import private as private_ops
from barter.ops.fit import fit, sgd
from barter.ops.private import clipped_sum
from barter.privacy import Privacy, account
from barter.privacy.account import SampledRelease, calibrate_step_noise, composed_epsilon
from barter.privacy.noise import Seeded
from barter.privacy.prices import Description
from barter.setup.participants import initial_network
from barter.testing.conformance import few_digits
from tests.conftest import same, small_federation, state, tiny

SPEC = Spec(1, 8, 8, 3, (0.5,), (0.5,))


def images(n: int, seed: int = 0) -> Images:
    at = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, 1, 8, 8), generator=at, dtype=torch.uint8)
    return Images(pixels, torch.randint(3, (n,), generator=at), SPEC)


def network(name: str = "small-resnet") -> Any:
    model = initial_network(name, SPEC, 0).train()
    use_group_norm(model)
    return model


def total(model: nn.Module, data: Images, clip: float) -> Tensor:
    trained = dict(model.named_parameters())
    sums = clipped_sum(model, trained, F.cross_entropy, data, torch.arange(len(data)), clip)
    return torch.cat([part.flatten() for part in sums])


@pytest.mark.parametrize(
    "name", ["small-cnn", "small-vgg", "small-resnet", "small-separable", "small-mlp"]
)
def test_each_images_gradient_is_cut_by_itself(name: str) -> None:
    model, data = network(name), images(5)
    expected = torch.zeros(sum(p.numel() for p in model.parameters()))
    lengths = []
    for i in range(len(data)):
        x = prepare_batch(data.pixels[i : i + 1], SPEC, Augment())
        slopes = torch.autograd.grad(
            F.cross_entropy(model(x), data.labels[i : i + 1]), list(model.parameters())
        )
        slope = torch.cat([part.flatten() for part in slopes])
        lengths.append(float(slope.norm()))
        expected += slope * min(1.0, lengths[0] / float(slope.norm()))
    assert max(lengths) > lengths[0] > min(lengths) or len(set(lengths)) > 1
    assert torch.allclose(total(model, data, lengths[0]), expected, atol=1e-5)


def test_a_replaced_image_moves_the_sum_by_2_c() -> None:
    model, data, other = network(), images(6), images(6, seed=1)
    swapped = Images(
        torch.cat([other.pixels[:1], data.pixels[1:]]),
        torch.cat([other.labels[:1], data.labels[1:]]),
        SPEC,
    )
    assert 0 < float((total(model, data, 0.1) - total(model, swapped, 0.1)).norm()) <= 0.2 + 1e-6
    assert float(total(model, Images(data.pixels[:0], data.labels[:0], SPEC), 0.1).norm()) == 0


def private(experiment: Experiment, noise: float, clip: float, counted: list[Any]) -> Sealed:
    assert isinstance(experiment.engine, LocalEngine)
    source = Seeded(0)

    def count(rate: float, steps: int) -> float:
        counted.append((rate, steps))
        return noise

    how = PrivateTraining(clip, source.normal, source.uniform, count)
    return Sealed(experiment.engine.clients[0].data, how)


def test_a_step_has_the_noise_that_is_paid_for() -> None:
    experiment = small_federation(
        tiny("local"), models="small-mlp", privacy=Privacy(training="clip=1 noise=1")
    )
    client, counted = experiment.engine.clients[0], []  # type: ignore[attr-defined, var-annotated]
    before = torch.cat([p.detach().flatten() for p in client.model.parameters()]).clone()
    client.data = private(experiment, noise=5.0, clip=1e-9, counted=counted)
    n = len(client.data)
    fitted = fit(client, epochs=1, steps=1, batch_size=20, recipe=sgd(1e9))
    after = torch.cat([p.detach().flatten() for p in client.model.parameters()])
    assert float((after - before).std()) == pytest.approx(5.0 / 20, rel=0.03), (
        "of 5 C, over 20 images on average"
    )
    assert counted == [(20 / n, 1)]
    assert (fitted.epochs, math.isnan(fitted.accuracy)) == (1, True)


def test_noise_is_added_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is rounded first has fewer values, by which sums can be told apart."""
    experiment = small_federation(
        tiny("local"), models="small-mlp", privacy=Privacy(training="clip=1 noise=1")
    )
    client = experiment.engine.clients[0]  # type: ignore[attr-defined]
    n = sum(p.numel() for p in client.model.parameters())
    sums = [torch.full_like(p, 1.0) for p in client.model.parameters()]
    monkeypatch.setattr(private_ops, "clipped_sum", lambda *_: sums)
    drawn = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    how = PrivateTraining(1.0, lambda count: drawn[:count], Seeded(0).uniform, lambda *_: 3.0)
    client.data = Sealed(client.data, how)
    seen = []
    monkeypatch.setattr(
        Trainer,
        "descend",
        lambda trainer: seen.extend(p.grad.flatten() for p in client.model.parameters()),
    )
    fit(client, epochs=1, steps=1, batch_size=20, recipe=sgd(0.1))
    exact = ((1.0 + 3.0 * drawn) / 20).float()
    assert torch.equal(torch.cat(seen), exact)
    rounded = (1.0 + (3.0 * drawn).float()) / 20
    assert not torch.equal(torch.cat(seen), rounded)


def test_a_private_run_learns_and_is_accounted_for() -> None:
    privacy = Privacy(training="clip=1 noise=0.7", epsilon=1000)
    experiment = small_federation(
        tiny("fedavg", lr=0.5), models="small-mlp", rounds=2, privacy=privacy
    )
    first, second = experiment.rounds(2)
    assert second.server["global"] > 0.2
    client = experiment.engine.clients[1]  # type: ignore[attr-defined]
    n = len(client.data)
    steps = 2 * -(-n // 50)
    assert client.released == {f"training: dp-sgd clip=1.0 noise=0.7 rate={50 / n!r}": steps}
    cost = composed_epsilon({SampledRelease(0.7, 50 / n): steps}, 1e-5)
    assert second.clients[1]["epsilon"] == pytest.approx(cost)
    statement = experiment.privacy()
    assert (
        statement.epsilon
        == max(second.clients[k]["epsilon"] for k in range(3))
        > first.clients[0]["epsilon"]
    )
    assert [
        (row.part, row.protection) for row in statement.rows if row.releases and row.epsilon
    ] == [("client_update", "training clip=1 noise=0.7")]
    assert not any(isinstance(part, nn.BatchNorm1d) for part in client.model.modules())


def test_a_private_run_stops_before_its_budget_is_exceeded() -> None:
    privacy = Privacy(training="clip=1 noise=2", epsilon=4.2)
    experiment = small_federation(tiny("fedavg"), rounds=20, privacy=privacy)
    with pytest.raises(PrivacyError, match=r"spent after round \d: "):
        list(experiment.rounds(20))
    assert experiment.round > 0
    assert 3 < experiment.privacy().epsilon <= 4.2


@pytest.mark.slow
def test_noise_is_found_for_all_rounds_of_each_client() -> None:
    privacy = Privacy(training="clip=1", epsilon=6)
    experiment = small_federation(tiny("fedavg"), models="small-mlp", rounds=2, privacy=privacy)
    assert experiment.config.privacy.training == "clip=1 epsilon=6 rounds=2"
    *_, last = experiment.rounds(2)
    noises = set()
    for k, client in experiment.engine.clients.items():  # type: ignore[attr-defined]
        ((name, steps),) = client.released.items()
        price = Description.read(name).price()
        assert isinstance(price, SampledRelease)
        noises.add(price.noise)
        assert last.clients[k]["epsilon"] == composed_epsilon({price: steps}, 1e-5)
        assert 6 - 1e-3 < last.clients[k]["epsilon"] <= 6
    assert len(noises) > 1, "clients with fewer images need more"
    with pytest.raises(PrivacyError, match="spent after round 2"):
        experiment.step()


@pytest.mark.parametrize(
    "privacy",
    [
        {"epsilon": 5000, "training": "clip=1"},
        {"training": "clip=1 epsilon=5000 rounds=2"},
        {"epsilon": 5000, "parts": {"client_update": "gaussian clip=1"}},
    ],
)
def test_no_noise_is_found_for_an_epsilon_that_protects_nothing(
    privacy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took more than half a minute, in which the accountant was asked again and again."""
    asked: list[Any] = []
    monkeypatch.setattr(account, "_composed_epsilon", lambda *args: asked.append(args) or 1e9)
    with pytest.raises(ConfigError, match="epsilon=5000: such an epsilon protects nothing"):
        Privacy(**privacy).settle(tiny("fedavg"), 20)
    assert not asked
    given = Privacy(epsilon=5000, training="clip=1 noise=0.2").settle(tiny("fedavg"), 20)
    assert given.training == "clip=1 noise=0.2"


def test_noise_is_found_with_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = account._composed_epsilon
    monkeypatch.setattr(
        account, "_composed_epsilon", lambda *args: asked.append(args) or answer(*args)
    )
    assert calibrate_step_noise(9.0, 1e-5, 1.0, 10) > 1
    assert len(asked) <= 16


def test_a_client_keeps_the_noise_it_has_found() -> None:
    privacy = Privacy(training="clip=1 epsilon=5 rounds=2")
    experiment = small_federation(tiny("fedavg"), models="small-mlp", privacy=privacy)
    client, guard = experiment.engine.clients[0], experiment.engine.guard  # type: ignore[attr-defined]
    with guard.seal_images(client, "client_update", 0):
        noise = client.data.training.count(0.5, 4)
        assert client.data.training.count(0.5, 2) == noise
    assert client.released == {f"training: dp-sgd clip=1.0 noise={noise!r} rate=0.5": 6}


def test_private_runs_are_the_same_again() -> None:
    one, other = (
        small_federation(tiny("fedavg"), privacy=Privacy(training="clip=1 noise=1"))
        for _ in range(2)
    )
    one.step()
    other.step()
    assert same(state(one), state(other))


DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "privacy.md").read_text()
LISTED = DOCUMENT.partition("**Methods that work:**")[2].partition(", and")[0]
WORKS = re.findall(r"`(\w+)`", LISTED)


def test_the_document_lists_methods_that_work() -> None:
    assert "fedavg" in WORKS
    assert len(WORKS) > 8


@pytest.mark.parametrize("name", WORKS)
def test_methods_that_train_by_fit_alone(name: str) -> None:
    algorithm = tiny(name)
    public = "tests.conftest:other_digits" if algorithm.needs_public_data else ""
    data = Data(source=few_digits(), public=public)
    privacy = Privacy(epsilon=1000, training="clip=1 noise=1")
    experiment = small_federation(algorithm, data=data, privacy=privacy)
    record = experiment.step()
    assert not record.failures
    assert all(told["epsilon"] > 0 for told in record.clients.values())
    assert math.isfinite(experiment.privacy().epsilon)
    assert (experiment.privacy().epsilon > 0) == (name != "local"), "nothing leaves there"


def test_fedfree_without_what_looks_at_classes_and_images() -> None:
    privacy = Privacy(epsilon=1000, training="clip=1 noise=1")
    plain = tiny("fedfree", outputs="all", offset="received")
    experiment = small_federation(plain, privacy=privacy, models="small-mlp")
    for record in experiment.rounds(2):
        assert not record.failures
        assert record.mean("taken") > 0
    assert 0 < experiment.privacy().epsilon < math.inf
    for changes in ({"outputs": "trained"}, {"offset": "own"}):
        other = tiny("fedfree", **{"outputs": "all", "offset": "received", **changes})
        experiment = small_federation(other, privacy=privacy, models="small-mlp")
        with pytest.raises(ClientError, match=r"privacy.training: this method"):
            list(experiment.rounds(2))


@pytest.mark.parametrize(
    ("substitute", "parts"),
    [("noise", {"learn.weights", "teach.logits"}), ("photographs", {"teach.logits"})],
)
def test_dffke_that_shows_no_images(substitute: str, parts: set[str]) -> None:
    quiet = tiny(
        "dffke",
        reveal="nothing",
        substitute=substitute,
        local_review=False,
        balanced=False,
        later_epochs=0,
    )
    once = Privacy(training="clip=1 noise=1", epsilon=20)
    experiment = small_federation(quiet, privacy=once, rounds=2)
    first, second = experiment.rounds(2)
    assert first.clients[0]["epsilon"] == second.clients[0]["epsilon"] > 10, (
        "it trains before the first exchange only"
    )
    statement = experiment.privacy()
    assert math.isfinite(statement.epsilon)
    found = {row.part for row in statement.rows}
    assert found & {"learn.weights", "learn.embeddings", "teach.logits"} == parts


@pytest.mark.parametrize("name", ["dffke", "fedproto", "central", "dense", "heterofl", "fedaf"])
def test_methods_that_look_at_images_otherwise_are_refused(name: str) -> None:
    experiment = small_federation(tiny(name), privacy=Privacy(training="clip=1 noise=1"))
    with pytest.raises(ClientError, match=r"privacy.training: (this method|which classes)"):
        experiment.step()


def test_images_are_open_again_afterwards() -> None:
    experiment = small_federation(tiny("local"), privacy=Privacy(training="clip=1 noise=1"))
    experiment.step()
    data = experiment.engine.clients[0].data  # type: ignore[attr-defined]
    assert not isinstance(data, Sealed)
    assert len(data.pixels) == len(data)


def test_networks_that_mix_images_are_refused() -> None:
    experiment = small_federation(tiny("local"), models="small-mlp")
    client = experiment.engine.clients[0]  # type: ignore[attr-defined]
    client.data = private(experiment, 1.0, 1.0, [])
    with pytest.raises(ConfigError, match="BatchNorm1d mixes images"):
        fit(client, epochs=1, batch_size=20, recipe=sgd(0.1))


def test_networks_that_know_images_already_are_refused() -> None:
    with pytest.raises(ConfigError, match="were trained on images without"):
        small_federation(
            tiny("fedavg"), start="runs/other", privacy=Privacy(training="clip=1 noise=1")
        )


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        (
            {"training": "clip=1"},
            "privacy.training: it needs noise=..., or privacy.epsilon for the run",
        ),
        (
            {"training": "clip=1 noise=1 epsilon=8"},
            "noise is given, or found from epsilon and rounds, not both",
        ),
        ({"training": "clip=1 epsilon=8 rounds=1.5"}, "write it as clip=1"),
        ({"training": "noise=1"}, "privacy.training='noise=1': it needs clip=..."),
        ({"training": "much"}, "write it as clip=1 or clip=1 noise=1.1"),
        (
            {"training": "clip=0 noise=1"},
            "privacy.training='clip=0 noise=1': clip=0.0: must be float > 0",
        ),
        (
            {"training": "clip=1 noise=1", "parts": {"client_update": "withhold"}},
            "leave out privacy.parts",
        ),
    ],
)
def test_mistakes(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_federation(tiny("fedavg"), privacy=Privacy(**privacy))
