"""Protected answers on the way that all answers take: engines, accounts, budgets, statements."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
import tomli_w
import torch
from torch import Tensor

from barter import Crossing, FedAvg
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import CheckpointError, ClientError, ConfigError, PrivacyError
from barter.core.nodes import Client, Server
from barter.core.params import Fraction
from barter.core.payload import State
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.privacy import Privacy
from barter.privacy.guard import Guard
from barter.privacy.prices import Description
from barter.privacy.statement import Statement
from barter.setup.config import Config, read_toml, resolve, to_toml, with_settings
from barter.testing.conformance import few_digits
from tests.conftest import same, small_federation, state, tiny

DELTA = 1e-5


class Told(TypedDict):
    """Of each image."""

    rows: Tensor
    labels: Tensor
    count: int


class Remembering(Server):
    """A server that keeps what it was told."""

    heard: dict[int, Told] = {}


@dataclass(frozen=True, kw_only=True)
class Telling(Algorithm[Remembering, Client]):
    """Clients tell all that they have."""

    crosses = {"tell": Crossing(up="every image, and its label")}
    tells = {"tell.rows": "row", "tell.labels": "label", "tell.count": "nothing"}

    fraction: Fraction = 1.0  # of the clients that are asked

    def round(self, server: Remembering, clients: Clients, t: int) -> None:
        server.heard = dict(clients.sample(self.fraction).run(self.tell))

    def tell(self, client: Client) -> Told:
        rows = client.data.pixels.float().flatten(1) - 127.5
        return {"rows": rows, "labels": client.data.labels, "count": len(rows)}


ROWS = {"tell.rows": "gaussian clip=2", "tell.labels": "withhold"}


def telling(parts: dict[str, str] | None = None, **options: Any) -> Experiment:
    epsilon = options.pop("epsilon", 8.0)
    algorithm = Telling(fraction=options.pop("fraction", 1.0))
    privacy = Privacy(epsilon=epsilon, delta=DELTA, parts=ROWS if parts is None else parts)
    return small_federation(
        algorithm, **{"models": "small-mlp", "rounds": 2, "privacy": privacy, **options}
    )


def counts(client: Client) -> dict[str, int]:
    """How often each part was released, whatever the mechanism."""
    return {Description.read(text).part: count for text, count in client.released.items()}


def test_what_arrives_is_clipped_and_noisy_and_the_client_keeps_its_own() -> None:
    experiment = telling()
    experiment.step()
    noise = float(experiment.config.privacy.parts["tell.rows"].rpartition("=")[2])
    for k, heard in experiment.server.heard.items():  # type: ignore[attr-defined]
        data = experiment.engine.clients[k].data  # type: ignore[attr-defined]
        own = data.pixels.float().flatten(1) - 127.5
        clipped = 2 * own / own.norm(dim=1, keepdim=True)
        assert float((heard["rows"] - clipped).std()) == pytest.approx(2 * noise, rel=0.05)
        assert heard["count"] == len(own)
        assert float((heard["labels"] == data.labels).float().mean()) < 0.3


def test_the_account_is_the_clients_and_stops_the_run_before_the_round_that_is_too_much() -> None:
    experiment = telling()
    first, second = experiment.rounds(2)
    assert 0 < first.clients[0]["epsilon"] < second.clients[0]["epsilon"] <= 8
    noise = float(experiment.config.privacy.parts["tell.rows"].rpartition("=")[2])
    assert experiment.engine.clients[0].released == {  # type: ignore[attr-defined]
        f"tell.rows: gaussian clip=2.0 noise={noise}": 2,
        "tell.labels: withhold": 2,
    }
    before = state(experiment)
    with pytest.raises(PrivacyError, match=r"spent after round 2: .* client 0, 1, 2 more than 8\."):
        experiment.step()
    assert same(before, state(experiment)), "nothing was begun"


def test_a_client_itself_does_not_answer_beyond_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = telling(min_clients=1)
    experiment.engine.clients[1].released = {"tell.rows": 2}  # type: ignore[attr-defined]
    record = experiment.step()
    (failure,) = record.failures
    assert "client 1 does not answer 'tell': it would have spent epsilon = 10" in failure
    assert "of 8" in failure
    assert set(experiment.server.heard) == {0, 2}  # type: ignore[attr-defined]
    monkeypatch.setattr(experiment, "_require_budget", lambda: None)
    experiment.step()
    with pytest.raises(
        PrivacyError,
        match=r"spent after round 2: client 0 does not answer 'tell': .*, of 8\. Finished",
    ):
        experiment.step()


def test_only_rounds_that_a_client_took_part_in_count() -> None:
    experiment = telling(fraction=0.34, rounds=4)
    for _ in range(4):
        experiment.step()
    released = [counts(client).get("tell.rows", 0) for client in experiment.engine.clients.values()]  # type: ignore[attr-defined]
    assert sum(released) == 4
    assert max(released) < 4
    statement = experiment.privacy()
    assert statement.epsilon == max(statement.clients.values()) < 8
    assert next(row for row in statement.rows if row.part == "tell.rows").releases == max(released)


def test_a_resumed_run_goes_on_with_its_account_and_its_noise(tmp_path: Path) -> None:
    whole = telling(out=tmp_path / "whole", rounds=3)
    list(whole.rounds(3))
    part = telling(out=tmp_path / "part", rounds=3)
    part.step()
    part.folder.release()  # type: ignore[union-attr]
    config = resolve_own(tmp_path / "part")
    assert "noise=" in config["privacy"]["parts"]["tell.rows"], "as calibrated"
    again = telling(out=tmp_path / "part", rounds=3, resume=True)
    list(again.rounds(3))
    assert same(state(whole), state(again))
    assert counts(again.engine.clients[0])["tell.rows"] == 3  # type: ignore[attr-defined]
    assert (tmp_path / "whole" / "privacy.json").read_text() == (
        tmp_path / "part" / "privacy.json"
    ).read_text()
    again.folder.release()  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"privacy.parts.tell.rows differs"):
        telling(out=tmp_path / "part", rounds=5, resume=True)
    calibrated = Privacy(**config["privacy"])
    longer = small_federation(
        Telling(),
        models="small-mlp",
        out=tmp_path / "part",
        rounds=5,
        resume=True,
        privacy=calibrated,
    )
    with pytest.raises(PrivacyError, match="spent after round 3"):
        longer.step()


def resolve_own(folder: Path) -> dict[str, Any]:
    return read_toml(folder / "config.toml")


def test_runs_that_were_begun_before_there_was_privacy_go_on(tmp_path: Path) -> None:
    old = small_federation(Telling(), models="small-mlp", out=tmp_path, rounds=2)
    old.step()
    old.folder.release()  # type: ignore[union-attr]
    config = read_toml(tmp_path / "config.toml")
    del config["privacy"]
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))
    small_federation(Telling(), models="small-mlp", out=tmp_path, rounds=2, resume=True).step()


def test_forked_turns_and_turns_here_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from barter.engines import local

    here, forked = telling(), telling()
    forked.engine.cores = 2  # type: ignore[attr-defined]
    monkeypatch.setattr(local, "FORK_SECONDS", -1.0)
    monkeypatch.setattr(forked.engine, "_worth_forking", lambda method, clients: method == "tell")
    list(here.rounds(2))
    list(forked.rounds(2))
    assert same(state(here), state(forked))
    assert counts(forked.engine.clients[2])["tell.rows"] == 2  # type: ignore[attr-defined]


def test_the_statement_says_what_left_and_survives_a_file() -> None:
    experiment = telling({"tell.rows": "gaussian clip=2 noise=9"}, epsilon=None)
    experiment.step()
    bare = experiment.privacy()
    answers = [row for row in bare.rows if row.part.startswith("tell.")]
    assert [(row.part, row.protection) for row in answers] == [
        ("tell.rows", "gaussian clip=2 noise=9"),
        ("tell.labels", ""),
        ("tell.count", ""),
    ]
    assert [math.isinf(row.epsilon) for row in answers] == [False, True, False]
    assert math.isinf(bare.epsilon)
    assert bare.why == (
        "mean and deviation of pixels, tell.labels, results of evaluation left without protection",
    )
    assert json.loads(bare.to_json())["epsilon"] == "infinity"
    assert Statement.from_json(bare.to_json()) == bare
    experiment = telling()
    experiment.step()
    whole = experiment.privacy()
    assert whole.epsilon == pytest.approx(whole.clients[0])
    assert whole.epsilon < 8
    assert not whole.why


def test_rows_that_a_trained_network_made_promise_nothing_alone() -> None:
    parts = {
        "learn.embeddings": "means clip=2",
        "learn.weights": "withhold",
        "teach.logits": "gaussian clip=1",
    }
    privacy = Privacy(epsilon=4, parts=parts).settle(tiny("dffke"), 1)
    guard = Guard(privacy, tiny("dffke"))
    assert {part: guard.plan.public_assumption(part) for part in guard.plan.covers} == {
        "learn.embeddings": "the client's network",
        "learn.labels": "the client's network",
        "learn.weights": "",
        "teach.logits": "",
    }


def test_dffke_with_everything_protected() -> None:
    parts = {
        "learn.weights": "gaussian clip=1",
        "learn.embeddings": "gaussian clip=1 each=answer",
        "learn.labels": "withhold",
        "teach.logits": "gaussian clip=1",
    }
    experiment = small_federation(
        tiny("dffke"), rounds=1, models="small-mlp", privacy=Privacy(epsilon=50, parts=parts)
    )
    experiment.step()
    statement = experiment.privacy()
    assert statement.epsilon == pytest.approx(50, abs=0.01), (
        "of three answers of each client, and of nothing else"
    )
    assert statement.clients == dict.fromkeys(range(3), statement.epsilon)


@pytest.mark.parametrize(
    ("name", "method"), [("dffke", "learn"), ("fedproto", "learn"), ("feddm", "condense")]
)
def test_all_of_a_method_can_be_withheld(name: str, method: str) -> None:
    """What is zero then must still be an answer: a number of images, classes, sizes."""
    experiment = small_federation(
        tiny(name), models="small-mlp", privacy=Privacy(parts={method: "withhold"})
    )
    experiment.step()
    rows = {row.part: row for row in experiment.privacy().rows if row.part.startswith(method)}
    harmless = [part for part, row in rows.items() if not row.protection]
    assert harmless == (["learn.examples"] if name == "dffke" else [])
    assert all(row.epsilon == 0 for row in rows.values())


def test_a_word_cannot_be_withheld() -> None:
    with pytest.raises(ConfigError, match=r"learn='withhold': learn.name holds a word, which"):
        Privacy(parts={"learn": "withhold"}).settle(tiny("fedfree"), 1)


def test_variances_of_networks_stay_what_they_are() -> None:
    parts = {"client_update": "gaussian clip=1 noise=1"}
    experiment = small_federation(tiny("fedavg"), rounds=1, privacy=Privacy(parts=parts))
    assert isinstance(experiment.engine, LocalEngine)
    told = experiment.engine.call("client_update", {0: (experiment.server.model.state_dict(),)})[0]
    least = {name: float(value.min()) for name, value in told.items() if value.is_floating_point()}
    assert least.pop("body.2.running_var") >= 0
    assert max(least.values()) < 0
    assert all(not value.any() for value in told.values() if not value.is_floating_point()), (
        "counters are withheld"
    )


def test_the_papers_noise_promises_nothing_and_is_said_to() -> None:
    parts = {"learn.embeddings": "paper"}
    experiment, bare = (
        small_federation(tiny("dffke"), privacy=Privacy(parts=p), rounds=1) for p in (parts, {})
    )
    for e in (experiment, bare):
        e.engine.round = 1
    noisy, exact = (e.engine.call("learn", {0: ()})[0] for e in (experiment, bare))
    assert float((noisy["embeddings"] - exact["embeddings"]).std()) > 0.01
    assert torch.equal(noisy["labels"], exact["labels"])
    row = next(row for row in experiment.privacy().rows if row.part == "learn.embeddings")
    assert row.protection == "paper, without a guarantee"
    assert math.isinf(row.epsilon)
    assert "learn.embeddings left with noise that gives no guarantee" in experiment.privacy().why


@dataclass(frozen=True, kw_only=True)
class Vandal(FedAvg):
    """Writes to what it was given."""

    def client_update(self, client: Client, w: State) -> State:
        for value in w.values():
            value.fill_(50)
        return w


def test_changes_are_since_what_came_not_since_what_became_of_it() -> None:
    privacy = Privacy(parts={"client_update": "gaussian clip=1 noise=1e-9 of=change"})
    experiment = small_federation(Vandal(), privacy=privacy)
    assert isinstance(experiment.engine, LocalEngine)
    w = dict(experiment.server.model.state_dict())
    told = experiment.engine.call("client_update", {0: (w,)})[0]
    changes = [
        float((told[at] - value).square().sum())
        for at, value in w.items()
        if value.is_floating_point()
    ]
    assert sum(changes) == pytest.approx(1, rel=1e-3)


def test_methods_that_are_not_said_to_cross_are_not_answered() -> None:
    experiment = telling()
    assert isinstance(experiment.engine, LocalEngine)
    replies = experiment.engine.call("gallery", {0: (1, 2)})
    assert "'gallery' is not answered" in replies.failures[0].error


def test_nothing_is_said_of_what_does_not_cross() -> None:
    experiment = small_federation(tiny("local"), rounds=1)
    experiment.step()
    statement = experiment.privacy()
    assert not any("." in row.part for row in statement.rows)
    assert statement.why == (
        "mean and deviation of pixels, results of evaluation left without protection",
    )
    experiment = small_federation(tiny("local"), rounds=1, privacy=Privacy(epsilon=1))
    experiment.step()
    assert experiment.privacy().epsilon == 0.0


MISTAKES = [
    ({"tell.row": "withhold"}, None, r"Telling sends no 'tell.row': did you mean 'tell.rows'\?"),
    ({"tell.rows": "gaussian clip=2"}, None, "it needs noise=..., or privacy.epsilon for the run"),
    ({"tell.rows": "laplace clip=2"}, 4.0, "it needs noise=...$"),
    ({"tell.count": "response epsilon=1"}, None, "rows of tell.count belong to no single image"),
    (
        {"tell": "withhold", "tell.rows": "withhold"},
        None,
        "tell.rows is protected twice, by tell and tell.rows",
    ),
    (
        {"tell.rows": "means clip=1 labels=names"},
        4.0,
        "no 'tell.names' for the labels of tell.rows",
    ),
    (
        {"tell.rows": "gaussian clip=-1"},
        4.0,
        "tell.rows='gaussian clip=-1': clip=-1.0: must be float > 0",
    ),
    ({"tell.rows": "gaussian clips=1"}, 4.0, "tell.rows='gaussian clips=1': gaussian needs clip"),
    ({"tell.rows": "gaussian clip=1 nois=1"}, 4.0, "unknown key 'nois': did you mean 'noise'"),
    (
        {"tell.count": "gaussian clip=1"},
        4.0,
        "there are no decimal numbers in it; `withhold` protects it",
    ),
    (
        {"tell.rows": "gaussian clip=1 each=answer of=change"},
        4.0,
        "the server sends no decimal numbers that could change",
    ),
    ({"tell.labels": "response epsilon=5"}, 4.0, None),
    ({"tell.labels": "response epsilon=5", "tell.rows": "gaussian clip=1"}, 4.0, "already cost"),
]


@pytest.mark.parametrize(("parts", "epsilon", "message"), MISTAKES)
def test_mistakes_are_found_before_anything_runs(
    parts: dict[str, str], epsilon: float | None, message: str | None
) -> None:
    privacy = Privacy(epsilon=epsilon, parts=parts)
    if message is None:
        assert privacy.settle(Telling(), 2) == privacy
        return
    with pytest.raises(ConfigError, match=message):
        Config(algorithm=Telling(), privacy=privacy, rounds=2)


def test_a_part_that_another_configuration_would_send_is_none() -> None:
    privacy = Privacy(epsilon=4, parts={"teach.embeddings": "gaussian clip=1"})
    assert (
        "noise=" in privacy.settle(tiny("dffke", embedding_loss=True), 1).parts["teach.embeddings"]
    )
    with pytest.raises(
        ConfigError, match="DFFKE as configured sends no 'teach.embeddings': leave it out"
    ):
        privacy.settle(tiny("dffke"), 1)


def test_every_part_is_named_once() -> None:
    with pytest.raises(
        ConfigError, match="FedAvg sends no 'learn.labels': there are: client_update$"
    ):
        Privacy(parts={"learn.labels": "withhold"}).settle(FedAvg(), 1)


@dataclass(frozen=True, kw_only=True)
class Vague(Telling):
    """Does not say what it tells."""

    tells = {}

    def tell(self, client: Client) -> Any:
        return len(client.data)


def test_a_mechanism_that_does_not_fit_is_refused_or_that_clients_failure() -> None:
    with pytest.raises(
        ConfigError, match="tell.labels holds labels; `response` or `withhold` protects them"
    ):
        telling({"tell.labels": "gaussian clip=1 noise=1 each=answer"}, epsilon=None)
    privacy = Privacy(parts={"tell": "gaussian clip=1 noise=1"})
    with pytest.raises(
        ClientError, match=r"gaussian clip=1 noise=1: there are no decimal numbers"
    ) as caught:
        small_federation(Vague(), models="small-mlp", privacy=privacy).step()
    assert not hasattr(caught.value, "__notes__"), (
        "what says what to change is one line, without a traceback"
    )


@dataclass(frozen=True, kw_only=True)
class Twice(Telling):
    """Says everything in two entries."""

    def tell(self, client: Client) -> list[Told]:  # type: ignore[override]
        return 2 * [super().tell(client)]


def test_an_image_has_one_row_in_an_answer() -> None:
    privacy = Privacy(parts={"tell.rows": "gaussian clip=1 noise=1"})
    with pytest.raises(ClientError, match="an image has rows in several entries of the answer"):
        small_federation(Twice(), models="small-mlp", privacy=privacy).step()


def test_a_configuration_is_read_and_written() -> None:
    settings = [
        "algorithm.name=dffke",
        "privacy.epsilon=8",
        'privacy.parts={"learn.embeddings" = "gaussian clip=4"}',
    ]
    config = resolve(with_settings({}, settings))
    assert config.privacy.parts == {"learn.embeddings": "gaussian clip=4 noise=2.6844"}
    import tomllib

    assert resolve(tomllib.loads(to_toml(config))) == config
    for setting, message in {
        "privacy.parts=3": "privacy.parts=3: must be a table of str -> str",
        "privacy.delta=1": "privacy.delta=1: must be float >= 1e-12 and <= 0.01",
        "privacy.sigma=1": "unknown key 'privacy.sigma'",
    }.items():
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            resolve(with_settings({}, [setting]))


def test_many_images_cost_no_more() -> None:
    assert len(few_digits()[0]) > 100
    one = telling(rounds=5).config.privacy.parts["tell.rows"]
    assert one == telling(rounds=5, clients=2).config.privacy.parts["tell.rows"]
