"""Flower's SuperLink behind a door: other machines reach what sites need, at a port of its own, and nothing else.

Flower serves its control (who may join, which app runs) at the same port as its sites, asks nobody who they are, and
reads whatever is sent before it looks at the sender. Here control listens at 127.0.0.1 only. Which of the two somebody
may have is decided by the port he came to, never by the address that he, or a proxy, says he has.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from barter.flower.address import Address
from barter.flower.flwr_internals import registered, run_superlink

__all__ = ["Gate", "at_most", "main"]

FOR_SITES = "/v1/fleet/"
HEAD, PART = (
    FOR_SITES + "push-messages",
    FOR_SITES + "push-object",
)  # the two that an answer consists of
STRANGERS = 64_000  # bytes of a request of somebody who has not shown a registered key
MEMBERS = 32_000_000  # of one who has: Flower's chunks have 5 MB, what it does not cut is small
PATIENCE = 120.0  # seconds that all of a request may take
IDLE = 20.0  # seconds that somebody may be connected without a request
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Scope]]
Send: TypeAlias = Callable[[Scope], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request is not let in, with this status of HTTP's."""

    def __init__(self, status: int) -> None:
        self.status = status


class Gate:
    """At the control's port everything is let in; elsewhere, requests of sites, as long as they are small and quick.

    `most` says how many bytes an answer of a site may have in all.
    """

    def __init__(
        self,
        app: App,
        control: int,
        most: Callable[[], int],
        known: Callable[[Scope], bytes | None],
    ) -> None:
        self.app, self.control, self.most, self.known = app, control, most, known
        self.sent: Counter[bytes] = Counter()  # bytes of the answer that a site is sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope.get("server") or ("", None))[1] == self.control:
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                body = await self._admitted(scope, receive)
            except Refused as refused:
                headers = [(b"content-length", b"0"), (b"connection", b"close")]
                await send(
                    {"type": "http.response.start", "status": refused.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": b""})
                return
            whole = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Scope:
                return whole.pop() if whole else await receive()

            await self.app(scope, again, send)

    async def _admitted(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that may come in."""
        if not scope["path"].startswith(FOR_SITES):
            raise Refused(403)
        said = dict(scope["headers"]).get(b"content-length", b"")
        size = (
            int(said) if said.isdigit() else MEMBERS + 1
        )  # who does not say may send as much as he wants to
        asked = size > STRANGERS or scope["path"] in (HEAD, PART)
        sender = await asyncio.to_thread(self.known, scope) if asked else None
        limit = STRANGERS if sender is None else MEMBERS
        if size > limit and said:
            raise Refused(413)
        try:
            async with asyncio.timeout(PATIENCE):
                body = await _read(receive, limit)
        except TimeoutError:
            raise Refused(408) from None
        if sender is not None:
            if scope["path"] == HEAD:
                self.sent[sender] = 0
            self.sent[sender] += len(body)
            if self.sent[sender] > self.most():
                raise Refused(413)
        return body


async def _read(receive: Receive, limit: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400)
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise Refused(413)
    return bytes(body)


def main() -> None:
    """Be `flower-superlink`, with another port for the sites."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sites", required=True, help="HOST:PORT, where sites come to")
    parser.add_argument(
        "--port", type=int, required=True, help="where this machine controls the SuperLink"
    )
    parser.add_argument("--most", type=int, default=2 * 10**9, help="bytes that an answer may have")
    parser.add_argument(
        "--largest", type=Path, help="a file that says how many those that are asked for can have"
    )
    args, of_flower = parser.parse_known_args()
    sites = Address.read(args.sites)
    sys.argv = ["flower-superlink", "--host", "127.0.0.1", "--port", str(args.port), *of_flower]
    listening = [_listen("127.0.0.1", args.port), _listen(sites.host, sites.port)]
    most = partial(at_most, args.most, args.largest)
    run_superlink(
        lambda app: Gate(app, args.port, most, lambda scope: registered(app, scope)),
        listening,
        IDLE,
    )


def at_most(most: int, largest: Path | None) -> int:
    """How many bytes an answer may have: as many as the file says, if it says so, and never more than `most`."""
    try:
        return min(most, int(largest.read_text())) if largest is not None else most
    except (OSError, ValueError):
        return most


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


if __name__ == "__main__":
    main()
