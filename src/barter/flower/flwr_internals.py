"""What barter uses of Flower beyond its documented interface: all of it is here, and looked at before it is used.

A node that stays: Flower's SuperNode starts a process for every message, which takes seconds. The Fleet API, by which
it speaks to its SuperLink, is simple, and Flower's own code for it serves a node that stays as well. And a SuperLink
with a door, which Flower has not.
"""

from __future__ import annotations

import inspect
import logging
import socket
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.serverapp import Grid

try:
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectUnavailableError,
        inflate_object_from_contents,
        pull_objects,
        push_objects,
    )
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode.fleet_http_connection import http_request_response

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

__all__ = [
    "Fleet",
    "NotLetIn",
    "connect",
    "hurry",
    "names",
    "registered",
    "run_superlink",
    "strange",
]

TRIED = ("1.41.", "1.42.")
SOON = {
    "initial_backoff": 0.05,
    "backoff_cap": 1.0,
}  # seconds until one looks again for what is still on its way
STALL = 60.0  # seconds in which a part of a reply must come
REPLY_LOST = 4  # Flower's code: the server asks again
log = logging.getLogger("barter")


def strange() -> str:
    """What of the installed Flower is not as it is known here; empty where all is well."""
    found = version("flwr")
    if not found.startswith(TRIED):
        return f"flwr {found} was not tried, those that were are {' and '.join(f'{known}x' for known in TRIED)}"
    if MISSING:
        return f"flwr {found}: {MISSING}"
    used: dict[Callable[..., Any], tuple[str, ...]] = {
        http_request_response: (
            "server_address",
            "insecure",
            "root_certificates",
            "authentication_keys",
        ),
        pull_objects: ("object_ids", "pull_object_fn", *SOON),
        push_objects: ("objects", "push_object_fn", "object_ids_to_push"),
        inflate_object_from_contents: ("object_id", "object_contents"),
    }
    for function, parameters in used.items():
        if lacking := [
            name for name in parameters if name not in inspect.signature(function).parameters
        ]:
            return f"flwr {found}: {function.__name__} does not take {', '.join(lacking)}"
    return ""


def hurry(seconds: float) -> None:
    """Whoever reads a reply that is still being sent looks again at once, not a second later; and not for ever.

    Flower reads one reply after the other: a site that announces one and sends no more of it would keep the server from
    those of all others, until none of them is in time.
    """
    grid = import_module("flwr.superlink.grid.http_grid")
    if not strange() and hasattr(grid, "pull_objects"):
        vars(grid)["pull_objects"] = partial(_pulled, seconds)


def _pulled(
    seconds: float, object_ids: list[str], pull_object_fn: Callable[[str], bytes]
) -> dict[str, bytes]:
    """The parts of a reply, which may take half of the time that there is for an answer, and stand still for less."""
    last, stall = time.monotonic(), min(STALL, seconds / 4)

    def pull(id: str) -> bytes:
        nonlocal last
        try:
            part = pull_object_fn(id)
        except ObjectUnavailableError:
            if time.monotonic() - last > stall:
                raise ObjectPullError(id, f"nothing came for {stall:g} s") from None
            raise
        last = time.monotonic()
        return part

    return pull_objects(
        object_ids,
        pull,
        **SOON,  # type: ignore[arg-type]
        max_tries_per_object=None,
        max_time=seconds / 2,
    )


def names(grid: Grid) -> dict[int, str]:
    """The names under which the keys of nodes that are online were registered, of those that have one."""
    return {info.node_id: info.name for info in grid.get_nodes() if info.name}


def run_superlink(guarded: Callable[[Any], Any], sockets: list[socket.socket], idle: float) -> None:
    """Be `flower-superlink`, with its application guarded, at these sockets, and with no faith in what proxies say.

    Who is connected and has nothing to ask is not kept for longer than `idle` seconds.
    """
    command = import_module("flwr.superlink.cli.flower_superlink")

    def run(app: Any, **options: Any) -> None:
        import uvicorn

        config = uvicorn.Config(
            guarded(app), **{**options, "proxy_headers": False, "http": _punctual(idle)}
        )
        uvicorn.Server(config).run(sockets=sockets)

    vars(command)["uvicorn"] = SimpleNamespace(run=run)
    command.flower_superlink()


