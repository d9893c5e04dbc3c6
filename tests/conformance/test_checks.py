"""Methods that break one rule each, and what `barter check` says of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import Algorithm, Client, Clients, Crossing, Server
from barter.cli.app import main
from barter.core.algorithm import ServerModel
from barter.core.params import Count
from barter.core.payload import State
from barter.ops.fit import fit, sgd
from barter.testing import conformance
from barter.testing.conformance import CHECKS, Trial, _difference, find_problem
from tests.conformance.disturbed import require_undisturbed
from tests.conftest import tiny


@dataclass(frozen=True, kw_only=True)
class Sound(Algorithm):
    """Clients train, and tell how many they are."""

    crosses = {"learn": Crossing(down="a number", up="another")}

    epochs: Count = 1  # E: local epochs

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.learn, t)

    def learn(self, client: Client, t: int) -> float:
        self.change(client)
        return 1.0

    def change(self, client: Client) -> None:
        fit(client, epochs=self.epochs, batch_size=50, recipe=sgd(0.05))

    def add(self, client: Client, value: float) -> None:
        with torch.no_grad():
            next(client.model.parameters()).add_(value)


@dataclass(frozen=True, kw_only=True)
class Forgets(Sound):
    """What a client counts is annotated nowhere."""

    def change(self, client: Client) -> None:
        client.count = getattr(client, "count", 0) + 1  # type: ignore[attr-defined]
        self.add(client, client.count)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Gambles(Sound):
    """Draws where no seed reaches."""

    def change(self, client: Client) -> None:
        self.add(client, random.random())


seen: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Whispers(Sound):
    """Clients tell each other something behind the wire's back."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        seen.clear()
        clients.run(self.learn, t)

    def change(self, client: Client) -> None:
        seen.append(client.id)
        self.add(client, len(seen))


@dataclass(frozen=True, kw_only=True)
class Leans(Sound):
    """Clients tell the server something behind the wire's back."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        seen.clear()
        clients.run(self.learn, t)
        server.report["clients"] = len(seen)

    def change(self, client: Client) -> None:
        seen.append(client.id)


@dataclass(frozen=True, kw_only=True)
class Conceals(Sound):
    """Says that nothing comes up."""

    crosses = {"learn": Crossing(down="a number")}


@dataclass(frozen=True, kw_only=True)
class Promises(Sound):
    """Returns something else than it says."""

    def learn(self, client: Client, t: int) -> State:
        return torch.zeros(3)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Breaks(Sound):
    """Raises at a client."""

    def change(self, client: Client) -> None:
        raise ValueError("too tired")


@dataclass(frozen=True, kw_only=True)
class Sends(Sound):
    """Returns what cannot be sent."""

    def learn(self, client: Client, t: int) -> Any:
        return client


@dataclass(frozen=True, kw_only=True)
class Silent(Sound):
    """With a field that nobody explains."""

    mystery: int = 3


@dataclass(frozen=True, kw_only=True)
class Trusts(Sound):
    """Takes it that a number of rows is the one that it asked for."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        server.report["sum"] = float(torch.stack(list(clients.run(self.rows).values())).sum())

    crosses = {"rows": Crossing(up="three numbers")}

    def rows(self, client: Client) -> torch.Tensor:
        self.change(client)
        return torch.ones(3)


@dataclass(frozen=True, kw_only=True)
class Passes(Trusts):
    """Has the others stumble over what one of them says."""

    crosses = {
        "rows": Crossing(up="three numbers"),
        "take": Crossing(down="everybody's numbers"),
    }

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.take, list(clients.run(self.rows).values()))

    def take(self, client: Client, rows: list[torch.Tensor]) -> None:
        torch.stack(rows)


@dataclass(frozen=True, kw_only=True)
class Poisons(Trusts):
    """Lets what one says grow beyond all numbers."""

    may_be_infinite = frozenset({"rows"})

    def round(self, server: Server, clients: Clients, t: int) -> None:
        total = sum(rows.flatten()[:1].sum() for rows in clients.run(self.rows).values())
        if server.model_or_none is not None:
            next(server.model.parameters()).data.fill_(total)

    server_model = ServerModel("own")


@dataclass(frozen=True, kw_only=True)
class Hides(Trusts):
    """Keeps its failures to itself."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.rows)
        clients._engine.failures.clear()  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Expects(Trusts):
    """Takes it that every client answers."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        answers = clients.run(self.rows)
        server.report["sum"] = sum(float(answers[k].sum()) for k in clients)


