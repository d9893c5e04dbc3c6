"""Serve Flower's SuperLink so that other machines reach only the sites' API.

Flower serves its control API (which sites may join, which app runs) at the same port as its sites,
without authentication, and reads a whole request before it checks the sender. Here the control API
listens at 127.0.0.1 only, and sites have a port of their own. Access is decided by the port of the
connection, never by the address that a client, or a proxy, claims.
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
from barter.flower.flwr_internals import run_superlink, signing_key

__all__ = ["Gate", "main", "size_limit"]

FOR_SITES = "/v1/fleet/"
# An answer consists of one request to HEAD and several to PART.
HEAD = FOR_SITES + "push-messages"
PUSH_OBJECT = FOR_SITES + "push-object"
STRANGERS = 64_000  # largest request in bytes without a registered key
# Largest request in bytes with a registered key. Flower's chunks have 5 MB, and all that it does
# not split is small.
MEMBERS = 32_000_000
REQUEST_SECONDS = 120.0  # seconds within which a request must arrive completely
IDLE = 20.0  # seconds that a connection may be open without a request
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Scope]]
Send: TypeAlias = Callable[[Scope], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """An error: a request is refused, with this HTTP status."""

    def __init__(self, status: int) -> None:
        self.status = status


class Gate:
    """ASGI application that filters the requests to Flower's.

    At the control port all requests pass. At other ports only requests of sites pass, within limits
    of bytes and seconds.

    Args:
        app: Flower's application.
        control: The control port.
        most: Returns the largest size in bytes of one answer of a site.
        known: Returns the registered key that a request is signed with; none if there is none.
    """

    def __init__(
        self,
        app: App,
        control: int,
        most: Callable[[], int],
        known: Callable[[Scope], bytes | None],
    ) -> None:
        self.app = app
        self.control = control
        self.most = most
        self.known = known
        self.sent: Counter[bytes] = Counter()  # key -> bytes received of the site's current answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, port = scope.get("server") or ("", None)
        if scope["type"] == "lifespan" or port == self.control:
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                body = await self._read_admitted(scope, receive)
            except Refused as refused:
                headers = [(b"content-length", b"0"), (b"connection", b"close")]
                await send(
                    {"type": "http.response.start", "status": refused.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": b""})
                return
            unread = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Scope:
                return unread.pop() if unread else await receive()

            await self.app(scope, replay, send)

    async def _read_admitted(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body of a site's request.

        Raises:
            Refused: With status 403 if the request is not for the API of sites, 413 if it is too
                large, 408 if it takes longer than `REQUEST_SECONDS`, 400 if the site disconnects.
                Requests without a registered key may have `STRANGERS` bytes, others `MEMBERS`, and
                all parts of an answer together `most()`.
        """
        if not scope["path"].startswith(FOR_SITES):
            raise Refused(403)
        length = dict(scope["headers"]).get(b"content-length", b"")
        # A request without a length may become arbitrarily large.
        size = int(length) if length.isdigit() else MEMBERS + 1
        needs_key = size > STRANGERS or scope["path"] in (HEAD, PUSH_OBJECT)
        sender = await asyncio.to_thread(self.known, scope) if needs_key else None
        limit = STRANGERS if sender is None else MEMBERS
        if size > limit and length:
            raise Refused(413)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
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
    """Read the body of a request, of `limit` bytes at most.

    Raises:
        Refused: With status 413 if it is larger, 400 if the site disconnects.
    """
    body = bytearray()
    more = True
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
    """Run `flower-superlink` with a separate port for the sites."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sites", required=True, help="HOST:PORT to listen on for sites")
    parser.add_argument("--port", type=int, required=True, help="control port, at 127.0.0.1 only")
    parser.add_argument("--most", type=int, default=2 * 10**9, help="largest answer in bytes")
    parser.add_argument(
        "--largest", type=Path, help="file with the largest size in bytes of the current answers"
    )
    args, flower_args = parser.parse_known_args()
    sites = Address.read(args.sites)
    sys.argv = ["flower-superlink", "--host", "127.0.0.1", "--port", str(args.port), *flower_args]
    sockets = [_listen("127.0.0.1", args.port), _listen(sites.host, sites.port)]
    most = partial(size_limit, args.most, args.largest)

    def guard(app: Any) -> Gate:
        return Gate(app, args.port, most, partial(signing_key, app))

    run_superlink(guard, sockets, IDLE)


def size_limit(most: int, largest: Path | None) -> int:
    """Return the largest size of an answer in bytes: the file's, at most `most`.

    Args:
        most: The limit of the configuration.
        largest: The file with the size of the current answers. None, a missing or an invalid file
            stand for no further limit.
    """
    try:
        return min(most, int(largest.read_text())) if largest is not None else most
    except (OSError, ValueError):
        return most


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


if __name__ == "__main__":
    main()
