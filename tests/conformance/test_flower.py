"""On Flower's grid every algorithm ends with the bits it has in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from barter.config import Config
from barter.core.payload import isolate, leaves
from barter.data.task import Data
from barter.deploy import conduct
from barter.engines import flower
from barter.experiment import Experiment
from barter.runs.journal import Journal
from tests.conftest import federation, same, tiny
from tests.engines.grid import LoopbackGrid, site

flwr = pytest.importorskip("flwr")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flower, "POLL_SECONDS", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(name: str, **options: Any) -> Config:
    algorithm = tiny(name)
    models = "small-mlp" if algorithm.one_architecture else "small-5"
    data = Data(public="digits" if algorithm.needs_public_data else "")
    settings = {"algorithm": algorithm, "clients": 3, "models": models, "data": data, "rounds": 2, "device": "cpu"}
    return Config(**{**settings, **options})


def sites(tmp_path: Path, count: int = 3) -> list[Any]:
    return [site(tmp_path / f"memory-{k}", name=f"site-{k}", share=k, device="cpu") for k in range(count)]


def everything(experiment: Experiment, grid: LoopbackGrid) -> dict[str, Any]:
    members = {k: grid.sites[100 + k].client.memory() for k in experiment.engine.client_ids}
    return dict(leaves(isolate({"server": experiment.server.memory(), "clients": members})))


def test_a_run_on_flower_is_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = federation(tiny(name))
    records = [(r.round, r.clients, r.server, r.bytes) for r in local.rounds(2)]
    grid = LoopbackGrid(sites(tmp_path), monkeypatch)
    remote = conduct(grid, config(name), tmp_path / "run", Journal(tmp_path / "journal"))
    assert remote.folder is not None
    assert [(r.round, r.clients, r.server, r.bytes) for r in remote.folder.records()] == records
    straight = {"server": local.server.memory(), "clients": local.engine.memory()}
    assert same(everything(remote, grid), dict(leaves(isolate(straight))))
    # Fewest messages: evaluation rides on a reply, and is asked for by itself only where a client had nothing to do.
    calls = Counter((request["round"], node, request["method"]) for node, request in grid.asked if "method" in request)
    idle = {(r, node) for r, node in [(r, 100 + k) for r in (1, 2) for k in range(3)]}
    idle -= {(r, node) for r, node, method in calls if method != "evaluate"}
    assert {(r, node) for r, node, method in calls if method == "evaluate"} == idle


def test_a_resumed_server_finds_the_sites_as_it_left_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight_grid = LoopbackGrid(sites(tmp_path / "straight"), monkeypatch)
    straight = conduct(straight_grid, config(name, rounds=3), tmp_path / "a", Journal(tmp_path / "journal"))
    expected = everything(straight, straight_grid)

    grid = LoopbackGrid(sites(tmp_path), monkeypatch)
    last = list(tiny(name).crosses)[-1], "evaluate"  # clients that are asked once have only the latter in round 2

    def until_the_last_call(node: int, request: dict[str, Any], answer: Any) -> Any:
        reply = answer()
        if request.get("round") == 2 and request["method"] in last:
            raise KeyboardInterrupt  # the site has done its part of the round, and the server dies
        return reply

    grid.deliver = until_the_last_call
    with pytest.raises(KeyboardInterrupt):
        conduct(grid, config(name, rounds=3), tmp_path / "b", Journal(tmp_path / "journal"))
    again = LoopbackGrid(sites(tmp_path), monkeypatch)  # and so do the sites: what they know is on disk
    resumed = conduct(again, config(name, rounds=3), tmp_path / "b", Journal(tmp_path / "journal"))
    assert same(everything(resumed, again), expected)
