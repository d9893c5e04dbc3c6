"""Sites bring their own data and networks; a server makes one federation of them, or says why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.data.task import Data
from barter.flower.consent import Consent
from barter.flower.handshake import Hello, Setup, agree, introduce, make_site
from barter.runs.folder import checkpoint_rounds
from barter.runs.journal import Journal
from barter.runs.selection import best_round
from barter.setup.config import Config, to_toml
from tests.conftest import tiny


def own_network(spec: Spec) -> nn.Module:
    """A site's own code."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(spec.channels * spec.height * spec.width, 9),
        nn.Tanh(),
        nn.Linear(9, spec.classes),
    )


def images(path: Path, *, bright: int, classes: int = 3, side: int = 8, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    data = {}
    for part, n in (("train", 60), ("test", 12)):
        data[f"x_{part}"] = rng.integers(0, bright, (n, side, side, 1), dtype=np.uint8)
        data[f"y_{part}"] = np.arange(n) % classes
    np.savez(path, **data)
    return f"npz:{path}"


def hello(name: str = "a", **changes: Any) -> Hello:
    spec = Spec(1, 8, 8, 3, (0.5,), (0.25,))
    return dataclasses.replace(Hello(name, None, spec, ("0", "1", "2"), 10, "small-cnn"), **changes)


def config(**changes: Any) -> Config:
    return Config(
        **{
            "algorithm": tiny("dffke"),
            "clients": 2,
            "data": Data(source="sites"),
            "device": "cpu",
            **changes,
        }
    )


def test_pixel_statistics_are_those_of_all_images_together() -> None:
    one, two = torch.rand(30, dtype=torch.float64), torch.rand(90, dtype=torch.float64) ** 3
    both = torch.cat([one, two])
    hellos = [
        hello(
            n,
            examples=len(x),
            spec=Spec(1, 8, 8, 3, (float(x.mean()),), (float(x.std(correction=0)),)),
        )
        for n, x in (("a", one), ("b", two))
    ]
    spec, ids = agree(config(), hellos[::-1])
    assert spec.mean[0] == pytest.approx(float(both.mean()), rel=1e-12)
    assert spec.std[0] == pytest.approx(float(both.std(correction=0)), rel=1e-12)
    assert [ids[k].name for k in (0, 1)] == ["a", "b"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (hello("a"), "two sites are called 'a'"),
        (
            hello("b", spec=Spec(1, 8, 8, 4, (0.5,), (0.25,)), classes=tuple("0123")),
            "a has 3 .* b has 4",
        ),
        (hello("b", classes=("cat", "dog", "owl")), "disagree on the classes.*cat, dog, owl"),
        (
            hello("b", spec=Spec(3, 8, 8, 3, (0.5,) * 3, (0.25,) * 3)),
            r"a has \(1, 8, 8\), b \(3, 8, 8\)",
        ),
        (hello("b", share=1), "a own, b 1"),
    ],
)
def test_sites_that_do_not_fit_together(other: Hello, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agree(config(), [hello("a"), other])


def test_as_many_sites_as_the_run_is_for() -> None:
    with pytest.raises(ConfigError, match="the run is for 3 clients, the sites are a, b"):
        agree(config(clients=3), [hello("a"), hello("b")])


def test_hello_survives_the_wire() -> None:
    assert Hello.read(hello().payload()) == hello()
    for broken in ({"name": "a"}, {**hello().payload(), "spec": "x"}):
        with pytest.raises(ConfigError, match="malformed"):
            Hello.read(broken)


@pytest.mark.parametrize(
    "change",
    [
        {"examples": "x"},
        {"examples": -5},
        {"examples": 10**15},
        {"name": 7},
        {"share": -1},
        {"share": "x"},
        {"classes": [1]},
    ],
)
def test_a_hello_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="impossible values"):
        Hello.read({**hello().payload(), **change})
    spec = hello().payload()["spec"]
    for odd in ({**spec, "mean": []}, {**spec, "std": [float("nan")]}, {**spec, "classes": True}):
        with pytest.raises(ConfigError, match="impossible values"):
            Hello.read({**hello().payload(), "spec": odd})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"set either data \(its own\) or share"),
        ({"data": "digits", "share": 0}, r"set either data \(its own\) or share"),
        ({"share": -1}, "share"),
        ({"share": 0, "threads": 0}, "threads"),
    ],
)
def test_a_site_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Setup(name="a", **fields)


