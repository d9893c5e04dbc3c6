"""Recipes: what they hold, that they run, and what is said of the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from barter import Experiment
from barter.cli import reproducing
from barter.cli.app import main
from barter.compare.comparison import RunJob
from barter.core.errors import CheckpointError, ConfigError
from barter.recipes.recipe import PaperFigure, PublishedRecipe, find_recipe, recipe_names
from barter.recipes.reproduction import Reproduction, changed_settings, plan_reproduction
from barter.recipes.stored import StoredRun, common_rounds, read_stored_runs
from barter.runs.summary import METRICS
from barter.setup.config import resolve
from tests.conftest import TINY

ON_CPU = [name for name in recipe_names() if find_recipe(name).device == "cpu"]


def run(seed: int, *accuracies: float) -> StoredRun:
    values: list[float | None] = [value / 100 for value in accuracies]
    rounds: list[float | None] = list(range(1, len(values) + 1))
    return StoredRun("demo", seed, {"round": rounds, "global": values})


def recipe(*published: StoredRun, tolerance: float = 2.0) -> PublishedRecipe:
    config = {"rounds": 2, "data": {"source": "npz:cifar10.npz"}, "device": "cuda"}
    return PublishedRecipe("demo", "demo", "", "global", "0", tolerance, config, None, published)


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_hold_what_they_need(name: str) -> None:
    found = find_recipe(name)
    config = resolve(found.config)
    assert found.metric in METRICS
    assert found.tolerance > 0
    assert found.published, "there is something to compare with"
    for published in found.published:
        assert published.row == found.row
        assert published.value(found.metric) is not None
        assert published.settings, "how it was run is stored, too"
    assert common_rounds(found.published) == list(range(1, config.rounds + 1))
    assert not changed_settings(found), (
        "the defaults have changed since: name the former value in the recipe, or run "
        f"`barter reproduce {name}` again and store its results.jsonl as {name}.jsonl"
    )


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_can_be_planned(name: str, tmp_path: Path) -> None:
    found = find_recipe(name)
    _, jobs = plan_reproduction(found, tmp_path / "runs")
    for job in jobs:
        assert job.config.algorithm == resolve(found.config).algorithm
        assert job.config.privacy == resolve(found.config).privacy


def test_there_are_recipes_for_every_paper_and_for_the_cpu() -> None:
    assert len(recipe_names()) >= 10
    assert len(ON_CPU) >= 2
    papers = {
        paper.source.partition(",")[0] for n in recipe_names() if (paper := find_recipe(n).paper)
    }
    assert papers == {"DFFKE", "FedAF", "FedZGE", "DFRD", "FedFree"}


def test_all_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    for name in recipe_names():
        assert f" {name} " in listed
    assert "x_train (50000, 32, 32, 3)" in listed
    assert main(["reproduce", "--device", "cpu"]) == 2
    assert "--device is for a recipe" in capsys.readouterr().err


def in_process(jobs: Sequence[RunJob], parallel: int, *_: Callable[..., Any]) -> list[RunJob]:
    """Run jobs here, with so little work that it takes no time."""
    for job in jobs:
        name = next(n for n in TINY if type(job.config.algorithm).__name__.lower() == n)
        algorithm = replace(job.config.algorithm, **TINY[name])
        small = replace(job.config, algorithm=algorithm, models="small-mlp", clients=2)
        done = (job.folder / "config.toml").is_file()
        for _ in Experiment.from_config(small, job.folder, resume=done).rounds(job.config.rounds):
            pass
    return []


@pytest.mark.parametrize("name", ["dffke-digits", "fedrolex-digits"])
def test_a_recipe_is_run_and_compared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproducing, "run_all", in_process)
    command = ["reproduce", name, "--seeds", "0", "--rounds", "1", "--out", str(tmp_path / "runs")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert find_recipe(name).title in said
    assert re.search(r"^verdict: (below|within|above) the spread: \d", said, re.M)
    assert re.search(r"one seed took .*\d s", said)
    (stored,) = read_stored_runs(tmp_path / "runs" / "results.jsonl")
    assert (stored.row, stored.seed, stored.rounds) == (find_recipe(name).row, 0, [1])
    assert stored.settings["algorithm.name"] == name.partition("-")[0]
    assert stored.version


def test_missing_data_say_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "fedaf-cifar10-alpha-0.1"]) == 2
    said = capsys.readouterr().err
    assert "cifar10.npz is missing" in said
    assert "x_train (50000, 32, 32, 3)" in said
    found = recipe(run(0, 50))
    (tmp_path / "mine.npz").touch()
    assert found.data_setting(tmp_path / "mine.npz", download=False) == [
        f"data.source=npz:{tmp_path / 'mine.npz'}"
    ]
    assert found.data_setting(None, download=True) == ["data.source=cifar10", "data.download=true"]
    digits = find_recipe("dffke-digits")
    assert digits.data_setting(None, download=False) == []
    with pytest.raises(ConfigError, match="needs no file"):
        digits.data_setting(Path("x.npz"), download=False)
    assert main(["reproduce", "fedaf"]) == 2
    assert "no recipe 'fedaf': there are fedaf-cifar10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("published", "obtained", "verdict"),
    [
        # t(0.975, 2) = 4.303, deviation 1, sqrt(1/3 + 1): 4.97 points
        ((50, 51, 52), (47.0,), "within the spread: 47.0, and 46.0 to 56.0 is expected"),
        ((50, 51, 52), (45.9,), "below the spread: 45.9, and 46.0 to 56.0"),
        ((50, 51, 52), (56.1,), "above the spread"),
        # with three seeds, sqrt(1/3 + 1/3): 3.51 points
        ((50, 51, 52), (47, 47, 47), "below the spread: 47.0, and 47.5 to 54.5"),
        ((50, 50, 50), (50.4,), "within the spread"),
        ((50, 50, 50), (50.6,), "above the spread"),
        ((50,), (51.9,), "within the tolerance of 2 points: 51.9 and published 50.0; 1 published"),
        ((50,), (47.9,), "below the tolerance of 2 points"),
        ((50, 50.1), (52.5,), "above the tolerance of 2 points.*2 published seeds are too few"),
    ],
)
def test_verdicts(published: Sequence[float], obtained: Sequence[float], verdict: str) -> None:
    found = recipe(*(run(seed, value) for seed, value in enumerate(published)))
    result = Reproduction(found, [run(seed, value) for seed, value in enumerate(obtained)])
    assert result.agrees == verdict.startswith("within")
    assert re.match(verdict, result.verdict), result.verdict


def test_results_are_compared_after_the_last_common_round() -> None:
    found = recipe(run(0, 40, 50, 60))
    assert Reproduction(found, [run(0, 41)]).last == 1
    assert Reproduction(found, [run(0, 41)]).agrees
    longer = Reproduction(found, [run(0, 41, 50, 60, 70)])
    assert longer.last == 3
    assert longer.columns()["this run"] == {1: 0.41, 2: 0.5, 3: 0.6, 4: 0.7}
    other = StoredRun("demo", 0, {"round": [9], "global": [0.5]})
    with pytest.raises(CheckpointError, match="share no round"):
        _ = Reproduction(found, [other]).last
    unmeasured = StoredRun("demo", 0, {"round": [1], "own": [0.5]})
    with pytest.raises(CheckpointError, match="no run measured 'global' after round 1"):
        _ = Reproduction(found, [unmeasured]).agrees


def test_changed_defaults_are_named() -> None:
    before = replace(run(0, 50), settings={"algorithm.name": "dffke", "algorithm.share": 0.3,
                                           "data.source": "npz:/elsewhere.npz", "gone": 1})  # fmt: skip
    assert changed_settings(recipe(before)) == {"algorithm.share": (0.3, 0.6)}


def test_figures_of_papers() -> None:
    assert str(PaperFigure("x", 43.2, 4.82)) == "43.20 ± 4.82"
    assert str(PaperFigure("x", (72.81, 83.6))) == "72.81 to 83.60"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg-digits", "fedrolex-digits"])
def test_recipes_for_the_cpu_reproduce_what_is_published(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", name, "--out", str(tmp_path)]) == 0
    assert "verdict: within the spread" in capsys.readouterr().out
