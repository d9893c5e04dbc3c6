"""Rounds are chosen, kept and stopped by validation accuracy, and the run's folder says so."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import Crossing, load
from barter import experiment as experiments
from barter.cli.app import main
from barter.compare import comparison as comparisons
from barter.compare.comparison import Comparison, RunJob
from barter.compare.specification import ComparisonSpec
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import CheckpointError, ConfigError
from barter.core.evaluation import accuracy
from barter.core.nodes import Client, Server
from barter.core.record import Round
from barter.data.task import Data
from barter.experiment import Experiment
from barter.privacy import Privacy
from barter.report.comparison import ComparisonReport
from barter.report.run import RunReport
from barter.runs import folder as folders
from barter.runs.folder import checkpoint_rounds, early_stop, has_ended, read_records
from barter.runs.selection import Selection, best_round, validation_accuracy
from barter.setup.config import Config, to_toml
from barter.testing.conformance import few_digits
from tests.conftest import digits_file, perceptrons, same, state, tiny
from tests.test_bad_input import said


class Actor(Client):
    """Remembers how often it was evaluated."""

    acts: int = 0


@dataclass(frozen=True, kw_only=True)
class Scripted(Algorithm[Server, Actor]):
    """Clients whose validation accuracy is written down, round by round; on test images they get worse."""

    crosses = {"act": Crossing()}

    script: str = ""  # empty: they tell nothing

    def round(self, server: Server, clients: Clients, t: int) -> None:
        clients.run(self.act)

    def act(self, client: Actor) -> None:
        client.model.get_parameter("head.bias").data += 1

    def evaluate(self, client: Actor) -> dict[str, float]:
        if not self.script:
            return {}
        client.acts += 1
        return {"global": 1 - client.acts / 20, "val": float(self.script.split()[client.acts - 1])}


RISES = (0.1, 0.5, 0.4, 0.5, 0.3, 0.2, 0.6, 0.1, 0.1, 0.1)  # best in round 2, and later in round 7


def scripted(script: Sequence[float] = RISES, source: Any = None, **options: Any) -> Experiment:
    data = Data(source=source or few_digits(60), validation=0.1)
    algorithm = Scripted(script=" ".join(map(str, script)))
    return Experiment(
        algorithm,
        **{"data": data, "clients": 2, "models": "small-mlp", "device": "cpu", **options},
    )


def played(*accuracies: float | None) -> list[Round]:
    """Rounds in which clients have this mean on validation images."""
    return [
        Round(t, {0: {} if value is None else {"val": value}}, {}, {"round": 1.0}, {}, [])
        for t, value in enumerate(accuracies, 1)
    ]


def test_the_accuracy_that_rounds_are_chosen_by() -> None:
    clients = {0: {"val": 0.2, "val_local": 0.8}, 1: {"val": 0.4, "val_local": 1.0}}
    served = Round(1, clients, {"val": 0.7}, {}, {}, [], primary="server")
    assert validation_accuracy(served) == 0.7
    assert validation_accuracy(Round(1, clients, {"global": 0.7}, {}, {}, [])) == pytest.approx(0.3)
    own = {k: {"val_local": said["val_local"], "global": 0.1} for k, said in clients.items()}
    assert validation_accuracy(Round(1, own, {}, {}, {}, [])) == pytest.approx(0.9)
    assert validation_accuracy(Round(1, {0: {"global": 0.9}}, {}, {}, {}, [])) is None


def test_the_first_of_equal_rounds_is_the_best() -> None:
    best = best_round(played(0.1, None, 0.4, 0.4, 0.3))
    assert best is not None
    assert best.round == 3
    assert best_round(played(None, None)) is None


def test_patience_counts_rounds_without_improvement() -> None:
    selection = Selection(2)
    stops = []
    for record in played(0.3, 0.2, 0.4, 0.4, 0.1, 0.5):
        selection.add(record)
        stops.append(selection.stop() is not None)
    assert stops == [False, False, False, False, True, False]
    seldom = Selection(2)
    for record in played(0.3, None, None, 0.2, None, None):
        seldom.add(record)
        assert seldom.stop() is None, "rounds without a measurement say nothing"
    seldom.add(played(*[None] * 6, 0.1)[-1])
    assert seldom.stop() is not None
    assert Selection(None).stop() is None


def test_records_hold_accuracies_on_validation_images() -> None:
    experiment = perceptrons(tiny("fedavg"), data=Data(source=few_digits(), validation=0.2))
    record = experiment.step()
    assert experiment.validation is not None
    for k, client in experiment.engine.clients.items():
        for name in ("val", "val_local"):
            assert record.clients[k][name] == accuracy(client.model, client.tests[name])
        assert torch.equal(client.tests["val_local"].pixels, experiment.task.validation[k].pixels)
    assert record.server["val"] == accuracy(experiment.server.model, experiment.validation)
    assert "val" not in perceptrons(tiny("fedavg")).step().clients[0]


@pytest.mark.parametrize("fields", [{"keep": "best"}, {"patience": 3}])
def test_nothing_is_chosen_without_validation_images(fields: dict[str, Any]) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(ConfigError, match=f"^{name}={value!r}: .* there are none; set data.valid"):
        Config(algorithm=tiny("fedavg"), **fields)
    Config(algorithm=tiny("fedavg"), data=Data(validation=0.1), **fields)


def test_the_last_rounds_and_the_best_are_kept(tmp_path: Path) -> None:
    experiment = scripted(keep="best", out=tmp_path / "run")
    kept = [checkpoint_rounds(tmp_path / "run") for _ in experiment.rounds(8)]
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [6, 7], [7, 8]]
    last = scripted(keep_rounds=1, out=tmp_path / "last")
    assert [checkpoint_rounds(tmp_path / "last") for _ in last.rounds(2)] == [[1], [2]]


def test_the_former_best_stays_until_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = scripted(keep="best", out=tmp_path / "run")
    list(experiment.rounds(6))

    def full(*_: object) -> None:
        raise CheckpointError("no space")

    monkeypatch.setattr(folders, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space"):
        experiment.step()
    assert checkpoint_rounds(tmp_path / "run") == [2, 6]


def test_networks_of_kept_rounds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = scripted(keep="best", out=run)
    biases = [
        experiment.engine.clients[1].model.get_parameter("head.bias").clone()
        for _ in experiment.rounds(5)
    ]
    for which, t in (("best", 2), ("last", 5), (4, 4)):
        model = load(run, 1, round=which)  # type: ignore[arg-type]
        assert model.round == t
        assert torch.equal(model.network.get_parameter("head.bias"), biases[t - 1])
    with pytest.raises(CheckpointError, match="round 3 is not kept, only rounds 2, 4, 5"):
        load(run, 1, round=3)


def test_a_best_round_that_is_not_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    list(scripted(out=run).rounds(5))
    with pytest.raises(
        CheckpointError, match="round 2, the best on validation, is not kept, only rounds 4, 5"
    ):
        load(run, 1, round="best")
    list(perceptrons(tiny("local"), out=tmp_path / "blind").rounds(1))
    with pytest.raises(CheckpointError, match="has no best round: it recorded no validation"):
        load(tmp_path / "blind", 1, round="best")


def test_a_run_without_improvement_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = scripted(patience=3, out=tmp_path / "run")
    assert [r.round for r in experiment.rounds(9)] == [1, 2, 3, 4, 5]
    assert (
        "stopped early after round 5: validation accuracy was best in round 2 (50.0%) and did not improve for 3 rounds"
        in caplog.messages
    )
    assert list(experiment.rounds(9)) == []
    assert early_stop(tmp_path / "run") == experiment.stopped
    assert has_ended(tmp_path / "run", 9)
    assert not has_ended(tmp_path, 9)


def test_a_stopped_run_goes_on_with_more_patience_alone(tmp_path: Path) -> None:
    run, source = tmp_path / "run", few_digits(60)

    def resumed(patience: int) -> list[int]:
        experiment = scripted(source=source, patience=patience, out=run, resume=run.exists())
        rounds = [r.round for r in experiment.rounds(10)]
        assert experiment.folder is not None
        experiment.folder.release()
        return rounds

    assert resumed(3) == [1, 2, 3, 4, 5]
    (run / folders.STOPPED).unlink()  # as if it had been killed before it was written
    assert resumed(3) == []
    assert has_ended(run, 10)
    assert resumed(5) == [6, 7, 8, 9, 10]
    assert not (run / folders.STOPPED).exists()


COMMAND = [
    *(
        "--algorithm",
        "tests.test_validation:Scripted",
        "--set",
        f"algorithm.script={' '.join(map(str, RISES))}",
    ),
    *("--set", "clients=2", "--set", "models=small-mlp", "--set", "data.validation=0.1"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digits_file(tmp_path_factory.mktemp("data"))


def done(run: Path) -> list[int]:
    return [r.round for r in read_records(run)]


def test_the_command_line_stops_and_goes_on(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    place = ["--set", f"data.source={source}", "--set", "rounds=9", "--set", "keep=best"]
    assert main(["run", "--out", str(run), *COMMAND, *place, "--patience", "3"]) == 0
    printed = capsys.readouterr().out
    assert "\nstopped early after round 5: validation accuracy was best in round 2" in printed
    assert re.search(r"best on val, round 2 +90\.0", printed), "its accuracy on test images"
    assert main(["resume", str(run)]) == 0
    assert "; --rounds or a larger --patience continues" in capsys.readouterr().out
    assert done(run) == [1, 2, 3, 4, 5]

    # Asked for explicitly, it goes on, and patience is counted anew.
    assert main(["resume", str(run), "--rounds", "6"]) == 0
    assert done(run)[-1] == 6
    assert not has_ended(run, 9)
    assert main(["resume", str(run)]) == 0
    assert done(run)[-1] == 9, "round 7 was better"
    assert checkpoint_rounds(run) == [7, 8, 9]

    assert (
        main(
            ["export", str(run), "--client", "0", "--round", "best", "--to", f"{run}/n.safetensors"]
        )
        == 0
    )
    assert "after round 7" in capsys.readouterr().out
    evaluate = ["evaluate", str(run), "--data", source, "--client", "0", "--round"]
    assert main([*evaluate, "8"]) == 0
    assert "accuracy in % after round 8 on" in capsys.readouterr().out
    assert "round 1 is not kept, only rounds 7, 8, 9" in said(capsys, [*evaluate, "1"])
    assert "--round first: write best, last, or the number" in said(capsys, [*evaluate, "first"])


def test_a_run_goes_back_to_a_kept_round(tmp_path: Path, source: str) -> None:
    run, straight = tmp_path / "run", scripted(source=source, keep="best", rounds=7)
    list(straight.rounds(7))
    place = ["--set", f"data.source={source}", "--set", "rounds=6", "--set", "keep=best"]
    assert main(["run", "--out", str(run), *COMMAND, *place, "--patience", "4"]) == 0
    assert has_ended(run, 9)
    assert main(["resume", str(run), "--round", "best", "--rounds", "3"]) == 0
    assert (done(run), checkpoint_rounds(run)) == ([1, 2, 3], [2, 3])
    assert not (run / folders.STOPPED).exists(), "that was later"
    again = Experiment.from_config(straight.config, run, resume=True)
    list(again.rounds(7))
    assert same(state(again), state(straight))


def test_a_run_on_flower_does_not_go_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(algorithm=tiny("fedavg"), data=Data(validation=0.1), engine="flower")
    folders.RunFolder.create(tmp_path / "run", to_toml(config)).release()
    for option in (["--round", "1"], ["--patience", "9"]):
        assert f"{' '.join(option)}: sites of a run on Flower" in said(
            capsys, ["resume", str(tmp_path / "run"), "--trust", *option]
        )


def test_a_run_from_before_there_was_validation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(config: Config) -> str:
        new = re.compile(r"(validation|keep|keep_rounds|patience) = ")
        return "".join(
            line for line in to_toml(config).splitlines(keepends=True) if not new.match(line)
        )

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "to_toml", before)
        first = perceptrons(tiny("local"), out=tmp_path / "run")
        first.step()
    assert "validation" not in (tmp_path / "run" / "config.toml").read_text()
    assert first.folder is not None
    first.folder.release()
    assert perceptrons(tiny("local"), out=tmp_path / "run", resume=True).round == 1


def test_sites_that_tell_no_accuracy_give_nothing_to_choose_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = scripted(script=(), patience=1)
    assert len(list(experiment.rounds(3))) == 3
    assert [line for line in caplog.messages if "no client reports a validation" in line]
    assert len(caplog.messages) == 1


def test_choosing_by_accuracies_reveals_them() -> None:
    """A promise holds where sites withhold results; whoever chooses rounds by them has seen them."""
    private = Privacy(epsilon=50, parts={"client_update": "gaussian clip=1"})
    data = Data(source=few_digits(60), validation=0.2)
    for patience in (None, 3):
        experiment = perceptrons(tiny("fedavg"), data=data, privacy=private, patience=patience)
        experiment.step()
        statement = experiment.privacy()
        chosen = any(
            "results of evaluation left without protection" in why for why in statement.why
        )
        assert chosen == (patience is not None)
        assert "Validation images count as test images" in statement.left_out


def test_a_comparison_counts_a_stopped_run_as_finished(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparisons, "draw_curves", lambda *_: None)  # which take a while to draw
    folder, name = tmp_path / "c", COMMAND[1]
    settings = ["rounds=9", "patience=3", f"data.source={source}", *COMMAND[3::2]]

    def planned(*more: str) -> tuple[Comparison, list[RunJob]]:
        return Comparison.plan(
            folder, ComparisonSpec.of({}, name, "0", [*settings, *more], [], {"metric": "val"})
        )

    comparison, (job,) = planned()
    assert not job.finished
    list(Experiment.from_config(job.config, job.folder).rounds(9))
    assert job.finished
    results, missing = comparison.results()
    assert not missing
    assert len(results[name][0]) == 5
    assert main(["compare", str(folder)]) == 0
    table = (folder / "table.md").read_text().splitlines()
    cells = dict(zip(*(map(str.strip, table[i].split("|")) for i in (0, 2)), strict=True))
    assert cells["validation"] == "**30.0**", "after the last round"
    assert cells["clients: global test"] == "**75.0**"
    assert (cells["best round on validation"], cells["accuracy in it"]) == ("2", "90.0")
    (row,) = csv.DictReader(io.StringIO((folder / "table.csv").read_text()))
    assert (float(row["best_round_mean"]), float(row["best_mean"])) == (2.0, 0.9)
    rounds = list(csv.DictReader(io.StringIO((folder / "rounds.csv").read_text())))
    assert [float(row["val"]) for row in rounds] == list(RISES[:5])
    with pytest.raises(CheckpointError, match="has patience=3, and patience=4 is asked for"):
        planned("patience=4")
    assert ComparisonReport(folder).finished
    assert RunReport(job.folder, images=False).finished
