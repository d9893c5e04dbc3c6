"""Flower's SuperLink with a gate: from other machines only what sites need, and sites must hold a registered key.

Flower serves its control (who may join, which app runs) at the same port as its sites, and asks nobody who they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from typing import Any, TypeAlias

import flwr.superlink.main as superlink
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware

__all__ = ["Gate", "main"]

FOR_SITES = "/v1/fleet/"
Scope: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[[Scope, Any, Callable[[Scope], Awaitable[None]]], Awaitable[None]]


class Gate:
    """Refuses requests from other machines that are not a site's."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Callable[[Scope], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(FOR_SITES) or _from_here(scope.get("client")):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _from_here(client: tuple[str, int] | None) -> bool:
    try:
        return client is not None and ip_address(client[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Be `flower-superlink`, with the gate outermost."""
    inner = superlink._get_middleware
    superlink._get_middleware = lambda: [Middleware(Gate), *inner()]
    flower_superlink()


if __name__ == "__main__":
    main()
