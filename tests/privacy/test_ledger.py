"""A site's ledger: each release is priced by what it was, over all runs, and within a budget."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barter.cli.app import main
from barter.core.errors import CheckpointError, PrivacyError
from barter.core.images import Spec
from barter.privacy import Privacy
from barter.privacy.account import (
    GaussianRelease,
    SampledRelease,
    calibrate_noise,
    composed_epsilon,
)
from barter.privacy.guard import Guard
from barter.privacy.ledger import Ledger
from barter.privacy.prices import protected_epsilon, total_epsilon
from barter.setup.config import Config, to_toml
from barter.setup.participants import initial_network
from tests.conftest import small_federation, tiny

DELTA = 1e-5
BUDGET = 8.0
CALLS = 5
# Noise with which so many calls cost nearly the budget: after call k, a site that prices all its
# releases by the current noise says 7.92.
NOISES = [calibrate_noise(7.92, DELTA, k) for k in range(1, CALLS + 1)]
TRUE = composed_epsilon({GaussianRelease(noise): 1 for noise in NOISES}, DELTA)


def noisy(noise: float, **options: Any) -> Privacy:
    options = {"epsilon": BUDGET, "delta": DELTA, **options}
    return Privacy(parts={"client_update": f"gaussian clip=5 noise={noise!r}"}, **options)


TRAINING = Privacy(epsilon=BUDGET, delta=DELTA, training="clip=1 noise=2")
ATTACKS = {
    "changing the noise in each call": [noisy(noise) for noise in NOISES],
    "switching to private training": [noisy(NOISES[0]), TRAINING],
    "one call with much noise": [noisy(NOISES[0]), noisy(1000.0)],
}


@pytest.mark.parametrize("settings", ATTACKS.values(), ids=ATTACKS)
def test_settings_that_change_do_not_change_what_was_released(settings: list[Privacy]) -> None:
    """In one process: guards of other settings at the door of the same client."""
    experiment = small_federation(tiny("fedavg"), models="small-mlp", clients=1)
    client = experiment.engine.clients[0]  # type: ignore[attr-defined]
    answer = {"head.weight": client.model.state_dict()["head.weight"]}
    first = Guard(settings[0], experiment.algorithm, secret=True)
    first.protect(client, "client_update", answer, (), 0)
    said = client.report["epsilon"]
    assert said == pytest.approx(7.92, abs=1e-6)
    for privacy in settings[1:]:
        guard = Guard(privacy, experiment.algorithm, secret=True)
        assert guard.cost(client.released) == said, "whatever the settings are by now"
        with suppress(PrivacyError), guard.seal_images(client, "client_update", 0):
            if privacy.training:
                client.data.training.count(0.1, 50)
            guard.protect(client, "client_update", answer, (), 0)
        assert said <= client.report["epsilon"] <= BUDGET
    assert len(client.released) == (2 if len(settings) == 2 and settings[1].parts else 1), (
        "only what is nothing but noise was within the budget"
    )


def test_each_release_has_its_own_price() -> None:
    account = {f"client_update: gaussian clip=5.0 noise={noise!r}": 1 for noise in NOISES}
    assert total_epsilon(account, DELTA) == pytest.approx(TRUE, rel=1e-9)
    assert TRUE > 1.5 * BUDGET
    steps = "training: dp-sgd clip=1.0 noise=2.0 rate=0.1"
    both = composed_epsilon({GaussianRelease(NOISES[0]): 1, SampledRelease(2.0, 0.1): 50}, DELTA)
    mixed = {"a: gaussian clip=1.0 noise=" + repr(NOISES[0]): 1, steps: 50, "b: withhold": 9}
    assert total_epsilon(mixed, DELTA) == both
    assert total_epsilon({"training 0.1 2.0": 50}, DELTA) == total_epsilon({steps: 50}, DELTA), (
        "as older versions wrote it"
    )


@pytest.mark.parametrize(
    ("text", "protected"),
    [
        ("client_update", math.inf),
        ("client_update: magic noise=3.0", math.inf),
        ("client_update: gaussian clip=1.0", math.inf),
        ("training: dp-sgd clip=1.0 noise=-1.0 rate=0.1", math.inf),
        ("training 0.1 nan", math.inf),
        ("client_update: nothing", 0.0),
        ("learn.embeddings: paper", 0.0),
        ("a: response epsilon=0.5 given the client's network", 0.5),
    ],
)
def test_what_has_no_known_price_is_infinite(text: str, protected: float) -> None:
    assert total_epsilon({text: 1}, DELTA) == math.inf
    assert protected_epsilon({text: 1}, DELTA) == pytest.approx(protected, abs=2e-3)
    assert total_epsilon({text: 0}, DELTA) == 0


class Caller:
    """A server that asks one site, which has images of its own."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        pytest.importorskip("flwr")
        from tests.flower.grid import site

        pixels = np.random.default_rng(0).integers(256, size=(40, 8, 8, 1), dtype=np.uint8)
        labels = np.arange(40) % 4
        np.savez(
            folder / "own.npz",
            x_train=pixels,
            y_train=labels,
            x_test=pixels,
            y_test=labels,
            classes=list("abcd"),
        )
        fields = {"name": "a", "data": f"npz:{folder / 'own.npz'}", "device": "cpu", **fields}
        self.site = site(folder / "memory", **fields)

    def hello(self, privacy: Privacy) -> dict[str, Any]:
        return dict(self.site.answer({"ask": "hello", "config": self.config(privacy)}))

    def config(self, privacy: Privacy, **fields: Any) -> str:
        fields = {"algorithm": tiny("fedavg"), "rounds": 9, **fields}
        return to_toml(
            Config(**fields, models="small-mlp", device="cpu", clients=1, privacy=privacy)
        )

    def ask(
        self, privacy: Privacy, round: int, run: str = "0" * 16, **fields: Any
    ) -> dict[str, Any]:
        spec = {"channels": 1, "height": 8, "width": 8, "classes": 4, "mean": [0.5], "std": [0.25]}
        weights = initial_network("small-mlp", Spec.of(spec), 0).state_dict()
        session = {
            "run": run,
            "config": self.config(privacy, **fields),
            "spec": spec,
            "client": 0,
            "architecture": "small-mlp",
            "attempt": "a",
            "history": {},
        }
        call = {"round": round, "method": "client_update", "before": 0, "args": (weights,)}
        request = {"ask": "call", "session": session, "alone": False, "evaluate": True, **call}
        return dict(self.site.answer(request))


