"""The engine whose clients are Flower sites; a call is a message on a grid."""

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
from barter.core.answers import largest_answer
from barter.core.clients import Failure, Replies
from barter.core.errors import BarterError, PayloadError
from barter.core.nodes import Monitor
from barter.core.payload import Payload
from barter.core.wire_codec import WireCodec
from barter.engines.base import BaseEngine
from barter.flower.client_app import from_records, pack_blobs, record_sizes, to_records
from barter.flower.codec import decode, encode
from barter.flower.flwr_internals import node_names
from barter.flower.frames import Frame
from barter.flower.heartbeat import poll_interval
from barter.flower.site import EVALUATE
from barter.privacy.side_information import EPSILON, ERRORS, FAILURES
from barter.privacy.side_information import PROGRESS as PROGRESS_PART

__all__ = ["POLL_SECONDS", "SPARE", "FlowerEngine", "Hellos", "Member"]

PROGRESS = "query.progress"
# Seconds between two questions for progress, times the number of sites asked: each question
# costs the SuperLink about a dozen requests.
PROGRESS_SECONDS = 2.0
POLL_SECONDS = 0.05  # shortest interval between two polls of the SuperLink
MAX_SENDS = 3  # how often a call is sent to a site whose message or reply Flower lost
# Largest size in bytes of an answer's structure: names, shapes, and values outside of tensors.
# Parsing takes seconds for every few megabytes; the largest states have 0.2.
STRUCTURE = 4_000_000
ANSWER_BYTES = 2 * 10**9  # largest size of a decoded answer, as `answer_mb` has by default
SPARE = 10**6  # bytes that Flower and an evaluation may add to an answer
LATE = "no answer in time"
LOST_CODES = {  # Flower's own error codes: there is no answer of the site
    3: LATE,
    4: "the reply was lost",
    5: "the site went offline",
    8: "the site's client process died",
}
Reply: TypeAlias = tuple[int, Callable[[], Payload]]  # client (or node), function for its answer
log = logging.getLogger("barter")


@dataclass
class Member:
    """A site that takes part in a run, as its hello describes it."""

    id: int
    name: str
    node: int
    examples: int
    architecture: str


class Lost(Exception):
    """An error: Flower has no answer of a site."""


def send_requests(
    grid: Grid, requests: Mapping[int, RecordDict], action: str, ttl: float
) -> dict[int, str]:
    """Send requests to nodes, all at once.

    Args:
        grid: Flower's grid.
        requests: The records for each node.
        action: Flower's message type, such as "train.call".
        ttl: Seconds for which the messages are valid.

    Returns:
        The message id of each node whose message Flower accepted.
    """
    messages = [Message(records, node, action, ttl=ttl) for node, records in requests.items()]
    ids = grid.push_messages(messages) if messages else ()
    # Flower accepts no more messages when it is overloaded: ids are then missing or empty.
    return {node: id for node, id in zip(requests, ids, strict=False) if id}


def receive_replies(
    grid: Grid, pending: dict[str, int], most: Mapping[int, int | None] | None = None
) -> Iterator[Reply]:
    """Yield the answers that have arrived, and remove their messages from `pending`.

    Args:
        grid: Flower's grid.
        pending: Message id -> client (or node) that the message was sent to.
        most: Client (or node) -> largest size of its answer's tensors in bytes, to which `SPARE` is
            added; None for no limit. It is 0 for those that are missing, and for all by default.

    Yields:
        The client (or node), and a function that decodes and returns its answer, or raises why
        there is none: Lost, PayloadError or BarterError.
    """
    # Matched by the message replied to: errors that the SuperLink reports for a site have the
    # id of another sender.
    for reply in grid.pull_messages(list(pending)) if pending else ():
        sender = pending.pop(reply.metadata.reply_to_message_id, None)
        if sender is not None:
            yield sender, partial(_content, reply, (most or {}).get(sender, 0))


def _content(reply: Message, most: int | None) -> Payload:
    """Decode a reply, unless it is larger than any valid one.

    Args:
        reply: The reply.
        most: Largest size of its tensors in bytes; none: unknown.

    Raises:
        PayloadError: If it is too large; it is not parsed then.
        Lost: If Flower reports that there is no answer of the site.
        BarterError: If Flower reports another error.
    """
    if not reply.has_error():
        _require_size(reply.content, most)
        return decode(from_records(reply.content))
    code = reply.error.code
    if code in LOST_CODES:
        raise Lost(LOST_CODES[code])
    reason = (reply.error.reason or "").strip()
    raise BarterError(
        f"Flower's error {code}: {reason.splitlines()[-1] if reason else 'no reason'}"
    )


