"""The check of a guarantee: it finds one that is broken, and none that holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import FedAvg
from barter.attacks.canary import (
    TOGETHER,
    EpsilonBound,
    Game,
    _score,
    play_canary_game,
    prove_epsilon,
)
from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.core.nodes import Client, Silence
from barter.experiment import Experiment
from barter.privacy import Privacy, mechanisms
from barter.privacy.account import GaussianRelease, SampledRelease, composed_epsilon
from barter.privacy.noise import Seeded
from tests.conftest import small_federation
from tests.privacy.test_runs import Telling, Told
from tests.privacy.test_wagers import Pixels

DELTA = 1e-5


def played(experiment: Experiment, tries: int, images: int = 3) -> dict[str, EpsilonBound]:
    bounds = play_canary_game(experiment, tries, images, Silence())
    return {bound.part: bound for bound in bounds}


class Brief(Telling):
    """Clients tell one number of each image, so that all of an image's influence is in it."""

    def tell(self, client: Client) -> Told:
        told = super().tell(client)
        return {**told, "rows": told["rows"].mean(1, keepdim=True)}


def rows(mechanism: str, labels: str = "withhold") -> Experiment:
    parts = {"tell.rows": mechanism, "tell.labels": labels}
    if mechanism.startswith("means"):
        parts = {"tell.rows": mechanism}
    privacy = Privacy(delta=DELTA, parts=parts)
    return small_federation(Brief(), models=[Pixels], clients=1, privacy=privacy)


def averaging(privacy: Privacy, **options: Any) -> Experiment:
    algorithm = FedAvg(epochs=1, batch_size=2, lr=0.1, **options)
    return small_federation(algorithm, models=[Pixels], clients=1, privacy=privacy)


def replace_noise(privacy: Privacy, noise: str) -> Privacy:
    parts = {part: text.replace("noise=2", noise) for part, text in privacy.parts.items()}
    return Privacy(training=privacy.training.replace("noise=2", noise), parts=parts)