@dataclass(frozen=True, kw_only=True)
class Headless(Sound):
    """Calls a model its primary one that nobody has."""

    primary = "server"


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        (
            Forgets,
            "resumes",
            "annotated on its class, with a default\\): clients.0.model.* differs, by up to",
        ),
        (
            Gambles,
            "follows_the_seed",
            "random numbers only\\): clients.0.model.* differs, by up to",
        ),
        (Whispers, "ignores_the_order", "share state outside of messages\\?\\): clients.0"),
        (Whispers, "runs_side_by_side", "state that is not its client's"),
        (Conceals, "crosses_what_it_says", "learn: 72 bytes go up, crosses says 'down: a number'"),
        (Promises, "survives_the_wire", "learn is a Tensor, expected dict"),
        (
            Breaks,
            "runs",
            "client 0 failed in 'learn', round 1: ValueError: too tired.*test_checks.py\", line",
        ),
        (Headless, "runs", "primary is 'server', and the server has no accuracy"),
        (Sends, "runs", "a barter.core.nodes.Client cannot be sent"),
        (
            Trusts,
            "tolerates_malformed_answers",
            "whose answer is .* to 'rows': .*stack expects each tensor to be equal size",
        ),
        (
            Passes,
            "tolerates_malformed_answers",
            "whose answer is .* to 'rows': 0 of 3 clients answered 'take', 2 must",
        ),
        (
            Poisons,
            "tolerates_malformed_answers",
            "whose answer is .* to 'rows': round \\d+ left NaN or infinity in the server's state "
            "\\(model",
        ),
        (
            Hides,
            "tolerates_malformed_answers",
            "whose answer is .* to 'rows': no failure of 'rows' is recorded",
        ),
        (Expects, "tolerates_dropouts", 'KeyError: 2.*test_checks.py", line'),
        (Silent, "is_documented", "mystery has no comment next to it"),
    ],
)
def test_a_broken_rule_is_named(kind: type[Algorithm[Any, Any]], check: str, message: str) -> None:
    said = find_problem(getattr(conformance, check), Trial(kind()))
    assert re.search(message, said), said
    assert "\n" not in said
    assert len(said) < 400, "no tensors are printed"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgets, "resumed after round 1"),
        (Gambles, "again with the same seed"),
        (Whispers, "last client first"),
        (Leans, "clients in processes"),
        (Promises, "learn is a Tensor, expected dict"),
    ],
)
def test_one_disturbed_run_notices_what_six_checks_do(
    kind: type[Algorithm[Any, Any]], message: str
) -> None:
    assert re.search(message, find_problem(require_undisturbed, Trial(kind())))


def test_a_wire_that_isolates_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tiny("fedavg"))
    for check in (conformance.isolates_parties, require_undisturbed):
        assert find_problem(check, trial) == ""
    monkeypatch.setattr(conformance, "isolate", lambda tree, device=None, path="": tree)
    for check in (conformance.isolates_parties, require_undisturbed):
        assert "with a receiver that overwrites its copy: server.model" in find_problem(
            check, trial
        )


def test_the_example_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent.parent / "examples")
    assert main(["check", "own_algorithm:ClassLogits", "--set", "algorithm.epochs=1"]) == 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:Sound"]) == 0
    said = capsys.readouterr()
    assert said.out.count("ok  ") == len(CHECKS)
    assert main(["check", f"{__name__}:Breaks"]) == 1
    said = capsys.readouterr()
    assert "no  it runs" in said.out
    assert "too tired" in said.out
    assert f"Breaks breaks 1 of {len(CHECKS)} rules" in said.err
    assert main(["check", f"{__name__}:Nobody"]) == 2


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), "by up to 1"),
        (
            torch.tensor([1, 5], dtype=torch.uint8),
            torch.tensor([2, 5], dtype=torch.uint8),
            "by up to 1",
        ),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.double), "torch.float64"),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.5, torch.inf]), "by up to"),
        (torch.ones(1), None, "Tensor and NoneType"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), ""),
        (torch.nan, torch.nan, ""),
        (1, 2, "1 and 2"),
    ],
)
def test_differences_of_checkpoints_are_described(one: Any, other: Any, said: str) -> None:
    found = _difference(one, other)
    assert said in found
    assert bool(found) == bool(said)
