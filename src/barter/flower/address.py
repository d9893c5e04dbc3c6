"""Where a coordinator is: a host and a port, as people write them. Needs nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from barter.core.errors import ConfigError

__all__ = ["Address", "require_name"]

LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True)
class Address:
    """A host, which is a name or an address of version 4 or 6, and a port."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """HOST:PORT; an address of version 6 stands in brackets."""
        host, _, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        wrong = f"address {text!r}: write HOST:PORT, as the sites reach it"
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{wrong}; a port is a number from 1 to 65535")
        if bare != host or ":" in bare:
            if bare == host:
                raise ConfigError(
                    f"{wrong}; an address of version 6 stands in brackets, as in [2001:db8::7]:8443"
                )
            if not _is_ip(bare, 6):
                raise ConfigError(f"{wrong}; {bare!r} is not an address of version 6")
        elif not _is_ip(bare, 4) and not _is_name(bare):
            raise ConfigError(f"{wrong}; {bare!r} is neither a host's name nor an address")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_ip(text: str, version: int) -> bool:
    try:
        return "%" not in text and ip_address(text).version == version
    except ValueError:
        return False


def _is_name(text: str) -> bool:
    """Whether a host may be called so: the last word of a name is not a number, or it would be a mistaken address."""
    labels = text.removesuffix(".").split(".")
    return len(text) < 254 and all(map(LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def require_name(name: str) -> str:
    """A name that a site may have: it is a folder, a word in messages, and part of what others read."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"site name {name[:60]!r}: use letters, digits, - and _, 40 at most, a letter or digit first"
        )
    return name