@pytest.mark.parametrize("settings", ATTACKS.values(), ids=ATTACKS)
def test_a_server_cannot_change_the_settings_of_a_run(
    tmp_path: Path, settings: list[Privacy]
) -> None:
    caller = Caller(tmp_path, epsilon=BUDGET)
    assert caller.ask(settings[0], 1)["epsilon"] == pytest.approx(7.92, abs=1e-6)
    for t, privacy in enumerate(settings[1:], 2):
        refused = caller.ask(privacy, t)
        assert "answer" not in refused
        change = "the server changed privacy.parts.client_update of run 0000000000000000 from "
        assert f"{change}'gaussian clip=5 noise={NOISES[0]!r}' to " in refused["error"]
        assert "start a new run" in refused["error"]
    assert "it would have spent epsilon" in caller.ask(settings[0], 2)["error"]
    assert "answer" not in caller.ask(settings[0], 2, algorithm=tiny("fedavg", lr=0.5))
    ledger = Ledger(tmp_path / "memory" / "ledger.jsonl")
    assert total_epsilon(ledger.account(), DELTA) == pytest.approx(7.92, abs=1e-6)


def test_more_rounds_are_no_other_settings(tmp_path: Path) -> None:
    caller = Caller(tmp_path)
    assert "answer" in caller.ask(noisy(20.0), 1)
    assert "answer" in caller.ask(noisy(20.0), 2, rounds=12, timeout=50.0)


def test_the_budget_over_all_runs_holds_whatever_a_run_is_called(tmp_path: Path) -> None:
    noise = calibrate_noise(5.0, DELTA, 1)
    three, four = (composed_epsilon({GaussianRelease(noise): n}, DELTA) for n in (3, 4))
    budget = (three + four) / 2
    assert 4 * 5 > four > budget > 8, "composed, not added"
    caller = Caller(tmp_path, budget=budget)
    assert caller.site.quiet, "a budget is a guarantee"
    runs = [f"{n:016x}" for n in range(4)]
    refused: list[str] = []
    for run in runs:
        reply = caller.ask(noisy(noise, epsilon=8.0), 1, run)
        if "error" in reply:
            refused.append(reply["error"])
        else:
            assert reply["epsilon"] == pytest.approx(5.0, abs=1e-3), "of this run"
    assert len(refused) == 1
    assert "over all runs it would have spent epsilon = " in refused[0]
    assert f"of its total budget of {budget:g}" in refused[0]
    ledger = Ledger(tmp_path / "memory" / "ledger.jsonl")
    assert total_epsilon(ledger.account(), DELTA) == pytest.approx(three)
    assert "answer" in caller.ask(noisy(1000.0), 1, "f" * 16), "what fits is answered"
    other = Caller(tmp_path, budget=three - 1, name="b")
    said = other.hello(noisy(noise))["error"]
    assert "cannot take part: it has spent epsilon = " in said
    with pytest.raises(PrivacyError, match="all runs together would have spent"):
        ledger.add(runs[0], {f"x: gaussian clip=1.0 noise={noise!r}": 1}, {}, (budget, DELTA))