CHANGE = Privacy(parts={"client_update": "gaussian clip=0.01 noise=2 of=change"})
TRAINING = Privacy(training="clip=1 noise=2")
SOUND = {
    "gaussian": ("tell.rows", lambda: rows("gaussian clip=2 noise=2")),
    "gaussian on answers": ("tell.rows", lambda: rows("gaussian clip=2 noise=2 each=answer")),
    "laplace": ("tell.rows", lambda: rows("laplace clip=2 noise=1.5")),
    "response": ("tell.labels", lambda: rows("gaussian clip=2 noise=2", "response epsilon=1.5")),
    "means": ("tell.rows", lambda: rows("means clip=2 noise=1")),
    "change": ("client_update", lambda: averaging(CHANGE)),
    "training": ("training", lambda: averaging(TRAINING)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("part", "make"), SOUND.values(), ids=SOUND)
def test_no_guarantee_is_broken(part: str, make: Any) -> None:
    bounds = played(make(), tries=600)
    for bound in bounds.values():
        assert bound.proved <= bound.stated, bound
    assert bounds[part].proved > 0, "the attacker is not blind"
    if "tell.labels" in bounds and part == "tell.rows":
        assert (bounds["tell.labels"].stated, bounds["tell.labels"].proved) == (0, 0)


def test_epsilon_is_that_of_the_round() -> None:
    bounds = played(rows("gaussian clip=2 noise=3", "response epsilon=0.4"), tries=20)
    assert bounds["tell.rows"].stated == composed_epsilon({GaussianRelease(3.0): 1}, DELTA)
    assert bounds["tell.labels"].stated == pytest.approx(0.4, abs=1e-3)
    both = bounds[TOGETHER].stated
    assert bounds["tell.rows"].stated < both <= bounds["tell.rows"].stated + 0.41
    steps = played(averaging(TRAINING), tries=20, images=5)["training"]
    assert steps.stated == composed_epsilon({SampledRelease(2.0, 0.4): 3}, DELTA)


def quieter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the noise that is paid for."""
    normal = Seeded.normal
    monkeypatch.setattr(Seeded, "normal", lambda self, count: 0.1 * normal(self, count))
    draw = mechanisms.Laplace.draw
    monkeypatch.setattr(
        mechanisms.Laplace, "draw", lambda self, count, source: 0.1 * draw(self, count, source)
    )
    monkeypatch.setattr(mechanisms.Response, "keep", lambda self, classes: 0.999)


MADE = {
    "gaussian": ("tell.rows", lambda z: rows(f"gaussian clip=2 noise={z}")),
    "gaussian on answers": ("tell.rows", lambda z: rows(f"gaussian clip=2 noise={z} each=answer")),
    "laplace": ("tell.rows", lambda z: rows(f"laplace clip=2 noise={z}")),
    "response": ("tell.labels", lambda z: rows(f"gaussian clip=2 noise={z}", "response epsilon=1")),
    "means": ("tell.rows", lambda z: rows(f"means clip=2 noise={z}")),
    "change": ("client_update", lambda z: averaging(replace_noise(CHANGE, f"noise={z}"))),
    "training": ("training", lambda z: averaging(replace_noise(TRAINING, f"noise={z}"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_tenth_of_the_noise_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, make = MADE[name]
    quieter(monkeypatch)
    bound = played(make(6.0), tries=200, images=20 if name == "means" else 1)[part]
    assert bound.stated < bound.proved <= bound.provable, bound
    assert bound.is_broken == (name != "means"), "whose rows assume that the network is public"


@pytest.mark.parametrize("name", ["gaussian", "training"])
def test_noise_that_is_switched_off_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seeded, "normal", lambda self, count: torch.zeros(count).double())
    part, make = MADE[name]
    assert played(make(12.0), tries=40, images=1)[part].is_broken


def test_a_client_that_is_never_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(rows("gaussian clip=2 noise=2"), 1)
    game.client.id = 7
    monkeypatch.setattr(game, "play", lambda *_: None)
    with pytest.raises(ConfigError, match="hardly ever asks client 7"):
        _score(game, 0, 20, {}, Silence())


def test_a_bound_is_below_what_is_true_and_not_far() -> None:
    at = torch.Generator().manual_seed(0)
    apart = 1.5
    no, yes = (torch.randn(4000, generator=at).double() + shift for shift in (0.0, apart))
    true = composed_epsilon({GaussianRelease(2 / apart): 1}, 0.05)
    proved, hits, alarms = prove_epsilon(no, yes, 0.05)
    assert 0.6 * true < proved < true
    assert hits[0] < hits[1]
    assert alarms[0] < alarms[1]
    assert prove_epsilon(no[:2000], no[2000:], DELTA)[0] == 0, "nothing to tell apart"
    assert prove_epsilon(-yes, -no, 0.05)[0] == pytest.approx(proved, rel=0.3), "either way"
    certain = prove_epsilon(torch.zeros(400), torch.ones(400), DELTA)[0]
    low, high = (0.005 ** (1 / 200), 1 - 0.005 ** (1 / 200))
    assert certain == pytest.approx(math.log((low - DELTA) / high)), "by hand"


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ConfigError, match="the run protects nothing"):
        played(averaging(Privacy()), 20)
    with pytest.raises(ConfigError, match="at least 20"):
        played(averaging(TRAINING), 19)


CONFIG = """
clients = 1
models = "small-mlp"
device = "cpu"
threads = 1
[algorithm]
name = "fedavg"
epochs = 1
[privacy]
training = "clip=1 noise=30"
"""


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(CONFIG)
    options = ["--canary", "--tries", "20", "--images", "1"]
    assert main(["attack", str(file), *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "No bound exceeds the stated ε." in text
    assert "One round of clients with 1 images, 20 tries with either image" in text
    monkeypatch.setattr(Seeded, "normal", lambda self, count: torch.zeros(count).double())
    run = tmp_path / "run"
    run.mkdir()
    file.rename(run / "config.toml")
    assert main(["attack", str(run), *options]) == 1
    assert "the guarantee is broken: training reveals more than its ε" in capsys.readouterr().err
    (bound,) = json.loads((run / "canary.json").read_text())["bounds"]
    assert bound["part"] == "training"
    assert bound["proved"] > bound["stated"]
