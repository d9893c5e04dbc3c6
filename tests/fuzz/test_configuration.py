"""Configurations that nobody would write: each is one, or an error of one line."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from barter.algorithms import ALGORITHMS
from barter.core.errors import ConfigError
from barter.flower.consent import Consent
from barter.setup.config import known_keys, read_toml, resolve, to_plain, to_toml, with_settings
from tests.conftest import NEEDED
from tests.fuzz.limits import EDGES, Cases, damaged, one_line

WORDS = (
    "",
    "none",
    "auto",
    "dffke",
    "paper",
    "iid",
    "\ud800",
    "\0",
    "a" * 5000,
    "é",
    "../..",
    "x:y",
    ":",
    "clients:/",
)
STRANGE: tuple[Any, ...] = (
    *EDGES,
    *WORDS,
    *(-1, -0.0, 0.5, 1e308, float("nan"), float("inf"), 10**400, True, False, None),
    *([], [1, "a"], {}, {"name": "fedavg"}, {"a": {"b": []}}, [[[[]]]]),
)


def changed(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """The values with some of them put in another's place."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for _ in range(rng.choice((1, 1, 2, 5))):
        tables = [out, *(value for value in out.values() if isinstance(value, dict) and value)]
        table = rng.choice(tables)
        key = rng.choice([*table, rng.choice(WORDS), "name", "preset"])
        if rng.randrange(5):
            table[key] = rng.choice(STRANGE)
        else:
            table.pop(key, None)
    return out


def test_values(cases: Cases) -> None:
    """What is taken can be written down, and is the same again."""
    whole = [
        to_plain(resolve({"algorithm": {"name": name, **NEEDED.get(name, {})}}))
        for name in ALGORITHMS
    ]
    for rng in cases(250):
        tree = changed(rng, rng.choice(whole))
        with one_line():
            config = resolve(tree)
            assert resolve(tomllib.loads(to_toml(config))) == config


def test_settings(cases: Cases) -> None:
    keys = sorted(known_keys())
    for rng in cases(200):
        settings = [
            f"{rng.choice((rng.choice(keys), *WORDS))}{rng.choice('==== .')}{rng.choice(STRANGE)}"
            for _ in range(rng.randrange(1, 4))
        ]
        with one_line():
            resolve(with_settings({}, settings))


def test_files(cases: Cases, tmp_path: Path) -> None:
    path, whole = tmp_path / "c.toml", to_toml(resolve({})).encode()
    for rng in cases(300):
        path.write_bytes(damaged(rng, whole))
        with one_line():
            resolve(read_toml(path))


def test_deep_files_are_refused(tmp_path: Path) -> None:
    for text in ("a = " + "[" * 5000, "a = " + "{a = " * 3000, ".".join("a" * 1000) + " = 1"):
        (tmp_path / "c.toml").write_text(text)
        with one_line():
            resolve(read_toml(tmp_path / "c.toml"))


@pytest.mark.parametrize("part", ["a", '"a"', "'a'", r'"\".\""', "a\t"])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "a = {{ b = 1, {} = 1 }}"])
def test_endless_keys_are_refused_at_once(part: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(line.format(".".join([part] * 20_000)))
    with pytest.raises(
        ConfigError, match=r"c\.toml is not TOML: a key of more than a hundred parts$"
    ):
        read_toml(path)
    with pytest.raises(ValueError, match="a key of more than a hundred parts"):
        Consent().require_code("a", path.read_text())


def test_words_and_numbers_with_dots_are_no_keys(tmp_path: Path) -> None:
    tree = {"models": ".".join("a" * 90), "start": "../" * 200, "mean": [0.5] * 500}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(tree))
    assert read_toml(tmp_path / "c.toml") == tree
