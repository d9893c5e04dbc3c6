"""The simulated network: exact times, dropouts, deadlines, over-selection, and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models import VisionTransformer

from barter import Algorithm, Client, Clients, Crossing, Experiment, Server
from barter.compute.flops import add_flops, count_flops, set_aside
from barter.compute.fused import by_blocks
from barter.core.errors import ClientError, ConfigError
from barter.core.record import Round
from barter.core.wire_settings import WireSettings
from barter.engines import local
from barter.engines.local import LocalEngine
from barter.engines.network import Network
from barter.runs.tables import closing_table
from barter.setup.config import resolve, to_plain, with_defaults, with_settings
from tests.conftest import perceptrons, same, state, tiny

EXACT = WireSettings(profile="exact")
# A million bytes per second up, two million down; a million operations per second.
TOY: dict[str, Any] = {
    "up_mbps": 8.0,
    "down_mbps": 16.0,
    "latency_ms": 100.0,
    "gflops": 0.001,
    "server_gflops": 0.002,
}


class Counting(Client):
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Toy(Algorithm[Server, Counting]):
    """Two calls whose bytes and operations are round numbers."""

    crosses = {
        "learn": Crossing(down="half a million numbers", up="a quarter of them"),
        "confirm": Crossing(up="a number"),
    }

    def round(self, server: Server, clients: Clients, t: int) -> None:
        torch.ones(10, 10) @ torch.ones(10, 10)  # 2,000 operations
        clients.run(self.learn, torch.zeros(500_000))
        clients.run(self.confirm)

    def learn(self, client: Counting, vector: Tensor) -> Tensor:
        torch.ones(100, 50) @ torch.ones(50, 100)  # a million operations
        client.calls += 1
        return vector[:250_000]

    def confirm(self, client: Counting) -> int:
        client.calls += 1
        return 1


def toy(clients: int = 3, min_clients: int | None = 1, **changes: Any) -> Experiment:
    network = Network(**{**TOY, **changes})
    return perceptrons(Toy(), clients=clients, min_clients=min_clients, network=network)


def calls(experiment: Experiment) -> list[int]:
    assert isinstance(experiment.engine, LocalEngine)
    clients = experiment.engine.clients.values()
    return [client.calls for client in clients if isinstance(client, Counting)]


def test_the_time_of_a_round_follows_from_bytes_operations_and_latency() -> None:
    record = toy(gflops=[0.001, 0.0005, 0.001]).step()
    # 0.1 s there, 2 MB at 2 MB/s, 1 or 2 s of work, 1 MB at 1 MB/s, 0.1 s back.
    assert record.simulated["learn"] == pytest.approx(4.2, rel=1e-12), "that of the slowest client"
    assert record.simulated["confirm"] == pytest.approx(0.2 + 8e-6, rel=1e-12)
    assert record.simulated["server"] == pytest.approx(0.001, rel=1e-12)
    assert record.simulated_seconds == pytest.approx(4.401008, rel=1e-12)
    assert [m["flops"] for m in record.clients.values()] == [1e6, 1e6, 1e6]
    assert record.server["flops"] == 2000
    seconds = record.values("simulated_call_seconds")
    assert seconds == pytest.approx({0: 3.400008, 1: 4.400008, 2: 3.400008})
    assert Round.from_json(record.to_json()) == record
    table = closing_table([record, record], ["a"] * 3, [1] * 3, [[0]] * 3)
    assert table.caption == "simulated time 8.8 s, 4.4 s a round"
    assert record.scalars()["simulated_seconds/learn"] == record.simulated["learn"]


def test_training_counts_forward_and_backward_products() -> None:
    experiment = perceptrons(tiny("fedavg", epochs=2), network=Network(**TOY))
    record = experiment.step()
    images = [len(client.data) for client in experiment.engine.clients.values()]  # type: ignore[attr-defined]
    first, second = 2 * 64 * 256, 2 * 256 * 10  # operations of the two layers for an image
    for k, n in enumerate(images):
        batch = min(50, n)
        seen = 2 * -(-n // batch) * batch
        # Images need no gradient, so the first layer has two products and not three.
        assert record.clients[k]["flops"] == seen * (2 * first + 3 * second)
    assert record.server["flops"] == 0, "a mean has no products"


def test_a_late_client_fails_and_is_as_before_the_call() -> None:
    experiment = toy(gflops=[0.001, 0.0001, 0.001], policy="deadline", deadline=4)
    record = experiment.step()
    (late,) = record.failures
    assert late == (
        "client 1 failed in 'learn', round 1: TimeoutError: its answer took 12.2 s of simulated "
        "time, and network.deadline is 4 s"
    )
    assert record.simulated["learn"] == 4.0
    assert calls(experiment) == [2, 1, 2], "the late call is undone, the next one is not"
    with pytest.raises(ClientError, match="2 of 3 clients answered 'learn', 3 must"):
        toy(3, None, gflops=[0.001, 0.0001, 0.001], policy="deadline", deadline=4).step()


def test_over_selection_takes_the_first_answers_of_a_round() -> None:
    speeds = [0.001, 0.0002, 0.0005, 0.0004]
    experiment = toy(4, gflops=speeds, policy="over-select", over_select=1.3)
    record = experiment.step()
    assert [failure.partition(": ")[2] for failure in record.failures] == [
        "TimeoutError: its answer was not among the first 3 of 4",
        "ConnectionError: its answer was not among the first 3 of 4",
    ]
    assert record.participants == [0, 2, 3]
    assert record.simulated["learn"] == pytest.approx(0.2 + 1 + 2.5 + 1), "of the third answer"
    assert calls(experiment) == [2, 0, 2, 2]
    assert experiment.step().participants == [0, 2, 3], "asked again in the next round"


def test_dropouts_follow_the_seed_and_leave_enough_clients() -> None:
    def lost(seed: int, dropout: float, min_clients: int) -> list[list[str]]:
        network = Network(**TOY, dropout=dropout)
        experiment = perceptrons(
            Toy(), clients=4, min_clients=min_clients, network=network, seed=seed
        )
        return [record.failures for record in experiment.rounds(6, progress=False)]

    failures = lost(0, 0.3, 1)
    assert failures == lost(0, 0.3, 1) != lost(1, 0.3, 1)
    out = [{line.split()[1] for line in lines} for lines in failures]
    assert 3 <= sum(map(len, out)) <= 12, "about 30 % of 24"
    assert any("'learn'" not in str(lines) for lines in failures if lines), "in any call"
    gone = next(line for line in failures if "'learn'" in str(line))
    assert "'confirm'" in str(gone), "until the next round"
    assert max(len({line.split()[1] for line in lines}) for lines in lost(0, 0.9, 3)) == 1


@pytest.mark.parametrize(("name", "wire"), [("fedavg", None), ("fedproto", EXACT)])
def test_without_losses_results_are_those_without_a_network(
    name: str, wire: WireSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same encoding, which is lean over a network unless the run says otherwise."""
    plain = perceptrons(tiny(name), wire=wire or WireSettings(profile="lean"))
    plain.step()
    simulated = perceptrons(tiny(name), wire=wire, network=Network.preset("hospital"))
    here = simulated.step()
    assert here.wire == ("lean" if wire is None else "exact")
    assert same(state(simulated), state(plain))
    monkeypatch.setattr(local, "FORK_SECONDS", 0)
    forked = perceptrons(tiny(name), wire=wire, network=Network.preset("hospital"))
    forked.engine.cores = 2  # type: ignore[attr-defined]
    assert forked.step().simulated == here.simulated, "times do not depend on where clients run"


