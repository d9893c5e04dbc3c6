"""The few exceptions that barter raises on purpose."""

from __future__ import annotations

__all__ = [
    "BarterError",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "Interrupted",
    "PayloadError",
    "PrivacyError",
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
