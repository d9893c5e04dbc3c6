"""The door of a SuperLink: who comes to which port, how much is read of whom, and for how long."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message as FleetMessage
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.routers.runtime import router as runtime_router
from flwr.superlink import main as superlink
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from barter.core.errors import ConfigError
from barter.flower import gateway
from barter.flower.address import Address, require_name
from barter.flower.flwr_internals import HOLD_QUERY, connect
from barter.flower.gateway import MEMBERS, STRANGERS, Gate, LongPoll, size_limit
from barter.flower.supervise import FLOWER, free_port

CONTROL, SITES = 9091, 8443
PULL, HEAD, PART = "/v1/fleet/pull-messages", "/v1/fleet/push-messages", "/v1/fleet/push-object"


class Door:
    """A gate, an application behind it that reads all it is sent, and requests to it."""

    def __init__(self, most: int = 10**9) -> None:
        self.bodies: list[bytes] = []
        self.gate = Gate(
            self._application,
            CONTROL,
            lambda: most,
            lambda scope: dict(scope["headers"]).get(b"key"),
        )

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def ask(
        self,
        path: str,
        *parts: bytes,
        port: int = SITES,
        kind: str = "http",
        pause: float = 0,
        **headers: Any,
    ) -> Any:
        said: list[Any] = []
        coming = list(parts or [b""])

        async def receive() -> Any:
            await asyncio.sleep(pause)
            if not coming:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming)}

        async def send(message: Any) -> None:
            said.append(message.get("status", message.get("code")))

        given = [
            (name.replace("_", "-").encode(), str(value).encode())
            for name, value in headers.items()
        ]
        scope = {
            "type": kind,
            "path": path,
            "server": ("::", port),
            "client": ("127.0.0.1", 1),
            "headers": given,
        }
        asyncio.run(self.gate(scope, receive, send))
        return said[0]


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/runtime/pull-task-input", "/docs", "/v1/fleet"]
)
def test_control_has_a_port_of_its_own(path: str) -> None:
    door = Door()
    assert door.ask(path) == 403, "also of one who seems to be here: proxies and tunnels are"
    assert door.ask(path, kind="websocket") == 1008
    assert door.bodies == []
    assert door.ask(path, b"x", port=CONTROL) == 200
    assert door.ask(PULL, b"y", b"z") == 200
    assert door.bodies == [b"x", b"yz"]


def test_of_strangers_little_is_read() -> None:
    door = Door()
    for path in (PULL, HEAD, PART):
        assert door.ask(path, b"x" * STRANGERS, content_length=STRANGERS) == 200
        assert door.ask(path, content_length=STRANGERS + 1) == 413, "nothing is read"
        assert door.ask(path, b"x" * STRANGERS, b"x") == 413, "who does not say how much"
        assert door.ask(path, b"x" * STRANGERS, b"x", content_length=1) == 413, (
            "nor tells the truth"
        )
        assert door.ask(path, b"x" * (STRANGERS + 1), content_length=STRANGERS + 1, key="k") == 200
        assert door.ask(path, content_length=MEMBERS + 1, key="k") == 413
    assert [len(body) for body in door.bodies] == 3 * [STRANGERS, STRANGERS + 1]


def test_an_answer_has_an_end() -> None:
    door = Door(most=100)
    assert [door.ask(PART, b"x" * 40, content_length=40, key="k") for _ in range(3)] == [
        200,
        200,
        413,
    ]
    assert door.ask(PART, b"x" * 40, content_length=40, key="other") == 200
    assert door.ask(HEAD, b"x" * 40, content_length=40, key="k") == 200, "the next answer"
    assert [door.ask(PART, b"x" * 40, content_length=40, key="k") for _ in range(2)] == [200, 413]


def test_an_answer_ends_where_its_contract_does(tmp_path: Path) -> None:
    largest = tmp_path / "largest"
    assert size_limit(100, None) == size_limit(100, largest) == 100
    for text, most in (("40", 40), ("400", 100), ("", 100), ("nonsense", 100)):
        largest.write_text(text)
        assert size_limit(100, largest) == most


def test_who_is_slow_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    assert door.ask(PULL, b"x", b"y", pause=0.01) == 200
    monkeypatch.setattr(gateway, "REQUEST_SECONDS", 0.05)
    assert door.ask(PULL, b"x", b"y", pause=0.04) == 408
    assert door.bodies == [b"xy"]


SEND, REPLIES = "/v1/runtime/push-messages", "/v1/runtime/pull-messages"


def poll_of(node: int) -> bytes:
    return bytes(PullMessagesRequest(node=Node(node_id=node)).SerializeToString())


def messages_for(*nodes: int) -> bytes:
    metadata = [Metadata(dst_node_id=node) for node in nodes]
    messages = [FleetMessage(metadata=data) for data in metadata]
    return bytes(PushAppMessagesRequest(messages_list=messages).SerializeToString())


class Office:
    """A gate in an event loop, an application behind it with prepared answers, and requests."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.passed: list[str] = []  # paths of requests that came to the application
        self.gate = Gate(
            self._application, CONTROL, lambda: 10**9, lambda scope: dict(scope["headers"])[b"key"]
        )

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        assert not (await receive())["more_body"]
        self.passed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.answers.get(scope["path"], b"")})

    def ask(
        self, path: str, body: bytes = b"", query: str = "", stays: bool = True
    ) -> asyncio.Task[None]:
        """Begin a request, and let the gate do all that it does without waiting."""
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not coming and stays:
                await asyncio.sleep(60)
            return coming.pop() if coming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "path": path,
            "query_string": query.encode(),
            "server": ("::", CONTROL if "/runtime/" in path else SITES),
            "headers": [(b"key", b"k"), (b"content-length", str(len(body)).encode())],
        }
        return asyncio.ensure_future(self.gate(scope, receive, send))


