"""What a site takes part in, and how much of it: its own word, whatever the coordinator asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from barter.core.errors import ConfigError
from barter.core.params import Positive, check
from barter.core.payload import Payload, nbytes
from barter.setup.config import Config, parsed, plain

__all__ = ["Consent"]

GIVES_ALL = "central"  # the method that is given every private image


@dataclass(frozen=True, kw_only=True)
class Consent:
    """The table [consent] of site.toml."""

    # by name or package.module:Class; empty: all, central for own data excepted
    algorithms: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()  # their steps that this site answers; empty: all
    megabytes: Positive | None = None  # the most that one call may bring; none: any amount
    # the longest that one call may compute; none: as long as the run waits
    seconds: Positive | None = None

    def __post_init__(self) -> None:
        check(self, "consent.")

    def require_code(self, site: str, toml: str) -> None:
        """Refuse a run that names code which is not consented to, before any of it is imported."""
        section = parsed(toml).get("algorithm", "")
        name = str(section.get("name", "") if isinstance(section, Mapping) else section)
        if ":" in name and self.algorithms and name not in self.algorithms:
            raise self._refusal(site, name)

    def require(self, site: str, config: Config, *, own_data: bool) -> None:
        """Refuse a run that asks for more than is consented to."""
        name = str(plain(config)["algorithm"]["name"])
        if self.algorithms and name not in self.algorithms:
            raise self._refusal(site, name)
        if name == GIVES_ALL and own_data and name not in self.algorithms:
            raise ConfigError(
                f"site {site} does not take part in {name}, which asks for every private image, unless its "
                "consent.algorithms names it"
            )
        beyond = [
            method
            for method in config.algorithm.crosses
            if self.methods and method not in self.methods
        ]
        if beyond:
            raise ConfigError(
                f"site {site} does not answer {', '.join(beyond)}, which {name} asks for: consent.methods has "
                f"{', '.join(self.methods)}"
            )

    def _refusal(self, site: str, name: str) -> ConfigError:
        return ConfigError(
            f"site {site} does not take part in {name}: consent.algorithms has {', '.join(self.algorithms)}"
        )

    def require_size(self, site: str, sent: Payload) -> None:
        """Refuse to look at more than was consented to."""
        size = nbytes(sent) / 1e6
        if self.megabytes is not None and size > self.megabytes:
            raise ConfigError(
                f"site {site} was sent {size:.1f} MB, and takes {self.megabytes:g} (consent.megabytes) in a call"
            )

    def within(self, site: str, seconds: float, spent: float) -> float:
        """How long a call may go on of those seconds that the server waits, where some are spent on it already."""
        if self.seconds is None:
            return seconds
        left = self.seconds - spent
        if left <= 0:
            raise ConfigError(
                f"site {site} computes for {self.seconds:g} s (consent.seconds) in a call, and they are spent"
            )
        return seconds if seconds <= left else left
