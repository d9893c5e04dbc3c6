"""A run's folder from elsewhere runs no code without consent; one that was started here needs none."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from barter import ALGORITHMS, load
from barter.cli import running
from barter.cli.app import main
from barter.compare.comparison import PLAN
from barter.core.errors import CheckpointError, ConfigError
from barter.runs import checkpoint
from barter.runs.folder import _file
from barter.setup.config import resolve, to_plain
from barter.setup.trust import DEPLOYMENT, code_names, note_consent, require_consent
from tests.conftest import NEEDED, digits_file, federation, perceptrons, tiny
from tests.fuzz.limits import within_limits

COMMANDS: dict[str, list[str]] = {
    "resume": ["--rounds", "2"],
    "report": [],
    "attack": ["--shadows", "0"],
    "evaluate": ["--data", "digits"],
    "export": ["--client", "0", "--to", "{}/out.safetensors"],
    "show images": [],
}
CODE = """
from pathlib import Path
from torch import nn
Path(__file__).with_suffix(".ran").touch()
def make(spec):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.channels * spec.height * spec.width, 8), nn.ReLU(),
                         nn.Linear(8, spec.classes))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round that names no code."""
    folder = tmp_path_factory.mktemp("trust")
    run = folder / "run"
    experiment = federation(
        tiny("local", max_epochs=1), digits_file(folder), clients=2, models="small-mlp", out=run
    )
    experiment.step()
    assert experiment.folder is not None
    experiment.folder.release()
    return run


@pytest.fixture
def foreign(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, and beside it a module that notes when it is imported."""
    (tmp_path / "foreigncode.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreigncode", raising=False)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def name_code(run: Path, section: str, key: str) -> None:
    """Make the run's configuration name the module."""
    tree = tomllib.loads((run / "config.toml").read_text())
    (tree[section] if section else tree)[key] = "foreigncode:make"
    (run / "config.toml").write_text(tomli_w.dumps(tree))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_that_a_folder_names(
    command: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command.split(), str(foreign), *(a.format(tmp_path) for a in COMMANDS[command])]
    for section, key in (("", "models"), ("algorithm", "name"), ("data", "source")):
        before = (foreign / "config.toml").read_text()
        name_code(foreign, section, key)
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "would run code: foreigncode:make; if you trust it, add --trust" in error
        assert error.count("\n") == 1
        (foreign / "config.toml").write_text(before)
    assert not (tmp_path / "foreigncode.ran").exists()
    name_code(foreign, "algorithm", "name")
    main([*arguments, "--trust"])
    assert (tmp_path / "foreigncode.ran").exists()


def test_a_run_on_flower_from_elsewhere_starts_no_program(
    foreign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder holds programs and their settings, so they need consent whatever they name."""
    tree = tomllib.loads((foreign / "config.toml").read_text())
    (foreign / "config.toml").write_text(tomli_w.dumps({**tree, "engine": "flower"}))
    started: list[Path] = []
    monkeypatch.setattr(running, "_drive", lambda config, out, **_: started.append(out))
    assert main(["resume", str(foreign)]) == 2
    assert "would run code: its Flower deployment; if you trust it" in capsys.readouterr().err
    assert started == []
    assert main(["resume", str(foreign), "--trust"]) == 0
    note_consent(foreign, [DEPLOYMENT])  # as starting it here does
    assert main(["resume", str(foreign)]) == 0
    assert started == [foreign, foreign]


def test_a_comparison_from_elsewhere_is_shown_with_consent_only(
    finished: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "comparison"
    run = folder / "local" / "seed-0"
    (folder / "local").mkdir(parents=True)
    shutil.copytree(finished, run)
    plan = {"variants": {"local": "local"}, "seeds": [0], "rounds": 1, "common": {}}
    (folder / PLAN).write_text(tomli_w.dumps(plan))
    name_code(run, "", "models")
    assert main(["compare", str(folder)]) == 2
    assert "would run code: foreigncode:make" in capsys.readouterr().err
    assert not (tmp_path / "foreigncode.ran").exists()


def test_a_checkpoint_that_names_a_network_needs_consent(foreign: Path, tmp_path: Path) -> None:
    """Its configuration does not name it."""
    path = _file(foreign, 1)
    state, notes = checkpoint.read_checkpoint(path, torch.device("cpu"))
    state["networks"]["architectures"][0] = "foreigncode:make"
    checkpoint.write_checkpoint(
        path, state, {key: notes[key] for key in ("round", "config", "data")}
    )
    with pytest.raises(ConfigError, match="would run code: foreigncode:make; if you trust it"):
        load(foreign, client=0)
    assert not (tmp_path / "foreigncode.ran").exists()
    assert load(foreign, client=1).architecture == "small-mlp"
    with pytest.raises(Exception, match="another network than foreigncode:make"):
        load(foreign, client=0, trust=True)
    assert (tmp_path / "foreigncode.ran").exists()


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        (4096, "holds the weights of another network than small-mlp: shapes differ at body"),
        (10**9, "height is 1000000000, expected a number from 1 to 4096"),
    ],
)
def test_a_network_is_not_built_larger_than_its_weights(
    foreign: Path, side: int, reason: str
) -> None:
    """It would take 16 GB and more."""
    path = _file(foreign, 1)
    state, notes = checkpoint.read_checkpoint(path, torch.device("cpu"))
    state["networks"]["spec"] |= {"height": side, "width": side}
    checkpoint.write_checkpoint(
        path, state, {key: notes[key] for key in ("round", "config", "data")}
    )
    with pytest.raises(CheckpointError, match=reason), within_limits():
        load(foreign, client=0)


def test_an_own_run_needs_no_consent(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is interrupted, resumed and loaded; a copy elsewhere is not this user's run."""
    own = tmp_path / "own"
    source = f"data.source={digits_file(tmp_path)}"
    options = f"{source} clients=2 rounds=1 models=foreigncode:make algorithm.max_epochs=1 threads=1".split()
    settings = [word for option in options for word in ("--set", option)]
    assert main(["run", "--algorithm", "local", "--out", str(own), *settings]) == 0
    assert main(["resume", str(own), "--rounds", "2"]) == 0
    assert load(own, client=1).architecture == "foreigncode:make"
    shutil.copytree(own, tmp_path / "copy")
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "copy"), "--rounds", "3"]) == 2
    assert f"{tmp_path / 'copy'} was not started here" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "copy"), "--rounds", "3", "--trust"]) == 0
    assert main(["resume", str(tmp_path / "copy"), "--rounds", "4"]) == 0  # Consent is remembered.
    assert main(["report", str(own), "--no-images"]) == 0


