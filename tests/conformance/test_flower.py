"""On Flower's grid every algorithm ends with the bits it has in one process, also where it was interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from barter.core.payload import isolate, leaves, nbytes
from barter.core.wire_settings import WireSettings
from barter.experiment import Experiment
from barter.flower import engine
from barter.flower.deploy import SPARE, conduct
from barter.runs.journal import Journal
from barter.setup.config import Config
from tests.conftest import digits_file, federation, least, same
from tests.flower.grid import LoopbackGrid, site

ROUNDS = 3
IMAGES = 180
# Both engines have the same profile: the one that changes most values, which also compares what it
# leaves exact, and for two methods the defaults of Flower and of one process.
SMALL = WireSettings(profile="small", rounding="stochastic", deflate=True)
WIRE = {"dffke": WireSettings(profile="lean"), "fedavg": WireSettings(profile="exact")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sites(tmp_path: Path) -> list[Any]:
    return [
        site(tmp_path / f"memory-{k}", name=f"site-{k}", share=k, device="cpu") for k in range(3)
    ]


def everything(experiment: Experiment, grid: LoopbackGrid) -> dict[str, Any]:
    members = {k: grid.sites[100 + k].client.memory() for k in experiment.engine.client_ids}
    return dict(leaves(isolate({"server": experiment.server.memory(), "clients": members})))


def test_a_run_on_flower_is_the_same_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round begins with sites that know nothing, the second with what they wrote down, the third goes on."""
    models = "small-mlp" if least(name).server_model.one_architecture else "small-mlp,small-cnn"
    source = digits_file(tmp_path, IMAGES)
    wire = WIRE.get(name, SMALL)
    local = federation(least(name), source, models=models, wire=wire)
    records = [(r.round, r.clients, r.server, r.bytes) for r in local.rounds(ROUNDS)]
    straight = {"server": local.server.memory(), "clients": local.engine.memory()}

    first = LoopbackGrid(sites(tmp_path), monkeypatch)
    data = local.config.data
    config = Config(
        algorithm=least(name),
        data=data,
        clients=3,
        models=local.config.models,
        rounds=ROUNDS,
        device="cpu",
        wire=wire,
    )
    largest = tmp_path / "largest"
    last = (
        list(config.algorithm.crosses)[-1],
        "evaluate",
    )  # clients that are asked once have only the latter in round 2

    def until_the_last_call(node: int, request: dict[str, Any], answer: Any) -> Any:
        reply = answer()
        if request.get("method", "evaluate") != "evaluate":
            most = largest.read_text()
            assert most, f"the contract of {request['method']} says how large its answers can be"
            assert 2 * nbytes(reply["answer"]) + SPARE <= int(most)
        if request.get("round") == 2 and request["method"] in last:
            raise KeyboardInterrupt  # the site has done its part of the round, and the server dies
        return reply

    first.deliver = until_the_last_call
    with pytest.raises(KeyboardInterrupt):
        conduct(first, config, tmp_path / "run", Journal(tmp_path / "journal"), largest)
    again = LoopbackGrid(
        sites(tmp_path), monkeypatch
    )  # and so do the sites: what they know is on disk
    remote = conduct(again, config, tmp_path / "run", Journal(tmp_path / "journal"))
    assert remote.folder is not None
    assert [(r.round, r.clients, r.server, r.bytes) for r in remote.folder.records()] == records
    assert same(everything(remote, again), dict(leaves(isolate(straight))))
    called = {request["method"] for _, request in first.asked if "method" in request}
    assert config.algorithm.crosses.keys() - called == ({"train"} if name == "dffke" else set()), (
        "which says nothing"
    )
    # Fewest messages: evaluation rides on a reply, and is asked for by itself only where a client had nothing to do.
    asked = [
        (node, request) for node, request in first.asked if request.get("round") == 1
    ] + again.asked
    calls = Counter(
        (request["round"], node, request["method"])
        for node, request in asked
        if "method" in request
    )
    idle = {(r, 100 + k) for r in range(1, ROUNDS + 1) for k in range(3)}
    idle -= {(r, node) for r, node, method in calls if method != "evaluate"}
    assert {(r, node) for r, node, method in calls if method == "evaluate"} == idle
