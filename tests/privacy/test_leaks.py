"""Ways to have a finite ε while something leaves uncounted: none of them is open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
from torch import Tensor

from barter import Crossing, FedAvg
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import ClientError
from barter.core.nodes import Client, Server
from barter.core.payload import State
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.privacy import Privacy
from barter.privacy.side_information import PIXELS, RESULTS
from barter.privacy.statement import make_statement
from tests.conftest import small_federation, tiny

TRAINING = Privacy(epsilon=1000, training="clip=1 noise=1")


class Said(TypedDict):
    """Of no image."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Careless(Algorithm):
    """Answers what it does not say."""

    crosses = {"tell": Crossing(up="how many images, or all of them")}
    tells = {"tell.count": "nothing"}

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.tell)

    def tell(self, client: Client) -> Said | Tensor:
        return client.data.pixels.float()


@dataclass(frozen=True, kw_only=True)
class Breaking(FedAvg):
    """Breaks off when all have answered."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        super().round(server, clients, t)
        raise RuntimeError("the server's disk is full")


@dataclass(frozen=True, kw_only=True)
class Silent(FedAvg):
    """Its clients say nothing of themselves, neither in their reports nor in evaluations."""

    def client_update(self, client: Client, w: State) -> State:
        answer = super().client_update(client, w)
        client.report = {}
        return answer

    def evaluate(self, client: Client) -> dict[str, float]:
        client.report = {}
        return {}


@dataclass(frozen=True, kw_only=True)
class Loud(FedAvg):
    """Its clients answer what the server refuses."""

    def client_update(self, client: Client, w: State) -> State:
        return {name: 1e9 + value for name, value in super().client_update(client, w).items()}


def federation(kind: type[FedAvg], **options: Any) -> Experiment:
    one = tiny("fedavg")
    algorithm = kind(epochs=one.epochs, batch_size=one.batch_size)
    return small_federation(algorithm, **{"models": "small-mlp", "privacy": TRAINING, **options})


def true_costs(experiment: Experiment) -> dict[int, float]:
    engine = experiment.engine
    assert isinstance(engine, LocalEngine)
    assert engine.guard is not None
    return {k: engine.guard.cost(client.released) for k, client in engine.clients.items()}


def test_training_counts_in_a_round_that_breaks_off(tmp_path: Path) -> None:
    experiment = federation(Breaking, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="disk"):
        experiment.step()
    assert experiment.privacy().clients == true_costs(experiment)
    assert 1 < experiment.privacy().epsilon < math.inf
    assert (tmp_path / "run" / "privacy.json").read_text() == experiment.privacy().to_json()


def test_training_counts_whatever_a_method_makes_of_reports(tmp_path: Path) -> None:
    experiment = federation(Silent, out=tmp_path / "run", rounds=2)
    experiment.step()
    first = experiment.privacy()
    assert first.clients == true_costs(experiment)
    assert first.epsilon > 1
    assert experiment.folder is not None
    experiment.folder.release()
    again = federation(Silent, out=tmp_path / "run", rounds=2, resume=True)
    assert again.privacy() == first, "the account is in the checkpoint"


def test_training_of_which_nobody_says_the_cost_has_no_epsilon() -> None:
    experiment = federation(FedAvg)
    experiment.step()
    said = {k: epsilon for k, epsilon in experiment.engine.reported_epsilon.items() if k != 1}
    found = make_statement(
        TRAINING, experiment.algorithm, experiment.engine.crossed, said, secret=True
    )
    assert math.isinf(found.epsilon)
    assert found.why == ("client 1 reports no finite ε",)
    for nonsense in (None, "little", math.nan, -1.0):
        experiment.engine.reported_epsilon.clear()
        experiment.engine.record_epsilon(1, nonsense)
        assert math.isinf(experiment.privacy().epsilon)


def test_what_is_no_part_of_an_answer_has_left_too() -> None:
    experiment = small_federation(Careless(), models="small-mlp")
    experiment.step()
    found = experiment.privacy()
    assert [row.part for row in found.rows if row.bare] == [PIXELS, "tell", RESULTS, RESULTS]
    assert found.why == (f"{PIXELS}, tell, {RESULTS} left without protection",)
    noisy = Privacy(epsilon=9, parts={"tell": "gaussian clip=1"})
    experiment = small_federation(Careless(), models="small-mlp", privacy=noisy)
    experiment.step()
    found = experiment.privacy()
    assert 0 < found.clients[0] < math.inf, "of its numbers; how many there are is counted nowhere"
    assert (
        "tell: the shape of the answer depends on private images and is not protected" in found.why
    )


def test_what_the_run_told_that_this_one_started_from_is_not_forgotten(tmp_path: Path) -> None:
    noisy = Privacy(epsilon=8, parts={"client_update": "gaussian clip=1 of=change"})
    before = federation(FedAvg, privacy=Privacy(), out=tmp_path / "before", rounds=1)
    before.step()
    for start, finite in (("", True), (str(tmp_path / "before"), False)):
        experiment = federation(FedAvg, privacy=noisy, rounds=1, start=start)
        experiment.step()
        assert math.isfinite(experiment.privacy().epsilon) == finite
    (why,) = experiment.privacy().why
    assert (
        why
        == f"it started from the networks of {start}, and what that run revealed about the same images is not counted"
    )


def test_what_the_server_refuses_has_left_too() -> None:
    experiment = federation(Loud, privacy=Privacy())
    with pytest.raises(ClientError, match="client_update"):
        experiment.step()
    assert [
        (row.part, row.epsilon) for row in experiment.privacy().rows if row.part == "client_update"
    ] == [("client_update", math.inf)]


@pytest.mark.parametrize(("secret", "protected"), [(False, True), (True, False), (True, True)])
def test_nobody_knows_which_images_a_site_chose(secret: bool, protected: bool) -> None:
    """Labels are told one by one, and their order follows from how long a client trained: it must not be known."""
    chosen = []
    for _ in range(2):
        parts = {"learn.labels": "response epsilon=1"} if protected else {}
        experiment = small_federation(
            tiny("dffke"), models="small-mlp", privacy=Privacy(parts=parts)
        )
        engine = experiment.engine
        assert isinstance(engine, LocalEngine)
        assert engine.guard is not None
        engine.guard.secret = secret
        engine.call("learn", {0: ()})
        chosen.append(engine.clients[0].offered[0])  # type: ignore[attr-defined]
    assert torch.equal(*chosen) == (not secret or not protected)
