"""The measurement of HtFLlib beside barter: the parts that do not need HtFLlib."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from barter import ALGORITHMS
from barter.core.images import Images
from barter.core.record import Round
from barter.data.partition import Dirichlet
from barter.data.task import make_task
from benchmarks import htfllib
from benchmarks.htfllib import HtfllibError, Log, Settings

COMMIT = "e959261d906f40377410bc4d9d13ba3f6af56782"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    digits = load_digits()
    images = (digits.images * 15).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(
        path,
        x_train=images[:400],
        y_train=digits.target[:400],
        x_test=images[400:800],
        y_test=digits.target[400:800],
    )
    return Settings(
        data=str(path),
        models="small-mlp",
        size=10,
        clients=2,
        rounds=2,
        batch_size=20,
        features=64,
        shared="small-cnn",
        test_images=15,
        train_images=100,
        device="cpu",
    )


@pytest.fixture(scope="module")
def split(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    htfllib.write_common_split(settings, work / "split")
    return work


def bytes_of(images: Images) -> Counter[bytes]:
    rows = zip(images.pixels, images.labels, strict=True)
    return Counter(pixels.numpy().tobytes() + bytes([int(label)]) for pixels, label in rows)


def test_both_libraries_get_the_same_images(settings: Settings, split: Path) -> None:
    task = htfllib.read_common_split(settings, split / "split")
    htfllib.write_htfllib_data(task, split / "dataset")
    for part, sets in (("train", task.train), ("test", task.local_tests)):
        for k, images in enumerate(sets):
            # As HtFLlib's read_data reads them.
            with (split / "dataset" / part / f"{k}.npz").open("rb") as file:
                content = np.load(file, allow_pickle=True)["data"].tolist()
            inputs = images.batch(torch.arange(len(images)))
            assert content["x"].dtype == np.float32
            assert content["x"].shape == (len(images), 1, 10, 10), "resized, channels first"
            assert np.array_equal(content["x"], inputs.numpy())
            assert content["y"].tolist() == images.labels.tolist()


def test_the_split_is_a_part_of_the_one_that_barter_makes(settings: Settings, split: Path) -> None:
    found = htfllib.read_common_split(settings, split / "split")
    partition = Dirichlet(alpha=settings.alpha, balanced=True)
    source = htfllib.split_data(settings)
    task = make_task(source, partition, settings.clients, settings.seed, torch.device("cpu"))
    for k in range(settings.clients):
        assert len(found.train[k]) == settings.train_images
        assert len(found.local_tests[k]) == settings.test_images
        assert not bytes_of(found.train[k]) - bytes_of(task.train[k])
        assert not bytes_of(found.local_tests[k]) - bytes_of(task.local_tests[k])
    assert not found.train[0].augment.crop
    in_order = task.train[0].labels[: settings.train_images]
    assert not torch.equal(found.train[0].labels, in_order), "shuffled: HtFLlib's batches are not"


def test_networks_are_equal_after_pooling(settings: Settings, split: Path, tmp_path: Path) -> None:
    spec = htfllib.read_common_split(settings, split / "split").spec
    alike = replace(settings, features=512, models="small-mlp,small-cnn")
    folder = tmp_path / "networks"
    htfllib.write_htfllib_networks(alike, spec, folder)
    counts = htfllib.compare_networks(alike, spec, folder)
    assert counts["small-mlp"] == [100 * 256 + 256, 512, 512 * 10 + 10], "256 features became 512"
    theirs = torch.load(folder / "Client_1_model.pt", weights_only=False)
    images = torch.rand(3, *spec.shape)
    with torch.no_grad():
        theirs.eval()
        assert torch.equal(theirs.head(theirs.base(images)), theirs(images))
    assert "barter" not in (folder / "Client_0_model.pt").read_bytes().decode("latin-1")
    (folder / "Client_1_model.pt").replace(folder / "Client_0_model.pt")
    with pytest.raises(HtfllibError, match="small-mlp: .* in barter, .* in HtFLlib"):
        htfllib.compare_networks(alike, spec, folder)
    other = replace(alike, shared="small-mlp")
    with pytest.raises(HtfllibError, match="--shared small-mlp has 256 features and not 512"):
        htfllib.write_htfllib_networks(other, spec, tmp_path / "other")


LOG = """
-------------Round number: 0-------------
Client 0: Acc: 0.1, AUC: 0
Seconds of evaluation: 0.5
Averaged Test Accuracy: 0.1000
Std Test Accuracy: 0.0100
------------------------- time cost ------------------------- 3.5
Seconds of evaluation: 0.25
Averaged Test Accuracy: 0.3000
-------------------------------------------------- 2.25
Seconds of evaluation: 0.125
Averaged Test Accuracy: 0.4000
"""


def test_the_log_gives_accuracy_after_and_seconds_within_a_round() -> None:
    log = Log()
    complete = []
    for line in LOG.splitlines(keepends=True):
        log.read(line)
        complete.append(log.is_complete(2))
    assert log.rounds() == [
        {"round": 1, "seconds": 3.0, "evaluation": 0.25, "accuracy": 0.3},
        {"round": 2, "seconds": 2.0, "evaluation": 0.125, "accuracy": 0.4},
    ]
    assert complete.index(True) == len(complete) - 1, "the second round is complete when evaluated"


def fake_checkout(folder: Path) -> Path:
    """Write a checkout that has just the texts that patches replace."""
    for patch in htfllib.PATCHES:
        path = folder / "system" / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{patch.old}\n" * patch.times)
    return folder


def test_patches_apply_to_a_copy_or_fail_clearly(tmp_path: Path) -> None:
    checkout = fake_checkout(tmp_path / "HtFLlib")
    before = htfllib.hash_code(checkout)
    htfllib.copy_checkout(checkout, tmp_path / "copy")
    patched = (tmp_path / "copy" / "system" / "main.py").read_text()
    assert all(patch.new in patched for patch in htfllib.PATCHES if patch.file == "main.py")
    assert htfllib.hash_code(checkout) == before, "the checkout itself is not changed"
    base = checkout / "system" / "flcore" / "servers" / "serverbase.py"
    base.write_text(base.read_text().replace("stats", "metrics"))
    assert htfllib.hash_code(checkout) != before
    with pytest.raises(HtfllibError, match=r"serverbase\.py has 'stats = .* 0 times, 1 expected"):
        htfllib.copy_checkout(checkout, tmp_path / "another")
    with pytest.raises(HtfllibError, match="no checkout of HtFLlib"):
        htfllib.copy_checkout(tmp_path, tmp_path / "third")


def test_a_folder_of_work_is_used_again_for_the_same_split(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = fake_checkout(tmp_path / "HtFLlib")
    monkeypatch.setattr(htfllib, "count_own_split", lambda *_: {})
    alike = replace(settings, shared="small-mlp", features=256)
    work = tmp_path / "work"
    first = htfllib.prepare(alike, checkout, work)
    written = (work / "dataset" / "given" / "train" / "1.npz").stat().st_mtime_ns
    assert htfllib.prepare(replace(alike, rounds=9), checkout, work) == first
    assert (work / "dataset" / "given" / "train" / "1.npz").stat().st_mtime_ns == written
    with pytest.raises(HtfllibError, match="of other settings: give a new folder"):
        htfllib.prepare(replace(alike, seed=1), checkout, work)
    with pytest.raises(HtfllibError, match="give a new or empty folder"):
        htfllib.prepare(alike, checkout, tmp_path)


def test_a_folder_in_another_repository_has_no_commit_of_its_own(tmp_path: Path) -> None:
    inside = Path(__file__).parent
    with pytest.raises(HtfllibError, match="give its commit with --commit"):
        htfllib.find_commit(inside, None)
    assert htfllib.find_commit(inside, COMMIT) == COMMIT
    assert htfllib.find_commit(tmp_path, COMMIT) == COMMIT


def test_methods_exist_with_these_fields(settings: Settings) -> None:
    methods = htfllib.methods(settings)
    for name, method in methods.items():
        algorithm = ALGORITHMS[name](**method.fields)
        assert (algorithm.optimizer, algorithm.lr, algorithm.batch_size) == ("sgd", 0.01, 20)
    command = htfllib.htfllib_command(settings, methods["fml"], 10, Path("networks"))
    assert " ".join(command[1:]) == (
        "main.py -data given -m given -mfn networks -algo FML -ncl 10 -nc 2 -gr 2 -ls 1 -lbs 20 "
        "-lr 0.01 -fd 64 -dev cpu -eg 1 -al 0.5 -bt 0.5"
    )


def test_a_run_of_barter(settings: Settings, split: Path) -> None:
    first, second = htfllib.barter_rounds(settings, "lgfedavg", "auto", split)
    assert (first["round"], second["round"]) == (1, 2)
    assert second["evaluation"] == second["phases"]["evaluate"] > 0
    # The wall clock of the step, which also writes a checkpoint.
    assert second["seconds"] > second["phases"]["round"] - second["evaluation"]
    assert 0 < second["accuracy"] <= 1


def test_accuracy_is_weighted_by_test_images() -> None:
    clients = {
        0: {"local": 0.1, "shared_local": 0.5, "local_images": 30},
        1: {"local": 0.1, "shared_local": 1.0, "local_images": 10},
    }
    record = Round(1, clients, {}, {"round": 3.0, "evaluate": 1.0}, {}, [])
    found = htfllib.round_of_record(record, 3.5, "shared_local")
    assert found["accuracy"] == pytest.approx(25 / 40)
    assert (found["seconds"], found["evaluation"]) == (2.5, 1.0)


def test_barter_can_take_the_batches_of_htfllib(settings: Settings) -> None:
    batches = htfllib.batches_in_order(7, 3, torch.device("cpu"))
    found = [next(batches).tolist() for _ in range(3)]
    assert found == [[0, 1, 2], [3, 4, 5], [0, 1, 2]], "the seventh image is dropped"


def test_clients_of_one_architecture_share_it(settings: Settings) -> None:
    many = replace(settings, clients=10)
    assert htfllib.shortest_family(many) == ["small-mlp"]
    assert len(htfllib.shortest_family(replace(many, models="small-5"))) == 5
    uneven = htfllib.shortest_family(replace(many, models="resnets-3-3-4"))
    assert uneven == ["resnet18"] * 3 + ["resnet34"] * 3 + ["resnet50"] * 4


def test_a_process_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    program = "import time; print('begun', flush=True); time.sleep(60)"
    start = time.monotonic()
    lines = htfllib.stream_lines([sys.executable, "-c", program], tmp_path, {}, 0.3)
    with pytest.raises(HtfllibError, match="the end of --seconds"):
        list(lines)
    assert time.monotonic() - start < 30
    broken = htfllib.stream_lines([sys.executable, "-c", "1 / 0"], tmp_path, {}, None)
    with pytest.raises(HtfllibError, match="ZeroDivisionError"):
        list(broken)


def test_libraries_alternate_and_finished_runs_are_skipped(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    rounds = [
        {"round": t, "seconds": 2.0, "evaluation": 1.0, "accuracy": 0.5, "phases": {}}
        for t in (1, 2)
    ]

    def of_htfllib(_: Settings, method: Any, *rest: Any) -> list[dict[str, Any]]:
        if method.htfllib == "FML":
            raise HtfllibError("failed")
        done.append(("htfllib", method.htfllib))
        return rounds

    def of_barter(_: Settings, name: str, precision: str, *rest: Any) -> list[dict[str, Any]]:
        done.append((precision, name))
        return rounds

    prepared = htfllib.Prepared(tmp_path, 10, "hash")
    monkeypatch.setattr(htfllib, "prepare", lambda *_: prepared)
    monkeypatch.setattr(htfllib, "run_htfllib", of_htfllib)
    monkeypatch.setattr(htfllib, "run_barter", of_barter)
    words = ["--htfllib", str(fake_checkout(tmp_path / "HtFLlib")), "--commit", COMMIT]
    words += ["--data", settings.data, "--device", "cpu", "--out", str(tmp_path / "out.json")]
    words += ["--precision", "auto", "fp32", "--only", "local", "fml"]
    args = htfllib.parse_arguments(words)
    begin = time.monotonic()
    assert not htfllib.measure(args, tmp_path / "work", begin), "a run failed"
    assert done == [
        ("htfllib", "Local"),
        ("auto", "local"),
        ("fp32", "local"),
        ("auto", "fml"),
        ("fp32", "fml"),
    ]
    table = htfllib.make_table(htfllib.read_runs(args.out))
    assert "| htfe-1, 64 px | local | fp32 | 2.00 | 2.00 | 1.0 | 2.0 / 2.0 |" in table
    assert "fml" not in table, "HtFLlib's run is missing"

    done.clear()
    later = Namespace(**{**vars(args), "only": ["local", "fedkd"], "seconds": 299.0})
    assert htfllib.measure(later, tmp_path / "work", begin)
    assert done == [("htfllib", "FedKD"), ("auto", "fedkd"), ("fp32", "fedkd")]
    done.clear()
    unknown = Namespace(**{**vars(later), "models": ["htfe-10"], "only": ["fedkd"]})
    assert not htfllib.measure(unknown, tmp_path / "work", begin)
    assert not done, "nothing is known of these networks, and 2.5 times 120 s do not fit"
    with pytest.raises(ValueError, match="--only fedprot: choose from"):
        htfllib.plan(settings, ["fedprot"], ["auto"])
