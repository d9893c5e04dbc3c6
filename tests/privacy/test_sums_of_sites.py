"""A federation of sites with a budget: one release each, and a finite ε for the whole run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from barter.flower import engine
from barter.flower.deploy import conduct
from barter.privacy import Privacy
from barter.privacy.ledger import Ledger
from barter.runs.journal import Journal
from barter.setup.config import Config
from barter.testing.conformance import few_digits
from tests.conftest import tiny
from tests.flower.grid import LoopbackGrid, site


def test_sites_with_a_budget_release_sums_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
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
        sites.append(site(memory, name=f"site-{k}", data=f"npz:{own}", device="cpu", epsilon=8.0))
    config = Config(
        algorithm=tiny("moments"),
        models="small-mlp",
        device="cpu",
        clients=2,
        rounds=3,
        privacy=Privacy(epsilon=8, parts={"describe": "gaussian clip=1"}),
    )
    grid = LoopbackGrid(sites, monkeypatch)
    experiment = conduct(grid, config, tmp_path / "run", Journal(tmp_path / "journal"))
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
