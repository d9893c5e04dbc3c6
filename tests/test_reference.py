"""Every public name has an example that runs; tests/test_documents.py builds the reference."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest

import barter
import barter.algorithms

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