def _require_size(records: RecordDict, most: int | None) -> None:
    """Raise if records are larger than those of a valid answer.

    Args:
        records: The records, unparsed.
        most: Largest size of the tensors in bytes, to which `SPARE` is added; None for no limit.
            The structure may have `STRUCTURE` bytes in any case.

    Raises:
        PayloadError: If they are.
    """
    structure, tensors = record_sizes(records)
    if structure > STRUCTURE:
        raise PayloadError(
            f"an answer whose structure has {structure / 1e6:.1f} MB, expected at most "
            f"{STRUCTURE / 1e6:g}; many numbers must be sent as a tensor"
        )
    if most is not None and tensors > most + SPARE:
        raise PayloadError(
            f"an answer of {tensors / 1e6:.1f} MB, expected at most {(most + SPARE) / 1e6:.1f}"
        )


class Hellos:
    """The hellos of nodes, requested as the nodes come online.

    Args:
        grid: Flower's grid.
        config: The run's configuration as TOML, which sites decide upon.
        timeout: Seconds for which a request is valid.
    """

    def __init__(self, grid: Grid, config: str, timeout: float) -> None:
        self.grid = grid
        self.config = config
        self.timeout = timeout
        self.pending: dict[str, int] = {}  # message id -> node
        self.received: dict[int, Payload] = {}  # node -> hello
        self.refused: dict[int, str] = {}  # node -> reason
        self.reporting: set[int] = set()  # nodes that report progress during a call

    def poll(self, nodes: Iterable[int]) -> dict[int, Payload]:
        """Ask new nodes for hellos; return the hellos that arrived since the last poll.

        A node is asked once. It is refused, for the whole run, if it answers with an error, with
        something invalid, or under another name than its key was registered for. One whose message
        was lost is asked again in the next poll.

        Args:
            nodes: The nodes that are online.

        Returns:
            Node -> hello, whose fields are not checked (`Hello.read` does that).
        """
        new_nodes = (
            set(nodes) - self.received.keys() - self.refused.keys() - set(self.pending.values())
        )
        request = to_records(encode({"ask": "hello", "config": self.config}))
        asked = send_requests(
            self.grid, dict.fromkeys(new_nodes, request), "query.hello", self.timeout
        )
        self.pending |= {message: node for node, message in asked.items()}
        hellos: dict[int, Payload] = {}
        answers = list(receive_replies(self.grid, self.pending))
        registered_names = node_names(self.grid) if answers else {}
        for node, answer in answers:
            try:
                tree = answer()
                if "error" in tree:
                    raise BarterError(str(tree["error"]))
                name = tree["hello"]["name"]
                # The registered key identifies a site, not the name that it claims.
                if name != registered_names.get(node, name):
                    raise BarterError(
                        f"the site whose key is registered for {registered_names[node]} "
                        f"claims to be {str(name)[:60]!r}"
                    )
                hellos[node] = tree["hello"]
                if tree.get("tells") is True:
                    self.reporting.add(node)
            except Lost as lost:
                # The node is no longer pending, so the next poll asks it again.
                log.warning("node %s did not say hello: %s", node, lost)
            except Exception as error:  # The answer is untrusted and may be anything.
                self.refuse(node, error)
        self.received |= hellos
        return hellos

    def refuse(self, node: int, error: Exception) -> None:
        """Exclude a node from the run for this reason, and discard its hello."""
        self.received.pop(node, None)
        self.refused[node] = str(error)
        log.warning("node %s is refused: %s", node, error)