def test_a_resumed_run_has_the_same_bits_dropouts_and_times(tmp_path: Path) -> None:
    def begin(out: Path | None, resume: bool = False) -> Experiment:
        network = Network.preset("mobile", {"dropout": 0.4})
        options = {"network": network, "min_clients": 1, "out": out, "resume": resume}
        return perceptrons(tiny("fedkd"), **options)

    straight = begin(None)
    whole = list(straight.rounds(3, progress=False))
    first = begin(tmp_path / "run")
    first.step()
    assert first.folder is not None
    first.folder.release()
    second = begin(tmp_path / "run", resume=True)
    rest = list(second.rounds(3, progress=False))
    assert same(state(second), state(straight))
    assert [r.simulated for r in rest] == [r.simulated for r in whole[1:]]
    assert [r.failures for r in rest] == [r.failures for r in whole[1:]]
    assert any(r.failures for r in rest)


@pytest.mark.parametrize("preset", Network.presets)
def test_presets_are_written_out_and_can_be_changed(preset: str) -> None:
    settings = [f"network.preset={preset}", "network.dropout=0.2", "min_clients=2"]
    config = resolve(with_settings({"algorithm": {"name": "fedavg"}}, settings))
    assert config.network == Network.preset(preset, {"dropout": 0.2})
    tree = to_plain(config)
    assert tree["network"]["up_mbps"] == config.network.up_mbps
    assert resolve(tree).network == config.network
    links = config.network.links(200, seed=0)
    assert links == config.network.links(200, seed=0)
    median = sorted(link.up for link in links)[100]
    assert 0.7 < median / {"hospital": 12.5e6, "broadband": 6.25e6, "mobile": 1.5e6}[preset] < 1.3


