"""A grid in this process: Flower's own client app, messages and contexts, without its network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from barter.flower import client_app, deploy
from barter.flower.codec import decode, encode
from barter.flower.engine import PROGRESS
from barter.flower.frames import Frame
from barter.flower.handshake import Setup, make_site
from barter.flower.site import Site


class Nobody:
    """The other end of a connection that is not there."""

    def sendall(self, data: bytes) -> None:
        pass


class LoopbackGrid(Grid):
    """Nodes 100, 101, ... are sites; each message runs Flower's client app, which asks the site."""

    def __init__(self, sites: Iterable[Site], monkeypatch: pytest.MonkeyPatch) -> None:
        self.sites = {100 + i: site for i, site in enumerate(sites)}
        self.offline: set[int] = set()
        self.deliver: Callable[[int, dict[str, Any], Callable[[], Any]], Any] = (
            lambda node, request, answer: answer()
        )
        self.progress: Callable[[int], Any] = lambda node: (
            None
        )  # what a node says while its call goes on
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.sent = 0
        for name, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():
            monkeypatch.setattr(TaskIdentity, name, value)
        monkeypatch.setattr(deploy, "POLL_SECONDS", 0)  # all sites are here
        monkeypatch.setattr(client_app, "ask_worker", self._hand_over)
        monkeypatch.setattr(client_app.atexit, "register", lambda function: function)

    def _hand_over(self, door: Path, frame: Frame, deadline: float) -> tuple[Frame, Nobody]:
        node, request = int(door.name), decode(frame)
        self.asked.append((node, request))
        answer = partial(self.sites[node].answer, request)
        return encode(self.deliver(node, request, answer)), Nobody()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.sites if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"m{self.sent}"
            ids.append(f"m{self.sent}")
            node = message.metadata.dst_node_id
            context = Context(1, node, {"socket": f"/{node}"}, RecordDict(), {})
            try:
                if message.metadata.message_type == PROGRESS:
                    reply = Message(
                        client_app.to_records(encode(self.progress(node))), reply_to=message
                    )
                else:
                    reply = client_app.app(message, context)
            except Code as code:
                reply = Message(Error(code.number, "made by Flower"), reply_to=message)
            except Silent:
                continue
            except Exception as error:
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            self.replies[f"m{self.sent}"] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for id in message_ids:
            with suppress(KeyError):
                found.append(self.replies.pop(id))
        return found

    def set_run(self, run: Any) -> None: ...
    @property
    def run(self) -> Any: ...
    def create_message(self, *args: Any) -> Message: ...  # type: ignore[override]
    def send_and_receive(self, messages: Any, *, timeout: Any = None) -> Any: ...


class Code(Exception):
    """Flower itself answers, with an error."""

    def __init__(self, number: int) -> None:
        self.number = number


class Silent(Exception):
    """Nobody answers."""


def site(memory: Path, **fields: Any) -> Site:
    return make_site(Setup(**fields), memory)
