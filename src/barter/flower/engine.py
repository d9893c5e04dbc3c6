"""Clients at Flower's sites: calls are messages on its grid."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from barter.core.algorithm import Algorithm
from barter.core.answers import most_bytes
from barter.core.clients import Failure, Replies
from barter.core.errors import BarterError
from barter.core.nodes import Monitor
from barter.core.payload import Payload
from barter.engines.base import BaseEngine
from barter.flower.client_app import from_records, in_bulk, to_records
from barter.flower.codec import decode, encode
from barter.flower.flwr_internals import names
from barter.flower.frames import Frame
from barter.flower.heartbeat import pause
from barter.flower.site import EVALUATE
from barter.privacy.side_information import EPSILON, ERRORS

__all__ = ["POLL_SECONDS", "FlowerEngine", "Hellos", "Member"]

PROGRESS, PROGRESS_SECONDS = (
    "query.progress",
    2.0,
)  # for each site that is asked: a dozen requests of the SuperLink's
POLL_SECONDS = 0.05  # between two looks at least
TRIES = 3  # how often a call is sent to a site that Flower lost on the way
LATE = "no answer in time"
LOST = {  # Flower's own error codes: the site did not say anything
    3: LATE,
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


def ask(grid: Grid, requests: Mapping[int, RecordDict], action: str, ttl: float) -> dict[int, str]:
    """Send requests to nodes, all at once; the messages' numbers, of those that Flower has taken."""
    messages = [Message(records, node, action, ttl=ttl) for node, records in requests.items()]
    taken = grid.push_messages(messages) if messages else ()
    return {
        node: id for node, id in zip(requests, taken, strict=False) if id
    }  # none where it is all too much


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
    raise BarterError(
        f"Flower's error {code}: {reason.strip().splitlines()[-1] if reason.strip() else 'no reason'}"
    )


