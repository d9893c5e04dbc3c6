"""The few exceptions that barter raises on purpose."""

from __future__ import annotations

__all__ = ["BarterError", "CheckpointError", "ClientError", "ConfigError", "Interrupted", "PayloadError"]


class BarterError(Exception):
    """Base of every error that barter raises on purpose."""


class ConfigError(BarterError):
    """The user asked for something that cannot be: the message says what to change."""


class PayloadError(BarterError):
    """A tree that may not cross between parties."""


class ClientError(BarterError):
    """Too few clients answered a call."""


class CheckpointError(BarterError):
    """A run folder that cannot be written, read or continued."""


class Interrupted(BarterError):
    """The user pressed Ctrl-C."""
