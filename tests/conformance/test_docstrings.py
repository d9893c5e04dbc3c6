"""The first line of a docstring is a short sentence of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import barter

ROOT = Path(barter.__file__).parent
LONGEST = 99  # characters of a first line; most are shorter than 80
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(name: str, node: Documented) -> Iterator[tuple[str, Documented]]:
    """Yield a module or class, and the public classes and functions in it, with their names."""
    yield name, node
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_") and not child.name.startswith("__"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from definitions(f"{name}.{child.name}", child)
        else:
            yield f"{name}.{child.name}", child


def problems(path: Path, name: str) -> list[str]:
    """Return the docstrings of a file whose first line is long, open, or not followed by a gap."""
    found = []
    for place, node in definitions(name, ast.parse(path.read_text())):
        # The module of an algorithm begins with its citation, which may take several lines.
        is_citation = isinstance(node, ast.Module) and path.parent.name == "algorithms"
        text = ast.get_docstring(node)
        if text is None or is_citation:
            continue
        first, _, rest = text.partition("\n")
        if len(first) > LONGEST:
            found.append(f"{place}: {len(first)} characters: {first}")
        elif not first.endswith("."):
            found.append(f"{place}: no full stop: {first}")
        elif rest and not rest.startswith("\n"):
            found.append(f"{place}: no empty line after: {first}")
    return found


@pytest.mark.parametrize(
    "package", sorted({path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")})
)
def test_first_lines_of_docstrings_are_short_sentences(package: str) -> None:
    found = []
    for path in sorted((ROOT / package).glob("*.py")):
        found += problems(path, path.relative_to(ROOT).with_suffix("").as_posix())
    assert found == []


def test_the_check_of_docstrings_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        '"""Sound.\n\nMore."""\n\n'
        'class Row:\n    """A row\n    of a table."""\n\n'
        '    def join(self):\n        """Join."""\n\n'
        '    def _hide(self):\n        """hide"""\n\n'
        f'def long():\n    """{"x" * 99}."""\n\n'
        'def crowded():\n    """Do this.\n    And that."""\n'
    )
    assert problems(file, "one") == [
        "one.Row: no full stop: A row",
        f"one.long: 100 characters: {'x' * 99}.",
        "one.crowded: no empty line after: Do this.",
    ]
