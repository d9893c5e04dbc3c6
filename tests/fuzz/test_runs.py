"""Run folders that somebody made up: checkpoints with the right checksum and the wrong contents."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import Experiment
from barter.runs import checkpoint
from barter.runs.folder import _file, read_records
from barter.setup.trust import read_run
from barter.trained.model import load_all
from tests.conftest import digits_file, federation, tiny
from tests.fuzz.limits import Cases, damaged, one_line
from tests.fuzz.mutations import mutate

CPU = torch.device("cpu")
ROUNDS = ("0", "-5", "1000000000", "../../x", "", "1" * 400, "1e3", "\0", "none", " 1", "2")
TEXTS = ("null", "[]", "{}", '{"config": 3}', "algorithm = 3", "= 3", "x" * 10_000, "", "\0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    experiment = federation(
        tiny("fedavg"), digits_file(folder), clients=2, threads=1, out=folder / "run"
    )
    experiment.step()
    assert experiment.folder is not None
    experiment.folder.release()
    return folder / "run"


def crafted(rng: random.Random, state: Any, notes: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """The contents of a checkpoint with something changed."""
    match rng.randrange(4):
        case 0:
            return state, {**notes, "round": rng.choice(ROUNDS)}
        case 1:
            key = rng.choice(("config", "data"))
            text = damaged(rng, notes[key].encode()).decode("latin-1")
            return state, {**notes, key: rng.choice((text, rng.choice(TEXTS)))}
        case 2:
            key = rng.choice(("networks", "clients", "server", "crossed", "told"))
            return {**state, key: mutate(rng, state[key]).answer}, notes
        case _:
            return mutate(rng, state).answer, notes


def test_crafted_checkpoints(cases: Cases, finished: Path, tmp_path: Path) -> None:
    """Each is loaded and resumed, or refused in one line; nothing large is allocated."""
    run = tmp_path / "run"
    state, notes = checkpoint.read_checkpoint(_file(finished, 1), CPU)
    notes = {key: notes[key] for key in ("round", "config", "data")}
    for rng in cases(60):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(finished, run)
        try:
            checkpoint.write_checkpoint(_file(run, 1), *crafted(rng, state, notes))
        except Exception:  # No payload: such a file cannot be written.
            continue
        with one_line():
            for model in load_all(run):
                model(torch.zeros(1, *model.spec.shape, dtype=torch.uint8))
        with one_line():
            experiment = Experiment.from_config(read_run(run), run, resume=True)
            assert experiment.folder is not None
            experiment.folder.release()
            assert experiment.round == 1
        assert len(read_records(run)) <= 1