def _punctual(idle: float) -> Any:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Punctual(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
        """Uvicorn's, which would wait for the first line of a request for ever."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(idle, self._look, None)

        def _look(self, before: Any) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self.loop.call_later(idle, self._look, self.cycle)

    return Punctual


def registered(app: Any, scope: MutableMapping[str, Any]) -> bytes | None:
    """The key that a request to the Fleet API is signed with, if it is one of a node's that was let in."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    request = Request({**scope, "state": {}})
    try:
        key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        request.state.protobuf_request = ActivateNodeRequest(
            public_key=key
        )  # whose key is asked for, and no more
        authenticate_node(request)
    except (HTTPException, ValueError):
        return None
    return (
        None if app.state.linkstate_factory.state().get_node_id_by_public_key(key) is None else key
    )


class NotLetIn(Exception):
    """The SuperLink refuses a node: its key is not registered, or the same key is connected already.

    Flower answers both with the same code and the same words.
    """


class Fleet:
    """A node's connection to its SuperLink: it takes messages, and gives replies."""

    def __init__(self, connection: tuple[Any, ...]) -> None:
        self.node, self._receive, self._send, _, _, self._pull, self._push, self._confirm = (
            connection
        )

    def pull(self) -> Message | None:
        """The next message, if there is one. What cannot be had whole is answered so, and asked for again."""
        if (found := self._receive()) is None:
            return None
        head, tree = found
        run, id = head.metadata.run_id, head.metadata.message_id
        try:
            parts = [part.object_id for part in iterate_object_tree(tree)]
            contents: dict[str, bytes] = {}
            for some in (
                parts[-1:],
                parts[:-1],
            ):  # what is sent last is waited for first: then all are there
                contents |= pull_objects(some, partial(self._pull, run), **SOON)  # type: ignore[arg-type]
            self._confirm(run, id)
            message = inflate_object_from_contents(id, contents)
            if not isinstance(message, Message):
                raise TypeError(f"a {type(message).__name__} is no message")
        except (Exception, RunNotRunningException) as error:
            log.warning("message %s did not arrive whole: %s", id, error)
            self.push(Message(Error(REPLY_LOST, str(error)), reply_to=head), 0.0)
            return None
        message.metadata.__dict__["_message_id"] = id  # what travels cannot hold its own hash
        return message

    def push(self, reply: Message, seconds: float) -> None:
        """Send a reply that took so long; a server that is gone, or has given up, is not told."""
        run = reply.metadata.run_id
        try:
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                parts = get_all_nested_objects(reply)
                wanted, session = self._send(reply, get_object_tree(reply), seconds)
                push_objects(parts, partial(self._push, run, session), object_ids_to_push=wanted)
        except (Exception, RunNotRunningException) as error:
            why = str(error) or type(error).__name__
            log.warning(
                "the reply to message %s was not taken: %s", reply.metadata.reply_to_message_id, why
            )


@contextmanager
def connect(address: str, certificate: Path | None, key: Path | None) -> Iterator[Fleet]:
    """Be a node of the SuperLink at an address, with a heartbeat; without certificate and key, an unknown one.

    Raises:
        NotLetIn: If the SuperLink refuses the key.
    """
    keys = None
    if key is not None:
        private = load_ssh_private_key(key.read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{key} is not a key of the kind that Flower takes")
        keys = private, private.public_key()
    vouching = None if certificate is None else str(certificate)
    try:
        with http_request_response(address, vouching is None, vouching, keys) as connection:
            yield Fleet(connection)
    except SystemExit as end:
        # Flower ends the process where it handles the answer: what was answered is this exception's context.
        response = getattr(end.__context__, "response", None)
        answer = FlowerError.from_json(getattr(response, "text", None))
        if answer is not None and answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            raise NotLetIn(answer.message) from end
        raise
