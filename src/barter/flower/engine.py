"""Clients at Flower's sites: calls are messages on its grid."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from flwr.app import Message
from flwr.serverapp import Grid

from barter.core.algorithm import Algorithm
from barter.core.clients import Failure, Replies
from barter.core.errors import BarterError
from barter.core.nodes import Monitor
from barter.core.payload import Payload
from barter.engines.base import BaseEngine
from barter.flower.codec import decode, encode
from barter.flower.front import from_records, to_records
from barter.flower.site import EVALUATE

__all__ = ["POLL_SECONDS", "FlowerEngine", "Hellos", "Member"]

POLL_SECONDS = 0.2
TRIES = 3  # how often a call is sent to a site that Flower lost on the way
LOST = {  # Flower's own error codes: the site did not say anything
    3: "no answer in time",
    4: "the reply was lost",
    5: "the site went offline",
    8: "the site's client process died",
}
Reply: TypeAlias = tuple[int, Callable[[], Payload]]  # a client, and how to get what it says
log = logging.getLogger("barter")


@dataclass
class Member:
    """A site that takes part, and what it said of itself."""

    id: int
    name: str
    node: int
    examples: int
    architecture: str


class Lost(Exception):
    """Flower has no answer of a site's."""


def ask(grid: Grid, node: int, tree: Payload, action: str, ttl: float) -> str | None:
    """Send a request to a node; the message's number."""
    (sent,) = grid.push_messages([Message(to_records(encode(tree)), node, action, ttl=ttl)])
    return sent or None


def replies(grid: Grid, pending: dict[str, int]) -> Iterator[Reply]:
    """Whose messages are answered by now, and how to get each answer; they are pending no more."""
    # By the message they reply to: what the SuperLink says for a site comes under a number of its own.
    for reply in grid.pull_messages(list(pending)) if pending else ():
        asked = pending.pop(reply.metadata.reply_to_message_id, None)
        if asked is not None:
            yield asked, lambda reply=reply: _content(reply)  # type: ignore[misc]


def _content(reply: Message) -> Payload:
    if not reply.has_error():
        return decode(from_records(reply.content))
    code, reason = reply.error.code, reply.error.reason or ""
    if code in LOST:
        raise Lost(LOST[code])
    raise BarterError(f"Flower's error {code}: {reason.strip().splitlines()[-1] if reason.strip() else 'no reason'}")


class Hellos:
    """What nodes say of themselves, asked as they come."""

    def __init__(self, grid: Grid, config: str, timeout: float) -> None:
        self.grid, self.config, self.timeout = grid, config, timeout
        self.pending: dict[str, int] = {}
        self.said: dict[int, Payload] = {}
        self.refused: dict[int, str] = {}

    def poll(self, nodes: Iterable[int]) -> dict[int, Payload]:
        """Ask those of these nodes that were not asked; what came since the last time."""
        for node in set(nodes) - self.said.keys() - self.refused.keys() - set(self.pending.values()):
            message = ask(self.grid, node, {"ask": "hello", "config": self.config}, "query.hello", self.timeout)
            if message is not None:
                self.pending[message] = node
        new: dict[int, Payload] = {}
        for node, answer in replies(self.grid, self.pending):
            try:
                tree = answer()
                if "error" in tree:
                    raise BarterError(str(tree["error"]))
                new[node] = tree["hello"]
            except Lost as lost:
                log.warning("node %s did not say hello: %s", node, lost)  # it is asked again
            except Exception as error:  # a stranger's words
                self.refused[node] = str(error)
                log.warning("node %s is not let in: %s", node, error)
        self.said |= new
        return new


