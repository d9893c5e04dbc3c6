"""What is installed is all that is needed, and what messages tell people to install exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from barter.cli.common import EXTRAS
from barter.version import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "barter"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OFFERED = set(PROJECT["project"]["optional-dependencies"])


def test_a_wheel_holds_every_file() -> None:
    files = {
        path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["barter"]
    data = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    packages = {path.parent for path in files if path.name == "__init__.py"}
    assert not [
        path for path in files - data if path.suffix != ".py" or path.parent not in packages
    ]


@pytest.mark.parametrize("chosen", ["", "ACTIVE"])
def test_threads_that_wait_sleep_unless_somebody_wants_otherwise(chosen: str) -> None:
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {"OMP_WAIT_POLICY": chosen} if chosen else {}
    say = f"import sys, barter, os; print('torch' in sys.modules, *map(os.environ.get, {ours}))"
    said = subprocess.run(
        [sys.executable, "-c", say], env=environment, capture_output=True, text=True, check=True
    )
    wanted = ["False", chosen, "None"] if chosen else ["False", "PASSIVE", "10000"]
    assert said.stdout.split() == wanted, "before torch is loaded, which reads it"


def test_extras_that_are_named_exist() -> None:
    texts = [
        *SOURCE.rglob("*.py"),
        *SOURCE.glob("*/templates/*"),
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    command = r"(?:pip install[^\n]*\[([\w,]+)\]')|install_command\([\"']([\w,]+)[\"']\)"
    found = [match for path in texts for match in re.findall(command, path.read_text())]
    named = {one or other for one, other in found}
    assert named >= {"onnx", "report", "privacy", "flower"}
    assert {extra for names in named for extra in names.split(",")} | {
        extra for _, extra in EXTRAS.values()
    } <= OFFERED


def test_nobody_is_told_to_install_from_pypi() -> None:
    """Not before the package is there: the command would fail, or install somebody else's."""
    texts = [*SOURCE.rglob("*.py"), *SOURCE.glob("*/templates/*"), *ROOT.glob("[!C]*.md")]
    texts += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    advice = re.compile(r"pip install[^\n]*?(?<![\w/])barter[-_]fl(?!-[\d])")
    assert [path for path in texts if advice.search(path.read_text())] == []


def test_the_lowest_versions_are_those_of_the_metadata() -> None:
    """`make test-lowest` tests what is promised: a bound that is raised here and not there would go unnoticed."""
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = {
        match[1]: match[2]
        for group in groups
        for match in [re.match(r"([\w-]+)>=([\d.]+)", requirement) for requirement in group]
        if match
    }
    bounds.pop("flwr")  # pins versions of its own

    def padded(version: str) -> list[int]:
        parts = [int(part) for part in version.split(".")]
        return parts + [0] * (3 - len(parts))

    assert {name: padded(low) for name, low in bounds.items()} == {
        name: padded(version) for name, version in pinned.items()
    }


def test_the_documents_say_how_to_install() -> None:
    page = (ROOT / "docs" / "get-started.md").read_text()
    assert f"dist/barter_fl-{__version__}-py3-none-any.whl" in page
    table = page.split("| extra | for |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == OFFERED
