"""Runs with many clients: what is in memory, on disk and in the record depends on the sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import barter
from barter import Experiment
from barter.core.client_states import LazyClient
from barter.core.errors import CheckpointError, ConfigError
from barter.core.images import SharedImages
from barter.core.metrics import Evaluation
from barter.data.task import Data
from barter.engines import local
from barter.engines.deliveries import is_deferrable
from barter.runs.progress import Onlooker
from barter.runs.tables import closing_cells
from tests.conftest import digits_file, perceptrons, same, state, tiny

MANY = 120


def random_data(clients: int = MANY) -> Data:
    """Two images for each client, and as many tests as classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2 * clients, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(2 * clients) % 10
    return Data(source=(images, labels, images[:20], labels[:20]))


def many(name: str = "fedavg", sampled: int = 3, **options: Any) -> Experiment:
    """A run with 120 clients, of which a few take part in a round."""
    algorithm = tiny(name, fraction=sampled / MANY)
    fixed: dict[str, Any] = {"partition": "iid", "clients": MANY, "models": "small-mlp"}
    return Experiment(algorithm, data=random_data(), device="cpu", **{**fixed, **options})


def release(experiment: Experiment) -> None:
    assert experiment.folder is not None
    experiment.folder.release()


def states_of_parties(experiment: Experiment) -> dict[str, Any]:
    """The state without the account of what was released, in which evaluations count."""
    parties = ("payload.server.", "payload.clients.")
    return {at: value for at, value in state(experiment).items() if at.startswith(parties)}


def names_of_states(out: Path) -> set[str]:
    return {path.name for path in (out / "clients").glob("client-*")}


@pytest.mark.parametrize("name", ["fedproto", "moon", "dffke"])
def test_states_on_disk_are_those_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barter.experiment.STATES_LIMIT", 1)  # Rest after every call.
    inside = perceptrons(tiny(name), state_store="memory")
    outside = perceptrons(tiny(name), state_store="disk", out=tmp_path / "run")
    first = [inside.step() for _ in range(2)]
    second = [outside.step()]
    release(outside)
    outside = perceptrons(tiny(name), state_store="disk", out=tmp_path / "run", resume=True)
    second.append(outside.step())
    assert [r.clients for r in first] == [r.clients for r in second]
    assert same(state(inside), state(outside))
    release(outside)
    again = perceptrons(tiny(name), state_store="memory", out=tmp_path / "run", resume=True)
    assert same(state(inside), state(again))
    again.step()
    assert (tmp_path / "run" / "clients").exists(), "the checkpoint of round 2 is kept"
    again.step()
    assert not (tmp_path / "run" / "clients").exists()


def test_memory_and_disk_depend_on_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = LazyClient._build

    def counted(client: LazyClient) -> Any:
        built.append(client.id)
        return build(client)

    monkeypatch.setattr(LazyClient, "_build", counted)
    experiment = many(out=tmp_path / "run")
    assert not built
    record = experiment.step()
    clients = experiment.engine.clients  # type: ignore[attr-defined]
    assert sorted(built) == record.participants
    assert len(record.participants) == 3
    assert all(client.is_resting for client in clients.values())
    first = names_of_states(tmp_path / "run")
    assert first == {f"client-{k:06d}-round-000001.safetensors" for k in record.participants}
    checkpoint = tmp_path / "run" / "checkpoints" / "round-000001.safetensors"
    weights = sum(4 * p.numel() for p in experiment.server.model.parameters())
    assert checkpoint.stat().st_size < 2 * weights
    data = [client.data for client in clients.values()]
    assert all(isinstance(images, SharedImages) for images in data)
    assert len({images._source.pixels.data_ptr() for images in data}) == 1
    assert not any("pixels" in vars(images) for images in data)
    for _ in range(3):
        record = experiment.step()
    kept = names_of_states(tmp_path / "run")
    assert len(kept) <= 12
    # The checkpoints of rounds 3 and 4 need one or two states of a client, never three.
    assert max(sum(f"client-{k:06d}" in name for name in kept) for k in clients) <= 2
    assert {k for k in clients if clients[k].memory()["model"]} == set(range(MANY))


def test_a_killed_run_with_many_clients_resumes(tmp_path: Path) -> None:
    straight = many("fedproto")
    for _ in range(3):
        straight.step()
    out = tmp_path / "run"
    broken = many("fedproto", out=out)
    broken.step()
    broken.step()
    release(broken)
    saved = names_of_states(out)
    # A round that was not finished has written a state and half of another.
    (out / "clients" / "client-000005-round-000003.safetensors").write_bytes(b"unfinished")
    (out / "clients" / ".client-000006-round-000003.safetensors.tmp").write_bytes(b"un")
    again = many("fedproto", out=out, resume=True)
    assert {path.name for path in (out / "clients").iterdir()} == {*saved, "initial.safetensors"}
    again.step()
    assert same(state(straight), state(again))


