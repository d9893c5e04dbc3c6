"""Cases from a seed, as many as the command line has time for."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.limits import Cases

log = logging.getLogger("fuzz")


@pytest.fixture
def cases(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Cases:
    """Sources of chance: so many that are always the same, or other ones for as long as the command line says."""
    seconds, seed = (
        request.config.getoption("--fuzz-seconds"),
        request.config.getoption("--fuzz-seed"),
    )

    def each(count: int) -> Iterator[random.Random]:
        end = time.monotonic() + (seconds or 0.0)
        for i in itertools.count():
            if time.monotonic() > end if seconds else i == count:
                record_property("cases", i)
                return
            log.warning("case %d of --fuzz-seed %d", i, seed)  # shown where one fails
            yield random.Random(f"{seed} {i}")

    return each
