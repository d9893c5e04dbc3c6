"""The few exceptions that barter raises on purpose."""

from __future__ import annotations

import traceback

__all__ = [
    "BarterError",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "Interrupted",
    "PayloadError",
    "PrivacyError",
    "in_short",
    "install_command",
    "lacks_memory",
    "with_place",
]


class BarterError(Exception):
    """Base of every error that barter raises on purpose.

    >>> from barter import BarterError, FedAvg
    >>> try:
    ...     FedAvg(fraction=2.0)
    ... except BarterError as error:
    ...     print(error)
    fraction=2.0: must be float > 0 and <= 1 (C: share of clients per round)
    """


class ConfigError(BarterError):
    """The user asked for something that cannot be: the message says what to change."""


class PayloadError(BarterError):
    """A tree that may not cross between parties."""


class ClientError(BarterError):
    """Too few clients answered a call."""


class CheckpointError(BarterError):
    """A run folder that cannot be written, read or continued."""


class PrivacyError(BarterError):
    """What was asked for would tell more of the data than the budget allows."""


class Interrupted(BarterError):
    """The user pressed Ctrl-C."""


def install_command(extra: str) -> str:
    """Return how to install what an extra of the package needs; barter itself is not on PyPI.

    >>> from barter.core.errors import install_command
    >>> install_command("report")
    "pip install '.[report]' in a checkout of barter"
    """
    return f"pip install '.[{extra}]' in a checkout of barter"


def in_short(error: BaseException) -> str:
    """Somebody else's exception in one line: what it quotes may hold anything, and torch's go on for a screen."""
    words = " ".join(str(error).split()[:60])
    speaks_for_itself = words and isinstance(error, OSError | ImportError | AttributeError)
    return words if speaks_for_itself else f"{type(error).__name__}: {words}"


def with_place(error: BaseException) -> str:
    """The same, and where it was raised."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{in_short(error)} ({frame.f_code.co_filename}:{line})"


def lacks_memory(error: BaseException) -> bool:
    """Whether the machine had no room for what was asked; torch says so in words only."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error)
    )
