"""A federation of sites with a budget: one release each, and a finite ε for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from barter.algorithms.moments import ClassMoments
from barter.core.errors import ClientError
from barter.core.payload import isolate, leaves
from barter.flower import engine
from barter.flower.deploy import conduct
from barter.flower.site import Site
from barter.privacy import Privacy
from barter.privacy.ledger import Ledger
from barter.runs.journal import Journal
from barter.setup.config import Config
from barter.testing.conformance import few_digits
from tests.conftest import tiny
from tests.flower.grid import LoopbackGrid, site

CONFIG = Config(
    algorithm=tiny("moments"),
    models="small-mlp",
    device="cpu",
    clients=2,
    rounds=3,
    privacy=Privacy(epsilon=8, parts={"describe": "gaussian clip=1"}),
)


def sites_with_budget(tmp_path: Path, epsilon: float) -> list[Site]:
    """Return two sites with data of their own."""
    x, y, x_test, y_test = few_digits()
    sites = []
    for k in range(2):
        own = tmp_path / f"own-{k}.npz"
        np.savez(
            own,
            x_train=x[k::2].permute(0, 2, 3, 1),
            y_train=y[k::2],
            x_test=x_test.permute(0, 2, 3, 1),
            y_test=y_test,
            classes=list("0123456789"),
        )
        memory = tmp_path / f"memory-{k}"
        sites.append(
            site(memory, name=f"site-{k}", data=f"npz:{own}", device="cpu", epsilon=epsilon)
        )
    return sites


def test_sites_with_a_budget_release_sums_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    grid = LoopbackGrid(sites_with_budget(tmp_path, 8.0), monkeypatch)
    experiment = conduct(grid, CONFIG, tmp_path / "run", Journal(tmp_path / "journal"))
    statement = experiment.privacy()
    assert statement.why == ()
    assert statement.epsilon == pytest.approx(8, rel=1e-3)
    assert statement.noise == "the operating system of each site"
    for k in range(2):
        (account,) = Ledger(tmp_path / f"memory-{k}" / "ledger.jsonl").runs().values()
        assert list(account.released.values()) == [1]
        (description,) = account.released
        assert description.startswith("describe: gaussian clip=1.0 noise=1.2005")
    assert experiment.folder is not None
    records = experiment.folder.records()
    assert len(records) == 3
    # Accuracies of sites with a budget stay there.
    assert all("global" not in values for r in records for values in r.clients.values())


def test_a_first_round_that_was_rolled_back_costs_no_second_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops after both uploads; when it resumes, sites send what they sent before.

    Their budgets would not allow a second release, and one of their processes has restarted.
    """
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    sites = sites_with_budget(tmp_path, 8.0)
    answers: list[Any] = []

    def stop_at_exchange(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if request.get("method") == "exchange":
            raise KeyboardInterrupt
        reply = answer()
        if request.get("method") == "describe":
            answers.append((node, reply["answer"]))
        return reply

    grid = LoopbackGrid(sites, monkeypatch)
    grid.deliver = stop_at_exchange
    with pytest.raises(KeyboardInterrupt):
        conduct(grid, CONFIG, tmp_path / "run", Journal(tmp_path / "journal"))
    first = dict(answers)
    assert len(first) == 2

    # Sums in the basis of another whitening would be added to those of this one.
    other_whitening = LoopbackGrid(sites_with_budget(tmp_path, 8.0), monkeypatch)
    make_reference = ClassMoments.make_reference

    def mirrored(self: ClassMoments, server: Any) -> Any:
        reference = isolate(make_reference(self, server))
        reference["whitening"]["projection"][:, 0] *= -1
        reference["example"][:, 0] *= -1
        return reference

    with monkeypatch.context() as patch:
        patch.setattr(ClassMoments, "make_reference", mirrored)
        with pytest.raises(ClientError, match=r"does not answer 'describe' again: .* new run"):
            conduct(other_whitening, CONFIG, tmp_path / "run", Journal(tmp_path / "journal"))

    again = LoopbackGrid([sites[0], sites_with_budget(tmp_path, 8.0)[1]], monkeypatch)
    answers.clear()

    def listen(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        reply = answer()
        if request.get("method") == "describe":
            answers.append((node, reply["answer"]))
        return reply

    again.deliver = listen
    experiment = conduct(again, CONFIG, tmp_path / "run", Journal(tmp_path / "journal"))
    second = dict(answers)
    assert first.keys() == second.keys()
    for node, answer in first.items():
        for path, value in leaves(answer):
            assert torch.equal(value, dict(leaves(second[node]))[path])
    assert experiment.folder is not None
    records = experiment.folder.records()
    assert [record.failures for record in records] == [[], [], []]
    assert experiment.privacy().epsilon == pytest.approx(8, rel=1e-3)
    for k in range(2):
        (account,) = Ledger(tmp_path / f"memory-{k}" / "ledger.jsonl").runs().values()
        assert list(account.released.values()) == [1]
