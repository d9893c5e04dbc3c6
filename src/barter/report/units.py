"""Choose units of time for a page, so that no axis is labelled "100m s"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from barter.runs.progress import format_duration

__all__ = ["Unit", "format_seconds", "time_unit"]


class Unit(NamedTuple):
    """A unit of time."""

    name: str
    seconds: float  # its length
    start: float  # the shortest time in seconds that is given in this unit


# Up to three minutes are easy to read in seconds; times below a second are not.
UNITS = (
    Unit("ms", 1e-3, 0.0),
    Unit("s", 1.0, 1.0),
    Unit("min", 60.0, 180.0),
    Unit("h", 3600.0, 3 * 3600.0),
)


def time_unit(seconds: Iterable[float]) -> Unit:
    """Return the unit that suits the longest of several times.

    It is the largest one whose `start` that time reaches; milliseconds without times.
    """
    longest = max(seconds, default=0.0)
    return next(unit for unit in reversed(UNITS) if longest >= unit.start)


def format_seconds(seconds: float) -> str:
    """Format a time with its unit; short times get more digits.

    >>> from barter.report.units import format_seconds
    >>> format_seconds(0.0312), format_seconds(1.57), format_seconds(75.2)
    ('31 ms', '1.6 s', '1 min 15 s')
    """
    if round(seconds, 3) < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else format_duration(seconds)