def test_a_share_of_data_that_the_run_does_not_have() -> None:
    with pytest.raises(
        ConfigError, match=r"site a has no data of its own, and the run has none to share"
    ):
        introduce(Setup(name="a", share=0), to_toml(config()))


def test_sites_with_data_and_networks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from barter.flower import engine
    from barter.flower.deploy import conduct
    from tests.flower.grid import LoopbackGrid, site

    monkeypatch.setattr(engine, "POLL_SECONDS", 0)
    sources = [
        images(tmp_path / f"{n}.npz", bright=bright, seed=bright)
        for n, bright in (("a", 256), ("b", 128))
    ]
    sites = [
        site(tmp_path / "ma", name="a", data=sources[0], model="small-cnn", device="cpu"),
        site(
            tmp_path / "mb",
            name="b",
            data=sources[1],
            model="tests.flower.test_sites:own_network",
            device="cpu",
        ),
    ]
    grid = LoopbackGrid(sites, monkeypatch)
    run = config(
        rounds=2,
        models="tests.flower.test_sites:own_network",  # or the coordinator runs no code
        data=Data(source="sites", validation=0.2),
        keep="best",
        keep_rounds=1,
    )
    experiment = conduct(grid, run, tmp_path / "run", Journal(tmp_path / "journal"))
    assert experiment.folder is not None
    rounds = experiment.folder.records()
    for record in rounds:
        assert record.failures == []
        assert all(
            "local" in metrics and "global" not in metrics for metrics in record.clients.values()
        )
        assert all(
            "val_local" in metrics and "val" not in metrics for metrics in record.clients.values()
        ), "there is no pooled validation set"
    best = best_round(rounds)
    assert best is not None
    assert checkpoint_rounds(tmp_path / "run") == sorted({best.round, 2})
    for one in grid.sites.values():
        assert (len(one.client.data), len(one.client.tests["val_local"])) == (48, 12)
    assert [member.examples for member in experiment.engine.members.values()] == [48, 48]
    # Nothing of a site's data is known to the server but what it said in its hello and what DFFKE sends.
    assert experiment.test is None
    assert experiment.server.spec.mean[0] == pytest.approx((127.5 + 63.5) / 2 / 255, abs=0.01)
    assert grid.sites[101].client.architecture == "tests.flower.test_sites:own_network"


def test_a_site_takes_part_in_what_it_consents_to() -> None:
    careful = Consent(algorithms=["fedavg", "dffke"], methods=["client_update"])  # type: ignore[arg-type]
    careful.require("a", config(algorithm=tiny("fedavg")), own_data=True)
    with pytest.raises(
        ConfigError,
        match="site a does not take part in fedprox: consent.algorithms has fedavg, dffke",
    ):
        careful.require("a", config(algorithm=tiny("fedprox")), own_data=True)
    with pytest.raises(
        ConfigError,
        match="site a does not answer learn, train, teach, exchange, which dffke asks for",
    ):
        careful.require("a", config(), own_data=True)


def test_central_is_to_be_named_by_whoever_has_data_of_its_own(tmp_path: Path) -> None:
    toml = to_toml(config(algorithm=tiny("central")))
    source = images(tmp_path / "a.npz", bright=100)
    for asked in (toml, toml.replace('"central"', '"barter.algorithms.central:Central"')):
        with pytest.raises(
            ConfigError,
            match="site a does not take part in central, which asks for every private image",
        ):
            introduce(Setup(name="a", data=source), asked)
    named = Setup(name="a", data=source, consent=Consent(algorithms=("central",)))
    assert introduce(named, toml)["name"] == "a"
    Consent().require(
        "a", config(algorithm=tiny("central")), own_data=False
    )  # a share of the run's data is the run's