def test_many_clients_start_from_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barter.experiment.STATES_LIMIT", 1)
    first = perceptrons(tiny("local"), state_store="disk", out=tmp_path / "first")
    first.step()
    options = {"start": tmp_path / "first"}
    inside = perceptrons(tiny("local"), state_store="memory", **options)
    outside = perceptrons(tiny("local"), state_store="disk", out=tmp_path / "run", **options)
    inside.step()
    outside.step()
    assert same(state(inside), state(outside))
    with pytest.raises(ConfigError, match="small-cnn here"):
        perceptrons(
            tiny("local"),
            models="small-cnn",
            state_store="disk",
            out=tmp_path / "other",
            **options,
        )
    assert not (tmp_path / "other").exists()


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    release_after = many(out=tmp_path / "run")
    release_after.step()
    release(release_after)
    lost = sorted((tmp_path / "run" / "clients").glob("client-*"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        many(out=tmp_path / "run", resume=True)


def test_networks_of_clients_that_never_trained_can_be_loaded(tmp_path: Path) -> None:
    experiment = Experiment(
        tiny("fedavg", fraction=0.4),
        data=digits_file(tmp_path),
        clients=5,
        models="small-mlp",
        device="cpu",
        state_store="disk",
        out=tmp_path / "run",
    )
    record = experiment.step()
    release(experiment)
    trained = record.participants[0]
    idle = next(k for k in range(5) if not record.clients[k]["bytes_up"])
    clients = experiment.engine.clients  # type: ignore[attr-defined]
    for k in (trained, idle):
        network = barter.load(tmp_path / "run", client=k).network
        assert same(dict(network.state_dict()), dict(clients[k].model.state_dict()))
    restored = Experiment.restore(tmp_path / "run")
    assert same(states_of_parties(restored), states_of_parties(experiment))


def test_other_clients_are_evaluated_by_default_if_there_are_many() -> None:
    assert Evaluation().settle(100).clients == "all"
    assert Evaluation().settle(101).clients == "sampled"
    assert Evaluation(clients=7).settle(5000).clients == 7
    record = many("fedproto").step()
    assert sorted(record.values("global")) == record.participants
    assert len(record.participants) == 3
    assert len(many(evaluate=Evaluation(clients=5)).step().values("global")) == 5


def test_labels_say_which_clients_were_evaluated() -> None:
    experiment = many()
    records = [experiment.step(), experiment.step()]
    line = Onlooker(Console(), 2).line(records[-1])
    assert "global of 3 sampled clients" in line
    rows, together = closing_cells(records, [str(k) for k in range(MANY)], None, None)
    seen = {k for record in records for k in record.participants}
    assert len(rows) == MANY
    assert together[-2][0] == f"mean of {len(seen)} evaluated of {MANY}"
    five = many(evaluate=Evaluation(clients=5)).step()
    assert five.describe_clients("global") == "5 clients"
    assert many(evaluate=Evaluation(clients="all")).step().describe_clients("global") == ""


@pytest.mark.parametrize("name", ["fedproto", "fedtgp", "lgfedavg"])
def test_what_all_receive_is_delivered_when_a_client_takes_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    run = local.LocalEngine._run_protected

    def counted(self: Any, method: str, client: Any, path: Any, args: Any) -> Any:
        if method == "receive":
            received.append(client.id)
        return run(self, method, client, path, args)

    sampled = Evaluation(clients="sampled")
    at_once = perceptrons(tiny(name, fraction=0.3), clients=6, evaluate=sampled)
    records = [at_once.step() for _ in range(3)]
    monkeypatch.setattr(local, "MANY_CLIENTS", 5)
    monkeypatch.setattr(local.LocalEngine, "_run_protected", counted)
    options: dict[str, Any] = {"clients": 6, "evaluate": sampled, "out": tmp_path / "run"}
    options["state_store"] = "disk"
    later = perceptrons(tiny(name, fraction=0.3), **options)
    deferred = [later.step() for _ in range(2)]
    release(later)
    assert len(set(received)) < 6, "who does not take part receives nothing yet"
    later = perceptrons(tiny(name, fraction=0.3), **options, resume=True)
    deferred.append(later.step())
    for one, other in zip(records, deferred, strict=True):
        assert one.bytes == other.bytes
        assert len(other.participants) == 2 < len(one.participants)
        for k in other.participants:
            assert one.clients[k] == other.clients[k]
    assert same(states_of_parties(at_once), states_of_parties(later))


def test_only_a_class_that_says_so_defers_its_method() -> None:
    fedproto = type(tiny("fedproto"))

    class Training(fedproto):  # type: ignore[misc, valid-type]
        def receive(self, client: Any, prototypes: Any) -> None:
            """Train, which takes the client's current weights."""

    assert is_deferrable(fedproto(), "receive")
    assert not is_deferrable(fedproto(), "learn")
    assert not is_deferrable(Training(), "receive")
