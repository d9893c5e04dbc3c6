"""Protected answers of sites: noise that the server cannot know, and an account that only grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.flower import engine
from barter.flower.deploy import conduct
from barter.privacy import Privacy
from barter.privacy.ledger import Ledger
from barter.privacy.prices import protected_epsilon
from barter.runs.journal import Journal
from barter.setup.config import Config, to_toml
from barter.setup.participants import initial
from tests.conftest import tiny
from tests.flower.grid import LoopbackGrid, site

PARTS = {"client_update": "gaussian clip=5"}
FIELDS: dict[str, Any] = {"algorithm": tiny("fedavg"), "models": "small-mlp", "device": "cpu"}


def config(rounds: int, clients: int) -> Config:
    return Config(
        **FIELDS, clients=clients, rounds=rounds, privacy=Privacy(epsilon=20, parts=PARTS)
    )


def test_a_run_across_sites_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    sites = [
        site(tmp_path / f"memory-{k}", name=f"site-{k}", share=k, device="cpu") for k in range(2)
    ]
    grid = LoopbackGrid(sites, monkeypatch)
    experiment = conduct(grid, config(2, 2), tmp_path / "run", Journal(tmp_path / "journal"))
    statement = experiment.privacy()
    assert max(statement.clients.values()) == pytest.approx(20, abs=0.01)
    assert statement.why == (
        "mean and deviation of pixels, results of evaluation left without protection",
    )
    assert statement.noise == "the operating system of each site"
    assert (tmp_path / "run" / "privacy.json").read_text() == statement.to_json()
    assert experiment.folder is not None
    told = [record.clients[1]["epsilon"] for record in experiment.folder.records()]
    assert told[0] < told[1] == statement.clients[1]
    ledger = Ledger(tmp_path / "memory-1" / "ledger.jsonl")
    (account,) = ledger.runs().values()
    assert account.config is not None
    assert account.config["privacy"]["epsilon"] == 20
    assert protected_epsilon(account.released, account.delta) == told[1]
    assert account.released["results of evaluation: nothing"] == 2


def test_a_site_that_wants_a_promise_says_nothing_else(tmp_path: Path) -> None:
    """Neither its accuracies nor the mean of its pixels are in any account."""
    pixels = np.random.default_rng(0).integers(256, size=(40, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(40) % 4
    np.savez(
        tmp_path / "own.npz",
        x_train=pixels,
        y_train=labels,
        x_test=pixels,
        y_test=labels,
        classes=list("abcd"),
    )
    run, said = config(1, 1), {}
    for epsilon in (None, 30.0):
        own = f"npz:{tmp_path / 'own.npz'}"
        one = site(
            tmp_path / f"memory-{epsilon}", name="a", data=own, device="cpu", epsilon=epsilon
        )
        hello = one.introduce(to_toml(run))
        about = {
            "run": "0" * 16,
            "config": to_toml(run),
            "spec": hello["spec"],
            "client": 0,
            "history": {},
        }
        session = {**about, "architecture": "small-mlp", "attempt": "a"}
        weights = initial("small-mlp", Spec.of(hello["spec"]), run.seed).state_dict()
        call = {
            "ask": "call",
            "session": session,
            "alone": False,
            "round": 1,
            "before": 0,
            "evaluate": True,
        }
        first = one.answer({**call, "method": "client_update", "args": (weights,)})
        asked = one.answer({**call, "method": "evaluate", "args": ()})
        narrow = {**session, "attempt": "b", "spec": {**hello["spec"], "classes": 2}}
        weights = initial("small-mlp", Spec.of(narrow["spec"]), run.seed).state_dict()
        failed = one.answer(
            {**call, "session": narrow, "method": "client_update", "args": (weights,)}
        )
        said[epsilon] = (
            hello["spec"]["mean"],
            set(first["evaluation"]),
            {*asked["answer"], *asked["evaluation"]},
        )
        assert ("out of bounds" in failed["error"] + failed["traceback"]) == (epsilon is None), (
            "a label is quoted"
        )
        assert first["epsilon"] == first["evaluation"]["epsilon"] > 0
    assert said[30.0] == ([0.5], {"epsilon"}, {"epsilon"})
    assert said[None][0] != [0.5]
    assert "local" in said[None][1] & said[None][2]


def test_what_a_site_told_counts_also_where_the_server_takes_it_back(tmp_path: Path) -> None:
    one = site(tmp_path / "memory", name="a", share=0, device="cpu")
    run = config(3, 1)
    spec = one.introduce(to_toml(run))["spec"]
    weights = initial("small-mlp", Spec.of(spec), run.seed).state_dict()

    def ask(attempt: str, history: dict[str, int], round: int) -> dict[str, Any]:
        about = {
            "run": "0" * 16,
            "config": to_toml(run),
            "spec": spec,
            "client": 0,
            "architecture": "small-mlp",
        }
        session = {**about, "attempt": attempt, "history": history}
        call = {
            "round": round,
            "method": "client_update",
            "before": 0,
            "args": (weights,),
            "evaluate": False,
        }
        return dict(one.answer({"ask": "call", "session": session, "alone": False, **call}))

    first = ask("a", {}, 1)["answer"]
    assert torch.equal(first["head.weight"], ask("a", {}, 1)["answer"]["head.weight"]), (
        "asked again, answered again"
    )
    assert list(one.client.released.values()) == [1]
    again = ask("b", {"a": 0}, 1)["answer"]
    assert not torch.equal(first["head.weight"], again["head.weight"]), (
        "done again, and with other noise"
    )
    assert list(one.client.released.values()) == [2]
    assert "answer" in ask("b", {"a": 0}, 2)
    refused = ask("b", {"a": 0}, 3)["error"]
    assert "does not answer 'client_update'" in refused
    assert "answer" not in ask("c", {"a": 0, "b": 0}, 1), (
        "nor does it in an attempt that knows of nothing"
    )


@pytest.mark.parametrize(
    ("algorithm", "privacy", "why"),
    [
        ("fedavg", Privacy(), "client_update would be released without protection"),
        ("fedavg", Privacy(epsilon=9, parts=PARTS), "its privacy.epsilon is 9.0"),
        ("fedavg", Privacy(training="clip=1 noise=1"), "its privacy.epsilon is None"),
        (
            "dffke",
            Privacy(epsilon=4, parts={"learn.embeddings": "gaussian clip=1"}),
            "learn.weights, learn.embeddings",
        ),
        (
            "fedavg",
            Privacy(epsilon=8, delta=1e-3, parts=PARTS),
            "its privacy.delta is 0.001, and may be 1e-05 at most",
        ),
        ("fedavg", Privacy(epsilon=8, parts=PARTS), None),
        ("fedavg", Privacy(epsilon=3, training="clip=1 noise=1"), None),
        ("local", Privacy(epsilon=3), None),
    ],
)
def test_a_site_can_ask_for_a_promise(
    tmp_path: Path, algorithm: str, privacy: Privacy, why: str | None
) -> None:
    careful = site(tmp_path, name="a", share=0, device="cpu", epsilon=8)
    run = to_toml(Config(**{**FIELDS, "algorithm": tiny(algorithm)}, clients=1, privacy=privacy))
    said = careful.answer({"ask": "hello", "config": run})
    session = {
        "run": "0" * 16,
        "config": run,
        "spec": {},
        "client": 0,
        "architecture": "small-mlp",
        "attempt": "a",
    }
    if why is None:
        assert "hello" in said
        return
    assert (
        "requires a privacy guarantee of epsilon = 8, and the run gives none: " + why
        in said["error"]
    )
    with pytest.raises(ConfigError, match="requires a privacy guarantee"):
        careful.settle(session)
