"""All uses of Flower's undocumented interfaces.

`unsupported_reason` checks them before they are used.

They serve two purposes. Flower's SuperNode starts a process for every message, which takes seconds;
barter's node is one long-running process that uses Flower's own client of the Fleet API. And
Flower's SuperLink cannot separate the ports of sites and control; barter's gateway does.
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
    from flwr.proto.fleet_pb2 import (
        PullMessagesRequest,
        PullMessagesResponse,
        PushMessagesResponse,
    )
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest
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
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.fleet_http_connection import http_request_response

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

__all__ = [
    "HOLD_QUERY",
    "Fleet",
    "NotLetIn",
    "connect",
    "count_missing_parts",
    "node_names",
    "poll_faster",
    "polling_node",
    "receiving_nodes",
    "run_superlink",
    "signing_key",
    "unsupported_reason",
]

TRIED = ("1.41.", "1.42.")
# Backoff in seconds for objects that are still being sent; Flower's own begins at a second.
SOON = {"initial_backoff": 0.05, "backoff_cap": 1.0}
HOLD_QUERY = "hold"  # in the URL of polls that the gateway may hold; Flower ignores it
STALL = 60.0  # seconds within which the next part of a reply must arrive
REPLY_LOST = 4  # Flower's error code after which the server asks again
log = logging.getLogger("barter")


def unsupported_reason() -> str:
    """Return why the installed Flower is not supported; an empty string if it is."""
    installed = version("flwr")
    if not installed.startswith(TRIED):
        tested = " and ".join(f"{prefix}x" for prefix in TRIED)
        return f"flwr {installed} was not tested with barter, which supports {tested}"
    if MISSING:
        return f"flwr {installed}: {MISSING}"
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
        FleetHttpClient._unary_unary: ("path", "rpc_method", "request", "response_type"),
    }
    for function, parameters in used.items():
        accepted = inspect.signature(function).parameters
        missing = [name for name in parameters if name not in accepted]
        if missing:
            return f"flwr {installed}: {function.__name__} does not take {', '.join(missing)}"
    return ""


def poll_faster(seconds: float) -> None:
    """Make Flower's grid poll faster for replies in transfer, with a time limit.

    Flower reads one reply after the other: a site that announces a reply and does not send it would
    block the replies of all other sites until they are late. This patches Flower in this process;
    it does nothing if the installed Flower is not supported.

    Args:
        seconds: The time for an answer. The transfer of a reply may take half of it.
    """
    grid = import_module("flwr.superlink.grid.http_grid")
    if not unsupported_reason() and hasattr(grid, "pull_objects"):
        vars(grid)["pull_objects"] = partial(_pull_in_time, seconds)


def _pull_in_time(
    seconds: float, object_ids: list[str], pull_object_fn: Callable[[str], bytes]
) -> dict[str, bytes]:
    """Pull the parts of a reply.

    Args:
        seconds: The time for an answer. All parts may take half of it, and no pause between two
            parts may take longer than a quarter of it, or than `STALL`.
        object_ids: The parts.
        pull_object_fn: Flower's function that pulls one part.

    Raises:
        ObjectPullError: If it takes longer.
    """
    last = time.monotonic()
    stall = min(STALL, seconds / 4)

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


def node_names(grid: Grid) -> dict[int, str]:
    """Return the names of online nodes whose keys were registered under a name."""
    return {info.node_id: info.name for info in grid.get_nodes() if info.name}


def run_superlink(guarded: Callable[[Any], Any], sockets: list[socket.socket], idle: float) -> None:
    """Run `flower-superlink` with a wrapped application until it ends.

    Proxy headers are disabled. Flower's options are those in `sys.argv`.

    Args:
        guarded: Wraps Flower's application.
        sockets: The sockets to listen on.
        idle: Seconds after which a connection without a request is closed.
    """
    command = import_module("flwr.superlink.cli.flower_superlink")

    def run(app: Any, **options: Any) -> None:
        import uvicorn

        options["proxy_headers"] = False
        options["http"] = _punctual_protocol(idle)
        config = uvicorn.Config(guarded(app), **options)
        uvicorn.Server(config).run(sockets=sockets)

    vars(command)["uvicorn"] = SimpleNamespace(run=run)
    command.flower_superlink()


def _punctual_protocol(idle: float) -> Any:
    """Return uvicorn's HTTP protocol, extended to close idle connections.

    Args:
        idle: Seconds without a request after which a connection is closed.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Punctual(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
        """Uvicorn's protocol, with a limit on the wait for a request's first line."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(idle, self._close_if_idle, None)

        def _close_if_idle(self, earlier_cycle: Any) -> None:
            """Close the connection if no request came since the last check, and none is open."""
            if self.transport.is_closing():
                return
            is_complete = earlier_cycle is None or earlier_cycle.response_complete
            if self.cycle is earlier_cycle and is_complete:
                self.transport.close()
            else:
                self.loop.call_later(idle, self._close_if_idle, self.cycle)

    return Punctual


def receiving_nodes(request: bytes) -> set[int]:
    """Return the ids of the nodes to which the server sends messages by this request."""
    messages = PushAppMessagesRequest.FromString(request).messages_list
    return {message.metadata.dst_node_id for message in messages}


def polling_node(request: bytes) -> int | None:
    """Return the id of the node that asks for messages by this request.

    Returns None if the request is invalid.
    """
    decode_error = import_module("google.protobuf.message").DecodeError
    try:
        return int(PullMessagesRequest.FromString(request).node.node_id)
    except decode_error:
        return None


def count_missing_parts(response: bytes) -> int:
    """Return how many parts of a reply Flower asks for when it accepts the reply."""
    return len(set(PushMessagesResponse.FromString(response).objects_to_push))


def signing_key(app: Any, scope: MutableMapping[str, Any]) -> bytes | None:
    """Return the registered key that signed a request to the Fleet API, or None.

    Args:
        app: Flower's application.
        scope: The request's ASGI scope.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    request = Request({**scope, "state": {}})
    try:
        key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        # Flower's function reads nothing of this message but the key.
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)
        authenticate_node(request)
    except (HTTPException, ValueError):
        return None
    node = app.state.linkstate_factory.state().get_node_id_by_public_key(key)
    return None if node is None else key


