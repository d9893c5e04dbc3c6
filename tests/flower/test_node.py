"""A site's node on Flower: messages come in, replies go out, and what is used of Flower is looked at first."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

from barter.core.encodings import ENCODINGS, IMAGE_ENCODINGS, encode_tensor
from barter.core.errors import PayloadError
from barter.core.wire_codec import decode_payload
from barter.flower import flwr_internals, node, supervise
from barter.flower.client_app import IN_A_PIECE, from_records, to_records
from barter.flower.codec import decode, encode
from barter.flower.flwr_internals import Fleet, unsupported_reason
from barter.flower.frames import Blob, Frame
from barter.flower.handshake import Setup
from barter.flower.heartbeat import NOT_LET_IN, ProgressFile, poll_interval
from tests.flower.test_frames import serving
from tests.forked import forked, status, until


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Link:
    """A SuperLink in memory, as Flower's connection shows it to a node."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Message, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.confirmed: list[str] = []
        self.replies: list[tuple[Message, list[str]]] = []
        self.pushed: dict[str, bytes] = {}
        self.known: set[str] = set()  # what need not be pushed again
        self.closed = False  # whether who asks next has to go

    def send(self, content: RecordDict, kind: str = "train.call", ttl: float = 5.0) -> str:
        message = Message(content, 7, kind, ttl=ttl)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.waiting.append((message, get_object_tree(message)))
        self.objects |= {id: part.deflate() for id, part in get_all_nested_objects(message).items()}
        return message.metadata.message_id

    def fleet(self) -> Fleet:
        return Fleet(
            (7, self._receive, self._take, None, None, self._pull, self._push, self._confirm)
        )

    def _receive(self) -> tuple[Message, Any] | None:
        if self.closed:
            raise SystemExit
        return self.waiting.pop(0) if self.waiting else None

    def _pull(self, run: int, id: str) -> bytes:
        if id not in self.objects:
            raise ObjectPullError(id, "gone")
        return self.objects[id]

    def _confirm(self, run: int, id: str) -> None:
        self.confirmed.append(id)

    def _take(self, reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        ids = [part.object_id for part in flwr_internals.iterate_object_tree(tree)]
        self.replies.append((reply, ids))
        return set(ids) - self.known, "session"

    def _push(self, run: int, session: str, id: str, content: bytes) -> None:
        assert session == "session"
        self.pushed[id] = content


@pytest.fixture
def link() -> Iterator[Link]:
    return Link()


def test_a_message_comes_whole_and_its_reply_goes_whole(link: Link) -> None:
    id = link.send(to_records(encode({"a": [1, 2.5]})))
    fleet = link.fleet()
    message = fleet.pull()
    assert message is not None
    assert decode(from_records(message.content)) == {"a": [1, 2.5]}
    assert link.confirmed == [id]
    assert fleet.pull() is None
    fleet.push(Message(to_records(encode({"b": 3})), reply_to=message), 0.5)
    ((head, ids),) = link.replies
    assert (head.metadata.reply_to_message_id, head.metadata.src_node_id) == (id, 7)
    assert set(link.pushed) == set(ids)
    arrived = flwr_internals.inflate_object_from_contents(head.metadata.message_id, link.pushed)
    assert isinstance(arrived, Message)
    assert decode(from_records(arrived.content)) == {"b": 3}


def test_what_the_superlink_has_is_not_sent_again(link: Link) -> None:
    link.send(to_records(encode("x")))
    fleet = link.fleet()
    message = fleet.pull()
    assert message is not None
    reply = Message(to_records(encode({"b": 3})), reply_to=message)
    link.known = set(get_all_nested_objects(reply)) - {reply.object_id}
    fleet.push(reply, 0.0)
    assert set(link.pushed) == set(link.replies[0][1]) - link.known


def test_a_message_that_does_not_arrive_whole_is_asked_for_again(link: Link) -> None:
    id = link.send(to_records(encode("x")))
    link.objects.popitem()
    assert link.fleet().pull() is None
    ((reply, _),) = link.replies
    assert (reply.error.code, reply.metadata.reply_to_message_id) == (4, id)
    assert link.confirmed == []


@pytest.mark.parametrize(
    "error", [ConnectionError("no such run"), RunNotRunningException("no such run")]
)
def test_a_reply_that_nobody_takes_is_not_the_end(
    link: Link, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    link.send(to_records(encode("x")))
    fleet = link.fleet()
    message = fleet.pull()
    assert message is not None

    def gone(*_: Any) -> Any:
        raise error

    fleet._send = gone
    fleet.push(Message(to_records(encode("y")), reply_to=message), 0.0)
    assert "was not accepted: no such run" in caplog.text


def test_a_node_asks_the_worker_and_says_why_there_is_no_answer(link: Link, tmp_path: Path) -> None:
    lost = serving(tmp_path / "door", lambda frame: Frame(frame.header.upper(), {}))
    for content, kind, door in (
        (to_records(Frame("hello", {})), "train.call", "door"),
        (to_records(Frame("hello", {})), "train.other", "door"),
        (RecordDict(), "train.call", "door"),
        (to_records(Frame("hello", {})), "train.call", "nowhere"),
    ):
        link.send(content, kind, ttl=0.6)
        message = link.fleet().pull()
        assert message is not None
        link.fleet().push(node.answer_message(message, tmp_path / door), 0.0)
    well, *others = [reply for reply, _ in link.replies]
    assert not well.has_error()
    said = [reply.error for reply in others]
    assert [error.code for error in said] == [2, 2, 2]
    assert "train.other is not a message type that a site answers" in said[0].reason
    assert "PayloadError: a message of another program" in said[1].reason
    assert "the site's worker is not there" in said[2].reason
    assert lost == [], "the worker hears of the end of every call"


def test_a_node_without_a_heartbeat_ends(
    tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def connect(*_: object) -> Iterator[Fleet]:
        def heartbeat() -> None:
            raise OSError("500 Internal Server Error")

        threading.Thread(target=heartbeat, daemon=True).start()
        yield link.fleet()

    def ended() -> int:
        signal.alarm(20)
        with suppress(SystemExit):
            node.main()
        return 7

    monkeypatch.setattr(node, "connect", connect)
    monkeypatch.setattr(
        sys, "argv", ["node", "--superlink", "127.0.0.1:1", "--door", str(tmp_path / "door")]
    )
    assert status(forked(ended, tmp_path / "said")) == 7


@pytest.mark.parametrize("size", [0, 100, IN_A_PIECE + 1])
def test_a_frame_comes_as_it_went_in_a_piece_or_in_chunks(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    frame = Frame("header", {"t0": Blob("uint8", (0,), b""), "t1": Blob("uint8", (size,), data)})
    records = to_records(frame)
    assert ("bulk" in records) == (size > 0)
    assert isinstance(records.get("bulk"), ArrayRecord) == (size > IN_A_PIECE)
    arrived = from_records(records)
    assert arrived.header == "header"
    assert {name: (b.dtype, b.shape, bytes(b.data)) for name, b in arrived.blobs.items()} == {
        name: (b.dtype, b.shape, b.data) for name, b in frame.blobs.items()
    }


@pytest.mark.parametrize(
    ("tree", "bulk"),
    [
        ({"header": "h", "table": '[["t0", "uint8", [3], 3]]'}, {"bulk": b"1234"}),
        ({"header": "h", "table": "[]"}, {"bulk": "text"}),
        ({"header": "h", "table": "[]"}, {}),
        ({"header": "h", "table": "[1]"}, {"bulk": b""}),
        ({"header": "h", "table": "{"}, {"bulk": b""}),
        ({"header": "h", "table": '[["t0", "uint8", "x", 3]]'}, {"bulk": b"123"}),
        ({"header": "h"}, {"bulk": b""}),
    ],
)
def test_what_is_no_frame_is_refused(tree: dict[str, Any], bulk: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        from_records(RecordDict({"tree": ConfigRecord(tree), "bulk": ConfigRecord(bulk)}))


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "exact"])
def test_flower_carries_every_encoding_to_the_bit(encoding: str) -> None:
    is_image = encoding in IMAGE_ENCODINGS
    tensor = torch.rand(8, 3, 16, 16) if is_image else torch.randn(20, 50)
    coded = encode_tensor(tensor, encoding)
    assert coded is not None
    tree = decode(from_records(to_records(encode({"x": coded.to_payload()}))))
    assert torch.equal(decode_payload(tree)["x"], coded.value)
    tree["x"]["data"] = tree["x"]["data"][1:]
    with pytest.raises(PayloadError):
        decode_payload(tree)


def test_others_are_heard_while_a_call_goes_on(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, go = (
        link.send(to_records(Frame("1", {}))),
        link.send(to_records(Frame("2", {}))),
        threading.Event(),
    )

    def answer(message: Message, door: Path) -> Message:
        if message.metadata.message_id == first:
            assert go.wait(5)
        return Message(message.content, reply_to=message)

    monkeypatch.setattr(node, "answer_message", answer)
    serving = threading.Thread(
        target=node.serve_messages, args=(link.fleet(), Path("door")), daemon=True
    )
    serving.start()
    until(lambda: len(link.replies) == 1)
    go.set()
    until(lambda: len(link.replies) == 2)
    link.closed = True
    serving.join(10)
    assert not serving.is_alive(), "it would go on looking during other tests"
    assert [reply.metadata.reply_to_message_id for reply, _ in link.replies] == [second, first]


def test_the_node_says_how_far_its_worker_is(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("barter.flower.heartbeat.time.monotonic", lambda: now[0])
    turn = ProgressFile(tmp_path / "turn")

    def said() -> Any:
        link.send(to_records(encode(None)), "query.progress")
        message = link.fleet().pull()
        assert message is not None
        reply = node.answer_message(message, tmp_path / "door")  # where no worker answers
        return reply.error.code if reply.has_error() else decode(from_records(reply.content))

    assert said() == 2, "nothing was begun"
    turn.begin()
    turn.advance(0.25)
    assert said() == 0.0, "it is not written more often than once in a second"
    now[0] += 1.5
    turn.advance(0.5)
    assert said() == 0.75
    now[0] += 1.5
    turn.advance(0.5)
    assert said() == 1.0
    turn.begin()
    assert said() == 0.0
    ProgressFile(
        tmp_path / "nowhere" / "turn"
    ).begin()  # a disk that takes nothing is no reason to stop


def test_a_reply_that_is_announced_and_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.superlink.grid import http_grid

    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    flwr_internals.poll_faster(2.0)
    begin, here = time.monotonic(), {"a": b"1"}

    def pull(id: str) -> bytes:
        if id == "late" and time.monotonic() - begin > 0.3:
            return b"2"
        if id not in here:
            raise ObjectUnavailableError(id)
        return here[id]

    assert http_grid.pull_objects(object_ids=["a", "late"], pull_object_fn=pull) == {
        "a": b"1",
        "late": b"2",
    }
    begin = time.monotonic()
    with pytest.raises(ObjectPullError, match="nothing came for 0.5 s"):
        http_grid.pull_objects(object_ids=["a", "never"], pull_object_fn=pull)
    assert 0.5 < time.monotonic() - begin < 1.5


def test_after_a_poll_that_was_held_the_next_one_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "HOLD", 0.2)
    waits = iter([0.0, 0.15, 0.15])
    pauses: list[float] = []

    def pause(idle: float, shortest: float) -> float:
        pauses.append(idle)
        return 0.0

    monkeypatch.setattr(node, "poll_interval", pause)

    class Held:
        def pull(self) -> None:
            wait = next(waits, None)
            if wait is None:
                raise SystemExit
            time.sleep(wait)

    with suppress(SystemExit):
        node.serve_messages(Held(), Path("door"))  # type: ignore[arg-type]
    assert len(pauses) == 1, "after the poll that was answered at once"


def test_who_has_nothing_to_do_looks_less_and_less_often() -> None:
    assert [poll_interval(idle) for idle in (0.0, 0.5, 3.0, 10.0, 3600.0)] == pytest.approx(
        [0.05, 0.05, 0.3, 1.0, 1.0]
    )


def test_the_flower_that_is_installed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_reason() == ""
    monkeypatch.setattr(flwr_internals, "push_objects", lambda objects: None)
    assert unsupported_reason().endswith(
        ": <lambda> does not take push_object_fn, object_ids_to_push"
    )
    monkeypatch.setattr(flwr_internals, "MISSING", "cannot import name 'push_objects'")
    assert unsupported_reason().endswith("cannot import name 'push_objects'")
    monkeypatch.setattr(flwr_internals, "version", lambda name: "1.50.1")
    assert (
        unsupported_reason()
        == "flwr 1.50.1 was not tested with barter, which supports 1.41.x and 1.42.x"
    )


def test_a_flower_that_is_not_known_is_left_to_its_own_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert not supervise.uses_supernode(Setup(name="a", share=0))
    assert supervise.uses_supernode(Setup(name="a", share=0, supernode=True))
    assert caplog.messages == []
    monkeypatch.setattr(supervise, "unsupported_reason", lambda: "flwr 9 was not tried")
    assert supervise.uses_supernode(Setup(name="a", share=0))
    (said,) = caplog.messages
    assert said.endswith("takes seconds for every call: flwr 9 was not tried")


class Refusing(BaseHTTPRequestHandler):
    """A SuperLink that does not know a key, in Flower's words."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"code": 2004, "detail": "Failed to activate SuperNode."}).encode()
        self.send_response(412)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_node_whose_key_is_refused_ends_with_a_status_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = ec.generate_private_key(ec.SECP384R1())
    encoding = Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
    (tmp_path / "key").write_bytes(private.private_bytes(*encoding))
    superlink = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=superlink.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{superlink.server_address[1]}"
    words = [
        "node",
        "--superlink",
        address,
        "--door",
        str(tmp_path),
        "--key",
        str(tmp_path / "key"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")

    def be_a_node() -> int:
        with pytest.raises(SystemExit) as end:
            node.main()
        return int(end.value.code or 0)

    assert status(forked(be_a_node, tmp_path / "said")) == NOT_LET_IN
    superlink.shutdown()
    superlink.server_close()
    said = (tmp_path / "said").read_text()
    assert "the SuperLink refuses this site's key: Failed to activate SuperNode." in said
