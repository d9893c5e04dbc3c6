from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from barter import (
    DFFKE,
    Algorithm,
    Classifier,
    Client,
    Clients,
    Crossing,
    Experiment,
    Local,
    Server,
)
from barter.cli import running
from barter.cli.app import main
from barter.core.errors import CheckpointError, ClientError, ConfigError
from barter.core.images import Spec
from barter.data.partition import Iid
from barter.engines import forks
from barter.runs.tables import closing_table
from barter.setup.config import (
    Config,
    read_toml,
    resolve,
    to_toml,
    translate_former_fields,
    with_settings,
)
from tests.conftest import (
    federation,
    perceptrons,
    run_jobs_here,
    same,
    small_federation,
    state,
    tiny,
)

pytestmark = pytest.mark.usefixtures("few_images")


def test_the_loop_is_the_users() -> None:
    experiment = federation(tiny("local"))
    seen = []
    for r in experiment.rounds(10):
        seen.append(r.round)
        if r.round == 2:
            break
    seen += [r.round for r in experiment.rounds(4)]
    assert seen == [1, 2, 3, 4]
    assert list(experiment.rounds(4)) == []


@pytest.mark.parametrize("name", ["lgfedavg", "fedgen", "fedgh", "feddistill", "fedktl", "pfedla"])
def test_a_run_too_short_for_anything_to_come_back_says_so(name: str) -> None:
    algorithm = tiny(name)
    assert algorithm.remarks([]) == []
    experiment = perceptrons(algorithm)
    (first,), (second,) = experiment.rounds(1), experiment.rounds(2)
    (said,) = algorithm.remarks([first])
    assert "training was local only" in said
    assert algorithm.remarks([first, second]) == algorithm.remarks([second]) == []


def test_a_federation_of_one_says_that_it_learned_alone() -> None:
    algorithm = tiny("dffke", collaboration=0.1)
    (said,) = algorithm.remarks(list(perceptrons(algorithm).rounds(2)))
    assert "so training was local only" in said
    for name in ("dffke", "fedavg", "local"):  # who was taught, and who never wanted to be
        assert tiny(name).remarks(list(perceptrons(tiny(name)).rounds(1))) == []


def test_what_a_method_remarks_of_a_run_is_said_at_its_end(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Local, "remarks", lambda _, rounds: [f"no [layer] moved in {len(rounds)} rounds"]
    )
    experiment = perceptrons(tiny("local"))
    next(experiment.rounds(2))
    assert not caplog.messages
    perceptrons(tiny("local")).step()
    list(perceptrons(tiny("local")).rounds(2))
    assert caplog.messages == ["no [layer] moved in 2 rounds"]
    settings = [
        f"--set={s}"
        for s in ("rounds=2", "clients=2", "models=small-mlp", "algorithm.max_epochs=1")
    ]
    assert main(["run", "--algorithm", "local", *settings, "--out", str(tmp_path / "run")]) == 0
    assert "note: no [layer] moved in 2 rounds" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "run"), "--rounds", "3"]) == 0
    assert "note: no [layer] moved in 3 rounds" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "no [layer] moved in 3 rounds" in next((tmp_path / "run").glob("*.html")).read_text()
    monkeypatch.setattr(running, "run_all", run_jobs_here)
    folder = ["--out", str(tmp_path / "many"), "--seeds", "0"]
    assert main(["compare", "--algorithms", "local", *settings, *folder]) == 0
    assert main(["report", str(tmp_path / "many")]) == 0
    page = next((tmp_path / "many").glob("*.html")).read_text()
    assert "Remarks" in page
    assert "no [layer] moved in 2 rounds" in page


def test_own_modules_take_part() -> None:
    modules = [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
        for _ in range(2)
    ]
    experiment = federation(tiny("dffke"), models=modules, clients=3)
    (record,) = experiment.rounds(1)
    assert experiment.architectures == ["Sequential-0", "Sequential-1", "Sequential-0"]
    assert record.mean("global") > 0.05
    assert federation(tiny("local"), models=modules[0]).architectures == ["Sequential-0"] * 3
    with pytest.raises(ConfigError, match="give at least one"):
        federation(tiny("local"), models=[])
    with pytest.raises(ConfigError, match="3 is neither a name, a module nor a factory"):
        federation(tiny("local"), models=["small-cnn", 3])


