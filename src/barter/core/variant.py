"""Say how a configured method differs from the one its paper describes."""

from __future__ import annotations

import dataclasses
from typing import Any

from barter.core.algorithm import Algorithm

__all__ = ["PAPER_PRESET", "Difference", "describe_variant", "differences_from_paper"]

PAPER_PRESET = "paper"  # the preset that is the published method
MAX_NAMED_FIELDS = 4  # fields that a line names


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field whose value is not the paper's."""

    field: str
    value: object
    paper: object

    def __str__(self) -> str:
        return f"{self.field}={_plain(self.value)} (paper: {_plain(self.paper)})"


def _plain(value: object) -> str:
    return "none" if value is None else str(value)


def differences_from_paper(algorithm: Algorithm[Any, Any]) -> list[Difference]:
    """Compare a method with its preset "paper", field by field.

    Returns:
        The fields whose values differ, in the order of the class; empty for a method without such a
        preset, whose default is the paper's, and for the preset itself. Fields without a default
        never differ.
    """
    kind = type(algorithm)
    if PAPER_PRESET not in kind.presets:
        return []
    published = kind.preset(PAPER_PRESET, _required(algorithm))
    return [
        Difference(field.name, getattr(algorithm, field.name), getattr(published, field.name))
        for field in dataclasses.fields(kind)
        if getattr(algorithm, field.name) != getattr(published, field.name)
    ]


def _required(algorithm: Algorithm[Any, Any]) -> dict[str, object]:
    """Return the values of the fields that have no default.

    Presets cannot be built without them.
    """
    return {
        field.name: getattr(algorithm, field.name)
        for field in dataclasses.fields(algorithm)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def describe_variant(algorithm: Algorithm[Any, Any]) -> str:
    """Return a line on how a run differs from the published method.

    It names the first `MAX_NAMED_FIELDS` fields, and is empty if the run does not differ.

    >>> from barter import ALGORITHMS
    >>> from barter.core.variant import describe_variant
    >>> describe_variant(ALGORITHMS["fedavg"]())
    ''
    >>> describe_variant(ALGORITHMS["fedaf"].preset("paper"))
    ''
    >>> print(describe_variant(ALGORITHMS["fedaf"].preset("paper", {"ipc": 7})))
    FedAF differs from its paper in 1 field, ipc=7 (paper: 50); preset=paper is the published method
    """
    found = differences_from_paper(algorithm)
    if not found:
        return ""
    name = type(algorithm).__name__
    defaults = not _changed(algorithm)
    which = f"{name} with barter's defaults" if defaults else name
    fields = f"{len(found)} field{'s' * (len(found) > 1)}"
    more = f" and {len(found) - MAX_NAMED_FIELDS} more" if len(found) > MAX_NAMED_FIELDS else ""
    listed = ", ".join(map(str, found[:MAX_NAMED_FIELDS])) + more
    return (
        f"{which} differs from its paper in {fields}, {listed}; "
        f"preset={PAPER_PRESET} is the published method"
    )


def _changed(algorithm: Algorithm[Any, Any]) -> bool:
    """Return whether any field has another value than its default.

    Fields without a default, or with a default factory, do not count.
    """
    return any(
        getattr(algorithm, field.name) != field.default
        for field in dataclasses.fields(algorithm)
        if field.default is not dataclasses.MISSING
    )
