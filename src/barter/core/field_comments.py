"""Comments of dataclass fields, read from the source of their classes.

A field's meaning stands in the comment on its line, where a reader of the class looks for it:

    lr: Positive = 0.05  # η: learning rate of SGD

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
from io import StringIO
from typing import Any

__all__ = ["read_comments"]


def read_comments(cls: type[Any]) -> dict[str, str]:
    """Return the comment of each annotated field: on its line, or else directly above it."""
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(ancestor))
        except (OSError, TypeError):  # A class defined at a prompt has no source file.
            continue
        comments = {
            token.start[0]: token.string.lstrip("# ").strip()
            for token in tokenize.generate_tokens(StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        above: list[str] = []
        for number, line in enumerate(source.splitlines(), start=1):
            if line.strip().startswith("#"):
                above.append(comments.get(number, ""))
                continue
            name = line.strip().split(":")[0]
            if name in ancestor.__annotations__:
                meaning = comments.get(number) or " ".join(above)
                if meaning:
                    found[name] = meaning
            above = []
    return found