def perceptron(spec: Spec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, spec.classes))


def test_one_seed_is_one_run_whatever_the_models_are(tmp_path: Path) -> None:
    for models in (
        [perceptron, "small-mlp"],
        [lambda spec: perceptron(spec), perceptron],
        perceptron,
    ):
        one, again, other = (
            small_federation(tiny("dffke"), models=models, seed=seed) for seed in (1, 1, 2)
        )
        for experiment in (one, again, other):
            list(experiment.rounds(1))
            torch.rand(1)  # what else is drawn in this process changes nothing
        assert same(state(one), state(again))
        assert not same(state(one), state(other))


def test_functions_that_can_be_imported_are_named_in_the_configuration(tmp_path: Path) -> None:
    here = f"{__name__}:perceptron"
    first = federation(
        tiny("local"), models=[perceptron, "small-mlp"], out=tmp_path / "run", rounds=1
    )
    assert first.architectures == [here, "small-mlp", here]
    list(first.rounds(1))
    again = Experiment.from_config(resolve(read_toml(tmp_path / "run" / "config.toml")))
    list(again.rounds(1))
    assert same(state(first), state(again))
    assert (
        federation(tiny("local"), models=[lambda spec: perceptron(spec)]).config.models
        == "(given in Python)"
    )
    with pytest.raises(ConfigError, match="called with the task's spec, failed: .*argument"):
        federation(tiny("local"), models=lambda: perceptron)


class Redrawn(Local):
    """Parties whose networks are drawn anew."""

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        nn.init.normal_(next(network.parameters()))
        return network


def test_what_a_method_makes_of_a_network_comes_from_the_seed() -> None:
    one, again, other = (state(federation(Redrawn(), seed=seed)) for seed in (1, 1, 2))
    assert same(one, again)
    assert not same(one, other)


def test_partitions_and_models_by_name() -> None:
    experiment = federation(tiny("local"), partition="iid", models="small-mlp, small-cnn")
    assert experiment.config.partition == Iid()
    assert experiment.architectures == ["small-mlp", "small-cnn", "small-mlp"]
    with pytest.raises(ConfigError, match="unknown partition 'idd'"):
        federation(tiny("local"), partition="idd")
    with pytest.raises(ConfigError, match=r"does not take images of 1x8x8"):
        federation(
            tiny("local"),
            models=nn.Sequential(nn.Flatten(), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 10)),
        )


def test_own_modules_resume_in_python_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))]
    first = federation(tiny("local"), models=modules, out=tmp_path / "run")
    list(first.rounds(1))
    assert first.folder is not None
    first.folder.release()
    with pytest.raises(ConfigError, match="given in Python"):
        Experiment.from_config(
            resolve(read_toml(tmp_path / "run" / "config.toml")), tmp_path / "run", resume=True
        )
    second = federation(tiny("local"), models=modules, out=tmp_path / "run", resume=True)
    assert second.round == 1
    assert same(state(second), state(first))


def test_the_written_configuration_gives_the_same_run(tmp_path: Path) -> None:
    first = federation(tiny("dffke", discrepancy="mse"), out=tmp_path / "a", rounds=1, seed=3)
    list(first.rounds(1))
    again = Experiment.from_config(resolve(read_toml(tmp_path / "a" / "config.toml")))
    assert again.config == first.config
    list(again.rounds(1))
    assert same(state(first), state(again))


@dataclass(frozen=True, kw_only=True)
class Broken(Algorithm):
    """Fails in the server's half of the second round."""

    crosses = {}

    def round(self, server: Server, clients: Clients, t: int) -> None:
        if t == 2:
            raise RuntimeError("half way")


@dataclass(frozen=True, kw_only=True)
class Tunable(Broken):
    """With a field of its own."""

    mine: int = 1  # whatever


def test_an_unfinished_round_is_not_built_upon() -> None:
    experiment = federation(Broken())
    assert next(experiment.rounds(1)).round == 1
    with pytest.raises(RuntimeError, match="half way"):
        next(experiment.rounds(2))
    with pytest.raises(CheckpointError, match="middle of a round"):
        next(experiment.rounds(2))


