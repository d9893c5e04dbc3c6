"""What the fuzzers share: damage to bytes, and limits that a case must stay within."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from barter.core.errors import BarterError

MEMORY = 2**30  # bytes that a case may take beside what the process has
SECONDS = 20  # that a case may take
EDGES = (0, 1, 2**7 - 1, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)

Cases = Callable[[int], Iterator[random.Random]]


class Hang(BaseException):
    """A case that takes too long; nobody who handles errors may take it for one."""


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, lost, repeated or put elsewhere."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, width = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 8))
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + width] = (rng.choice(EDGES) % 256**width).to_bytes(
                    width, rng.choice(("little", "big"))
                )
            case 2:
                del out[at : at + rng.randrange(1, 64)]
            case 3:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
            case 4:
                del out[rng.randrange(len(out) + 1) :]
            case _:
                out[at:at] = rng.randbytes(rng.randrange(1, 16))
    return bytes(out)


@contextmanager
def within_limits() -> Iterator[None]:
    """A case that takes much memory or time fails."""

    def hung(*_: object) -> None:
        raise Hang

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    alarm = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def one_line(*, starved: bool = False) -> Iterator[None]:
    """Inside, all goes well or ends in an error of ours, of one line; for want of memory only where that may be."""
    caught = None
    try:
        with within_limits():
            yield
    except BarterError as error:
        caught = error
    if caught is not None:
        assert len(str(caught).splitlines()) == 1, str(caught)
        assert len(str(caught)) < 12_000, "the reason, not the file"
        assert starved or not isinstance(caught.__cause__, MemoryError), (
            f"memory was asked for before: {caught}"
        )
