"""Comparisons: which runs there are, that each is run once, and what stands in the folder afterwards."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barter.cli import running
from barter.cli.app import main
from barter.compare import comparison
from barter.compare.comparison import Comparison, RunJob, _as_drawn, run_all
from barter.compare.specification import ComparisonSpec, combine_sweeps, parse_seeds, parse_variants
from barter.core.errors import CheckpointError, ConfigError
from barter.runs.folder import read_records
from barter.setup.config import resolve, with_settings
from tests.conftest import run_jobs_here

FAST = ["rounds=2", "algorithm.max_epochs=1", "models=small-mlp", "clients=2"]


def test_seeds() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("3, 7-9,3") == [3, 7, 8, 9]
    for wrong in ("", "a", "4-2", "1,", "-3", "1.5", "0-1000", "0-999999999999", "9" * 5000):
        with pytest.raises(ConfigError, match="such as 0-4"):
            parse_seeds(wrong)


@given(st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=9))
def test_seeds_come_back_as_they_were_written(seeds: list[int]) -> None:
    assert parse_seeds(",".join(map(str, seeds))) == seeds


def test_variants_of_methods_and_fields() -> None:
    assert parse_variants(
        "local, dffke:preset=paper:share=0.3,my.module:Method:tau=1,dffke:partition.alpha=1"
    ) == {
        "local": ["algorithm.name=local"],
        "dffke, preset=paper, share=0.3": [
            "algorithm.name=dffke",
            "algorithm.preset=paper",
            "algorithm.share=0.3",
        ],
        "my.module:Method, tau=1": ["algorithm.name=my.module:Method", "algorithm.tau=1"],
        "dffke, partition.alpha=1": ["algorithm.name=dffke", "partition.alpha=1"],
    }
    assert parse_variants("local:data.source=folder:/tmp/x") == {
        "local, data.source=folder:/tmp/x": ["algorithm.name=local", "data.source=folder:/tmp/x"]
    }
    with pytest.raises(ConfigError, match="twice"):
        parse_variants("local,local")
    with pytest.raises(
        ConfigError, match="'local:max_epochs': what follows local: is a field with its value"
    ):
        resolve(with_settings({}, parse_variants("local:max_epochs")["local:max_epochs"]))


def test_sweeps_are_variants_too() -> None:
    both = combine_sweeps(
        {"dffke": ["algorithm.name=dffke"]}, ["algorithm.tau=0.8,0.9", "partition.alpha=1"]
    )
    assert both == {
        f"dffke, tau={tau}, partition.alpha=1": [
            "algorithm.name=dffke",
            f"algorithm.tau={tau}",
            "partition.alpha=1",
        ]
        for tau in ("0.8", "0.9")
    }
    assert combine_sweeps({"a": ["b"]}, []) == {"a": ["b"]}
    for wrong in ("tau", "algorithm.tau=", "=1", "algorithm.tau=1,,2"):
        with pytest.raises(ConfigError, match="--vary"):
            combine_sweeps({}, [wrong])


def asked(tree: dict[str, Any] | None = None, methods: str = "", **given: Any) -> ComparisonSpec:
    rest = {"seeds": None, "settings": [], "sweeps": [], "asked": {}} | given
    return ComparisonSpec.of(tree or {}, methods, **rest)


def test_a_file_may_name_variants_and_the_command_line_wins() -> None:
    table = {
        "seeds": "0-1",
        "target": 0.5,
        "baseline": "mine",
        "variants": {"mine": ["algorithm.share=0.1"]},
    }
    request = asked(
        {"clients": 3, "seed": 9, "compare": table}, asked={"target": 0.7, "metric": None}
    )
    assert (request.variants, request.seeds, request.base) == (
        table["variants"],
        [0, 1],
        {"clients": 3},
    )
    assert request.question == {"baseline": "mine", "target": 0.7}
    assert asked({"seed": 9}, "local").seeds == [9]
    assert asked({}, "local").seeds == [0, 1, 2]
    assert asked({"seed": 9, "compare": table}, seeds="4").seeds == [4]
    assert list(asked({"compare": table | {"vary": ["algorithm.lr=1,2"]}}).variants) == [
        "mine, lr=1",
        "mine, lr=2",
    ]
    for wrong, message in (
        ({"compare": {"seedz": 1}}, "unknown seedz"),
        ({"compare": 3}, "is a table"),
        ({"compare": {"target": "80%"}}, "compare.target='80%': must be a number"),
        ({"compare": {"vary": "algorithm.lr=1"}}, "must be a list"),
        ({"compare": {"seeds": [0, 1]}}, "must be a text"),
        ({"compare": {"variants": {"mine": "algorithm.share=0.1"}}}, "lists of settings"),
        ({"compare": {"variants": {"mine": ["rounds=3"]}}}, "the same rounds"),
        ({"compare": {"variants": {"mine": ["seed=3"]}}}, "--seeds"),
    ):
        with pytest.raises(ConfigError, match=message):
            asked(wrong)
    with pytest.raises(ConfigError, match="--seeds"):
        asked({}, "local", settings=["seed=3"])
    with pytest.raises(ConfigError, match="--seeds"):
        asked({}, "local", sweeps=["seed=3,4"])


def test_some_of_a_files_variants() -> None:
    variants = {"a": ["algorithm.name=local"], "b, c": ["algorithm.name=dffke"], "d": []}
    tree = {"compare": {"variants": variants, "baseline": "a"}}
    request = asked(tree, only=["d", "b, c"])
    assert list(request.variants) == ["b, c", "d"], "in the file's order"
    assert request.question == {}, "the file's baseline was left out"
    assert asked(tree, only=["a"]).question == {"baseline": "a"}
    with pytest.raises(ConfigError, match="no variant 'e'"):
        asked(tree, only=["e"])


@pytest.mark.parametrize(
    "suite", sorted((Path(__file__).parents[1] / "benchmarks" / "suites").glob("*.toml"))
)
def test_the_suites_of_the_benchmarks_can_be_compared(suite: Path, tmp_path: Path) -> None:
    content = tomllib.loads(suite.read_text())
    comparison, jobs = Comparison.plan(tmp_path / "c", asked(content))
    first = next(iter(comparison.variants))
    assert comparison.question.get("baseline", first) == first, "others are held against the first"
    seeds = 1 if content["compare"].get("seeds") == "0" else 3
    assert len(jobs) == seeds * len(comparison.variants)


def test_the_file_of_the_guide_can_be_compared(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "compare.md").read_text()
    tree = tomllib.loads(text.split("```toml")[1].split("```")[0])
    comparison, jobs = Comparison.plan(tmp_path / "c", asked(tree))
    assert list(comparison.variants) == ["local only", "fewer embeddings"]
    assert len(jobs) == 10


def planned(
    folder: Path, methods: str = "local", seeds: str = "0-1", **options: Any
) -> tuple[Comparison, list[RunJob]]:
    settings = options.pop("settings", ["rounds=2", "clients=2"])
    return Comparison.plan(
        folder, asked({}, methods, seeds=seeds, settings=settings, asked=options)
    )


def test_an_error_says_which_variant_it_is_of() -> None:
    request = asked({"algorithm": {"share": 0.5}}, "dffke,local")
    with pytest.raises(ConfigError, match="^variant 'local': unknown key 'algorithm.share'"):
        request.configurations()


def test_every_variant_with_every_seed_has_a_folder_of_its_own(tmp_path: Path) -> None:
    plan, jobs = planned(tmp_path / "c", "local,dffke:share=0.3,dffke:share=0.30", baseline="local")
    assert [(job.variant, job.seed, job.config.seed) for job in jobs] == [
        (name, seed, seed)
        for name in ("local", "dffke, share=0.3", "dffke, share=0.30")
        for seed in (0, 1)
    ]
    assert len({job.folder for job in jobs}) == 6
    again = Comparison.at(tmp_path / "c")
    assert (again.variants, again.question, again.seeds) == (
        plan.variants,
        {"baseline": "local"},
        [0, 1],
    )
    more, _ = planned(tmp_path / "c", "fedavg", "1-2", target=None, baseline=None)
    assert list(more.variants) == ["local", "dffke, share=0.3", "dffke, share=0.30", "fedavg"]
    assert (more.question, more.seeds) == ({"baseline": "local"}, [0, 1, 2]), "nothing is forgotten"


@given(st.lists(st.text(min_size=1, max_size=90), unique=True, min_size=1, max_size=5))
def test_folders_of_oddly_named_variants_are_different_and_inside(names: list[str]) -> None:
    comparison = Comparison(Path("c"), {})
    for name in names:
        comparison.variants[name] = comparison._slug(name)
    slugs = list(comparison.variants.values())
    assert len(set(slugs)) == len(names)
    assert all(Path(slug).name == slug and slug.strip(".") and len(slug) < 80 for slug in slugs)


def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedawg'.*fedavg"):
        planned(tmp_path / "a", "fedawg")
    with pytest.raises(ConfigError, match="nothing to compare"):
        planned(tmp_path / "a", "")
    with pytest.raises(ConfigError, match="different data do not go"):
        planned(tmp_path / "a", "local,local:data.source=mnist")
    with pytest.raises(ConfigError, match="baseline 'fedavg' is not compared: there are 'local'"):
        planned(tmp_path / "a", "local", baseline="fedavg")
    with pytest.raises(ConfigError, match="metric 'globl': did you mean 'global'"):
        planned(tmp_path / "a", "local", metric="globl")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        planned(tmp_path / "a", "local", target=80)
    with pytest.raises(ConfigError, match="target=inf: must be a finite number"):
        planned(tmp_path / "a", "local", metric="global_loss", target=math.inf)
    assert not (tmp_path / "a").exists(), "and nothing is written"
    planned(tmp_path / "losses", "local", metric="global_loss", target=1.5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is no comparison"):
        planned(tmp_path / "full")
    with pytest.raises(CheckpointError, match="not the folder of a comparison"):
        Comparison.at(tmp_path / "full")
    planned(tmp_path / "b")
    with pytest.raises(CheckpointError, match="no finished run"):
        Comparison.at(tmp_path / "b").write()
    for text, message in (("", "names no variants"), ('rounds = "many"', "not what barter wrote")):
        (tmp_path / "b" / "comparison.toml").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            Comparison.at(tmp_path / "b")


def test_runs_that_were_begun_otherwise_do_not_go_into_the_table(tmp_path: Path) -> None:
    _, jobs = planned(tmp_path, "local:max_epochs=3")
    jobs[0].folder.mkdir(parents=True)
    (jobs[0].folder / "config.toml").write_text(comparison.to_toml(jobs[0].config))
    planned(tmp_path, "local:max_epochs=3", "0-4", settings=["rounds=5", "clients=2", "device=cpu"])
    assert Comparison.at(tmp_path).rounds == 5, "more seeds and more rounds are welcome"
    with pytest.raises(
        CheckpointError, match=r"has partition\.alpha=0\.1, and partition\.alpha=9\.0 is asked for"
    ):
        planned(tmp_path, "fedavg", settings=["rounds=2", "clients=2", "partition.alpha=9"])
    with pytest.raises(CheckpointError, match=r"has clients=\d, and clients=\d is asked for"):
        planned(tmp_path, "fedavg", settings=["rounds=2", "clients=3"])
    with pytest.raises(
        CheckpointError, match=r"has algorithm\.lr=0\.001, and algorithm\.lr=0\.5 is asked for"
    ):
        planned(
            tmp_path, "local:max_epochs=3", settings=["rounds=2", "clients=2", "algorithm.lr=0.5"]
        )
    (jobs[0].folder / "config.toml").write_text(
        comparison.to_toml(jobs[0].config).replace(
            'root = "data"', f'root = "{Path("data").absolute()}"'
        )
    )
    planned(tmp_path, "local:max_epochs=3")  # the same folder by another name


SCRIPT = """
import json, pathlib, sys, time
folder, rounds, fails = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(sys.stdin.read())
for t in range(1, rounds + 1):
    clients = {k: {"global": 0.1 * t, "local": 0.2 * t} for k in (0, 1)}
    line = {"round": t, "clients": clients, "server": {}, "seconds": {"round": 1.0}, "bytes": {}, "failures": []}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    time.sleep(0.15)
    if fails:
        sys.exit("out of luck")