def test_algorithms_of_ones_own_run_from_files(tmp_path: Path) -> None:
    first = federation(Broken(), out=tmp_path / "run", rounds=1)
    list(first.rounds(1))
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'name = "tests.test_experiment:Broken"' in text
    assert type(resolve(read_toml(tmp_path / "run" / "config.toml")).algorithm) is Broken


def test_too_few_clients_stop_the_run_with_the_reason() -> None:
    class Bad(Local):
        def learn(self, client: Client) -> None:
            raise ValueError(f"client {client.id} is ill")

    with pytest.raises(ClientError, match="0 of 3 clients answered 'learn'.*client 1 is ill"):
        next(federation(Bad()).rounds(1))


def test_a_run_is_resumed_as_what_it_was(tmp_path: Path) -> None:
    first = federation(tiny("local"), out=tmp_path / "run")
    list(first.rounds(1))
    assert first.folder is not None
    first.folder.release()
    for changed, key in (
        ({"seed": 7}, "seed"),
        ({"clients": 4}, "clients"),
        ({"partition": Iid()}, "partition.alpha"),
    ):
        with pytest.raises(CheckpointError, match=f"another configuration: {key} differs"):
            federation(tiny("local"), **changed, out=tmp_path / "run", resume=True)
    assert federation(tiny("local"), rounds=99, out=tmp_path / "run", resume=True).round == 1


def test_a_run_with_the_former_name_of_a_field_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_before(config: Config) -> str:
        return to_toml(config).replace("\nfraction = 0.5", "\nparticipation = 0.5")

    method = tiny("dffke", fraction=0.5)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("barter.experiment.to_toml", written_before)
        first = federation(method, out=run)
        list(first.rounds(1))
    assert first.folder is not None
    first.folder.release()
    assert "participation = 0.5" in (run / "config.toml").read_text()
    assert resolve(read_toml(run / "config.toml")).algorithm == method
    assert federation(method, out=run, resume=True).round == 1
    with pytest.raises(
        ConfigError, match=r"'algorithm.participation': it is called 'fraction' now"
    ):
        type(method).preset("paper", {"participation": 0.5})
    with pytest.raises(ConfigError, match=r"it is called 'algorithm.fraction' now"):
        with_settings({"algorithm": {"name": "dffke"}}, ["algorithm.participation=0.5"])
    spelled = {"name": "dffke", "embeddings": "noise", "participation": 0.5, "share": 0.1}
    assert translate_former_fields({"algorithm": spelled}) == (
        'embeddings = "noise", participation = 0.5',
        'fraction = 0.5, reveal = "nothing"',
    )
    assert translate_former_fields({"algorithm": {"name": "dffke", "embeddings": "clean"}}) == (
        'embeddings = "clean"',
        "",
    )
    assert translate_former_fields({"rounds": 3}) is None
    assert translate_former_fields({"algorithm": "dffke"}) is None
    assert translate_former_fields({"algorithm": {**spelled, "fraction": 0.5}}) is None, (
        "see `resolve`"
    )
    with pytest.raises(ConfigError, match=r"participation is called fraction now"):
        resolve({"algorithm": {"name": "dffke", "participation": 0.5, "fraction": 0.5}})


def test_two_experiments_are_not_mixed_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    run = tmp_path / "run"
    settings = [
        "clients=2",
        "rounds=1",
        f"data.source=npz:{tmp_path / 'a.npz'}",
        "algorithm.max_epochs=1",
    ]
    settings += ["partition.name=iid"]
    assert (
        main(["run", "--algorithm", "local", *(f"--set={s}" for s in settings), "--out", str(run)])
        == 0
    )
    written = (run / "config.toml").read_text()
    recorded = (run / "metrics.jsonl").read_text()

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            Experiment.from_config(resolve(read_toml(run / "config.toml")), run, resume=True)
        assert (run / "metrics.jsonl").read_text() == recorded, "nothing is lost"

    (run / "config.toml").write_text(written.replace("seed = 0", "seed = 1"))
    refused(r"config\.toml was changed after round 1: seed differs")
    (run / "config.toml").write_text(written)
    np.savez(tmp_path / "a.npz", x_train=x[::-1], y_train=y)
    refused(r"a\.npz does not hold the data that .*run was begun with")
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    assert main(["resume", str(run), "--rounds", "2"]) == 0
    assert len(Path(run / "metrics.jsonl").read_text().splitlines()) == 2


