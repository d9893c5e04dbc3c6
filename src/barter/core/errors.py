"""Exceptions that barter raises, and short descriptions of foreign ones."""

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
    "StateError",
    "install_command",
    "is_out_of_memory",
    "locate_error",
    "summarise_error",
]


class BarterError(Exception):
    """Base class of all errors that barter raises on purpose.

    >>> from barter import BarterError, FedAvg
    >>> try:
    ...     FedAvg(fraction=2.0)
    ... except BarterError as error:
    ...     print(error)
    fraction=2.0: must be float > 0 and <= 1 (C: fraction of clients sampled per round)
    """


class ConfigError(BarterError):
    """An invalid configuration or request; the message says what to change."""


class PayloadError(BarterError):
    """A payload that must not be sent or accepted: wrong type, shape, dtype or range."""


class ClientError(BarterError):
    """Fewer clients answered a call than `min_clients` requires."""

    answered: int = 0  # the number of clients that did


class CheckpointError(BarterError):
    """A file or folder that cannot be written, read or resumed from."""


class PrivacyError(BarterError):
    """A release that would exceed the privacy budget."""


class StateError(BarterError):
    """A round that left NaN or infinity in the server's state."""


class Interrupted(BarterError):
    """The user pressed Ctrl-C."""


def install_command(extra: str) -> str:
    """Return the command that installs an optional dependency group of barter.

    It needs a checkout, since barter is not on PyPI.

    >>> from barter.core.errors import install_command
    >>> install_command("report")
    "pip install '.[report]' in a checkout of barter"
    """
    return f"pip install '.[{extra}]' in a checkout of barter"


def summarise_error(error: BaseException) -> str:
    """Return a foreign exception's type and message in one line of at most 60 words.

    Such messages may contain line breaks, and those of torch fill a screen. The type is left out of
    OSError, ImportError and AttributeError with a message, which is clear without it.
    """
    words = " ".join(str(error).split()[:60])
    is_clear = words and isinstance(error, OSError | ImportError | AttributeError)
    return words if is_clear else f"{type(error).__name__}: {words}"


def locate_error(error: BaseException) -> str:
    """Return `summarise_error` with the file and line that raised the exception.

    Raises:
        ValueError: If the exception has no traceback, because it was never raised.
    """
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{summarise_error(error)} ({frame.f_code.co_filename}:{line})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the CPU or on a GPU.

    Torch raises RuntimeError for both, so its errors are recognised by their messages.
    """
    phrases = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
    )