async def settle() -> None:
    await asyncio.sleep(0.02)


def test_a_poll_of_a_node_is_held_until_its_messages_are_complete() -> None:
    async def play(office: Office) -> None:
        def held() -> asyncio.Task[None]:
            return office.ask(PULL, poll_of(7), HOLD_QUERY)

        await held()
        assert office.passed.pop() == PULL, "whether there is something is not known yet"
        poll = held()
        await settle()
        assert not office.passed
        await office.ask(PULL, poll_of(7))
        assert office.passed.pop() == PULL, "Flower's own node would push its replies too late"
        await office.ask(SEND, messages_for(8, 9))
        await office.ask(REPLIES)
        await settle()
        assert not poll.done(), "messages of others"
        await office.ask(SEND, messages_for(7))
        await settle()
        assert not poll.done(), "their parts are not there yet"
        office.passed.clear()
        office.answers[PULL] = b"a message"
        await office.ask(REPLIES, b"of the next call")
        await poll
        assert sorted(office.passed) == sorted([PULL, REPLIES])
        await held()
        assert office.passed.pop() == PULL, "there may be another message"

    asyncio.run(play(Office()))


def test_a_poll_is_held_for_a_limited_time_and_dropped_with_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(office: Office) -> None:
        await office.ask(PULL, poll_of(7), HOLD_QUERY)
        await office.ask(PULL, poll_of(7), HOLD_QUERY, stays=False)
        assert office.passed == [PULL], "a message would be lost with the connection"
        monkeypatch.setattr(gateway, "HOLD", 0.05)
        await office.ask(PULL, poll_of(7), HOLD_QUERY)
        assert office.passed == [PULL, PULL]
        await office.ask(PULL, b"\xff", HOLD_QUERY)
        assert office.passed == [PULL, PULL, PULL], "Flower says what is wrong with it"

    asyncio.run(play(Office()))


@pytest.mark.parametrize("parts", [0, 2])
def test_the_servers_poll_is_held_until_a_reply_is_complete(parts: int) -> None:
    async def play(office: Office) -> None:
        await office.ask(REPLIES, b"x")
        poll = office.ask(REPLIES, b"x")
        await office.ask(REPLIES, b"y")
        await settle()
        assert office.passed == [REPLIES, REPLIES], "the other asks for other replies"
        wanted = PushMessagesResponse(objects_to_push=[str(part) for part in range(parts)])
        office.answers[HEAD] = wanted.SerializeToString()
        await office.ask(HEAD)
        for _ in range(parts):
            await settle()
            assert not poll.done()
            await office.ask(PART)
        await poll
        assert office.passed[-1] == REPLIES

    asyncio.run(play(Office()))


def test_few_polls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "REMEMBERED", 2)
    polls = LongPoll()
    for poll in (b"a", b"b", b"a", b"c"):
        polls.note_result(poll, 0, empty=True)
    assert list(polls.found_nothing) == [b"a", b"c"]


