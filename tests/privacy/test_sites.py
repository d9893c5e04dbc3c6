"""Protected answers of sites: noise that the server cannot know, and an account that only grows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.flower import engine
from barter.flower.consent import Consent
from barter.flower.deploy import conduct
from barter.flower.handshake import Hello, build_server
from barter.flower.site import FAILED, Site
from barter.privacy import Privacy
from barter.privacy.ledger import Ledger
from barter.privacy.prices import protected_epsilon
from barter.runs.journal import Journal
from barter.setup.config import Config, to_toml
from barter.setup.participants import initial_network
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
        weights = initial_network("small-mlp", Spec.of(hello["spec"]), run.seed).state_dict()
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
        said[epsilon] = (
            hello["spec"]["mean"],
            set(first["evaluation"]),
            {*asked["answer"], *asked["evaluation"]},
        )
        assert first["epsilon"] == first["evaluation"]["epsilon"] > 0
    assert said[30.0] == ([0.5], {"epsilon"}, {"epsilon"})
    assert said[None][0] != [0.5]
    assert "local" in said[None][1] & said[None][2]


Ask = Callable[..., Any]


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., tuple[Site, Ask]]:
    """A site with images of its own, and a function that asks it as a server may that wants to
    know more than it should."""

    def make(labels: Any, run: Config | None = None, **fields: Any) -> tuple[Site, Ask]:
        rng = np.random.default_rng(0)
        pixels = rng.integers(256, size=(len(labels), 8, 8, 1), dtype=np.uint8)
        names = {"classes": list("abcd")}
        np.savez(tmp_path / "own.npz", x_train=pixels, y_train=labels, **names)
        np.savez(tmp_path / "public.npz", x_train=255 - pixels, y_train=labels, **names)
        made = {"name": "a", "data": f"npz:{tmp_path / 'own.npz'}", "device": "cpu", **fields}
        one = site(tmp_path / f"memory-{len(list(tmp_path.iterdir()))}", **made)
        run = run or Config(**FIELDS, clients=1, rounds=1)

        def ask(args: tuple[Any, ...] | None = None, **changes: Any) -> dict[str, Any]:
            spec = {
                **{"channels": 1, "height": 8, "width": 8, "classes": 4},
                **{"mean": [0.5], "std": [0.25]},
                **changes.pop("spec", {}),
            }
            about = {"run": "0" * 16, "attempt": "a", "history": {}, "client": 0}
            session = {**about, "config": to_toml(run), "architecture": "small-mlp", **changes}
            if args is None:
                args = (initial_network("small-mlp", Spec.of(spec), run.seed).state_dict(),)
            method = {"method": next(iter(run.algorithm.crosses)), "args": args}
            call = {"round": 1, "before": 0, "evaluate": False, "alone": False, **method}
            return dict(one.answer({"ask": "call", "session": {**session, "spec": spec}, **call}))

        return one, ask

    return make


def test_an_error_says_nothing_of_a_label(own: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With a class too few, a call had succeeded or failed as one label is."""
    labels = np.arange(40) % 3
    other = labels.copy()
    other[7] = 3
    for spec in ({"classes": 3}, {"classes": 5}, {"height": 9}, {"std": [0.0]}):
        replies = [own(y)[1](spec=spec) for y in (labels, other)]
        assert replies[0] == replies[1]
        assert "error" in replies[0]
    assert (
        "has 4 classes and images of (1, 8, 8), and the run wants 3"
        in own(labels)[1](spec={"classes": 3})["error"]
    )
    assert "answer" in own(labels)[1]()
    failed = own(labels)[1](args=({"head.weight": torch.zeros(7)},))
    assert failed == {"error": FAILED, "traceback": "", "quiet": True}
    assert "head.weight" in caplog.text, "the site's log has the details"
    said = own(labels + 2)[0].answer({"ask": "hello", "config": to_toml(config(1, 1))})["error"]
    assert said.endswith("its data cannot be used in this run; its log says why")
    assert "class number 4" in caplog.text


def test_a_site_chooses_its_network(own: Any) -> None:
    labels = np.arange(40) % 4
    _, ask = own(labels, model="small-mlp")
    assert "answer" in ask()
    assert (
        "has the network small-mlp, and is asked for small-cnn"
        in ask(architecture="small-cnn")["error"]
    )
    code = "antigravity:fly"
    assert f"small-mlp, and is asked for {code}" in own(labels)[1](architecture=code)["error"]
    wanting = Config(**{**FIELDS, "models": code}, clients=1, rounds=1)
    for fields in ({}, {"consent": Consent(algorithms=("fedavg",))}):
        refused = own(labels, wanting, **fields)[1](architecture=code)["error"]
        assert f"does not import {code}" in refused
        assert "antigravity" not in sys.modules
    known = "tests.privacy.test_sites:nowhere"
    wanting = replace(wanting, models=known)
    agreed = own(labels, wanting, consent=Consent(models=(known,)))[1]
    assert "nowhere" in agreed(architecture=known)["error"]
    assert "is not client 3" in own(labels)[1](client=3)["error"]


def test_a_site_chooses_its_public_images(own: Any, tmp_path: Path) -> None:
    """A server could name the site's own file, and ask for predictions on it."""
    labels = np.arange(40) % 4
    private = f"npz:{tmp_path / 'own.npz'}"
    run = Config(**{**FIELDS, "algorithm": tiny("fedmd")}, clients=1, rounds=1)
    run = replace(run, data=replace(run.data, public=private))
    hello = {"ask": "hello", "config": to_toml(run)}
    one, ask = own(labels, run)
    for said in (one.answer(hello), ask(args=())):
        assert "needs public images, which a site chooses itself; set public" in said["error"]
    one, ask = own(labels, run, public=private)
    for said in (one.answer(hello), ask(args=())):
        assert said["error"].endswith(
            "its public images cannot be used in this run; its log says why"
        )
    one, ask = own(labels, run, public=f"npz:{tmp_path / 'public.npz'}")
    seen = one.answer(hello)["hello"]["public"]
    assert "answer" in ask(args=(torch.arange(3),))
    public = one.client.public
    assert public is not None
    assert seen == public.fingerprint()
    assert int(public.pixels[0, 0, 0, 0]) == 255 - int(
        np.load(tmp_path / "own.npz")["x_train"][0, 0, 0, 0]
    )
    with pytest.raises(ConfigError, match="site a has other public images than data.public="):
        build_server(
            run, Spec(1, 8, 8, 4, (0.5,), (0.25,)), {0: Hello.read(one.answer(hello)["hello"])}
        )


def test_a_share_of_data_that_are_public_is_not_private(tmp_path: Path) -> None:
    privacy = Privacy(epsilon=8, training="clip=1 noise=4")
    run = Config(**{**FIELDS, "algorithm": tiny("fedmd")}, clients=3, privacy=privacy)
    run = replace(run, data=replace(run.data, public="digits"))
    one = site(tmp_path / "memory", name="a", share=0, device="cpu")
    said = one.answer({"ask": "hello", "config": to_toml(run)})
    assert "1,433 public images are training images too" in said["error"]


def test_what_a_site_told_counts_also_where_the_server_takes_it_back(tmp_path: Path) -> None:
    one = site(tmp_path / "memory", name="a", share=0, device="cpu")
    run = config(3, 1)
    spec = one.introduce(to_toml(run))["spec"]
    weights = initial_network("small-mlp", Spec.of(spec), run.seed).state_dict()

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
