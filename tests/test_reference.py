"""The reference is complete: it builds, and every public name has an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
from pathlib import Path

import pytest

import barter
import barter.algorithms

ROOT = Path(__file__).parent.parent
# their files are the paper's: the package's own example shows those that it exports
METHODS = set(barter.algorithms.__all__) & set(barter.__all__)
SHOWN = {"barter": METHODS, **{name: {name} for name in barter.__all__ if name not in METHODS}}


@pytest.mark.parametrize("where", SHOWN)
def test_every_public_name_has_an_example_that_runs(where: str) -> None:
    text = inspect.getdoc(barter if where == "barter" else getattr(barter, where)) or ""
    examples = doctest.DocTestParser().get_doctest(text, {}, where, None, None)
    used = "".join(
        example.source for example in examples.examples if "import " not in example.source
    )
    assert all(re.search(rf"\b{name}\b", used) for name in SHOWN[where])
    said: list[str] = []
    assert not doctest.DocTestRunner().run(examples, out=said.append).failed, "".join(said)


def test_the_reference_builds_and_names_all_that_is_public(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs" / "reference.py"))["build"](tmp_path)
    for page, names in {
        "barter.html": barter.__all__,
        "barter/core/params.html": ["Count", "Fraction", "Positive"],
        "barter/compute/lanes.html": ["keep", "lane_module"],
        "barter/ops/fit.html": ["fit", "Trainer", "adam", "index_batches"],
        "barter/data/partition.html": ["Dirichlet"],
        "barter/trained/model.html": ["TrainedModel"],
    }.items():
        assert set(names) <= set(
            re.findall(r'<section id="(\w+)">', (tmp_path / page).read_text())
        ), page
    links = re.findall(r'href="(barter/[\w/.]+\.html)', (tmp_path / "barter.html").read_text())
    assert {"barter/core.html", "barter/ops.html", "barter/trained/model.html"} <= set(links)
    assert all((tmp_path / link).exists() for link in links)
