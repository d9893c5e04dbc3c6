"""Serve Flower's SuperLink so that other machines reach only the sites' API.

Flower serves its control API (which sites may join, which app runs) at the same port as its sites,
without authentication, and reads a whole request before it checks the sender. Here the control API
listens at 127.0.0.1 only, and sites have a port of their own. Access is decided by the port of the
connection, never by the address that a client, or a proxy, claims.

A request to Flower costs its single process much time, so polls that would find nothing are held
until there is something (`LongPoll`).
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from barter.flower.address import Address
from barter.flower.flwr_internals import (
    HOLD_QUERY,
    count_missing_parts,
    polling_node,
    receiving_nodes,
    run_superlink,
    signing_key,
)
from barter.flower.heartbeat import HOLD, LONGEST

__all__ = ["Gate", "LongPoll", "main", "size_limit"]

FOR_SITES = "/v1/fleet/"
# An answer consists of one request to HEAD and several to PUSH_OBJECT.
HEAD = FOR_SITES + "push-messages"
PUSH_OBJECT = FOR_SITES + "push-object"
SITE_POLL = FOR_SITES + "pull-messages"
FOR_SERVER = "/v1/runtime/"
SERVER_SEND = FOR_SERVER + "push-messages"
SERVER_POLL = FOR_SERVER + "pull-messages"
SERVER = 0  # the reader of replies; sites have other ids
REMEMBERED = 1000  # polls of which is known that they found nothing
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


class LongPoll:
    """Holds polls that would find nothing until there is something to read.

    A reader is a node's id, or `SERVER`. A poll is held if its reader was told that there is nothing
    and nothing has come since. So a poll without an earlier one is never held, and what this class
    does not notice is found when the poll's time is over.
    """

    def __init__(self) -> None:
        self.arrivals: Counter[int] = Counter()  # reader -> messages that have arrived for it
        self.found_nothing: dict[bytes, int] = {}  # poll -> its reader's arrivals at that time
        self.addressed: set[int] = set()  # nodes that the server is sending messages to
        self.missing: dict[bytes, int] = {}  # site's key -> parts of its reply that are missing
        self._arrived = asyncio.Event()

    def announce(self, readers: Iterable[int]) -> None:
        """Note that messages for these readers have arrived, and let their polls pass."""
        self.arrivals.update(readers)
        arrived = self._arrived
        self._arrived = asyncio.Event()
        arrived.set()

    def announce_messages(self) -> None:
        """Announce the messages that the server has been sending to nodes (`addressed`).

        Call this when the server polls for replies: by then they are sent completely.
        """
        if self.addressed:
            self.announce(self.addressed)
            self.addressed = set()

    def expect_parts(self, sender: bytes, count: int) -> None:
        """Note how many parts of a site's reply are to come; if none, announce the reply."""
        self.missing[sender] = count
        if count == 0:
            self.announce([SERVER])

    def note_part(self, sender: bytes) -> None:
        """Note a part of a site's reply; announce the reply with the last one."""
        self.missing[sender] = self.missing.get(sender, 0) - 1
        if self.missing[sender] == 0:
            self.announce([SERVER])

    async def hold(self, reader: int, poll: bytes, receive: Receive, seconds: float) -> bool:
        """Wait until a poll may find something, `seconds` at most.

        Args:
            reader: The poll's reader.
            poll: The poll's body.
            receive: The request's ASGI channel, by which a disconnection is noticed.
            seconds: The longest wait.

        Returns:
            Whether the poll can be passed on; False if its sender has disconnected meanwhile.
        """
        if self.found_nothing.get(poll) != self.arrivals[reader]:
            return True
        deadline = asyncio.get_running_loop().time() + seconds
        gone = asyncio.ensure_future(receive())  # The request was read: what comes is its end.
        try:
            while self.found_nothing.get(poll) == self.arrivals[reader]:
                left = deadline - asyncio.get_running_loop().time()
                arrival = asyncio.ensure_future(self._arrived.wait())
                done, _ = await asyncio.wait(
                    {arrival, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                arrival.cancel()
                if gone in done:
                    return False
                if not done:
                    break
            return True
        finally:
            gone.cancel()

    def note_result(self, poll: bytes, arrivals: int, *, empty: bool) -> None:
        """Remember whether a poll found nothing.

        Args:
            poll: The poll's body.
            arrivals: The arrivals of its reader when it passed.
            empty: Whether it found nothing.
        """
        self.found_nothing.pop(poll, None)
        if empty:
            self.found_nothing[poll] = arrivals
            if len(self.found_nothing) > REMEMBERED:
                del self.found_nothing[next(iter(self.found_nothing))]


class Gate:
    """ASGI application that filters the requests to Flower's, and holds polls.

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
        self.polls = LongPoll()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, port = scope.get("server") or ("", None)
        if scope["type"] == "lifespan" or port == self.control:
            if scope["type"] == "http" and scope["path"] in (SERVER_SEND, SERVER_POLL):
                await self._serve_server(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                body, sender = await self._read_admitted(scope, receive)
            except Refused as refused:
                headers = [(b"content-length", b"0"), (b"connection", b"close")]
                await send(
                    {"type": "http.response.start", "status": refused.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": b""})
                return
            await self._serve_site(scope, body, sender, receive, send)

    async def _serve_server(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request by which the server sends messages, or polls for replies."""
        try:
            body = await _read(receive, sys.maxsize)
        except Refused:  # It has disconnected.
            return
        if scope["path"] == SERVER_POLL:
            self.polls.announce_messages()
            await self._poll(scope, body, SERVER, LONGEST, receive, send)
        else:
            status, _ = await self._pass_on(scope, body, receive, send)
            if status == 200:
                self.polls.addressed |= receiving_nodes(body)

    async def _serve_site(
        self, scope: Scope, body: bytes, sender: bytes | None, receive: Receive, send: Send
    ) -> None:
        """Pass on a request of a site, which was admitted."""
        node = None
        if scope["path"] == SITE_POLL and scope.get("query_string") == HOLD_QUERY.encode():
            node = polling_node(body)
        if node is not None:
            await self._poll(scope, body, node, HOLD, receive, send)
            return
        status, answer = await self._pass_on(scope, body, receive, send)
        if sender is not None and status == 200:
            if scope["path"] == HEAD:
                self.polls.expect_parts(sender, count_missing_parts(answer))
            elif scope["path"] == PUSH_OBJECT:
                self.polls.note_part(sender)

    async def _poll(
        self, scope: Scope, body: bytes, reader: int, seconds: float, receive: Receive, send: Send
    ) -> None:
        """Pass on a poll, once it may find something or has been held for `seconds`."""
        if await self.polls.hold(reader, body, receive, seconds):
            arrivals = self.polls.arrivals[reader]
            status, answer = await self._pass_on(scope, body, receive, send)
            if status == 200:
                self.polls.note_result(body, arrivals, empty=not answer)

    async def _pass_on(
        self, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> tuple[int, bytes]:
        """Let Flower answer a request that was read; return the answer's status and body."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0
        answer = bytearray()

        async def replay() -> Scope:
            return unread.pop() if unread else await receive()

        async def note_and_send(message: Scope) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        # Parts of messages may be large, and nothing of the answer is needed.
        is_part = scope["path"].endswith("-object")
        await self.app(scope, replay, send if is_part else note_and_send)
        return (200 if is_part else status), bytes(answer)

    async def _read_admitted(self, scope: Scope, receive: Receive) -> tuple[bytes, bytes | None]:
        """Read the body of a site's request; return it and the key that signed it.

        The key is verified for requests that send messages and for large ones, otherwise it is None.

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
        return body, sender


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