class FlowerEngine(BaseEngine):
    """Runs remote methods at sites. One reply per client asked, none lost; what a site says is checked."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        grid: Grid,
        members: Sequence[Member],
        session: Callable[[Member], Payload],
        *,
        seed: int,
        min_clients: int | None = None,
        monitor: Monitor | None = None,
        timeout: float,
    ) -> None:
        super().__init__(algorithm, seed=seed, min_clients=min_clients, monitor=monitor)
        self.grid, self.session, self.timeout = grid, session, timeout
        self.members = {member.id: member for member in members}
        self.rejoin: Callable[[set[int]], dict[int, str]] = lambda nodes: {}  # the names of nodes not seen before
        self._evaluations: dict[int, Payload] = {}
        # Evaluation rides on the reply to the method that an algorithm names last.
        self._last = list(algorithm.crosses)[-1]

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.members)

    def examples(self, client: int) -> int:
        return self.members[client].examples

    def memory(self) -> dict[int, Payload]:
        return {}  # sites keep their own

    def recall(self, memory: Mapping[int, Payload]) -> None:
        pass

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        came = {k: self._evaluations.pop(k) for k in sorted(args) if k in self._evaluations}
        here = {k: {"answer": told} for k, told in came.items() if method == EVALUATE}
        with self.phase(method, len(args)):
            requests: dict[int, Payload] = {}
            alone = self.alone()
            for k in sorted(args.keys() - here.keys()):
                try:
                    requests[k] = self._request(method, k, args[k], alone)
                except BarterError as error:
                    failures[k] = self.failure(k, method, error)
            enough = len(args) if self.min_clients is None else min(self.min_clients, len(args))
            told: Iterator[Reply] = ((k, partial(dict, reply)) for k, reply in here.items())
            for k, answer in chain(told, self._gather(requests, lambda: len(answers) >= enough)):
                try:
                    answers[k] = self._checked(method, k, answer(), args[k])
                except Exception as error:  # whatever a stranger's answer makes go wrong is that stranger's failure
                    failures[k] = self.failure(k, method, error)
                    log.warning("%s", failures[k])
                self.watched.advance(1)
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.counting(answers), failures)

    def _request(self, method: str, k: int, args: tuple[Any, ...], alone: bool) -> Payload:
        return {
            "ask": "call",
            "session": self.session(self.members[k]),
            "round": self.round,
            "method": method,
            "before": self.asked_before(method, k),
            "args": self.wire.carry(args, method, k, "down"),
            "evaluate": method == self._last,
            "alone": alone,
            "timeout": self.timeout,
        }

    def _checked(self, method: str, k: int, reply: Payload, args: tuple[Any, ...]) -> Any:
        if "error" in reply:
            error = BarterError(str(reply["error"]))
            error.add_note(str(reply.get("traceback", "")))
            raise error
        arrived = self.arrived(reply["answer"], method, k, args)
        if reply.get("evaluation") is not None:
            self._evaluations[k] = reply["evaluation"]
        return arrived

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        said = str(error) if isinstance(error, BarterError | Lost) else f"{type(error).__name__}: {error}"
        notes = "\n".join(getattr(error, "__notes__", []))
        return Failure(client, method, self.round, f"site {self.members[client].name}: {said}", notes)

    def _gather(self, requests: Mapping[int, Payload], enough: Callable[[], bool]) -> Iterator[Reply]:
        """Every site's answer, or why there is none.

        A site that Flower lost is asked again when it is back; it is waited for only if too few others have answered,
        and an error or a bad answer is none.
        """
        deadline = time.monotonic() + self.timeout
        pending: dict[str, int] = {}  # message -> client
        waiting: dict[int, str] = dict.fromkeys(requests, "the site is offline")  # not asked yet, or lost; and why
        tries = dict.fromkeys(requests, 0)
        while waiting or pending:
            left = deadline - time.monotonic()
            for k, node in self._present([k for k in waiting if tries[k] < TRIES]).items() if left > 0 else ():
                if tries[k]:
                    log.warning("site %s is asked again", self.members[k].name)
                message = ask(self.grid, node, requests[k], "train.call", left)
                if message is not None:
                    pending[message], tries[k] = k, tries[k] + 1
                    del waiting[k]
            for k, answer in replies(self.grid, pending):
                try:
                    tree = answer()
                except Lost as lost:
                    waiting[k] = str(lost)
                    log.warning("site %s: %s", self.members[k].name, lost)
                    continue
                except Exception as error:
                    yield k, lambda error=error: _again(error)  # type: ignore[misc]
                    continue
                yield k, lambda tree=tree: tree  # type: ignore[misc]
            hopeless = all(tries[k] == TRIES for k in waiting)
            if left <= 0 or (not pending and waiting and (enough() or hopeless)):
                break
            time.sleep(POLL_SECONDS)
        for k, why in waiting.items():
            yield k, lambda why=why: _again(Lost(why))  # type: ignore[misc]
        for k in pending.values():
            late = Lost(f"no answer in time, which is {self.timeout:g} s")
            yield k, lambda late=late: _again(late)  # type: ignore[misc]

    def _present(self, wanted: Sequence[int]) -> dict[int, int]:
        """The nodes of those of these clients that are online; who came back under a new number is found by name."""
        if not wanted:
            return {}
        online = set(self.grid.get_node_ids())
        away = {self.members[k].name: self.members[k] for k in wanted if self.members[k].node not in online}
        if away:
            strangers = online - {member.node for member in self.members.values()}
            for node, name in self.rejoin(strangers).items():
                if name in away:
                    away[name].node = node
        return {k: self.members[k].node for k in wanted if self.members[k].node in online}


def _again(error: Exception) -> Payload:
    raise error
