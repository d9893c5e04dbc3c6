"""Sums of bounded terms: noise without clipping, and one release of each client in a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from barter import ALGORITHMS, DFFKE, ClassMoments
from barter.attacks.overheard import RecordingWire, record_wire
from barter.core.errors import ConfigError
from barter.core.wire import Direction
from barter.privacy import Privacy
from barter.privacy.account import calibrate_noise
from barter.privacy.mechanisms import Gaussian, ReleaseContext
from barter.privacy.settings import Plan
from tests.conftest import perceptrons, tiny


class Ones:
    """A source of noise that is always 1."""

    def normal(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.float64)

    def uniform(self, count: int) -> torch.Tensor:
        return torch.full((count,), 0.5, dtype=torch.float64)


def plan(mechanism: str, part: str = "describe", algorithm: Any = None) -> Plan:
    return Plan(Privacy(epsilon=8, parts={part: mechanism}), algorithm or ClassMoments())


def test_a_sum_gets_noise_and_is_not_clipped() -> None:
    value = {"counts": torch.tensor([30.0, -40.0]), "sums": torch.full((2, 2), 100.0)}
    mechanism = Gaussian(1.0, 2.5)
    (released,) = mechanism.apply([value], ReleaseContext(None, "sum", Ones()))  # type: ignore[arg-type,list-item]
    assert released["counts"].tolist() == [32.5, -37.5]
    assert released["sums"].tolist() == [[102.5, 102.5], [102.5, 102.5]]
    # As a whole answer it is clipped to norm 1 before: the norm of all six numbers is 206.2.
    (clipped,) = mechanism.apply([value], ReleaseContext(None, "answer", Ones()))  # type: ignore[arg-type,list-item]
    norm = (30**2 + 40**2 + 4 * 100**2) ** 0.5
    assert clipped["counts"].tolist() == pytest.approx([2.5 + 30 / norm, 2.5 - 40 / norm])


def test_what_is_not_finite_becomes_zero_before_noise() -> None:
    value = torch.tensor([float("nan"), float("inf"), 1.0])
    context = ReleaseContext(None, "sum", Ones())  # type: ignore[arg-type]
    (released,) = Gaussian(1.0, 2.0).apply([value], context)
    assert released.tolist() == [2.0, 2.0, 3.0]


def test_what_one_image_can_change() -> None:
    found = plan("gaussian clip=1")
    assert [found.each(part) for part in ("describe", "describe.sums")] == ["sum", "sum"]
    dffke = plan("gaussian clip=1", "learn.embeddings", DFFKE())
    assert [dffke.each(part) for part in ("learn", "learn.embeddings")] == ["answer", "image"]


def test_nothing_of_the_method_is_open_once_the_sums_are_protected() -> None:
    assert plan("gaussian clip=1").promised
    assert plan("gaussian clip=1").public_assumption("describe.squares") == ""
    partly = plan("gaussian clip=1", "describe.sums")
    assert partly.open() == ["describe.counts", "describe.squares"]
    nothing = Plan(Privacy(epsilon=8), ClassMoments())
    assert nothing.open() == ["describe.counts", "describe.sums", "describe.squares"]


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [
        ("gaussian clip=2", "by Euclidean norms; write `gaussian clip=1`"),
        ("laplace clip=1 noise=3", "by Euclidean norms; write `gaussian clip=1`"),
        ("gaussian clip=1 of=change", "write `gaussian clip=1`"),
        ("gaussian clip=1 each=image", "belong to no single image"),
        ("response epsilon=1", "belong to no single image"),
    ],
)
def test_other_mechanisms_are_refused(mechanism: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(mechanism, "describe.sums")


@pytest.mark.parametrize("rounds", [1, 20])
def test_the_noise_is_that_of_one_release_however_many_rounds_there_are(rounds: int) -> None:
    privacy = Privacy(epsilon=8, parts={"describe": "gaussian clip=1"})
    settled = privacy.settle(ClassMoments(), rounds).parts["describe"]
    noise = float(settled.rpartition("noise=")[2])
    assert noise == pytest.approx(calibrate_noise(8, 1e-5, 1), rel=1e-4)
    # A method that answers in every round needs sqrt(20) times as much for 20 rounds.
    parts = {"learn.embeddings": "gaussian clip=1"}
    often = replace(privacy, parts=parts).settle(DFFKE(), rounds).parts["learn.embeddings"]
    assert float(often.rpartition("noise=")[2]) == pytest.approx(noise * rounds**0.5, rel=1e-3)


def test_a_run_spends_its_budget_once_and_goes_on() -> None:
    privacy = Privacy(epsilon=8, parts={"describe": "gaussian clip=1"})
    experiment = perceptrons(tiny("moments"), privacy=privacy)
    records = list(experiment.rounds(4))
    assert len(records) == 4
    statement = experiment.privacy()
    assert statement.epsilon == pytest.approx(8, rel=1e-3)
    described = [row for row in statement.rows if row.part.startswith("describe")]
    assert [row.releases for row in described] == [1, 1, 1]
    assert all(row.epsilon == pytest.approx(8, rel=1e-3) for row in described)
    assert statement.why == ()


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.once])
def test_what_is_said_to_be_asked_once_is_asked_of_each_client_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: Counter[tuple[int, str]] = Counter()
    deliver = RecordingWire.deliver

    def count(
        self: RecordingWire, received: Any, method: str, client: int, direction: Direction
    ) -> Any:
        if direction == "up":
            heard[client, method] += 1
        return deliver(self, received, method, client, direction)

    monkeypatch.setattr(RecordingWire, "deliver", count)
    experiment = perceptrons(tiny(name))
    record_wire(experiment)
    list(experiment.rounds(3))
    for method in type(experiment.algorithm).once:
        assert {n for (_, asked), n in heard.items() if asked == method} == {1}
