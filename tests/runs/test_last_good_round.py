"""A round that ends badly is reported, and the last good round survives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from barter import Experiment
from barter.algorithms.fedavg import FedAvg
from barter.core.clients import Clients
from barter.core.errors import CheckpointError, ClientError, StateError
from barter.core.images import Images
from barter.core.nodes import Client, Server
from barter.core.payload import State
from barter.core.record import Round
from barter.data.task import Data
from barter.report.run import RunReport
from barter.runs.checkpoint import read_checkpoint, write_checkpoint
from barter.runs.collapse import AccuracyWatch
from barter.runs.folder import checkpoint_rounds, read_records
from barter.runs.progress import Watcher
from barter.setup.config import read_toml, resolve
from tests.conftest import TINY, digits_file, perceptrons, same, state


@dataclass(frozen=True, kw_only=True)
class Scripted(FedAvg):
    """FedAvg whose server has accuracies that are written down, round by round."""

    script: str = ""  # empty: those that it has

    def evaluate_server(self, server: Server, test: Images) -> dict[str, float]:
        if not self.script:
            return super().evaluate_server(server, test)
        said = self.script.split()[server.monitor.round - 1]  # type: ignore[attr-defined]
        return {} if said == "-" else {"global": float(said)}


@dataclass(frozen=True, kw_only=True)
class Diverges(FedAvg):
    """FedAvg whose server computes NaN in a round."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        super().round(server, clients, t)
        if t == 3:
            next(server.model.parameters()).data.fill_(float("nan"))


def scripted(run: Path, *accuracies: object, **options: Any) -> Experiment:
    script = " ".join(map(str, accuracies))
    return perceptrons(Scripted(script=script, **TINY["fedavg"]), out=run, **options)


def replaced(experiment: Experiment, client: int, round: int, times: float) -> None:
    """Have a client answer with weights that are so many times as large, in one round."""
    arrive = experiment.engine.receive_answer

    def arrived(answer: Any, method: str, k: int, sent: Any) -> Any:
        if k == client and method == "client_update" and experiment.engine.round == round:
            answer = {n: v * times if v.is_floating_point() else v for n, v in answer.items()}
        return arrive(answer, method, k, sent)

    experiment.engine.receive_answer = arrived  # type: ignore[method-assign]


def watched(*accuracies: float | None, chance: float = 0.1) -> tuple[AccuracyWatch, list[int]]:
    """Return the watch after these rounds, and the rounds in which it warned."""
    watch = AccuracyWatch(chance)
    warned = []
    for t, accuracy in enumerate(accuracies, 1):
        server = {} if accuracy is None else {"global": accuracy}
        if watch.add(Round(t, {}, server, {"round": 1.0}, {}, [], primary="server")):
            warned.append(t)
    return watch, warned


@pytest.mark.parametrize(
    ("accuracies", "warned", "good"),
    [
        ((0.1, 0.12, 0.1), [], 3),  # It never learned anything.
        ((0.2, 0.1), [], 2),  # It had not been far above chance.
        ((0.6, 0.3, 0.2), [], 3),  # It is still above chance.
        ((0.6, 0.1, 0.12, 0.1), [2], 1),
        ((0.6, None, None, 0.1, None), [4], 1),
        ((0.6, 0.1, 0.5, 0.1), [2, 4], 3),  # It recovers, and collapses again.
    ],
)
def test_a_collapse_is_noticed_once(
    accuracies: Sequence[float | None], warned: list[int], good: int
) -> None:
    watch, found = watched(*accuracies)
    assert (found, watch.good) == (warned, good)


def test_chance_is_that_of_the_most_frequent_class() -> None:
    assert watched(0.95, 0.9, chance=0.9)[1] == [2]
    assert watched(0.95, 0.92, chance=0.9)[1] == []
    assert watched(1.0, 1.0, chance=1.0)[1] == [], "there is only one class"
    experiment = perceptrons(Scripted())
    counts = torch.bincount(experiment.test.labels)  # type: ignore[union-attr]
    assert experiment.accuracy_watch.chance == float(counts.max()) / int(counts.sum())


