"""The queue of runs for tables: it stops in time, goes on where it stopped, and loses no curve."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from barter.attacks.overheard import clients_of
from barter.core.errors import ConfigError
from barter.core.record import Round
from barter.experiment import Experiment
from barter.recipes.reproduction import store_run
from barter.recipes.stored import StoredRun, read_stored_runs
from barter.setup.config import resolve
from benchmarks import paper_tables
from benchmarks.participants import average_participants, find_sampled
from tests.conftest import digits_file

SUITE = """
clients = 2
rounds = 3
device = "cpu"
models = "small-mlp"
[algorithm]
max_epochs = 1
[data]
source = "digits"
[compare]
seeds = "0-1"
[compare.variants]
"alone" = ["algorithm.name=local"]
"other" = ["algorithm.name=local", "algorithm.lr=0.1"]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SUITE)
    return path


def test_the_queue_has_every_row_with_every_seed(suite: Path, tmp_path: Path) -> None:
    runs = paper_tables.queue(suite, ["other@7", "alone"], None, [], tmp_path, tmp_path / "runs")
    assert [(run.row, run.config.seed, run.config.rounds) for run in runs] == [
        ("small: other", 0, 7),
        ("small: other", 1, 7),
        ("small: alone", 0, 3),
        ("small: alone", 1, 3),
    ]
    assert runs[0].folder == tmp_path / "runs" / "small-other" / "seed-0"
    with pytest.raises(ConfigError, match="no variant 'absent': alone, other"):
        paper_tables.queue(suite, ["absent@2"], None, [], tmp_path, None)
    with pytest.raises(ConfigError, match="write VARIANT@ROUNDS such as other@10"):
        paper_tables.queue(suite, ["other@seven"], None, [], tmp_path, None)
    suite.write_text(SUITE.replace('"digits"', '"npz:cifar100.npz"'))
    (run, *_) = paper_tables.queue(suite, [], "5", [], tmp_path / "data", None)
    assert run.config.data.source == f"npz:{tmp_path / 'data' / 'cifar100.npz'}"
    stored = store_run("a", run.config, [])
    assert stored.settings["data.source"] == "npz:cifar100.npz", "no path of this machine is stored"
    assert not {"data.root", "seed", "device"} & stored.settings.keys()
    assert run.folder is None


def test_a_setting_need_only_be_known_to_the_variants_in_the_queue(
    suite: Path, tmp_path: Path
) -> None:
    suite.write_text(SUITE + '"averaged" = ["algorithm.name=fedavg"]\n')
    (run,) = paper_tables.queue(suite, ["alone"], "0", ["algorithm.tau=0.5"], tmp_path, None)
    assert store_run("a", run.config, []).settings["algorithm.tau"] == 0.5
    with pytest.raises(ConfigError, match="variant 'averaged': unknown key"):
        paper_tables.queue(suite, ["averaged"], "0", ["algorithm.tau=0.5"], tmp_path, None)


