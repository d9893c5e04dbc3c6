"""The command line as a user meets it, mistakes above all."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from barter import FedAvg
from barter.cli.app import main
from barter.ops.condense import quantise_images
from barter.report.image_sheets import pictures
from barter.setup.config import read_toml, resolve
from tests.conftest import TINY, digits_file, federation, fewer_digits, tiny
from tests.forked import forked, status

SMALL = {
    "clients": 3,
    "rounds": 2,
    **{f"algorithm.{key}": value for key, value in TINY["dffke"].items()},
}
QUICK = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what it printed; tests that change the folder copy it."""
    out = tmp_path_factory.mktemp("quick") / "run"
    printed = io.StringIO()
    with redirect_stdout(printed), fewer_digits():
        assert main(["run", "--out", str(out), *QUICK]) == 0
    return out, printed.getvalue()


@pytest.fixture
def run(few_images: None, quick_run: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of this folder."""
    return Path(shutil.copytree(quick_run[0], tmp_path / "run"))


def test_a_file_of_an_older_version_is_read_and_says_how_it_is_written_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[algorithm]\nname = "dffke"\nembeddings = "noise"\n')
    assert main(["show", "config", str(file)]) == 0
    printed = capsys.readouterr()
    assert 'reveal = "nothing"' in printed.out
    assert printed.err == (
        f'{file} is of an older version: replace embeddings = "noise" by reveal = "nothing"\n'
    )
    file.write_text('[algorithm]\nname = "dffke"\ndocking_weight_decay = 0.001\n')
    assert main(["show", "config", str(file)]) == 0
    assert capsys.readouterr().err == (
        f"{file} is of an older version: remove docking_weight_decay = 0.001\n"
    )
    # Fields of an algorithm that is not run are nobody's concern.
    assert main(["show", "config", str(file), "--algorithm", "fedavg"]) == 0
    file.write_text('[algorithm]\nname = "absent.module:Method"\nparticipation = 0.5\n')
    assert main(["show", "config", str(file), "--algorithm", "fedavg"]) == 0
    assert not capsys.readouterr().err


def test_a_run_prints_a_table_and_leaves_a_folder(
    quick_run: tuple[Path, str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = quick_run[1]
    assert "DFFKE on digits: 3 clients, 3 architectures, 2 rounds, cpu" in text
    assert "round 1/2 learn" in text
    assert "round 2/2: accuracy" in text
    for word in ("1 small-vgg", "alone", "after", "mean", "run folder:"):
        assert word in text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    told = {"round", "clients", "server", "seconds", "bytes", "failures", "warnings"}
    assert set(lines[0]) == {*told, "participants", "primary", "simulated", "wire"}
    assert main(["resume", str(run)]) == 0, "a finished run shows its table again"
    said = capsys.readouterr().out
    assert "small-vgg" in said
    assert "2 of 2 rounds are done already" in said


def test_a_run_from_the_written_configuration_is_the_same_run(run: Path, tmp_path: Path) -> None:
    assert main(["run", str(run / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    one, other = (
        [
            {**json.loads(line), "seconds": 0}
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (run, tmp_path / "again")
    )
    assert one == other
    assert (run / "config.toml").read_text() == (tmp_path / "again" / "config.toml").read_text()


def test_a_run_shows_its_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "images", str(run), "--columns", "4"]) == 0
    sheets = [run / "images" / f"round-00{t}.png" for t in (1, 2)]
    assert capsys.readouterr().out.splitlines() == [f"picture: {path}" for path in sheets]
    for path in sheets:
        with Image.open(path) as picture:
            assert picture.width > 300
            assert np.asarray(picture.convert("L")).std() > 5, "something is drawn"
    assert main(["resume", str(run)]) == 0, "looking changes nothing"


def test_images_that_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert main(["show", "images", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    few = ["--set", f"data.source={digits_file(tmp_path)}", "--set", "models=small-mlp"]
    few += ["--set", "rounds=1"]
    assert "there is no folder" in said(str(tmp_path / "nowhere"))
    forgets = ["--set", "algorithm.memory=0"]
    assert main(["run", "--out", str(tmp_path / "a"), *QUICK, *few, *forgets]) == 0
    assert "remembers none" in said(str(tmp_path / "a"))
    local = ["--algorithm", "local", "--set", "algorithm.max_epochs=1"]
    assert main(["run", "--out", str(tmp_path / "b"), *local, *few]) == 0
    assert "Local as configured made no images" in said(str(tmp_path / "b"))
    for checkpoint in (tmp_path / "a" / "checkpoints").iterdir():
        checkpoint.unlink()
    assert "no checkpoint of a finished round" in said(str(tmp_path / "a"))
    assert "columns" in said(str(tmp_path / "b"), "--columns", "0")


@pytest.mark.parametrize(
    ("name", "parties"), [("fedaf", 3), ("feddm", 3), ("fedzge", 1), ("dfrd", 1)]
)
def test_generators_and_condensed_sets_are_images_too(
    name: str, parties: int, tmp_path: Path
) -> None:
    condensed = parties == 3
    experiment = federation(
        tiny(name, **({} if condensed else {"samples": 30})), rounds=2, out=tmp_path
    )
    list(experiment.rounds(2))
    ((last, rows),) = pictures(tmp_path, 6)
    assert last == 2, "as they are in the end"
    assert len(rows) == parties
    for party, real, made, classes in rows:
        assert (party == "server") == (parties == 1)
        assert real is None
        assert made.shape[1:] == (8, 8, 1)
        assert len(made) == len(classes) == 6
        assert len(set(classes)) > 1
        assert made.std() > 0.05
    again = next(pictures(tmp_path, 6))[1]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(rows, again, strict=True)), (
        "every time the same"
    )
    if condensed:
        sent = quantise_images(experiment.engine.clients[0].images[0], experiment.task.spec)
        shown = (255 * rows[0][2]).round().byte().permute(0, 3, 1, 2)
        assert all(any(torch.equal(image, one) for one in sent) for image in shown), (
            "what the server was sent"
        )


def test_images_go_where_a_folder_can_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "images", str(run), "--out", str(tmp_path / "new" / "folder")]) == 0
    assert (tmp_path / "new" / "folder" / "round-001.png").exists()
    capsys.readouterr()
    assert main(["show", "images", str(run), "--out", str(run / "config.toml")]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["algorithms", "models", "families", "datasets", "partitions"])
def test_lists(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    expected = {
        "algorithms": "dffke",
        "models": "vit-tiny",
        "families": "htfe-10",
        "datasets": "npz:PATH",
        "partitions": "dirichlet",
    }
    assert expected[what] in capsys.readouterr().out


def test_show_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "algorithm", "dffke"]) == 0
    text = capsys.readouterr().out
    assert main(["show", "algorithm", "tests.test_experiment:Tunable"]) == 0
    assert "algorithm.mine = 1" in capsys.readouterr().out
    order = [
        "The paper's fields",
        "tau =",
        "authors' code",
        "barter",
        "whiten =",
        "reveals",
        "rank =",
    ]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    for word in (
        "Data-Free Knowledge",
        "algorithm.tau = 0.98",
        "τ: local",
        "preset paper",
        "up: weights",
    ):
        assert word in " ".join(text.split()), word


def test_show_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "p.png"
    arguments = [
        "show",
        "partition",
        "dirichlet",
        "--set",
        "partition.alpha=0.5",
        "--set",
        "clients=4",
        "--out",
        str(picture),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1433" in printed
    assert "partition.alpha = 0.5" in printed, "what was chosen, not the default"
    assert min(Image.open(picture).size) > 300
    assert main([*arguments[:-1], str(tmp_path / "bare.png"), "--title", "none"]) == 0
    bare, titled = (Image.open(path).size for path in (tmp_path / "bare.png", picture))
    assert bare[0] == titled[0]
    assert bare[1] < titled[1]


def test_show_partition_names_domains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((8, 8, 8, 1), dtype=np.uint8), np.arange(8) % 2
    parts = {
        f"{kind}_{part}": a
        for part in ("train", "test")
        for kind, a in (("x", x), ("y", y), ("domain", y))
    }
    np.savez(tmp_path / "d.npz", **parts, domains=np.array(["photo", "sketch"]))
    settings = ["--set", f"data.source=npz:{tmp_path / 'd.npz'}", "--set", "clients=4"]
    assert main(["show", "partition", "domains", *settings, "--out", str(tmp_path / "p.svg")]) == 0
    printed = capsys.readouterr().out
    assert "samples by client and domain" in printed
    assert printed.count("sketch") == 1


def test_show_config_is_a_file_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--algorithm", "fedavg", "--set", "clients=3", "--set", "algorithm.lr=0.5"]
    assert main(["show", "config", *chosen]) == 0
    written = capsys.readouterr().out
    (tmp_path / "all.toml").write_text(written)
    config = resolve(read_toml(tmp_path / "all.toml"))
    assert (config.clients, config.algorithm) == (3, FedAvg(lr=0.5))
    assert main(["show", "config", str(tmp_path / "all.toml")]) == 0
    assert capsys.readouterr().out == written


def test_list_alone_says_what_there_is_to_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "barter list datasets" in capsys.readouterr().out.splitlines()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--help"],
        ["run", "--help"],
        ["resume", "--help"],
        ["list", "--help"],
        ["show", "--help"],
        ["--version"],
    ):
        assert main(arguments) == 0
    assert "KEY=VALUE" in capsys.readouterr().out


MISTAKES: list[tuple[list[str], str]] = [
    (["rn"], "No such command 'rn'"),
    (["run", "--algoritm", "dffke"], "No such option"),
    (["run", "a.toml", "b.toml"], "unexpected extra argument"),
    (["run", "none.toml"], "there is no such file"),
    (["run", "dffke"], "there is no such file; the method of this name is --algorithm dffke"),
    (["run", "--set", "algorithm=dffke"], "did you mean 'algorithm.name'"),
    (["run", "--set", "data=digits"], "did you mean 'data.source'"),
    (["run", "--set", "data.size=100000"], "int >= 1 and <= 4096 or none"),
    (["run", "broken.toml"], "is not TOML"),
    (["run", "."], "cannot be read"),
    (["run", "image.toml"], "broken.toml|cannot be read|not TOML"),
    (["run", "typo.toml"], "unknown key 'algorithm.shar': did you mean 'share'"),
    (["run", "flat.toml"], "algorithm is a table"),
    (["run", "list.toml"], "must be a name"),
    (["run", "table.toml"], "must be a name"),
    (["run", "digits.toml"], "is not TOML"),
    (["run", "huge.toml"], "finite"),
    (["run", "--algorithm", "..x:y"], "cannot be imported"),
    (["run", "--algorithm", "barter:Algorithm"], "no Algorithm with a round"),
    (["run", "--set", "data.source=npz:one.npy"], "holds one array"),
    (["run", "--set", "data.source=npz:torn.npz"], "cannot be read as an npz"),
    (["run", "--set", "data.source=npz:labels.npz"], "class number 1000000000000"),
    (["run", "--set", "partition.name=domains"], "one domain only"),
    (["run", "--out", "full/[/y]", "--set", "rounds=0"], "int >= 1"),
    (["show", "partition", "--out", "full"], "ending .png"),
    (["run", "--algorithm", "dfke"], "did you mean 'dffke'"),
    (["run", "--algorithm", "no.such:Thing"], "cannot be imported"),
    (["run", "--algorithm", "json:loads"], "is no Algorithm"),
    (["run", "--set", "rounds"], "write key=value"),
    (["run", "--set", "rounds=0"], "rounds=0: must be int >= 1"),
    (["run", "--set", "rounds=-3"], "int >= 1"),
    (["run", "--set", "rounds=two"], "must be int"),
    (["run", "--set", "rounds=1.5"], "must be int"),
    (["run", "--set", "seed=-1"], "int >= 0"),
    (["run", "--set", "clients=0"], "int >= 1"),
    (["run", "--set", "clients=100000"], "fewer clients"),
    (["run", "--set", "share=0.5"], "did you mean 'algorithm.share'"),
    (["run", "--set", "algorithm.share=1.5"], "> 0 and <= 1"),
    (["run", "--set", "algorithm.share=nan"], "finite"),
    (["run", "--set", "algorithm.memory=-1"], "int >= 0 or none"),
    (["run", "--set", "algorithm.discrepancy=l1"], "one of none, kl, mae, mse"),
    (["run", "--set", "algorithm.preset=papre"], "did you mean 'paper'"),
    (["run", "--set", "algorithm.local_review=maybe"], "must be bool"),
    (["run", "--set", "algorithm.transfer=public"], "data.public"),
    (["run", "--set", "partition.name=dirichle"], "did you mean 'dirichlet'"),
    (["run", "--set", "partition.alpha=0"], "float > 0"),
    (
        ["run", "--set", "partition.name=classes", "--set", "partition.per_client=11"],
        "only 10 classes",
    ),
    (
        [
            "run",
            "--set",
            "partition.name=domains",
            "--set",
            "data.source=npz:two.npz",
            "--set",
            "partition.min_samples=99",
        ],
        "min_samples",
    ),
    (["run", "--set", "data.source=cifar10"], "data.download=true"),
    (["run", "--set", "data.source=mnits"], "did you mean 'mnist'"),
    (["run", "--set", "data.source=npz:none.npz"], "does not exist"),
    (["run", "--set", "data.source=npz:broken.toml"], "cannot be read as an npz"),
    (["run", "--set", "data.source=folder:."], "holds no folders|holds no images"),
    (["run", "--set", "data.source=ftp:x"], "unknown kind of data"),
    (["run", "--set", "data.size=0"], "int >= 1"),
    (["run", "--set", "data.root=3"], "must be str"),
    (["run", "--set", "models=resnet19"], "did you mean 'resnet1"),
    (["run", "--set", "models=googlenet"], "googlenet cannot take images of 8x8"),
    (["run", "--algorithm", "fedavg", "--set", "models=small-5"], "needs one architecture"),
    (["run", "--precision", "half"], "'half' is not one of"),
    (["run", "--device", "cpu", "--precision", "bf16"], "there is fp32 only"),
    (["run", "--device-memory", "-3"], "device_memory=-3.0"),
    (["run", "--set", "streams=0"], "streams=0"),
    (["run", "--algorithm", "fedfree", "--set", "algorithm.tsallis_order=1.0"], "tsallis_order=1"),
    (["run", "--set", "min_clients=6"], "only 5 clients"),
    (["run", "--device", "tpu"], "'tpu' is not one of"),
    (["run", "--set", "device=gpu"], "one of auto, cpu, cuda"),
    (["run", "--out", "full"], "exists and is not empty: choose another --out$"),
    (
        ["run", "--algorithm", "fedavg:momentum=0.9:lr=0.1"],
        "its fields by --set algorithm.momentum=0.9 --set algorithm.lr=0.1$",
    ),
    (["run", "--algorithm", "fedavg", "--set", "algorithm.momentum=1"], "float >= 0 and < 1"),
    (["run", "--out", "broken.toml/run"], "cannot be written"),
    (["resume"], "Missing argument"),
    (["resume", "none"], "there is no folder none"),
    (["resume", "full"], "full is not the folder of a run: there is no config.toml"),
    (
        ["resume", "unborn"],
        "unborn was interrupted before its run began: there is nothing to continue, run it again",
    ),
    (["resume", "stale"], "unknown algorithm 'gone'"),
    (["list", "clients"], "is not one of"),
    (["show", "algorithm", "fedavgg"], "did you mean 'fedavg'"),
    (["show", "partition", "dirchlet"], "did you mean 'dirichlet'"),
    (["show", "partition", "--out", "none/p.png"], "cannot be written"),
    (["show", "nothing"], "No such command"),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("rounds = = 3")
    Path("image.toml").write_bytes(b"\x89PNG\xff\xfe")
    Path("typo.toml").write_text('[algorithm]\nname = "dffke"\nshar = 0.5\n')
    Path("flat.toml").write_text('algorithm = "dffke"\n')
    Path("list.toml").write_text('[algorithm]\nname = ["dffke"]\n')
    Path("table.toml").write_text("[partition.name]\na = 1\n")
    Path("digits.toml").write_text("rounds = " + "9" * 5001)
    Path("huge.toml").write_text("[algorithm]\nlr = " + "9" * 401)
    for folder in ("full", "stale", "unborn/flower"):
        Path(folder).mkdir(parents=True)
    Path("full/file").touch()
    Path("stale/config.toml").write_text('[algorithm]\nname = "gone"\n')
    x, y = np.zeros((4, 8, 8, 1), dtype=np.uint8), np.zeros(4, dtype=np.int64)
    np.savez("two.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez("labels.npz", x_train=x, y_train=y + 10**12, x_test=x, y_test=y)
    np.save("one.npy", x)
    whole = Path("two.npz").read_bytes()
    Path("torn.npz").write_bytes(whole[: len(whole) // 2])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_in_one_line_and_status_2(
    arguments: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert said.err.startswith("barter: ")
    assert len(said.err.strip().splitlines()) == 1, said.err
    assert re.search(message, said.err), said.err


def test_names_with_brackets_and_dollars_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("$x_^$", "[a]", "[/b]"):
        for i in range(10):
            path = tmp_path / "data" / kind.replace("/", "") / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (i, 0, 0)).save(path)
    settings = [
        "--set",
        f"data.source=folder:{tmp_path / 'data'}",
        "--set",
        "partition.name=iid",
        "--set",
        "clients=2",
    ]
    assert main(["show", "partition", *settings, "--out", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    for kind in ("$x_^$", "[a]", "[b]"):
        assert kind in text
    assert (
        main(
            [
                "run",
                "--algorithm",
                "local",
                "--set",
                "rounds=1",
                "--set",
                "algorithm.max_epochs=1",
                "--set",
                "models=small-mlp",
                "--out",
                str(tmp_path / "[x]" / "["),
            ]
        )
        == 0
    )
    assert f"run folder: {tmp_path}/[x]/[" in capsys.readouterr().out


def test_too_little_memory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "run",
                "--set",
                f"algorithm.code_dim={10**12}",
                *QUICK[:6],
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 1
    )
    assert "not enough memory" in capsys.readouterr().err


def test_a_mistake_leaves_nothing_behind(workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    for arguments in (
        ["--set", "algorithm.transfer=public"],
        ["--set", "models=none"],
        ["--set", "clients=100000"],
    ):
        assert main(["run", *arguments]) == 2
    assert sorted(workplace.rglob("*")) == before


def test_there_are_enough_of_them() -> None:
    assert len(MISTAKES) >= 30


def test_a_failing_client_is_status_1_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "ill.py").write_text(
        "from barter import Local\n\nclass Ill(Local):\n    def learn(self, client):\n        raise ValueError('ill')\n"
    )
    # The installed command, from the folder that holds the module.
    command = [
        str(Path(sys.executable).with_name("barter")),
        "run",
        "--algorithm",
        "ill:Ill",
        "--out",
        "run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr
    assert "0 of 5 clients answered 'learn', 5 must" in said
    assert "and 2 more" in said
    assert "ValueError: ill" in said


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said"
    command = ["run", "--out", str(out), "--set", "rounds=50", "--set", "algorithm.max_epochs=1"]
    process = forked(partial(main, command), said)
    deadline = time.monotonic() + 60
    while not said.exists() or "learn" not in said.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, signal.SIGINT)
    assert status(process) == 130
    assert f"stopped in round 1; `barter resume {out}` continues" in said.read_text()
    assert "Traceback" not in said.read_text()


def test_an_interrupt_in_a_callback_is_not_lost(tmp_path: Path) -> None:
    """Python discards what the garbage collector's callbacks raise, and Ctrl-C may arrive in one."""
    out, said = tmp_path / "run", tmp_path / "said"
    command = ["run", "--out", str(out), "--set", "rounds=50", "--set", "algorithm.max_epochs=1"]

    def interrupt_once(phase: str, info: dict[str, int]) -> None:
        if "learn" in said.read_text():
            gc.callbacks.remove(interrupt_once)
            signal.raise_signal(signal.SIGINT)

    def run() -> int:
        gc.callbacks.append(interrupt_once)
        return main(command)

    assert status(forked(run, said)) == 130
    assert f"stopped in round 1; `barter resume {out}` continues" in said.read_text()
    assert "Traceback" not in said.read_text()


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: barter" in capsys.readouterr().out


def test_what_was_perhaps_meant_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lst"]) == 2
    assert capsys.readouterr().err == "barter: No such command 'lst'. Did you mean 'list'?\n"


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    commands = ["--help", "compare --help", "attack --help", "--version"]
    commands += ["rum", "run --tau", "list modles", "list models"]
    script = f"""
import sys
from barter.cli.app import main
for command in {commands!r}:
    main(command.split())
    if "torch" in sys.modules:
        sys.exit(command)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--rounds", "there is no --rounds: write --set rounds=..."),
        ("--max-epochs", "write --set algorithm.max_epochs=..."),
        ("--alpha", "--set algorithm.alpha=... or --set partition.alpha=..."),
        ("--model", "there is no --model: write --set models=..."),
        ("--data", "write --set data.source=..."),
        ("--partition", "write --set partition.name=..."),
        ("--output", "write --out ..."),
        ("--gpu", "write --device cuda"),
        ("--config", "write [CONFIG.toml]"),
        ("--rouds", "there is no --rouds: write --set rounds=..."),
        ("--algorthm", "Did you mean '--algorithm'?"),
        ("--nonsense", "No such option"),
    ],
)
def test_an_option_that_is_a_key_says_how_to_set_it(
    option: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", option, "3"]) == 2
    assert advice in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command", ["resume", "privacy", "attack", "show images", "evaluate --data digits"]
)
def test_who_gives_a_comparison_for_a_run_is_told_where_its_runs_are(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "local" / "seed-0"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    assert main([*command.split(), str(tmp_path)]) == 2
    assert f"is a comparison, give one of its runs, such as {run}" in " ".join(
        capsys.readouterr().err.split()
    )


def test_commands_without_settings_do_not_speak_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--rounds", "--gpu", "--data"):
        assert main(["report", "runs/mine", option, "3"]) == 2
        assert f"No such option '{option}'" in capsys.readouterr().err


def test_a_run_on_flower_is_not_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "config", "--set", "engine=flower", "--set", "rounds=2"]) == 0
    (tmp_path / "config.toml").write_text(capsys.readouterr().out)
    assert main(["resume", str(tmp_path), "--trust", "--rounds", "3"]) == 2
    assert "keeps the 2 rounds it was begun with" in " ".join(capsys.readouterr().err.split())
    assert main(["resume", str(tmp_path), "--trust", "--threads", "3"]) == 2
    assert "--threads 3: a run on Flower keeps those" in " ".join(capsys.readouterr().err.split())


def test_threads_are_said_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, short = (
        tmp_path / "run",
        ["--algorithm", "local", "--set", "algorithm.max_epochs=1", "--set", "clients=2"],
    )
    assert main(["run", *short, "--set", "rounds=1", "--threads", "2", "--out", str(out)]) == 0
    assert "2 clients, 2 architectures, 1 round, cpu, 2 threads; folder" in capsys.readouterr().out
    assert main(["resume", str(out)]) == 0
    assert ", cpu, 2 threads; folder" in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert main(["resume", str(out)]) == 0
    assert ", cpu, 2 of 8 threads; folder" in capsys.readouterr().out