class FlowerEngine(BaseEngine):
    """Engine that runs client methods at Flower sites.

    Every client that is called gets one reply or one failure. Answers are untrusted: they are
    checked against their contract.

    Args:
        algorithm: The method.
        grid: Flower's grid.
        members: The sites of the run.
        session: Returns what a site must know about the run; sent with every call.
        seed: Seed of the server's random streams.
        min_clients: Number of answers after which offline sites are not waited for; none: all.
        monitor: Shows the progress.
        timeout: Seconds that a site has for a call.
        codec: Encodes what sites are sent; None to send it as it is.
        answer_bytes: Largest size of a decoded answer whose contract has no limit.
    """

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
        codec: WireCodec | None = None,
        answer_bytes: int = ANSWER_BYTES,
    ) -> None:
        super().__init__(
            algorithm, seed=seed, min_clients=min_clients, monitor=monitor, codec=codec
        )
        self.answer_bytes = answer_bytes
        # client -> largest size in bytes of its answer to the current call; none: unknown
        self._limits: dict[int, int | None] = {}
        self.grid = grid
        self.session = session
        self.timeout = timeout
        self.members = {member.id: member for member in members}
        # Returns the site names of nodes that were not seen before.
        self.rejoin: Callable[[set[int]], dict[int, str]] = lambda nodes: {}
        # Called before each call with the largest size of an answer in bytes; none: unknown.
        self.expect: Callable[[int | None], None] = lambda n_bytes: None
        self.reporting: Set[int] = set()  # nodes that report progress during a call
        self._shown: dict[int, float] = {}  # client -> progress of its call that was displayed
        # client -> evaluation that came with its last reply and was not requested yet
        self._evaluations: dict[int, Payload] = {}
        self._hung: dict[int, int] = {}  # client -> last round in which it was late
        # The evaluation is sent with the reply to the method that the algorithm names last.
        self._last = list(algorithm.crosses)[-1]

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.members)

    def examples(self, client: int) -> int:
        return self.members[client].examples

    def memory(self) -> dict[int, Payload]:
        """Return nothing: sites save their own memory."""
        return {}

    def recall(self, memory: Mapping[int, Payload]) -> None:
        """Do nothing: sites restore their own memory."""

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Run a method at sites and return their checked answers.

        Evaluations that came with the previous reply are not requested; they are dropped if this
        call is not an evaluation. A site that fails, or whose answer is invalid or an outlier, is
        among the failures; nothing is raised.
        """
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        # An evaluation that is not used by this call is out of date, and dropped.
        evaluations = {k: self._evaluations.pop(k) for k in sorted(args) if k in self._evaluations}
        received = evaluations if method == EVALUATE else {}
        with self.phase(method, len(args)), self.wire.during_call(self.round):
            to_ask = {k: args[k] for k in sorted(args.keys() - received.keys())}
            requests = self._requests(method, to_ask, failures)
            most = self._largest(method, {k: args[k] for k in requests})
            self._limits = most
            self.expect(_most_of_all(most))
            enough = len(args) if self.min_clients is None else min(self.min_clients, len(args))
            earlier: Iterator[Reply] = (
                (k, partial(dict, answer=evaluation)) for k, evaluation in received.items()
            )
            later = self._gather(requests, most, lambda: len(answers) >= enough)
            for k, answer in chain(earlier, later):
                try:
                    answers[k] = self._check_reply(
                        method, k, answer(), args[k], counted=k in received
                    )
                except Exception as error:  # Whatever an answer causes is its client's failure.
                    failures[k] = self.failure(k, method, error)
                    log.warning("%s", failures[k])
                self.watched.advance(1 - self._shown.pop(k, 0.0))
        for k, failure in self.drop_outliers(method, answers, args).items():
            failures[k] = failure
            log.warning("%s", failure)
        self.failures += [failures[k] for k in sorted(failures)]
        return Replies(answers, self.image_counts(answers), failures)

    def _requests(
        self, method: str, args: Mapping[int, tuple[Any, ...]], failures: dict[int, Failure]
    ) -> dict[int, RecordDict]:
        """Encode the request for each client; add unreachable ones to `failures`.

        Arguments that several clients share (the same object) are checked and encoded once. Clients
        that were late in this round, or whose arguments cannot be sent, get no request.
        """
        requests: dict[int, RecordDict] = {}
        local_only = self.is_local_only()
        encoded: dict[int, tuple[Payload, Frame, ArrayRecord | ConfigRecord]] = {}  # by id()
        for k, arguments in args.items():
            if self._hung.get(k) == self.round:
                late = Lost("it did not answer an earlier call of this round in time")
                failures[k] = self.failure(k, method, late)
                continue
            request = {
                "ask": "call",
                "session": self.session(self.members[k]),
                "round": self.round,
                "method": method,
                "before": self.count_call(method, k),
                "evaluate": method == self._last,
                "tested": self.tests_due(k, method),
                "alone": local_only,
                "timeout": self.timeout,
            }
            if id(arguments) in encoded:
                tree, frame, bulk = encoded[id(arguments)]
                self.wire.count(tree, method, k, "down")
                requests[k] = to_records(encode({**request, "args": tree}, frame.blobs), bulk)
                continue
            try:
                tree = self.wire.encode(arguments, method, k, self.round)
            except BarterError as error:
                failures[k] = self.failure(k, method, error)
                continue
            frame = encode({**request, "args": tree})
            bulk = pack_blobs(frame.blobs)
            encoded[id(arguments)] = (tree, frame, bulk)
            requests[k] = to_records(frame, bulk)
        return requests

    def open_answer(self, answer: Payload, method: str, client: int) -> tuple[Payload, int | None]:
        """Return an answer, decoded, and its encoded size in bytes.

        Raises:
            PayloadError: If its encoding is malformed, or it is larger than any valid one when
                decoded.
        """
        most = self._limits.get(client)
        limit = self.answer_bytes if most is None else most + SPARE
        return self.wire.decode(answer, method, limit)

    def _largest(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> dict[int, int | None]:
        """Return the bytes of each client's largest valid answer; None if unlimited."""
        if self.server is None:
            return dict.fromkeys(args)
        if method == EVALUATE:  # a few numbers by name
            return dict.fromkeys(args, 0)
        return {
            k: largest_answer(self.algorithm, method, sent, self.knowledge_of(self.server, k))
            for k, sent in args.items()
        }

    def _check_reply(
        self, method: str, k: int, reply: Payload, args: tuple[Any, ...], *, counted: bool
    ) -> Any:
        """Return the answer of a reply after it was checked.

        What the reply releases is counted, the ε that it reports is recorded, and an evaluation
        that came along is kept for the next call.

        Args:
            method: The method that was called.
            k: The client.
            reply: The decoded reply, untrusted.
            args: The arguments that were sent.
            counted: Whether the answer was recorded as having left its client before.

        Raises:
            BarterError: If the reply is an error of the site, or breaks the method's contract. One
                that is no reply of a site at all may raise anything.
        """
        if "error" in reply:
            # Sites of older versions send messages that may quote their data.
            self.count_release(k, [FAILURES if reply.get("quiet") is True else ERRORS])
            error = BarterError(str(reply["error"]))
            error.add_note(str(reply.get("traceback", "")))
            raise error
        self.record_epsilon(k, reply.get(EPSILON))
        evaluation = reply.get("evaluation")
        if evaluation is not None:
            # It has left its site, whether or not the server will use it.
            self.count_release(k, self.parts(EVALUATE, evaluation))
        check = self.check_answer if counted else self.receive_answer
        answer = check(reply["answer"], method, k, args)
        if evaluation is not None:
            self._evaluations[k] = evaluation
        return answer

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        """Return a failure that names the client's site and the error."""
        reason = str(error)
        if not isinstance(error, BarterError | Lost):
            reason = f"{type(error).__name__}: {reason}"
        notes = "\n".join(getattr(error, "__notes__", []))
        where = f"site {self.members[client].name}"
        return Failure(client, method, self.round, f"{where}: {reason}", notes)

    def _gather(
        self,
        requests: Mapping[int, RecordDict],
        most: Mapping[int, int | None],
        enough: Callable[[], bool],
    ) -> Iterator[Reply]:
        """Send requests and yield every site's answer, or why there is none.

        A site whose message or reply Flower lost is asked again when it is online, `MAX_SENDS` times
        at most. It is waited for only until `enough` others have answered and no reply is
        pending. A site's error or malformed answer is final. A site that is late is not asked
        again in this round.
        """
        last = time.monotonic()  # when the last answer came
        deadline = last + self.timeout
        left = self.timeout
        progress = Progress(self.grid, last)
        pending: dict[str, int] = {}  # message id -> client
        # Clients not asked yet, or whose message was lost, and why.
        waiting: dict[int, str] = dict.fromkeys(requests, "the site is offline")
        tries = dict.fromkeys(requests, 0)
        while waiting or pending:
            left = deadline - time.monotonic()
            present = (
                self._present([k for k in waiting if tries[k] < MAX_SENDS]) if left > 0 else {}
            )
            client_of = {node: k for k, node in present.items()}
            asked = send_requests(
                self.grid, {node: requests[k] for node, k in client_of.items()}, "train.call", left
            )
            for node, message in asked.items():
                k = client_of[node]
                if tries[k]:
                    log.warning("site %s is asked again", self.members[k].name)
                pending[message] = k
                tries[k] += 1
                del waiting[k]
            polled = time.monotonic()
            for k, answer in receive_replies(self.grid, pending, most):
                last = time.monotonic()
                try:
                    tree = answer()
                except Lost as lost:
                    waiting[k] = str(lost)
                    log.warning("site %s: %s", self.members[k].name, lost)
                except Exception as error:
                    yield k, partial(_raise, error)
                else:
                    yield k, partial(_identity, tree)
            self._show_progress(progress, pending.values())
            hopeless = all(tries[k] == MAX_SENDS for k in waiting)
            if left <= 0 or (not pending and waiting and (enough() or hopeless)):
                break
            if waiting or pending:
                # The coordinator holds a poll while there is no reply, which counts as waiting.
                interval = poll_interval(time.monotonic() - last, POLL_SECONDS)
                next_poll = polled + min(interval, max(left, 0))
                time.sleep(max(0.0, next_poll - time.monotonic()))
        late = [k for k, why in waiting.items() if left <= 0 or why == LATE]
        if left <= 0:
            late += pending.values()
        self._hung |= dict.fromkeys(late, self.round)
        for k, why in waiting.items():
            yield k, partial(_raise, Lost(why))
        for k in pending.values():
            yield k, partial(_raise, Lost(f"{LATE} (within {self.timeout:g} s)"))

    def _show_progress(self, progress: Progress, clients: Iterable[int]) -> None:
        """Ask these clients how far they are, and display what they have reported since."""
        client_of = {self.members[k].node: k for k in clients}
        for node, done in progress.poll(client_of.keys() & self.reporting):
            k = client_of[node]
            self.count_release(k, [PROGRESS_PART])
            shown = self._shown.get(k, 0.0)
            self._shown[k] = max(shown, done)
            self.watched.advance(max(0.0, done - shown))

    def _present(self, wanted: Sequence[int]) -> dict[int, int]:
        """Return the nodes of those clients that are online.

        A site that came back as another node is found by its name, and gets that node.
        """
        if not wanted:
            return {}
        online = set(self.grid.get_node_ids())
        away = {
            self.members[k].name: self.members[k]
            for k in wanted
            if self.members[k].node not in online
        }
        if away:
            new_nodes = online - {member.node for member in self.members.values()}
            for node, name in self.rejoin(new_nodes).items():
                if name in away:
                    away[name].node = node
        return {k: self.members[k].node for k in wanted if self.members[k].node in online}


