"""What must hold on a GPU: graphs, streams and parking change how fast a run is, and nothing else."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.compute import graphs, lanes
from barter.compute.graphs import Captured
from barter.compute.lanes import Lane
from barter.compute.parking import Parking
from barter.core import seeds
from barter.core.payload import isolate, nbytes
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.ops.fit import Trainer, adam, sgd
from tests.conftest import federation, same, state, tiny

pytestmark = pytest.mark.cuda

# Enough steps of every kind that each is captured.
MORE: dict[str, dict[str, Any]] = {
    "dffke": {"decoder_steps": 6, "docking_epochs": 5, "exchange_epochs": 3, "exchange_steps": 6}
}


def on_cuda(name: str, **options: Any) -> Experiment:
    return federation(tiny(name, **MORE.get(name, {})), **{"device": "cuda", **options})


def finished(experiment: Experiment, rounds: int = 2) -> dict[str, Any]:
    list(experiment.rounds(rounds))
    return state(experiment)


def captured(engine: LocalEngine) -> list[Captured]:
    everywhere = [*engine.lanes, *([engine.server_lane] if engine.server_lane else [])]
    steps = [
        step for lane in everywhere for t in lane.trainers.values() for step in t.steps.values()
    ]
    return [step for step in steps if isinstance(step, Captured)]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two states are apart, relative to their size."""
    pairs = [
        (v, other[at]) for at, v in one.items() if isinstance(v, Tensor) and v.is_floating_point()
    ]
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((apart / sum(float(a.double().square().sum()) for a, _ in pairs)) ** 0.5)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_replayed_and_eager_steps_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = on_cuda(name, precision="fp32")
    with_graphs = finished(replayed)
    assert captured(replayed.engine), "nothing was captured"
    monkeypatch.setattr(graphs, "WARM_UP", 10**9)
    eager = on_cuda(name, precision="fp32")
    without = finished(eager)
    assert not captured(eager.engine)
    assert distance(with_graphs, without) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_number_of_streams_changes_nothing(name: str, precision: str) -> None:
    one, three = (finished(on_cuda(name, precision=precision, streams=n)) for n in (1, 3))
    assert same(one, three)


@pytest.mark.parametrize("name", ["fedavg", "dffke"])
def test_a_device_listed_twice_changes_nothing(name: str) -> None:
    twice = on_cuda(name, device=["cuda:0", "cuda:0"], streams=2)
    assert len(twice.engine.lanes) == 3, "two clients on the first entry, one on the second"
    assert same(finished(on_cuda(name, device="cuda:0")), finished(twice))


def test_a_run_takes_over_the_tracks_of_those_that_are_gone() -> None:
    """Where the last experiment is still there when the next one begins, as in a notebook, two sets of tracks serve."""
    held = []
    for _ in range(10):
        experiment = on_cuda("dffke", streams=2)
        list(experiment.rounds(1))
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - max(held[:4]) < 8 * 2**25, (
        "with tracks of their own, six runs leave two dozen workspaces"
    )


def test_parking_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_device = finished(on_cuda(name))
    fetched = Parking.on_device
    seen: list[str] = []

    def watched(self: Parking, client: Any) -> Any:
        seen.append(next(client.model.parameters()).device.type)
        return fetched(self, client)

    monkeypatch.setattr(Parking, "on_device", watched)
    monkeypatch.setattr(Parking, "is_crowded", lambda self, device: True)
    parked = finished(on_cuda(name))
    assert seen.count("cpu") == len(seen) > 3
    assert same(
        {at: _host(v) for at, v in on_the_device.items()},
        {at: _host(v) for at, v in parked.items()},
    )


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def test_resumed_equals_straight_and_memory_is_measured(name: str, tmp_path: Path) -> None:
    straight = finished(on_cuda(name), 3)
    first = on_cuda(name, out=tmp_path / "run")
    (record,) = first.rounds(1)
    assert record.server["device_memory"] > 1e6
    assert first.folder is not None
    first.folder.release()
    resumed = finished(on_cuda(name, out=tmp_path / "run", resume=True), 3)
    assert same(resumed, straight)


def test_bf16_is_the_default_and_weights_stay_fp32(name: str) -> None:
    experiment = on_cuda(name)
    assert experiment.precision == "bf16"
    default, full = finished(experiment), finished(on_cuda(name, precision="fp32"))
    # What a party keeps as it was sent, images and decoders, may be half.
    sent = (".buffer[", ".knowledge.decoder.")
    kept = {
        v.dtype
        for at, v in default.items()
        if isinstance(v, Tensor) and v.is_floating_point() and not any(part in at for part in sent)
    }
    assert kept == {torch.float32}
    assert not same(default, full)
    assert distance(default, full) < 0.5


def test_what_is_drawn_on_the_cpu_leaves_the_gpu_alone() -> None:
    device, drawn = torch.device("cuda", 0), []
    for inner in (False, True):
        with seeds.scope(0, "a", device=device):
            if inner:
                with seeds.scope(1, "b"):
                    torch.rand(1)
            drawn.append(torch.rand(3, device=device))
    assert torch.equal(*drawn)