def test_runs_of_older_versions_have_no_network() -> None:
    tree = to_plain(resolve({"algorithm": {"name": "fedavg"}}))
    older = {key: value for key, value in tree.items() if key != "network"}
    assert with_defaults(older)["network"] == tree["network"]
    assert not resolve(older).network.enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["network.preset=hospitl"], "did you mean 'hospital'"),
        (["network.dropout=0.3"], "network.up_mbps is missing"),
        (["network.preset=mobile"], "set min_clients to the number that must, of 5"),
        (["network.up_mbps=[1, 2]"], "network.up_mbps lists 2 values, and there are 5 clients"),
        (["network.up_mbps=0"], "must be float > 0 or a list of float > 0 or uniform"),
        (["network.up_mbps=normal(1, 2)"], "lognormal(MEDIAN, SIGMA)"),
        (["network.up_mbps=uniform(9, 2)"], "LOW is above HIGH"),
        (["network.up_mbps=uniform(0, 0)"], "must be above 0"),
        (["network.up_mbps=8", "network.policy=deadline"], "set network.deadline"),
        (["network.up_mbps=8", "network.deadline=5"], "belongs to network.policy=deadline"),
        (["network.up_mbps=8", "network.policy=over-select"], "set min_clients"),
        (["network.preset=hospital", "engine=flower"], "timeout is the deadline"),
        (["network=mobile"], "did you mean 'network.preset'?"),
        (["network.bandwidth=8"], "unknown key 'network.bandwidth'"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(with_settings({"algorithm": {"name": "fedavg"}}, settings))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_inner_counts_are_not_part_of_outer_ones() -> None:
    matrix = torch.ones(10, 10)
    with count_flops() as outer:
        with count_flops() as inner:
            matrix @ matrix
        with set_aside() as aside:
            matrix @ matrix
            add_flops(5)
        matrix @ matrix[0]
        add_flops(7)
    assert (inner.total, aside.total, outer.total) == (2000, 2005, 207)
    add_flops(1)  # Nothing is counted any more.
    with set_aside() as aside:
        matrix @ matrix
    assert (outer.total, aside.total) == (207, 0)


def test_counts_do_not_depend_on_the_kernels() -> None:
    images = torch.randn(2, 3, 32, 32)
    weight = torch.randn(8, 3, 7, 7, requires_grad=True)
    with count_flops() as plain:
        torch.conv2d(images, weight, stride=2, padding=3).sum().backward()
    with count_flops() as padded:
        by_blocks(images, weight, None, torch.float32).sum().backward()
    assert padded.total == plain.total == 2 * (2 * 2 * 8 * 16 * 16 * 147)
    network = VisionTransformer(8, 4, 1, 2, 16, 32, num_classes=4)
    images = torch.randn(2, 3, 8, 8)
    with count_flops() as training:
        network.train()(images)
    with count_flops() as evaluation, torch.no_grad():
        network.eval()(images)  # The fast path of attention.
    assert evaluation.total == training.total > 0