def test_the_last_good_round_survives_a_collapse(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = scripted(run, 0.5, 0.6, 0.1, 0.1, 0.1, 0.7, 0.7)
    kept = [checkpoint_rounds(run) for _ in experiment.rounds(5)]
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    (warning,) = read_records(run)[2].warnings
    assert warning == (
        f"accuracy fell to chance: 10.0% after 60.0% in round 2; `barter resume {run} --round 2` "
        "goes back"
    )
    assert not any(record.warnings for record in read_records(run) if record.round != 3)
    assert "fell to chance" in RunReport(run, images=False).page(live=False)
    assert experiment.folder is not None
    experiment.folder.release()
    again = scripted(run, 0.5, 0.6, 0.1, 0.1, 0.1, 0.7, 0.7, resume=True)
    list(again.rounds(6))
    assert checkpoint_rounds(run) == [5, 6], "it has recovered"
    assert again.folder is not None
    again.folder.release()


def test_a_run_goes_back_to_the_last_good_round(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = perceptrons(
        FedAvg(**TINY["fedavg"]),
        out=run,
        data=Data(source=digits_file(tmp_path)),
        keep_rounds=1,
    )
    found = []
    for record in experiment.rounds(3):
        found.append(state(experiment))
        if record.round == 1:
            experiment.accuracy_watch.highest = 1.0
            experiment.accuracy_watch.chance = 0.99  # All that follows is chance.
    assert checkpoint_rounds(run) == [1, 3]
    assert experiment.folder is not None
    experiment.folder.release()
    config = resolve(read_toml(run / "config.toml"))
    again = Experiment.from_config(config, run, resume=True, after_round=1)
    assert same(state(again), found[0])
    again.step()
    assert same(state(again), found[1])


def test_a_state_with_nan_is_not_saved_and_who_stands_out_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = perceptrons(Diverges(**TINY["fedavg"]), out=run)
    replaced(experiment, client=1, round=3, times=8)
    list(experiment.rounds(2))
    good = state(experiment)
    with pytest.raises(StateError) as caught:
        experiment.step()
    said = str(caught.value)
    assert said.startswith(
        "round 3 left NaN or infinity in the server's state (model.body.1.weight): it is not "
        "saved; the answer that stands out is client 1's to 'client_update': client_update"
    )
    assert said.endswith(
        f"`barter resume {run}` repeats round 3, `barter resume {run} --round 1` goes back"
    )
    assert checkpoint_rounds(run) == [1, 2]
    assert [record.round for record in read_records(run)] == [1, 2]
    again = perceptrons(Diverges(**TINY["fedavg"]), out=run, resume=True)
    assert same(state(again), good)


def test_a_checkpoint_that_holds_nan_is_refused_and_leads_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    list(perceptrons(FedAvg(**TINY["fedavg"]), out=run).rounds(2))
    path = run / "checkpoints" / "round-000002.safetensors"
    spoilt, notes = read_checkpoint(path, torch.device("cpu"))
    spoilt["server"]["model"]["head.bias"] *= math.nan
    write_checkpoint(path, spoilt, {key: notes[key] for key in ("config", "data", "round")})
    message = (
        rf"round 2 holds NaN or infinity \(.*head.bias\); `barter resume {run} --round 1` goes"
    )
    with pytest.raises(CheckpointError, match=message):
        perceptrons(FedAvg(**TINY["fedavg"]), out=run, resume=True)


def test_clients_that_fail_at_what_they_received_lead_back(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Explodes(FedAvg):
        """FedAvg whose clients compute NaN in the third round."""

        def client_update(self, client: Client, w: State) -> State:
            found = super().client_update(client, w)
            t = client.monitor.round  # type: ignore[attr-defined]
            return {**found, "head.bias": found["head.bias"] * math.nan} if t == 3 else found

    run = tmp_path / "run"
    experiment = perceptrons(Explodes(**TINY["fedavg"]), out=run)
    list(experiment.rounds(2))
    back = (
        f"; `barter resume {run} --round 1` goes back; a new run with robust=auto limits what one "
    )
    with pytest.raises(ClientError, match=back):
        experiment.step()
    defended = perceptrons(Explodes(**TINY["fedavg"]), robust="auto", out=tmp_path / "defended")
    list(defended.rounds(2))
    with pytest.raises(ClientError, match="--round 1` goes back$"):
        defended.step()


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_training_that_diverges_at_all_clients_asks_for_a_lower_rate(
    tmp_path: Path, fraction: float
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Explodes(FedAvg):
        """FedAvg whose clients' weights become far too large."""

        def client_update(self, client: Client, w: State) -> State:
            found = super().client_update(client, w)
            return {**found, "head.bias": found["head.bias"] + 1e30}

    settings = {**TINY["fedavg"], "fraction": fraction}
    experiment = perceptrons(Explodes(**settings), out=tmp_path / "run")
    with pytest.raises(ClientError, match="diverged at all clients: try a lower learning rate$"):
        experiment.step()


def test_an_outlier_costs_its_client_the_round(tmp_path: Path) -> None:
    experiment = perceptrons(FedAvg(**TINY["fedavg"]), min_clients=2)
    replaced(experiment, client=2, round=2, times=1000)
    one, two, three = experiment.rounds(3)
    assert not one.failures
    assert not three.failures
    (failure,) = two.failures
    assert failure.startswith("client 2 failed in 'client_update', round 2: PayloadError: ")
    assert failure.endswith("at most 100 times are accepted")
    assert two.participants == [0, 1]
    strict = perceptrons(FedAvg(**TINY["fedavg"]))
    replaced(strict, client=2, round=1, times=1000)
    with pytest.raises(ClientError, match="2 of 3 clients answered 'client_update', 3 must: .*100"):
        strict.step()


def test_a_warning_is_shown_under_its_round(capsys: pytest.CaptureFixture[str]) -> None:
    record = Round(1, {}, {}, {"round": 1.0}, {}, [], warnings=["accuracy fell to chance"])
    Watcher(Console(width=100), 2).finish(record)
    assert "  accuracy fell to chance\n" in capsys.readouterr().out
    assert Round.from_json(record.to_json()) == record