class Hellos:
    """What nodes say of themselves, asked as they come."""

    def __init__(self, grid: Grid, config: str, timeout: float) -> None:
        self.grid, self.config, self.timeout = grid, config, timeout
        self.pending: dict[str, int] = {}
        self.said: dict[int, Payload] = {}
        self.refused: dict[int, str] = {}
        self.telling: set[int] = set()  # nodes that say how far a call is, while it goes on

    def poll(self, nodes: Iterable[int]) -> dict[int, Payload]:
        """Ask those of these nodes that were not asked; what came since the last time."""
        new_ones = set(nodes) - self.said.keys() - self.refused.keys() - set(self.pending.values())
        hello = to_records(encode({"ask": "hello", "config": self.config}))
        asked = ask(self.grid, dict.fromkeys(new_ones, hello), "query.hello", self.timeout)
        self.pending |= {message: node for node, message in asked.items()}
        new: dict[int, Payload] = {}
        came = list(replies(self.grid, self.pending))
        keys = names(self.grid) if came else {}
        for node, answer in came:
            try:
                tree = answer()
                if "error" in tree:
                    raise BarterError(str(tree["error"]))
                said = tree["hello"]["name"]
                if said != keys.get(
                    node, said
                ):  # a key counts, and not what its holder claims to be
                    raise BarterError(
                        f"the site whose key is that of {keys[node]} says that it is {str(said)[:60]!r}"
                    )
                new[node] = tree["hello"]
                if tree.get("tells") is True:
                    self.telling.add(node)
            except Lost as lost:
                log.warning("node %s did not say hello: %s", node, lost)  # it is asked again
            except Exception as error:  # a stranger's words
                self.refuse(node, error)
        self.said |= new
        return new

    def refuse(self, node: int, error: Exception) -> None:
        """Do without a node, whatever it has said."""
        self.said.pop(node, None)
        self.refused[node] = str(error)
        log.warning("node %s is not let in: %s", node, error)


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
        self.rejoin: Callable[[set[int]], dict[int, str]] = (
            lambda nodes: {}
        )  # the names of nodes not seen before
        self.expect: Callable[[int | None], None] = lambda most: (
            None
        )  # told how many bytes an answer can have
        self.telling: Set[int] = set()  # nodes that say how far a call is
        # client -> how much of its call whoever watches has seen
        self._shown: dict[int, float] = {}
        self._evaluations: dict[int, Payload] = {}
        # client -> the last round in which it did not answer in time
        self._hung: dict[int, int] = {}
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
            requests = self._requests(
                method, {k: args[k] for k in sorted(args.keys() - here.keys())}, failures
            )
            self.expect(self._largest(method, {k: args[k] for k in requests}))
            enough = len(args) if self.min_clients is None else min(self.min_clients, len(args))
            told: Iterator[Reply] = ((k, partial(dict, reply)) for k, reply in here.items())
            for k, answer in chain(told, self._gather(requests, lambda: len(answers) >= enough)):
                try:
                    answers[k] = self._checked(method, k, answer(), args[k], counted=k in here)
                except Exception as error:  # whatever a stranger's answer makes go wrong is that stranger's failure
                    failures[k] = self.failure(k, method, error)
                    log.warning("%s", failures[k])
                self.watched.advance(1 - self._shown.pop(k, 0.0))
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.counting(answers), failures)

    def _requests(
        self, method: str, args: Mapping[int, tuple[Any, ...]], failures: dict[int, Failure]
    ) -> dict[int, RecordDict]:
        """What is sent to each client, or its failure; what several are told is looked at and encoded once."""
        requests: dict[int, RecordDict] = {}
        alone, told = self.alone(), dict[int, tuple[Payload, Frame, ArrayRecord | ConfigRecord]]()
        for k, arguments in args.items():
            if self._hung.get(k) == self.round:
                failures[k] = self.failure(
                    k, method, Lost("it did not answer in time before in this round")
                )
                continue
            request = {
                "ask": "call",
                "session": self.session(self.members[k]),
                "round": self.round,
                "method": method,
                "before": self.asked_before(method, k),
                "evaluate": method == self._last,
                "tested": self.tests_due(k, method),
                "alone": alone,
                "timeout": self.timeout,
            }
            if id(arguments) in told:
                tree, first, bulk = told[id(arguments)]
                self.wire.count(tree, method, k, "down")
                requests[k] = to_records(encode({**request, "args": tree}, first.blobs), bulk)
                continue
            try:
                tree = self.wire.carry(arguments, method, k, "down")
            except BarterError as error:
                failures[k] = self.failure(k, method, error)
                continue
            first = encode({**request, "args": tree})
            told[id(arguments)] = tree, first, (bulk := in_bulk(first.blobs))
            requests[k] = to_records(first, bulk)
        return requests

    def _largest(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> int | None:
        """How many bytes an answer of these clients can have, by its contract; none where that does not say."""
        if self.server is None:
            return None
        if method == EVALUATE:  # some numbers by name
            return 0
        found = [
            most_bytes(self.algorithm, method, sent, self.known(self.server, k))
            for k, sent in args.items()
        ]
        return None if None in found else max(filter(None, found), default=0)

    def _checked(
        self, method: str, k: int, reply: Payload, args: tuple[Any, ...], *, counted: bool
    ) -> Any:
        if "error" in reply:
            if reply.get("quiet") is not True:
                self.note(k, [ERRORS])
            error = BarterError(str(reply["error"]))
            error.add_note(str(reply.get("traceback", "")))
            raise error
        self.hear(k, reply.get(EPSILON))
        if (
            reply.get("evaluation") is not None
        ):  # it has left its site, whether or not it is asked for
            self.note(k, self.parts(EVALUATE, reply["evaluation"]))
        arrived = (self.seen_to if counted else self.arrived)(reply["answer"], method, k, args)
        if reply.get("evaluation") is not None:
            self._evaluations[k] = reply["evaluation"]
        return arrived

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        said = (
            str(error)
            if isinstance(error, BarterError | Lost)
            else f"{type(error).__name__}: {error}"
        )
        notes = "\n".join(getattr(error, "__notes__", []))
        return Failure(
            client, method, self.round, f"site {self.members[client].name}: {said}", notes
        )

    def _gather(
        self, requests: Mapping[int, RecordDict], enough: Callable[[], bool]
    ) -> Iterator[Reply]:
        """Every site's answer, or why there is none.

        A site that Flower lost is asked again when it is back; it is waited for only if too few others have answered,
        and an error or a bad answer is none. Who does not answer in time is not asked again in this round.
        """
        last, left = time.monotonic(), self.timeout
        deadline, progress = last + left, Progress(self.grid, last)
        pending: dict[str, int] = {}  # message -> client
        waiting: dict[int, str] = dict.fromkeys(
            requests, "the site is offline"
        )  # not asked yet, or lost; and why
        tries = dict.fromkeys(requests, 0)
        while waiting or pending:
            left = deadline - time.monotonic()
            present = self._present([k for k in waiting if tries[k] < TRIES]) if left > 0 else {}
            who = {node: k for k, node in present.items()}
            asked = ask(
                self.grid, {node: requests[k] for node, k in who.items()}, "train.call", left
            )
            for node, message in asked.items():
                k = who[node]
                if tries[k]:
                    log.warning("site %s is asked again", self.members[k].name)
                pending[message], tries[k] = k, tries[k] + 1
                del waiting[k]
            for k, answer in replies(self.grid, pending):
                last = time.monotonic()
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
            members = {self.members[k].node: k for k in pending.values()}
            for node, done in progress.poll(members.keys() & self.telling):
                seen = self._shown.get(members[node], 0.0)
                self._shown[members[node]] = max(seen, done)
                self.watched.advance(max(0.0, done - seen))
            hopeless = all(tries[k] == TRIES for k in waiting)
            if left <= 0 or (not pending and waiting and (enough() or hopeless)):
                break
            if waiting or pending:
                time.sleep(min(pause(time.monotonic() - last, POLL_SECONDS), max(left, 0)))
        late = (
            [*waiting, *pending.values()]
            if left <= 0
            else [k for k, why in waiting.items() if why == LATE]
        )
        self._hung |= dict.fromkeys(late, self.round)
        for k, why in waiting.items():
            yield k, lambda why=why: _again(Lost(why))  # type: ignore[misc]
        for k in pending.values():
            silent = Lost(f"{LATE}, which is {self.timeout:g} s")
            yield k, lambda silent=silent: _again(silent)  # type: ignore[misc]

    def _present(self, wanted: Sequence[int]) -> dict[int, int]:
        """The nodes of those of these clients that are online; who came back under a new number is found by name."""
        if not wanted:
            return {}
        online = set(self.grid.get_node_ids())
        away = {
            self.members[k].name: self.members[k]
            for k in wanted
            if self.members[k].node not in online
        }
        if away:
            strangers = online - {member.node for member in self.members.values()}
            for node, name in self.rejoin(strangers).items():
                if name in away:
                    away[name].node = node
        return {k: self.members[k].node for k in wanted if self.members[k].node in online}


class Progress:
    """How far sites are in a call that takes long: they are asked now and then, the seldomer the longer it takes and
    the more there are."""

    def __init__(self, grid: Grid, begin: float) -> None:
        self.grid, self.begin, self.last = grid, begin, begin
        self.pending: dict[str, int] = {}

    def poll(self, nodes: Set[int]) -> Iterator[tuple[int, float]]:
        """What has been said since the last time by those of these nodes that were asked."""
        now = time.monotonic()
        if now - self.last > max(PROGRESS_SECONDS * len(nodes), (now - self.begin) / 10):
            self.last = now
            question = to_records(encode(None))
            asked = ask(
                self.grid,
                dict.fromkeys(nodes - set(self.pending.values()), question),
                PROGRESS,
                60.0,
            )
            self.pending |= {message: node for node, message in asked.items()}
        for node, answer in replies(self.grid, self.pending):
            try:
                done = answer()
            except Exception:  # it is of no consequence
                continue
            if node in nodes and isinstance(done, float) and 0 <= done <= 1:
                yield node, done


def _again(error: Exception) -> Payload:
    raise error