def test_a_run_stops_in_time_and_goes_on(suite: Path, tmp_path: Path) -> None:
    (run,) = paper_tables.queue(suite, ["alone@2"], "0", [], tmp_path, tmp_path / "runs")
    out = tmp_path / "results.jsonl"
    paper_tables.work(run, out, deadline=0)
    assert [stored.rounds for stored in read_stored_runs(out)] == [[1]]
    paper_tables.work(run, out, deadline=math.inf)
    (stored,) = read_stored_runs(out)
    assert (stored.row, stored.seed, stored.rounds) == ("small: alone", 0, [1, 2])
    assert stored.value("primary") == stored.value("global")
    assert stored.settings["algorithm.name"] == "local"
    assert run.done == 2
    assert paper_tables.main(["--suite", str(suite), "--rows", "alone@2", "--seeds", "0",
                              "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0  # fmt: skip


def test_several_runs_at_a_time_lose_no_curve(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--suite", str(suite), "--rows", "alone@1", "other@2", "--seeds", "1",
                 "--ephemeral", "--copies", "--out", str(out)]  # fmt: skip
    assert paper_tables.main([*arguments, "--jobs", "2"]) == 0
    runs = read_stored_runs(out)
    assert sorted((run.row, run.seed, len(run.rounds)) for run in runs) == [
        ("small: alone", 1, 1),
        ("small: other", 1, 2),
    ]
    assert all(run.curve["copies"][-1] is None for run in runs), "local training makes no images"


def test_a_queue_names_what_failed_and_runs_the_rest(
    suite: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Forked processes have torch loaded, which saves its import. The test above covers spawned ones.
    context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context("fork"))
    variant = '"broken" = ["algorithm.name=local", "data.source=npz:absent.npz"]\n'
    suite.write_text(SUITE + variant)
    out = tmp_path / "results.jsonl"
    arguments = ["--suite", str(suite), "--rows", "broken@1", "alone@1", "--seeds", "0",
                 "--ephemeral", "--out", str(out)]  # fmt: skip
    assert paper_tables.main(arguments) == 1
    assert capsys.readouterr().out.endswith("failed: small: broken, seed 0\n")
    assert [run.row for run in read_stored_runs(out)] == ["small: alone"]


def test_the_copy_test_follows_the_last_round(suite: Path, tmp_path: Path) -> None:
    settings = ["algorithm.name=dffke", "algorithm.share=0.5", "algorithm.exchange_steps=2",
                "algorithm.decoder_steps=20", f"data.source={digits_file(tmp_path, 400)}"]  # fmt: skip
    variant = f'"exchange" = {settings}\n'
    suite.write_text(SUITE + variant)
    out = tmp_path / "results.jsonl"
    (run,) = paper_tables.queue(suite, ["exchange@2"], "0", [], tmp_path, None)
    paper_tables.work(run, out, math.inf, copies=True)
    (exchange,) = read_stored_runs(out)
    for metric in ("copies", "copies-features"):
        first, last = exchange.curve[metric]
        assert first is None
        # Decoded from single embeddings of half of the images; chance is 0.5.
        assert last is not None
        assert 0.5 < last <= 1
        low, high = (exchange.curve[f"{metric}-{end}"][1] for end in ("from", "to"))
        assert low is not None
        assert high is not None
        assert low < last <= high


def test_a_longer_curve_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    long = StoredRun("a", 0, {"round": [1, 2], "global": [0.1, 0.2]})
    short = StoredRun("a", 0, {"round": [1], "global": [0.3]})
    other = StoredRun("b", 0, {"round": [1], "global": [0.4]})
    for run in (short, long, short, other):
        paper_tables.store(out, run)
    assert read_stored_runs(out) == [long, other]


def test_a_queue_that_is_out_of_time_ends(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--suite", str(suite), "--rows", "alone@1", "--ephemeral", "--out", str(out)]
    assert paper_tables.main([*arguments, "--seconds", "0"]) == 0
    assert "out of time; left from here: small: alone, seed 0" in capsys.readouterr().out
    assert not out.exists()
    with pytest.raises(SystemExit):
        paper_tables.main([*arguments, "--jobs", "0"])
    assert "--jobs 0: at least one run at a time" in capsys.readouterr().err


def test_copies_are_measured_later_and_not_lost(suite: Path, tmp_path: Path) -> None:
    (run,) = paper_tables.queue(suite, ["alone@1"], "0", [], tmp_path, tmp_path / "runs")
    out = tmp_path / "results.jsonl"
    paper_tables.work(run, out, math.inf)
    assert paper_tables.is_finished(run, out, copies=False)
    assert not paper_tables.is_finished(run, out, copies=True)
    paper_tables.work(run, out, math.inf, copies=True)
    assert paper_tables.is_finished(run, out, copies=True)
    (measured,) = read_stored_runs(out)
    rated = replace(measured, curve={**measured.curve, "copies": [0.5]})
    paper_tables.store(out, rated)
    paper_tables.store(out, measured)
    assert read_stored_runs(out) == [rated]


def test_what_was_measured_earlier_stays_while_it_is_the_same_run(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    first = {"round": [1, 2], "global": [0.1, 0.2], "copies": [None, 0.5], "half": [0.3, None]}
    paper_tables.store(out, StoredRun("a", 0, {**first}))
    resumed = {"round": [1, 2, 3], "global": [0.1, 0.2, 0.3], "half": [None, None, 0.4]}
    paper_tables.store(out, StoredRun("a", 0, {**resumed}))
    (stored,) = read_stored_runs(out)
    assert stored.curve == {
        "round": [1, 2, 3],
        "global": [0.1, 0.2, 0.3],
        "copies": [None, 0.5, None],
        "half": [0.3, None, 0.4],
    }
    # With another accuracy in round 1 it is another run, of which nothing else is known.
    repeated = {"round": [1, 2, 3], "global": [0.15, 0.2, 0.3]}
    paper_tables.store(out, StoredRun("a", 0, {**repeated}))
    (stored,) = read_stored_runs(out)
    assert stored.curve == repeated


def measure_half(experiment: Experiment, record: Round) -> dict[str, float]:
    """Return half the accuracy, and in odd rounds the round's number."""
    accuracy = record.headline()
    assert accuracy is not None
    odd = {"odd": float(record.round)} if record.round % 2 else {}
    return {"half": accuracy / 2, **odd}


def test_measurements_are_columns_and_rounds_without_a_value_are_empty(
    suite: Path, tmp_path: Path
) -> None:
    (run,) = paper_tables.queue(suite, ["alone@3"], "0", [], tmp_path, tmp_path / "runs")
    out = tmp_path / "results.jsonl"
    name = f"{__name__}:measure_half"
    paper_tables.work(run, out, deadline=0, measure=name)
    paper_tables.work(run, out, deadline=math.inf, measure=name)
    (stored,) = read_stored_runs(out)
    accuracies = stored.curve["global"]
    assert stored.rounds == [1, 2, 3]
    # The run was resumed after round 1, whose values had been stored.
    halves = [round(value / 2, 4) for value in accuracies if value is not None]
    assert stored.curve["half"] == halves
    assert stored.curve["odd"] == [1.0, None, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("benchmarks.participants", "write MODULE:FUNCTION"),
        ("benchmarks.participants:absent", "cannot be imported"),
        ("benchmarks.exchange_drift:COLUMNS", "it is tuple, not a function"),
    ],
)
def test_a_measurement_that_cannot_be_called_is_refused_before_any_run(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--suite", str(suite), "--rows", "alone@1", "--ephemeral", "--out", str(out)]
    assert paper_tables.main([*arguments, "--measure", name]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_participants_are_the_clients_sampled_so_far() -> None:
    config = resolve(
        {
            "algorithm": {"name": "fedavg", "epochs": 1, "fraction": 0.5},
            "data": {"source": "digits"},
            "models": "small-mlp",
            "clients": 6,
            "device": "cpu",
        }
    )
    experiment = Experiment.from_config(config)
    seen: set[int] = set()
    for record in experiment.rounds(2, progress=False):
        assert len(record.participants) == 3
        seen.update(record.participants)
        columns = average_participants(experiment, record)
        assert columns["participants"] == len(seen)
        assert columns["participants-global"] == pytest.approx(record.mean("global", seen))
        assert columns["participants-own"] == pytest.approx(record.mean("local", seen))


def test_members_of_a_partial_collaboration_are_those_that_dffke_samples() -> None:
    config = resolve(
        {
            "algorithm": {
                "collaboration": 0.5,
                "fraction": 0.7,
                "max_epochs": 1,
                "decoder_steps": 1,
                "exchange_steps": 1,
                "share": 0.2,
            },
            "data": {"source": "digits"},
            "models": "small-mlp",
            "clients": 6,
            "device": "cpu",
        }
    )
    experiment = Experiment.from_config(config)
    for record in experiment.rounds(2, progress=False):
        taught = {k for k, client in clients_of(experiment).items() if client.exchanges}
        assert find_sampled(6, 0.5, 0.7, seed=0, rounds=record.round) == taught


def test_members_of_a_partial_collaboration_come_first() -> None:
    assert find_sampled(10, 0.3, 1.0, seed=0, rounds=1) == {0, 1, 2}
    assert find_sampled(10, 0.04, 1.0, seed=0, rounds=5) == {0}, "there is at least one"
    assert len(find_sampled(10, 0.5, 0.4, seed=0, rounds=1)) == 2
    assert find_sampled(10, 0.5, 0.4, seed=0, rounds=50) == set(range(5))


def test_a_stored_run_says_how_many_answers_failed(suite: Path, tmp_path: Path) -> None:
    (run,) = paper_tables.queue(suite, ["alone@2"], "0", [], tmp_path, None)
    records = list(Experiment.from_config(run.config).rounds(2, progress=False))
    assert "failures" not in store_run("a", run.config, records).curve
    records[1] = replace(records[1], failures=["client 1 failed in 'learn'"])
    assert store_run("a", run.config, records).curve["failures"] == [0, 1]