class Progress:
    """Requests to sites for their progress in a long call.

    The interval grows with the duration of the call and with the number of sites.

    Args:
        grid: Flower's grid.
        begin: When the call began, by the monotonic clock.
    """

    def __init__(self, grid: Grid, begin: float) -> None:
        self.grid = grid
        self.begin = begin
        self.last = begin  # when sites were last asked
        self.pending: dict[str, int] = {}  # message id -> node

    def poll(self, nodes: Set[int]) -> Iterator[tuple[int, float]]:
        """Ask nodes for progress if it is time to; yield (node, fraction) as reported.

        It is time after `PROGRESS_SECONDS` per node, or a tenth of the time since the call began if
        that is longer. Reports that are no fraction, or of other nodes, are ignored.
        """
        now = time.monotonic()
        if now - self.last > max(PROGRESS_SECONDS * len(nodes), (now - self.begin) / 10):
            self.last = now
            request = to_records(encode(None))
            idle = nodes - set(self.pending.values())
            asked = send_requests(self.grid, dict.fromkeys(idle, request), PROGRESS, 60.0)
            self.pending |= {message: node for node, message in asked.items()}
        for node, answer in receive_replies(self.grid, self.pending):
            try:
                done = answer()
            except Exception:  # Progress is only displayed: without it the call continues.
                continue
            if node in nodes and isinstance(done, float) and 0 <= done <= 1:
                yield node, done


def _most_of_all(most: Mapping[int, int | None]) -> int | None:
    """Return the clients' largest size; None if one is unknown, 0 without clients."""
    sizes = [size for size in most.values() if size is not None]
    return None if len(sizes) < len(most) else max(sizes, default=0)


def _raise(error: Exception) -> Payload:
    raise error


def _identity(tree: Payload) -> Payload:
    return tree
