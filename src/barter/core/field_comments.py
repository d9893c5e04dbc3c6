"""Comments of dataclass fields, read from the source of their classes.

A field's meaning is the comment on its line, where a reader of the class expects it:

    lr: Positive = 0.05  # η: learning rate of SGD

A class with many fields groups them under headings, each a comment that begins with two dashes:

    # -- The paper's fields

`barter show` and error messages show the same text. Python keeps no comments, so the source is read
again here. `dataclasses.field(metadata=...)` or `Annotated[..., Doc(...)]` would need no source but
would turn each line of an algorithm's fields into three. A class without source, such as one that
was typed at a prompt, has no comments, and nothing else depends on them.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import tokenize
from functools import cache
from io import StringIO
from typing import Any

__all__ = ["read_comments", "read_headings"]

HEADING = "-- "  # begins a comment that is the heading of the fields below it


def read_comments(cls: type[Any]) -> dict[str, str]:
    """Return the comment of each annotated field, on its line or directly above it.

    Fields without a comment are left out. If a subclass defines a field anew, its comment counts.
    """
    return _read(cls)[0]


def read_headings(cls: type[Any]) -> dict[str, str]:
    """Return the heading of each annotated field.

    Fields above the first heading of their class have "". A field that a subclass defines anew
    keeps its place, and so its first heading.
    """
    return _read(cls)[1]


def _read(cls: type[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the comments and the headings of a dataclass and its bases by field."""
    meanings: dict[str, str] = {}
    headings: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if dataclasses.is_dataclass(ancestor):
            own_meanings, own_headings = _read_own(ancestor)
            meanings |= own_meanings
            headings = own_headings | headings
    return meanings, headings


@cache
def _read_own(cls: type[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the comments and the headings of the fields that a class defines itself.

    They are cached, as `inspect.getsource` parses the whole module of a class.
    """
    meanings: dict[str, str] = {}
    headings: dict[str, str] = {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # A class defined at a prompt has no source file.
        return meanings, headings
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    heading = ""
    above: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if line.strip().startswith("#"):
            comment = comments.get(number, "")
            if comment.startswith(HEADING):
                heading = comment.removeprefix(HEADING)
                above = []
            else:
                above.append(comment)
            continue
        name = line.strip().split(":")[0]
        if name in cls.__annotations__:
            meaning = comments.get(number) or " ".join(above)
            if meaning:
                meanings[name] = meaning
            headings.setdefault(name, heading)
        above = []
    return meanings, headings