def test_nothing_is_imported_of_what_is_not_consented_to() -> None:
    toml = to_toml(config(algorithm=tiny("fedavg"))).replace(
        '"fedavg"', '"tests.flower.never_imported:It"'
    )
    picky = Setup(name="a", data="digits", consent=Consent(algorithms=("fedavg",)))
    with pytest.raises(ConfigError, match="does not take part in tests.flower.never_imported:It"):
        introduce(picky, toml)
    with pytest.raises(ConfigError, match="cannot be imported"):
        introduce(Setup(name="a", data="digits"), toml)
    code = "tests.flower.never_imported:make"
    trees: list[dict[str, Any]] = [
        {"models": code},
        {"data": {"source": "sites", "public": code}},
        {"partition": {"name": code}},
    ]
    for tree in trees:
        text = tomli_w.dumps({"algorithm": {"name": "fedavg"}, **tree})
        with pytest.raises(ConfigError, match=f"site a does not import {code}, which the run"):
            introduce(picky, text)
    own = Consent(algorithms=("fedavg",))
    own.require_code("a", tomli_w.dumps({"models": code}), own=(code,))
    Consent(algorithms=("fedavg", code)).require_code("a", tomli_w.dumps({"models": code}))


def test_how_much_a_site_does() -> None:
    Consent().require_size("a", torch.zeros(10**6))
    Consent(megabytes=4).require_size("a", [torch.zeros(10**6)])
    with pytest.raises(
        ConfigError,
        match=r"site a was sent 4.0 MB in a call, and accepts 3.9 \(consent.megabytes\)",
    ):
        Consent(megabytes=3.9).require_size("a", [torch.zeros(10**6)])
    for seconds, spent, left in (
        (None, 99.0, 60.0),
        (5, 0.0, 5),
        (5, 3.0, 2),
        (90, 0.0, 60),
        (90, 60.0, 30),
    ):
        assert Consent(seconds=seconds).within("a", 60.0, spent) == left
    assert Consent(seconds=5).within("a", float("nan"), 0.0) == 5
    with pytest.raises(
        ConfigError,
        match=r"site a computes for at most 5 s \(consent.seconds\) in a call",
    ):
        Consent(seconds=5).within("a", 60.0, 5.0)


def test_consent_stands_in_the_sites_file(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from barter.flower.supervise import load_setup

    file = tmp_path / "site.toml"
    file.write_text('name = "a"\nshare = 0\n[consent]\nalgorithms = ["fedavg"]\nseconds = 5\n')
    assert load_setup(file).consent == Consent(algorithms=("fedavg",), seconds=5.0)
    for lines, said in (
        ("[consent]\nalgorithms = 3", "consent.algorithms=3: must be a list of str"),
        ("[consent]\nsecond = 1", "unknown key 'consent.second': did you mean 'seconds'"),
        ("consent = 3", r"consent=3: must be a table, \[consent\]"),
    ):
        file.write_text(f'name = "a"\nshare = 0\n{lines}\n')
        with pytest.raises(ConfigError, match=said):
            load_setup(file)


def test_a_site_holds_on_to_its_consent_when_it_is_asked(tmp_path: Path) -> None:
    toml = to_toml(
        config(algorithm=tiny("fedavg"), data=Data(source="digits"), clients=3, models="small-mlp")
    )
    member = make_site(
        Setup(name="a", share=0, device="cpu", consent=Consent(megabytes=0.1)), tmp_path
    )
    spec = introduce(Setup(name="a", share=0), toml)["spec"]
    about = {
        "run": "0" * 16,
        "attempt": "1",
        "history": [],
        "config": toml,
        "spec": spec,
        "client": 0,
    }
    session = {**about, "architecture": "small-mlp"}
    call = {
        "ask": "call",
        "session": session,
        "round": 1,
        "before": 0,
        "evaluate": False,
        "alone": True,
    }
    elsewhere = {**session, "architecture": "tests.flower.never_imported:make"}
    said = member.answer({**call, "session": elsewhere, "method": "client_update", "args": ({},)})
    assert said["error"] == (
        "site a has the network small-mlp, and is asked for tests.flower.never_imported:make"
    )
    large = {"w": torch.zeros(10**5)}
    said = member.answer({**call, "method": "client_update", "args": (large,)})["error"]
    assert said == "site a was sent 0.4 MB in a call, and accepts 0.1 (consent.megabytes)"
    assert "error" in member.answer({"request": "without a question"})
    said = member.answer({**call, "method": "train", "args": ()})["error"]
    assert said == "'train' is not answered: the algorithm's `crosses` does not name it"
    other = {**session, "config": toml.replace('name = "fedavg"', 'name = "fedprox"')}
    picky = make_site(Setup(name="a", share=0, consent=Consent(algorithms=("fedavg",))), tmp_path)
    said = picky.answer({**call, "session": other, "method": "client_update", "args": ({},)})[
        "error"
    ]
    assert said.startswith("site a does not take part in fedprox")
