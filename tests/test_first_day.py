"""What somebody meets who uses barter for the first time: names, messages, and what is left behind."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import barter
from barter import ALGORITHMS, Experiment
from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.setup.config import resolve, with_settings


def test_every_method_can_be_imported_from_the_package_and_given_by_name() -> None:
    classes = {kind.__name__: kind for kind in ALGORITHMS.values()}
    for name, kind in classes.items():
        assert getattr(barter, name) is kind
    assert classes.keys() <= set(dir(barter))
    source = ast.parse(Path(barter.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module == "barter.algorithms"
        for alias in node.names
    }
    assert typed == {"ALGORITHMS", *classes}, "type checkers know the same names"
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        _ = barter.FedNothing  # type: ignore[attr-defined]


def test_an_experiment_takes_a_method_by_name_and_by_class() -> None:
    small: dict[str, Any] = {"data": few_digits(), "models": "small-mlp", "clients": 2}
    assert Experiment("fedavg", **small).algorithm == barter.FedAvg()
    assert Experiment(barter.FedAvg, **small).algorithm == barter.FedAvg()
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedawg'.*'fedavg'"):
        Experiment("fedawg")


@pytest.mark.parametrize("command", ["run", "show config"])
def test_the_file_of_a_comparison_is_led_to_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "small.toml"
    file.write_text('[compare.variants]\nalone = ["algorithm.name=local"]\n')
    assert main([*command.split(), str(file)]) == 2
    assert "give this file to `barter compare`" in capsys.readouterr().err


def unknown(*settings: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(with_settings({}, settings))
    return str(refused.value)


def test_unknown_keys_are_answered_briefly_and_for_the_chosen_method() -> None:
    said = unknown("x=1")
    assert said.startswith("unknown key 'x': there are answer_mb, clients, ")
    assert "tables algorithm, data, " in said
    assert "algorithm.lr" not in said
    assert len(said) < 400
    of_fedavg = unknown("algorithm.name=fedavg", "algorithm.qqq=1")
    assert "algorithm.fraction" in of_fedavg
    assert "algorithm.code_dim" not in of_fedavg, "that of another method"
    assert unknown("algorithm.name=fedavg", "algorithm.fracton=1").endswith(
        "did you mean 'algorithm.fraction'?"
    )
