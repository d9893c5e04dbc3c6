"""Parse the coordinator's address and validate site names. Standard library only."""

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
    """A host (DNS name, IPv4 or IPv6 address) and a port."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """Parse HOST:PORT; an IPv6 address stands in brackets.

        Raises:
            ConfigError: If the text is not a valid address; the message says which part is wrong.
        """
        host, _, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        wrong = f"address {text!r}: write HOST:PORT, as the sites reach it"
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{wrong}; a port is a number from 1 to 65535")
        if bare != host or ":" in bare:
            if bare == host:
                raise ConfigError(
                    f"{wrong}; put an IPv6 address in brackets, as in [2001:db8::7]:8443"
                )
            if not _is_ip(bare, 6):
                raise ConfigError(f"{wrong}; {bare!r} is not an IPv6 address")
        elif not _is_ip(bare, 4) and not _is_name(bare):
            raise ConfigError(f"{wrong}; {bare!r} is neither a host name nor an IPv4 address")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_ip(text: str, version: int) -> bool:
    """Return whether a text is an IP address of a version, without zone (%eth0)."""
    try:
        return "%" not in text and ip_address(text).version == version
    except ValueError:
        return False


def _is_name(text: str) -> bool:
    """Return whether the text is a valid host name.

    A name whose last label is a number is rejected: it is a mistyped IPv4 address.
    """
    labels = text.removesuffix(".").split(".")
    return len(text) < 254 and all(map(LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def require_name(name: str) -> str:
    """Return a site's name if it is valid.

    The name is used as a folder, in messages, and in files that other parties read.

    Raises:
        ConfigError: If it is empty, has other characters than ASCII letters, digits, - and _, or
            more than 40, or begins with - or _.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"site name {name[:60]!r}: use letters, digits, - and _, 40 at most, "
            "a letter or digit first"
        )
    return name