def test_after_an_error_the_folder_is_free_for_a_resumption(tmp_path: Path) -> None:
    experiment = federation(Broken(), out=tmp_path / "run")
    next(experiment.rounds(1))
    with pytest.raises(RuntimeError, match="half way"):
        next(experiment.rounds(2))
    assert federation(Broken(), out=tmp_path / "run", resume=True).round == 1


def test_a_client_that_cannot_be_evaluated_is_a_failure_like_any_other() -> None:
    class Shy(Local):
        def evaluate(self, client: Client) -> dict[str, float]:
            if client.id == 1:
                raise ValueError("no")
            return super().evaluate(client)

    (record,) = federation(Shy(max_epochs=1), min_clients=2).rounds(1)
    assert "global" not in record.clients[1]
    assert record.mean("global") > 0
    assert record.failures == ["client 1 failed in 'evaluate', round 1: ValueError: no"]
    closing_table([record], ["a", "b", "c"], [1, 1, 1], [[0], [0], [0]])


def test_bad_values_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="device='gpu': must be one of auto, cpu, cuda"):
        Experiment(DFFKE(), device="gpu")
    with pytest.raises(ConfigError, match="clients=0: must be int >= 1"):
        Experiment(DFFKE(), clients=0)
    with pytest.raises(ConfigError, match="min_clients=9: there are only 5"):
        Experiment(DFFKE(), min_clients=9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test wants absent")
def test_cuda_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        Experiment(DFFKE(), device="cuda")


def test_methods_choose_networks_that_they_can_use() -> None:
    for algorithm, expected in ((tiny("dffke"), 3), (tiny("fedavg"), 1), (tiny("fedzge"), 3)):
        experiment = Experiment(algorithm, clients=3, device="cpu")
        assert len(set(experiment.architectures)) == expected
    assert experiment.server.model_or_none is not None, "FedZGE's server has a model of its own"


def test_a_run_longer_than_configured_can_be_resumed(tmp_path: Path) -> None:
    """The loop is the caller's, and so is the number of rounds."""
    list(federation(tiny("local"), out=tmp_path, rounds=2).rounds(3))
    resumed = federation(tiny("local"), out=tmp_path, rounds=2, resume=True)
    assert [record.round for record in resumed.rounds(4)] == [4]
    assert "rounds = 2" in (tmp_path / "config.toml").read_text()


@dataclass(frozen=True, kw_only=True)
class Counting(Algorithm):
    """Says how many threads the server has."""

    crosses = {"nothing": Crossing()}

    def round(self, server: Server, clients: Clients, t: int) -> None:
        server.report["threads"] = torch.get_num_threads()

    def nothing(self, client: Client) -> None: ...


def test_a_run_remembers_its_number_of_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on(rounds: int, **options: Any) -> float:
        experiment = federation(Counting(), out=tmp_path / "run", **options)
        (record,) = experiment.rounds(rounds)
        assert experiment.folder is not None
        experiment.folder.release()
        assert read_toml(tmp_path / "run" / "config.toml")["threads"] == record.server["threads"]
        return record.server["threads"]

    before = torch.get_num_threads()
    assert go_on(1, threads=2) == 2
    assert go_on(2, resume=True) == 2
    assert not caplog.messages
    assert go_on(3, resume=True, threads=3) == 3
    assert caplog.messages == [
        f"{tmp_path / 'run'} continues with threads=3, begun with 2: last digits will differ"
    ]
    assert go_on(4, resume=True) == 3
    assert torch.get_num_threads() == before


def test_clients_stand_side_by_side_on_as_many_cores_as_there_are_threads() -> None:
    assert [federation(tiny("local"), threads=n).engine.cores for n in (1, 3)] == [
        1,
        3 if forks.can_fork() else 1,
    ]


def test_the_benchmark_of_overhead_finds_passes_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches into the trainer, so that a change there can end it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    overhead: Any = importlib.import_module("overhead")
    passes, updates = overhead.Clock(), overhead.Clock()
    with overhead.watched(passes, updates):
        perceptrons(tiny("fedproto")).step()
    assert passes.seconds > 0
    assert updates.seconds > 0