def test_a_site_without_a_promise_writes_down_what_left_in_clear(tmp_path: Path) -> None:
    caller = Caller(tmp_path)
    for _ in range(2):
        assert "hello" in caller.hello(Privacy())
    reply = caller.ask(Privacy(), 1)
    assert reply["epsilon"] is None
    ledger = Ledger(tmp_path / "memory" / "ledger.jsonl")
    assert ledger.account() == {
        "mean and deviation of pixels: nothing": 1,
        "client_update: nothing": 1,
        "results of evaluation: nothing": 1,
    }
    account = ledger.runs()["0" * 16]
    assert account.delta == DELTA
    assert account.data == [caller.site.data]
    lines = ledger.path.read_text().splitlines()
    line = json.loads(lines[-1])
    assert (line["round"], line["method"], line["images"]) == (1, "client_update", 40)
    # Such a site may later ask for a guarantee over all runs: it is too late.
    late = Caller(tmp_path, budget=100.0)
    assert "spent epsilon = inf of its total budget of 100" in late.hello(noisy(9.0))["error"]


def test_accounts_of_older_versions_have_no_known_price(tmp_path: Path) -> None:
    former = tmp_path / "memory" / ("0" * 16) / "released.json"
    former.parent.mkdir(parents=True)
    former.write_text('{"client_update": 1}')
    caller = Caller(tmp_path, epsilon=BUDGET)
    assert "it would have spent epsilon = inf" in caller.ask(noisy(50.0), 1)["error"]
    assert "answer" in caller.ask(noisy(50.0), 1, "1" * 16), "another run"
    budgeted = Caller(tmp_path, budget=20.0)
    said = budgeted.hello(noisy(50.0))["error"]
    assert f"{former} counts releases without their noise" in said
    former.write_text('{"training 0.1 4.0": 10}')
    budgeted = Caller(tmp_path, budget=20.0)
    assert "hello" in budgeted.hello(noisy(50.0)), "steps of training have their noise"
    former.write_text('["client_update"]')
    assert "is damaged" in Caller(tmp_path, budget=20.0).hello(noisy(50.0))["error"]


def test_a_line_that_was_not_finished_is_written_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "memory" / "ledger.jsonl")
    about = {"round": 1, "method": "m", "delta": DELTA, "data": "d", "images": 4}
    ledger.add("run", {"m: withhold": 1}, about)
    with ledger.path.open("ab") as file:
        file.write(b'{"run": "run", "releases": {"m: withh')
    again = Ledger(ledger.path)
    assert again.account() == {"m: withhold": 1}
    again.add("run", {"m: withhold": 2}, about)
    assert again.account() == Ledger(ledger.path).account() == {"m: withhold": 3}
    assert ledger.path.read_bytes().endswith(b"}\n")
    with ledger.path.open("ab") as file:
        file.write(b'{"run": "run", "releases": {"m: withhold": -3}}\n')
    with pytest.raises(CheckpointError, match=r"ledger.jsonl is damaged in line 3"):
        Ledger(ledger.path).runs()


def test_the_ledger_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caller = Caller(tmp_path, budget=20.0)
    for round, run in ((1, "1" * 16), (2, "1" * 16), (1, "2" * 16)):
        assert "answer" in caller.ask(noisy(4.0, delta=1e-6), round, run)
    assert main(["privacy", "--ledger", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    two, three = (f"{composed_epsilon({GaussianRelease(4.0): n}, 1e-6):.3g}" for n in (2, 3))
    assert f"client_update gaussian clip=5.0 noise=4.0 2 {two}" in text
    assert f"the run as a whole {two}" in text
    assert f"All 2 runs together: ε = {three} with δ = 1e-06" in text
    former = tmp_path / "memory" / ("3" * 16) / "released.json"
    former.parent.mkdir()
    former.write_text('{"client_update": 2}')
    assert main(["privacy", "--ledger", str(tmp_path / "memory" / "ledger.jsonl")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "client_update unknown: counted by an older version 2 ∞" in text
    assert "All 3 runs together: ε = ∞" in text
    for arguments in ([], ["run", "--ledger", "site"], ["--ledger", str(tmp_path / "none")]):
        assert main(["privacy", *arguments]) == 2
