"""A site's limits on runs, enforced at the site whatever the server asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from barter.core.errors import ConfigError
from barter.core.params import Positive, check_fields
from barter.core.payload import Payload
from barter.core.wire_codec import decoded_nbytes
from barter.setup.config import Config, parse_toml, to_plain
from barter.setup.trust import code_names

__all__ = ["Consent"]

GIVES_ALL = "central"  # the baseline that uploads every private image


@dataclass(frozen=True, kw_only=True)
class Consent:
    """The table [consent] of site.toml."""

    # allowed algorithms, by name or package.module:Class; empty: all, except central where the
    # site has its own data
    algorithms: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()  # allowed client methods of the algorithms; empty: all
    megabytes: Positive | None = None  # largest request of one call, in MB; none: no limit
    # networks that the run may choose for this site by package.module:factory, if `model` is empty;
    # models of the zoo need no consent
    models: tuple[str, ...] = ()
    seconds: Positive | None = None  # longest computation of one call; none: the run's timeout

    def __post_init__(self) -> None:
        check_fields(self, "consent.")

    def require_code(self, site: str, toml: str, own: Collection[str] = ()) -> None:
        """Refuse a run that names code without consent, before anything is imported.

        Args:
            site: The site's name, for messages.
            toml: The run's configuration.
            own: Code that the site itself names, such as its network.

        Raises:
            ConfigError: If `algorithms` is not empty, and the run names code as package.module:name
                that is neither there, in `models`, nor the site's own. The algorithm itself must be
                in `algorithms`.
        """
        tree = parse_toml(toml)
        section = tree.get("algorithm", "")
        name = str(section.get("name", "") if isinstance(section, Mapping) else section)
        if not self.algorithms:
            return
        if ":" in name and name not in self.algorithms:
            raise self._refusal(site, name)
        for code in code_names(tree):
            if code not in (*self.algorithms, *self.models, *own):
                raise ConfigError(
                    f"site {site} does not import {code[:200]}, which the run names: "
                    f"consent.algorithms has {', '.join(self.algorithms)}"
                )

    def require(self, site: str, config: Config, *, own_data: bool) -> None:
        """Refuse a run whose algorithm or client methods exceed the consent.

        Args:
            site: The site's name, for messages.
            config: The run's configuration.
            own_data: Whether the site trains on its own data, not on a share of the run's.

        Raises:
            ConfigError: If `algorithms` or `methods` is not empty and lacks the algorithm or one of
                its methods, or if the algorithm is `central`, which uploads all images, the site
                has its own data, and `algorithms` does not name it.
        """
        name = str(to_plain(config)["algorithm"]["name"])
        if self.algorithms and name not in self.algorithms:
            raise self._refusal(site, name)
        if name == GIVES_ALL and own_data and name not in self.algorithms:
            raise ConfigError(
                f"site {site} does not take part in {name}, which asks for every private image, "
                "unless its consent.algorithms names it"
            )
        not_allowed = [
            method
            for method in config.algorithm.crosses
            if self.methods and method not in self.methods
        ]
        if not_allowed:
            raise ConfigError(
                f"site {site} does not answer {', '.join(not_allowed)}, which {name} asks for: "
                f"consent.methods has {', '.join(self.methods)}"
            )

    def _refusal(self, site: str, name: str) -> ConfigError:
        return ConfigError(
            f"site {site} does not take part in {name}: "
            f"consent.algorithms has {', '.join(self.algorithms)}"
        )

    def require_model(self, site: str, own: str, name: str) -> None:
        """Refuse a network that the site does not allow, before it is imported.

        Args:
            site: The site's name, for messages.
            own: The architecture that the site chose itself; empty: it left it open.
            name: The architecture that the run wants.

        Raises:
            ConfigError: If the site chose another one; or if it left it open, and `name` is
                package.module:factory that is not in `models`.
        """
        if own and name != own:
            raise ConfigError(f"site {site} has the network {own}, and the run wants {name}")
        if not own and ":" in name and name not in self.models:
            raise ConfigError(
                f"site {site} does not import {name}: set model in its site.toml, or name it in "
                "consent.models"
            )

    def require_size(self, site: str, sent: Payload) -> None:
        """Refuse a request that is larger than `megabytes` when it is decoded.

        Args:
            site: The site's name, for messages.
            sent: The call's arguments as they were received, still encoded.

        Raises:
            ConfigError: If it is.
            PayloadError: If its encoding is malformed.
        """
        size = decoded_nbytes(sent) / 1e6
        if self.megabytes is not None and size > self.megabytes:
            raise ConfigError(
                f"site {site} was sent {size:.1f} MB in a call, and accepts {self.megabytes:g} "
                "(consent.megabytes)"
            )

    def within(self, site: str, seconds: float, spent: float) -> float:
        """Return for how many seconds a call may compute.

        It is the smaller of what the server waits and what is left of the consent's `seconds`;
        without these, what the server waits.

        Args:
            site: The site's name, for messages.
            seconds: How long the server waits for the answer.
            spent: Seconds spent on earlier attempts at the same call.

        Raises:
            ConfigError: If the earlier attempts have used up the consent's `seconds`.
        """
        if self.seconds is None:
            return seconds
        left = self.seconds - spent
        if left <= 0:
            raise ConfigError(
                f"site {site} computes for at most {self.seconds:g} s (consent.seconds) in a call, "
                "and this call has used them up"
            )
        return seconds if seconds <= left else left