class NotLetIn(Exception):
    """The SuperLink refuses a node: key not registered, or connected already.

    Flower answers both with the same code and the same message.
    """


class Fleet:
    """A node's connection to its SuperLink.

    Args:
        connection: What Flower's `http_request_response` yields.
    """

    def __init__(self, connection: tuple[Any, ...]) -> None:
        node, receive, send, _, _, pull_object, push_object, confirm_received = connection
        self.node = node
        self._receive = receive
        self._send = send
        self._pull_object = pull_object
        self._push_object = push_object
        self._confirm_received = confirm_received

    def pull(self) -> Message | None:
        """Return the next message, or none if there is none.

        A message that does not arrive completely is answered with an error after which the server
        sends it again.
        """
        received = self._receive()
        if received is None:
            return None
        head, tree = received
        run = head.metadata.run_id
        id = head.metadata.message_id
        pull_object = partial(self._pull_object, run)
        try:
            parts = [part.object_id for part in iterate_object_tree(tree)]
            contents: dict[str, bytes] = {}
            # The last part is pulled first: once it has arrived, all others have, too.
            for ids in (parts[-1:], parts[:-1]):
                contents |= pull_objects(ids, pull_object, **SOON)  # type: ignore[arg-type]
            self._confirm_received(run, id)
            message = inflate_object_from_contents(id, contents)
            if not isinstance(message, Message):
                raise TypeError(f"it is a {type(message).__name__}, not a message")
        except (Exception, RunNotRunningException) as error:
            log.warning("message %s did not arrive completely: %s", id, error)
            self.push(Message(Error(REPLY_LOST, str(error)), reply_to=head), 0.0)
            return None
        # The id is a hash of the message, so that the transmitted message cannot contain it.
        message.metadata.__dict__["_message_id"] = id
        return message

    def push(self, reply: Message, seconds: float) -> None:
        """Send a reply; log a warning if the server is gone or has given up.

        Args:
            reply: The reply.
            seconds: Seconds that its computation took.
        """
        run = reply.metadata.run_id
        try:
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                parts = get_all_nested_objects(reply)
                wanted, session = self._send(reply, get_object_tree(reply), seconds)
                push_object = partial(self._push_object, run, session)
                push_objects(parts, push_object, object_ids_to_push=wanted)
        except (Exception, RunNotRunningException) as error:
            why = str(error) or type(error).__name__
            log.warning(
                "the reply to message %s was not accepted: %s",
                reply.metadata.reply_to_message_id,
                why,
            )


def _let_polls_be_held() -> None:
    """Make Flower's client mark its polls, so that barter's gateway may hold them."""

    class HeldPolls(FleetHttpClient):
        """Flower's client of the Fleet API whose polls may be held."""

        def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:
            return self._unary_unary(
                path=f"/v1/fleet/pull-messages?{HOLD_QUERY}",
                rpc_method="/flwr.proto.Fleet/PullMessages",
                request=request,
                response_type=PullMessagesResponse,
            )

    vars(import_module("flwr.supernode.fleet_http_connection"))["FleetHttpClient"] = HeldPolls


@contextmanager
def connect(address: str, certificate: Path | None, key: Path | None) -> Iterator[Fleet]:
    """Connect to a SuperLink as a node, with Flower's heartbeat.

    Args:
        address: The SuperLink's address, HOST:PORT.
        certificate: Its CA certificate; none: without TLS.
        key: The node's private key; none: an unregistered node.

    Raises:
        NotLetIn: If the SuperLink refuses the key.
        TypeError: If the key is not an elliptic curve key.
    """
    keys = None
    if key is not None:
        private = load_ssh_private_key(key.read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{key} is not an elliptic curve key, which Flower requires")
        keys = (private, private.public_key())
    root = None if certificate is None else str(certificate)
    _let_polls_be_held()
    try:
        with http_request_response(address, root is None, root, keys) as connection:
            yield Fleet(connection)
    except SystemExit as end:
        # Flower exits in its handler of the error answer, so that the answer is in the context of
        # this exception.
        response = getattr(end.__context__, "response", None)
        answer = FlowerError.from_json(getattr(response, "text", None))
        if answer is not None and answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            raise NotLetIn(answer.message) from end
        raise
