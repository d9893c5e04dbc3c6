"""Mechanisms by their names in a configuration."""

from __future__ import annotations

from dataclasses import MISSING, fields

from barter.core.errors import ConfigError
from barter.core.params import build_dataclass, did_you_mean
from barter.privacy.dffke_noise import Paper
from barter.privacy.mechanisms import ClassMeans, Gaussian, Laplace, Mechanism, Response, Withhold

__all__ = ["MECHANISMS", "mechanism_of"]

KINDS: tuple[type[Mechanism], ...] = (Gaussian, Laplace, Response, ClassMeans, Paper, Withhold)
MECHANISMS = {kind.name: kind for kind in KINDS}


def mechanism_of(text: str, part: str) -> Mechanism:
    """Build a mechanism from its text in a configuration.

    Args:
        text: Name and options, such as "gaussian clip=4".
        part: The part that it protects, for messages.

    Raises:
        ConfigError: If the name or an option is unknown, missing or out of range.
    """
    name, *options = text.split() or [""]
    if name not in MECHANISMS:
        raise ConfigError(
            f"privacy.parts: {part}={text!r}: unknown mechanism: {did_you_mean(name, MECHANISMS)}"
        )
    values: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"privacy.parts: {part}={text!r}: write key=value, such as clip=4")
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = value
    kind = MECHANISMS[name]
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise ConfigError(f"privacy.parts: {part}={text!r}: {name} needs {field.name}=...")
    try:
        return build_dataclass(kind, values)
    except ConfigError as error:
        raise ConfigError(f"privacy.parts: {part}={text!r}: {error}") from None