"""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that take no time; that of seed 3 fails in its first round. Gives the names of those that were started."""
    started: list[str] = []

    def start(job: RunJob, threads: int) -> subprocess.Popen[bytes]:
        started.append(str(job))
        command = [
            sys.executable,
            "-c",
            SCRIPT,
            str(job.folder),
            str(job.config.rounds),
            str(job.seed == 3),
        ]
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        with comparison._log(job).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert process.stdin is not None
        process.stdin.write(comparison.to_toml(job.config).encode())
        process.stdin.close()
        return process

    monkeypatch.setattr(comparison, "_start", start)
    return started


def test_each_runs_once_so_many_at_a_time_and_failures_do_not_stop_the_rest(
    tmp_path: Path, pretended: list[str]
) -> None:
    _, jobs = planned(tmp_path, "local,fedavg", "2-4")
    seen: list[tuple[dict[str, tuple[int, int]], int, int]] = []
    told: list[str] = []
    failed = run_all(
        jobs, 2, lambda running, done, total: seen.append((dict(running), done, total)), told.append
    )
    assert sorted(pretended) == sorted(map(str, jobs))
    assert sorted(map(str, failed)) == ["fedavg, seed 3", "local, seed 3"]
    assert max(len(running) for running, _, _ in seen) == 2
    assert {total for *_, total in seen} == {6}
    assert {done for _, done, _ in seen} <= set(range(6))
    assert any(rounds == (1, 2) for running, _, _ in seen for rounds in running.values()), (
        "progress by round"
    )
    assert len(told) == 6
    assert all(job.done == len(read_records(job.folder)) for job in jobs)
    assert "local, seed 2: 20.0% clients: global test, 40.0% clients: local test; " in " ".join(
        told
    )
    assert sum("failed" in line and line.endswith("out of luck") for line in told) == 2
    pretended.clear()
    told.clear()
    run_all([job for job in jobs if job.seed != 3], 1, lambda *_: None, told.append)
    assert pretended == []
    assert told == ["4 of 4 runs are finished already"]
    results, missing = Comparison.at(tmp_path).results()
    assert {name: list(runs) for name, runs in results.items()} == {
        "local": [2, 4],
        "fedavg": [2, 4],
    }
    assert missing == ["local, seed 3", "fedavg, seed 3"]
    longer, _ = planned(tmp_path, "local", "2", settings=["rounds=3", "clients=2"])
    assert longer.results() == (
        {},
        [f"{name}, seed {seed}" for name in ("local", "fedavg") for seed in (2, 3, 4)],
    )
    shorter, _ = planned(tmp_path, "local", "2", settings=["rounds=1", "clients=2"])
    found, missing = shorter.results()
    assert {len(rounds) for runs in found.values() for rounds in runs.values()} == {1}, (
        "all of one length"
    )
    assert missing == []