def test_flower_keeps_its_routes_where_the_gate_looks_for_them() -> None:
    paths = {getattr(route, "path", "") for route in superlink.fleet_router.routes}
    assert {PULL, HEAD, PART} <= paths
    paths = {getattr(route, "path", "") for route in runtime_router.routes}
    assert {SEND, REPLIES} <= paths
    assert superlink.control_router.prefix == "/v1/control"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """A real SuperLink, told to believe every proxy; its ports for control and for sites."""
    home, (control, sites) = tmp_path_factory.mktemp("link"), (free_port(), free_port())
    env = {**os.environ, **FLOWER, "FLWR_HOME": str(home), "FORWARDED_ALLOW_IPS": "*"}
    arguments = _arguments(control, sites)
    code = "import sys; from barter.flower import gateway; gateway.IDLE = 1.0; gateway.HOLD = 0.4"
    code += f"; sys.argv[1:] = {arguments}"
    with (home / "log").open("wb") as log:
        link = subprocess.Popen(
            [sys.executable, "-c", f"{code}; gateway.main()"], env=env, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 60
    while not _reached(control):
        assert link.poll() is None, (home / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield control, sites
    link.terminate()
    link.wait(20)


def _arguments(control: int, sites: int) -> list[str]:
    where = ["--sites", f"127.0.0.1:{sites}", "--port", str(control)]
    return [
        *where,
        "--insecure",
        "--isolation",
        "process",
        "--disable-runtime-dependency-installation",
    ]


def _reached(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_real_superlink_is_reached_where_it_should_be(ports: tuple[int, int]) -> None:
    control, sites = (f"http://127.0.0.1:{port}" for port in ports)
    forged = {
        "x-forwarded-for": "127.0.0.1",
        "forwarded": "for=127.0.0.1",
        "content-type": "application/protobuf",
    }
    with httpx.Client(timeout=60, headers=forged) as client:
        assert client.post(f"{sites}/v1/control/list-runs").status_code == 403
        assert client.post(f"{control}/v1/control/list-runs").status_code == 200


def test_a_real_superlink_reads_more_of_those_it_knows(ports: tuple[int, int]) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    named = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    node = FleetHttpClient.from_server_address(f"127.0.0.1:{ports[1]}", True, None, [named, signed])
    node._client.timeout = httpx.Timeout(60)
    much = PullMessagesRequest(node=Node(node_id=1), message_ids=["x" * STRANGERS])
    with node, pytest.raises(httpx.HTTPStatusError) as stranger:
        node.PullMessages(much)
    assert stranger.value.response.status_code == 413
    node = FleetHttpClient.from_server_address(f"127.0.0.1:{ports[1]}", True, None, [named, signed])
    node._client.timeout = httpx.Timeout(60)
    with node:
        much.node.node_id = node.RegisterNode(
            RegisterNodeFleetRequest(public_key=signed._public_key_bytes)
        ).node_id
        assert not node.PullMessages(much).messages_list


def test_a_real_superlink_holds_the_second_poll_of_a_node(ports: tuple[int, int]) -> None:
    with connect(f"127.0.0.1:{ports[1]}", None, None) as fleet:
        assert fleet.pull() is None
        begin = time.monotonic()
        assert fleet.pull() is None
        assert time.monotonic() - begin >= 0.4


def test_a_real_superlink_keeps_nobody_who_says_nothing(ports: tuple[int, int]) -> None:
    with socket.create_connection(("127.0.0.1", ports[1]), timeout=30) as silent:
        silent.sendall(b"POST /v1/fl")
        assert silent.recv(1) == b"", "it is closed"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("fl.example.org:8443", "fl.example.org", 8443),
        ("192.0.2.7:1", "192.0.2.7", 1),
        ("[2001:db8::7]:65535", "2001:db8::7", 65535),
        ("localhost:80", "localhost", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.read(text) == Address(host, port)
    assert str(Address.read(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("here", "a port is a number from 1 to 65535"),
        ("host:0", "a port is a number"),
        ("host:65536", "a port is a number"),
        ("host:8o", "a port is a number"),
        ("host:٣", "a port is a number"),
        (":8443", "'' is neither a host name nor an IPv4 address"),
        ("2001:db8::7:8443", r"put an IPv6 address in brackets, as in \[2001:db8::7\]:8443"),
        ("[fl.example.org]:8443", "'fl.example.org' is not an IPv6 address"),
        ("[::1:8443", "in brackets"),
        ("256.0.0.1:8443", "'256.0.0.1' is neither"),
        ("a b:8443", "'a b' is neither"),
        ("https://fl.example.org:8443", "in brackets|is neither"),
        ("-x.org:8443", "'-x.org' is neither"),
    ],
)
def test_what_is_no_address(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"address .*write HOST:PORT.*{said}"):
        Address.read(text)


@pytest.mark.parametrize(
    "name", ["", "-a", "a/b", "..", "a b", "ä", "a\n", "x" * 41, "a.b", "\x1b[2J"]
)
def test_names_are_plain_and_short(name: str) -> None:
    with pytest.raises(ConfigError, match="site name .*: use letters, digits, - and _, 40 at most"):
        require_name(name)
    assert require_name("North_2-b") == "North_2-b"
    assert require_name("x" * 40)
