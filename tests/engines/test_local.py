from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
import torch

from barter import Crossing
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import PayloadError
from barter.core.nodes import Client, Server
from barter.ops.fit import fit, sgd
from tests.conftest import federation, perceptrons, same, small_federation, state, tiny


class Notes:
    """A monitor that writes down what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, float]] = []
        self.done = 0.0

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return self._phase(name, total)

    @contextmanager
    def _phase(self, name: str, total: float) -> Iterator[None]:
        before, self.done = self.done, 0.0
        yield
        self.phases.append((name, total, self.done))
        self.done = before

    def advance(self, amount: float) -> None:
        assert amount >= 0
        self.done += amount


def test_every_phase_is_shown_from_nothing_to_all() -> None:
    notes = Notes()
    (record,) = federation(tiny("dffke"), monitor=notes).rounds(1)
    assert [name for name, _, _ in notes.phases] == [
        "learn",
        "unify",
        "decoder",
        "teach",
        "exchange",
        "evaluate",
    ]
    for name, total, done in notes.phases:
        assert done == pytest.approx(total), name
    assert record.seconds.keys() == {name for name, _, _ in notes.phases} | {"round"}
    assert sum(record.seconds.values()) - record.seconds["round"] <= record.seconds["round"] + 0.05


@dataclass(frozen=True, kw_only=True)
class Rumour(Algorithm):
    """Clients train one after the other; what one is worth is told to the next."""

    crosses = {
        "hear": Crossing(),
        "train": Crossing(down="a number", up="a number"),
    }

    quiet: bool = False  # whether they train before they hear of each other

    def round(self, server: Server, clients: Clients, t: int) -> None:
        if self.quiet:
            clients.run(self.hear)
        clients.relay(self.train, 0.0)

    def hear(self, client: Client) -> None:
        fit(client, epochs=1, batch_size=50, recipe=sgd(0.1))

    def train(self, client: Client, rumour: float) -> float:
        self.hear(client)
        return rumour + 1


def test_alone_is_who_has_heard_nothing_of_others() -> None:
    def alone(algorithm: Rumour) -> list[bool]:
        (record,) = federation(algorithm).rounds(1)
        return ["before_global" in record.clients[k] for k in range(3)]

    assert alone(Rumour(quiet=True)) == [True, True, True]
    assert sorted(alone(Rumour())) == [False, False, True], "only the first in the chain"


def test_knowing_alone_costs_nothing_but_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, unmeasured = federation(tiny("fedrolex")), federation(tiny("fedrolex"))
    list(measured.rounds(2))
    monkeypatch.setattr(unmeasured.engine, "is_local_only", lambda: False)
    (first, _) = unmeasured.rounds(2)
    assert "before_global" not in first.clients[0]
    assert same(state(measured), state(unmeasured))
    modes = (
        [m.training for m in e.engine.clients[0].model.modules()] for e in (measured, unmeasured)
    )
    assert next(modes) == next(modes)


def test_a_client_counts_for_ten_times_the_one_in_the_middle_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = small_federation(tiny("fedavg"))
    engine, said = experiment.engine, {0: 30, 1: 50, 2: 2**39}
    monkeypatch.setattr(engine, "examples", said.__getitem__)
    assert engine.image_counts([0, 2]) == {0: 30, 2: 500}
    assert engine.image_counts([1, 2]) == {1: 50, 2: 500}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert (
        warning == "client 2 claims 549755813888 images: in means it is weighted as if it had 500"
    )
    said[2] = 500
    assert engine.image_counts([2]) == {2: 500}
    asked = Clients(engine, [2]).run(experiment.algorithm.evaluate)
    assert asked.num_examples == {2: 500}


def test_classes_that_a_client_claims_count_for_no_more_than_its_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_federation(tiny("fedftg"))
    engine, classes = experiment.engine, experiment.task.spec.classes
    said, weights = {0: 30, 1: 50, 2: 10**6}, experiment.server.model.state_dict()
    monkeypatch.setattr(engine, "examples", said.__getitem__)

    def told(client: int, *counts: int) -> list[int]:
        """What the server hears of so many images of the first classes."""
        claimed = torch.tensor([*counts] + [0] * (classes - len(counts)))
        answer = {"weights": weights, "counts": claimed}
        arrived = engine.receive_answer(answer, "learn", client, (weights,))
        assert all(
            torch.equal(weights[name], tensor) for name, tensor in arrived["weights"].items()
        )
        assert arrived["counts"].dtype == torch.int64
        return arrived["counts"].tolist()[: len(counts) + 1]

    assert told(1, 40, 9, 1) == [40, 9, 1, 0]
    assert told(2, 900_000, 99_999, 1) == [450, 50, 1, 0], (
        "500 images count of it, and a class stays one that it has"
    )
    with pytest.raises(PayloadError, match="the sum of its values is 51, expected 0 to 50"):
        told(1, 51)


class Empty(Algorithm[Server, Client]):
    """One client answers with a tensor that has no values."""

    crosses = {"ask": Crossing(up="a number")}

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.ask)

    def ask(self, client: Client) -> torch.Tensor:
        return torch.ones(1, device="meta" if client.id == 1 else "cpu")


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "forked"])
def test_an_answer_without_values_is_that_clients_failure(timeout: float | None) -> None:
    (record,) = perceptrons(Empty(), min_clients=1, timeout=timeout).rounds(1)
    (failure,) = record.failures
    assert "client 1 failed in 'ask', round 1: PayloadError" in failure
    assert "meta device" in failure