def test_runs_that_were_killed_or_are_in_use_are_said_to_be(
    tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, jobs = planned(tmp_path, "local", "2")
    told: list[str] = []
    start = comparison._start

    def doomed(job: RunJob, threads: int) -> subprocess.Popen[bytes]:
        process = start(job, threads)
        process.kill()
        return process

    monkeypatch.setattr(comparison, "_start", doomed)
    assert run_all(jobs, 1, lambda *_: None, told.append) == jobs
    assert told == ["local, seed 2 was killed by signal 9"]
    log = comparison._log(jobs[0])
    log.write_text(
        "barter: it is in use by another process\nround 2/5 learn: 40%, about 16 s left\n"
    )
    assert (
        comparison._why(jobs[0], 2)
        == f"failed, {log} says why: barter: it is in use by another process"
    )


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, pretended: list[str], sign: signal.Signals
) -> None:
    _, jobs = planned(tmp_path, seeds="0-2,4-9", settings=["rounds=20", "clients=2"])

    def impatient(running: Any, *_: int) -> None:
        if any(done for done, _ in running.values()):
            os.kill(os.getpid(), sign)
            time.sleep(0.1)

    listening = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(jobs, 2, impatient, lambda line: None)
    finally:
        signal.signal(signal.SIGINT, listening)
    before = [len(read_records(job.folder)) for job in jobs]
    assert sum(before) > 0
    assert max(before) < 20, "nobody was waited for"
    time.sleep(0.4)
    assert [len(read_records(job.folder)) for job in jobs] == before