def test_dropout_draws_from_the_seed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3))
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x))
            return out

    def run(**options: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        return finished(on_cuda("local", models=Dropping(), precision="fp32", **options))

    one, again, three, other = (
        run(streams=1),
        run(streams=1),
        run(streams=3),
        run(streams=1, seed=5),
    )
    assert same(one, again)
    assert same(one, three)
    assert not same(one, other)
    monkeypatch.setattr(graphs, "WARM_UP", 10**9)
    assert distance(one, run()) < 1e-5


def lane() -> Lane:
    return Lane(torch.device("cuda", 0), 2**30)


def test_a_loss_that_cannot_be_captured_runs_eagerly_and_says_why_once() -> None:
    place = lane()
    with place.open():
        torch.cuda.manual_seed(3)
        model = lanes.keep("model", nn.Linear(2, 1).cuda())

        def looks(x: Tensor) -> Tensor:
            value: Tensor = (model(x) * torch.rand(1, device="cuda")).sum()
            return value if value.item() < 1e9 else value * 0

        trainer = Trainer.of(model, sgd(0.1))
        x = torch.ones(3, 2, device="cuda")
        with pytest.warns(RuntimeWarning, match="looks runs step by step") as said:
            values = [trainer.step(looks, x).item() for _ in range(6)]
        assert len(said) == 1
        assert len(set(values)) == 6
        assert place.generator.get_offset() == 6 * 4, (
            "a failed capture takes nothing from the stream"
        )

        class Party:
            weight = 2.0

        party = Party()

        def holds(x: Tensor) -> Tensor:
            return model(x).sum() * party.weight

        with pytest.warns(RuntimeWarning, match="holds a Party"):
            trainer.step(holds, x)


def test_graphs_are_kept_over_trainers_and_the_optimizer_is_as_new() -> None:
    def steps(n: int) -> Tensor:
        torch.manual_seed(1)
        fresh = nn.Linear(4, 1).cuda()
        model = lanes.keep("model", fresh)
        trainer = Trainer.of(model, adam(0.1))
        x = torch.arange(12.0, device="cuda").view(3, 4)
        for _ in range(n):
            trainer.step(lambda x: (model(x) - 1).square().mean(), x)
        return model.weight.detach().clone()

    alone = steps(7)
    place = lane()
    with place.open():
        first = steps(7)
        (trainer,) = place.trainers.values()
        (step,) = trainer.steps.values()
        second = steps(7)
        assert list(trainer.steps.values()) == [step], "captured once"
        place.modules["model"].weight.data = place.modules["model"].weight.data.clone()
        third = steps(7)
        assert list(trainer.steps.values()) != [step], "a parameter that moved is captured anew"
    assert torch.allclose(first, alone, atol=1e-6)
    assert torch.equal(first, second)
    # Elsewhere in memory a product may be computed by another kernel, so the last bit may differ.
    assert torch.allclose(first, third, atol=1e-6)


def test_what_a_kept_module_gave_away_does_not_change_with_it() -> None:
    with lane().open():
        model = lanes.keep("model", nn.Linear(2, 1).cuda())
        trainer = Trainer.of(model, sgd(0.1))
        x = torch.ones(3, 2, device="cuda")
        for _ in range(3):
            trainer.step(lambda x: model(x).sum(), x)
        given = isolate(model.state_dict())
        before = given["weight"].clone()
        trainer.step(lambda x: model(x).sum(), x)
        for _ in range(5):
            trainer.step(lambda x: model(x).square().sum(), x)
        assert torch.equal(given["weight"], before)
        assert not torch.equal(given["weight"], model.weight)


def test_parties_are_isolated() -> None:
    sent = torch.ones(5, device="cuda")
    for device in (torch.device("cuda"), sent.device, None):
        arrived = isolate({"x": sent}, device)["x"]
        arrived.zero_()
        assert sent.sum().item() == 5


def test_a_failing_client_is_one_failure_and_an_interrupt_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from barter.algorithms.local import Local

    original = Local.learn

    def learn(self: Local, client: Any) -> None:
        original(self, client)
        if client.id == 1:
            raise ValueError("no mood")

    monkeypatch.setattr(Local, "learn", learn)
    (record,) = on_cuda("local", min_clients=1).rounds(1)
    assert [f for f in record.failures if "client 1" in f and "no mood" in f]
    original_evaluate = Local.evaluate

    def evaluate(self: Local, client: Any) -> Any:
        if client.id == 1:
            raise KeyboardInterrupt
        return original_evaluate(self, client)

    monkeypatch.setattr(Local, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        list(on_cuda("local", min_clients=1).rounds(1))


def test_a_checkpoint_holds_what_parties_share_once(tmp_path: Path) -> None:
    experiment = on_cuda("dffke", out=tmp_path / "run")
    list(experiment.rounds(2))
    checkpoint = tmp_path / "run" / "checkpoints" / "round-000002.safetensors"
    distinct = nbytes(experiment.server.memory()) + sum(
        nbytes(client.model.state_dict()) for client in experiment.engine.clients.values()
    )
    assert checkpoint.stat().st_size < 1.05 * distinct + 100_000
