"""Prepare docstrings for the reference: an extension of griffe, which mkdocstrings reads code with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

# A doctest: a prompt, and all lines until the next blank one.
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*(?:\n\n>>> .*(?:\n(?!\s*$).*)*)*", re.M)
TRAILING = re.compile(r"  # (.+)$")


class Docstrings(griffe.Extension):
    """Show doctests as code, and the comments of fields as their documentation."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of a package, which has been read."""
        self.prepare(pkg)

    def prepare(self, obj: griffe.Object) -> None:
        """Change the docstring of an object, and those of its members."""
        if obj.docstring is None and obj.is_attribute:
            text = field_comment(obj)
            if text:
                obj.docstring = griffe.Docstring(text, lineno=obj.lineno, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
        for member in obj.members.values():
            if not member.is_alias:
                self.prepare(member)


def fence_doctests(text: str) -> str:
    """Put each doctest of a docstring into a block of code."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def field_comment(field: griffe.Object) -> str:
    """Return the comment behind a field, or the comment lines above it."""
    if field.name.startswith("_") or field.lineno is None or not isinstance(field.filepath, Path):
        return ""
    lines = field.filepath.read_text().splitlines()
    trailing = TRAILING.search(lines[(field.endlineno or field.lineno) - 1])
    if trailing:
        return "" if trailing[1].startswith(("noqa", "type:")) else trailing[1]
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return " ".join(above)