def test_from_the_command_line_to_tables_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: list[str]
) -> None:
    out = str(tmp_path / "c")
    command = [
        "compare",
        "--algorithms",
        "local,fedavg",
        "--seeds",
        "0-2",
        "--set",
        "rounds=2",
        "--out",
        out,
    ]
    assert main([*command, "--baseline", "local", "--target", "0.15", "--jobs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "2 methods, 3 seeds, 6 runs" in printed
    assert "+0.0 [+0.0, +0.0]" in printed
    assert "rounds to 15% accuracy" in printed
    for name in (
        "table.md",
        "table.tex",
        "table.csv",
        "rounds.csv",
        "curves.svg",
        "curves.pdf",
        "curves.png",
    ):
        assert (tmp_path / "c" / name).stat().st_size > 100
    assert "fedavg" in (tmp_path / "c" / "curves.svg").read_text(), "text stays text"
    assert main(["compare", out, "--metric", "own"]) == 0
    assert "local test above local" in capsys.readouterr().out
    assert main([*command, "--seeds", "0-3"]) == 1
    assert "2 of 8 runs failed: local, seed 3; fedavg, seed 3" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (
        main(
            [
                "compare",
                "--algorithms",
                "local",
                "--seeds",
                "3",
                "--out",
                f"{out}-3",
                "--set",
                "rounds=2",
            ]
        )
        == 1
    )
    assert "1 of 1 run failed" in capsys.readouterr().err
    odd = [
        "compare",
        "--algorithms",
        "local",
        "--seeds",
        "0",
        "--set",
        "rounds=2",
        "--out",
        f"{out}-odd",
    ]
    (tmp_path / "odd.toml").write_text(
        '[compare.variants]\n"local [/big]" = ["algorithm.name=local"]\n_under = []\n'
    )
    assert main([odd[0], str(tmp_path / "odd.toml"), *odd[1:], "--baseline", "local [/big]"]) == 0
    assert "accuracy above local [/big]" in " ".join(capsys.readouterr().out.split())
    assert "_under" in (tmp_path / "c-odd" / "curves.svg").read_text()
    assert main(["compare", out, "--seeds", "0"]) == 2
    assert "repeat the command that began it" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "nowhere")]) == 2
    assert main(["compare"]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_real_runs_and_one_that_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "plan.toml"
    config.write_text(
        '[compare]\nseeds = "5"\n[compare.variants]\nalone = ["algorithm.name=local"]\n'
    )
    settings = [part for setting in FAST for part in ("--set", setting)]
    folder = tmp_path / "c"
    first = [part if part != "rounds=2" else "rounds=1" for part in settings]
    with monkeypatch.context() as patch:  # What goes on is a process of its own, not what stopped.
        patch.setattr(running, "run_all", run_jobs_here)
        assert main(["compare", str(config), *first, "--out", str(folder)]) == 0
    assert len(read_records(folder / "alone" / "seed-5")) == 1
    assert main(["compare", str(config), *settings, "--out", str(folder)]) == 0
    resumed = read_records(folder / "alone" / "seed-5")
    assert len(resumed) == 2
    begun = tmp_path / "plain"
    assert (
        main(["run", "--algorithm", "local", *settings, "--set", "seed=5", "--out", str(begun)])
        == 0
    )
    assert [r.clients for r in resumed] == [r.clients for r in read_records(begun)], (
        "the same as without a stop"
    )
    assert "rounds = 2" in (folder / "alone" / "seed-5" / "config.toml").read_text()
    capsys.readouterr()
    assert main(["resume", str(begun), "--rounds", "1"]) == 2
    assert "has done 2 already" in capsys.readouterr().err
    assert json.loads((begun / "metrics.jsonl").read_text().splitlines()[-1])["round"] == 2


def test_values_that_are_no_shares_are_drawn_as_they_are() -> None:
    curves = {"local": {0: [(1, 0.25), (2, None)]}}
    assert _as_drawn(curves, "global") == {"local": {0: [(1, 25.0), (2, None)]}}
    assert _as_drawn(curves, "global_loss") == curves