def test_records_of_deleted_folders_go_and_others_do_not_count(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for run in (one, other):
        run.mkdir()
        note_consent(run, ["a:b"])
        require_consent(run, ["a:b"])
    with pytest.raises(ConfigError, match="would run code: c:d; if"):
        require_consent(one, ["a:b", "c:d"])
    note_consent(one, ["c:d"])
    require_consent(one, ["a:b", "c:d"])
    other.rmdir()
    note_consent(one, ["e:f"])
    other.mkdir()
    with pytest.raises(ConfigError, match="would run code: a:b"):
        require_consent(other, ["a:b"])


def test_without_a_place_for_records_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    note_consent(tmp_path, ["a:b"])
    assert "resuming it will need --trust" in caplog.text
    with pytest.raises(ConfigError, match="would run code: a:b"):
        require_consent(tmp_path, ["a:b"])


def test_all_that_can_name_code_is_found() -> None:
    """Every text field of every algorithm, and no default."""
    for name, kind in ALGORITHMS.items():
        tree: dict[str, Any] = to_plain(
            resolve({"algorithm": {"name": name, **NEEDED.get(name, {})}})
        )
        assert code_names(tree) == list(NEEDED.get(name, {}).values())
        for field in dataclasses.fields(kind):
            if "str" in str(field.type):
                value = {"name": name, field.name: "m:f"}
                assert "m:f" in code_names({"algorithm": value}), (name, field.name)
    assert code_names({"algorithm": {"name": "fedktl", "generator": "file.pt"}}) == ["file.pt"]
    assert code_names({"models": "small-mlp, m:f:depth=2"}) == ["m:f:depth=2"]
    for harmless in ("npz:a:b", "folder:/x", "domains:/x", "clients:/x", "digits"):
        assert code_names({"data": {"source": harmless, "public": harmless}}) == []
    for odd in (None, 3, [], ["m:f"], {"name": ["m:f"]}):
        assert code_names({"algorithm": odd, "data": odd, "models": odd}) in ([], ["m:f"])


def test_nothing_else_imports_code() -> None:
    """Whoever adds a way to name code must tell `code_names` of it."""
    import barter

    root = Path(barter.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "import_object(" in (text := path.read_text()) or "jit.load(" in text
    }
    assert found == {
        "core/params.py",
        "data/sources.py",
        "models/pretrained.py",
        "models/zoo.py",
        "setup/config.py",
    }


def test_python_that_names_its_code_itself_needs_no_consent(tmp_path: Path) -> None:
    """A configuration in Python is its caller's own, also where it resumes a folder from elsewhere."""
    one = perceptrons(tiny("local", max_epochs=1), out=tmp_path / "run")
    one.step()
    assert one.folder is not None
    one.folder.release()
    two = perceptrons(tiny("local", max_epochs=1), out=tmp_path / "run", resume=True)
    assert two.round == 1
