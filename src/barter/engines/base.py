"""Base class of engines: random streams, failures, traffic, checks of answers."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from barter.compute import lanes
from barter.compute.flops import count_flops
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.answers import Known, Valid, shapes_of, validate
from barter.core.clients import Failure, Replies
from barter.core.errors import PayloadError, summarise_error
from barter.core.metrics import Evaluation
from barter.core.model import Classifier
from barter.core.nodes import Monitor, Server, Silence
from barter.core.outliers import OutlierComparison, compare_answers, find_large_logits, probe
from barter.core.payload import Payload, State, leaves, map_leaves, nbytes, to_floats
from barter.core.wire import Wire
from barter.core.wire_codec import WireCodec
from barter.engines.network import Clock
from barter.privacy.parts import nonempty_parts
from barter.privacy.side_information import RESULTS, holds_metrics

__all__ = ["BaseEngine"]

TIMES = 10  # A client's claimed image count is capped at this multiple of the median.
# From this multiple of its reference on, an accepted answer is named if a round goes wrong.
STANDS_OUT = 5.0
log = logging.getLogger("barter")


class BaseEngine:
    """Server side of all engines; a subclass knows the clients and how to call them."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        *,
        seed: int,
        min_clients: int | None,
        monitor: Monitor | None,
        codec: WireCodec | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.seed = seed
        self.min_clients = min_clients
        self.wire = Wire(algorithm.may_be_infinite, codec)
        self.watched = monitor or Silence()
        self.round = 0
        self.evaluation = Evaluation()  # The test sets that clients use, and when.
        # The last round of the run, which is always evaluated; 0 if unknown.
        self.last_round = 0
        self.participants: set[int] = set()  # Clients that answered a call in this round.
        self.failures: list[Failure] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)  # By phase.
        # (round, method, client) -> number of calls.
        self._calls: Counter[tuple[int, str, int]] = Counter()
        self._calls_round = 0  # The round of these calls.
        # Client -> part of its answers, or side information -> number of uploads.
        self.crossed: dict[int, dict[str, int]] = {}
        # Client -> ε of everything it has released, as it reports with its answers.
        self.reported_epsilon: dict[int, float] = {}
        self.adversarial: Sequence[int] = ()  # Simulated adversarial clients.
        self.clock: Clock | None = None  # Simulated time; None if no network is simulated.
        self.server: Server | None = None  # None in the engine of a single site.
        self._capped: set[int] = set()  # Clients whose claimed image count was capped.
        self._known: dict[int, Known] = {}
        # Function that builds a network -> what is known of each client that has this network.
        self._known_networks: dict[Callable[[], Classifier] | None, Known] = {}
        # Client -> its answer to the current call, as its contract knows it.
        self._valid: dict[int, Valid] = {}
        # The accepted answer of this round that is largest in comparison: round, client, method.
        self._extreme: tuple[int, int, str, OutlierComparison] | None = None
        # Architecture and number of weights -> a network in which uploaded weights are tried out,
        # and its largest logit for random images before that.
        self._networks: dict[tuple[str, int], tuple[Classifier, torch.Tensor]] = {}
        # Lane -> fraction of its current call whose progress has not been reported yet.
        self._credit: dict[int, float] = {}

    @property
    def client_ids(self) -> Sequence[int]:
        """Return the ids of all clients in ascending order."""
        raise NotImplementedError

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Run a method of the algorithm on clients.

        Args:
            method: The method's name.
            args: Client -> its arguments after the client.

        Returns:
            The accepted answers and the failures, which are recorded too. It is the caller
            (`Clients`) that requires `min_clients` answers.
        """
        raise NotImplementedError

    def memory(self) -> dict[int, Payload]:
        """Return the state of the clients that the server's checkpoint stores, by id."""
        raise NotImplementedError

    def recall(self, memory: Mapping[int, Payload]) -> None:
        """Restore the clients' state that `memory` returned."""
        raise NotImplementedError

    def on_server_stream(self) -> AbstractContextManager[None]:
        """Run the server's work inside the block on the server's own CUDA stream.

        An engine without such streams changes nothing.
        """
        return nullcontext()

    @contextmanager
    def count_server_work(self) -> Iterator[None]:
        """Count the server's operations inside the block, if time is simulated (`clock`)."""
        if self.clock is None:
            yield
            return
        with count_flops() as count:
            yield
        self.clock.add_server_work(count.total)

    def examples(self, client: int) -> int:
        """Return a client's number of images, as the client reports it."""
        raise NotImplementedError

    def image_counts(self, clients: Iterable[int]) -> dict[int, int]:
        """Return the clients' numbers of images as weights for means.

        The numbers are the clients' own claims, so each is capped at 10x the median over all
        clients of the run, rounded down and at least 1. A warning names a client whose claim is
        capped, once.
        """
        claimed = {k: self.examples(k) for k in self.client_ids}
        most = max(1, int(TIMES * statistics.median(claimed.values())))
        for k in sorted(claimed):
            if claimed[k] > most and k not in self._capped:
                log.warning(
                    "client %d claims %d images: in means it is weighted as if it had %d",
                    k,
                    claimed[k],
                    most,
                )
                self._capped.add(k)
        return {k: min(claimed[k], most) for k in clients}

    def cap_counts(self, answer: Payload, method: str, client: int, claims: Set[str]) -> Payload:
        """Scale an answer's image counts down if the client's number of images is capped.

        Counts are multiplied by capped / claimed number of images (`image_counts`) and rounded up.
        Without a cap the answer is returned as it is, otherwise a changed copy.

        Args:
            answer: The client's answer.
            method: The remote method.
            client: The client's id.
            claims: The paths of image counts in the answer.
        """
        share = self.image_counts([client])[client] / self.examples(client) if claims else 1.0
        if share == 1.0:
            return answer

        def scale(path: str, value: Any) -> Any:
            return (value.double() * share).ceil().to(value.dtype) if path in claims else value

        return map_leaves(answer, scale, method)

    def set_server(self, server: Server) -> None:
        """Set the server, whose knowledge of clients answers are checked against.

        What was known of clients before is forgotten.
        """
        self.server = server
        self._known.clear()
        self._known_networks.clear()

    def knowledge_of(self, server: Server, client: int) -> Known:
        """Return what the server knows of a client, which contracts may refer to.

        These are numbers of images and features, and the shapes and initial sizes of the networks'
        weights. It is computed once for each client. Of a client whose network the server cannot
        build, it is the number of images, the algorithm's feature width and the server's weights.
        """
        if client not in self._known:
            build = server.architectures.get(client)
            # Clients with the same network share what is known of it, however many they are.
            if build not in self._known_networks:
                self._known_networks[build] = self._knowledge_of_network(server, build)
            known = self._known_networks[build]
            self._known[client] = replace(known, examples=self.examples(client))
        return self._known[client]

    def _knowledge_of_network(
        self, server: Server, build: Callable[[], Classifier] | None
    ) -> Known:
        """Return the server's knowledge of any client with this network.

        Args:
            server: The server.
            build: Builds the network; None if the server cannot.
        """
        has_model = server.model_or_none is not None
        server_weights = shapes_of(server.model.state_dict()) if has_model else {}
        server_parameters = server.model.named_parameters() if has_model else ()
        parameters = frozenset(name for name, _ in server_parameters)
        known = Known(
            server.spec,
            0,
            features=self.algorithm.feature_width,
            server=server_weights,
            parameters=parameters,
        )
        if build is None:
            return known
        network = build()
        outgoing = self.algorithm.outgoing(network)
        weights = shapes_of(outgoing)
        initial: dict[str, tuple[float, float]] = {}
        tables: dict[str, tuple[int, int]] = {}
        for name, value in outgoing.items():
            if value.is_floating_point() and value.numel():
                peak = torch.linalg.vector_norm(value, math.inf)
                rms = torch.linalg.vector_norm(value) / math.sqrt(value.numel())
                initial[name] = (float(peak), float(rms))
            elif value.dtype == torch.int64 and value.numel() > 1:
                smallest, largest = int(value.amin()), int(value.amax())
                # Counters start from equal numbers and may grow.
                if smallest < largest:
                    tables[name] = (smallest, largest)
        parameters |= {name for name, _ in network.named_parameters()}
        return replace(
            known,
            features=network.feature_dim,
            weights=weights,
            parameters=parameters,
            initial=initial,
            tables=tables,
        )

    def receive_answer(
        self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]
    ) -> Payload:
        """Count an answer's parts as released, decode and check it, and return a copy.

        The parts of a rejected answer count as released too. The bytes of an accepted one are added
        to the traffic.

        Args:
            answer: The client's answer.
            method: The remote method.
            client: The client's id.
            sent: The arguments that the client received.

        Raises:
            PayloadError: If the answer does not match the method's return type.
        """
        list(leaves(answer, method))  # Raises if the answer is not a payload.
        # Parts are counted first: a rejected answer has left its client all the same.
        self.count_release(client, self.parts(method, answer))
        answer, size = self.open_answer(answer, method, client)
        return self.check_answer(answer, method, client, sent, size)

    def open_answer(self, answer: Payload, method: str, client: int) -> tuple[Payload, int | None]:
        """Return an answer as the server decodes it, and its encoded size in bytes.

        The size is None if answers are sent as they are. Nothing is counted.
        """
        return self.wire.transmit(answer, method, client, "up")

    def check_answer(
        self,
        answer: Payload,
        method: str,
        client: int,
        sent: tuple[Any, ...],
        size: int | None = None,
    ) -> Payload:
        """Check a decoded answer, count its bytes; return a copy that shares no memory.

        Image counts are capped, see `cap_counts`. Released parts must have been counted before. The
        engine of a single site has no server: there the answer passes and is checked by the server
        that receives it.

        Args:
            answer: The answer.
            method: The remote method.
            client: The client's id.
            sent: The arguments that the client received.
            size: Its encoded size in bytes; None if it was not encoded.

        Raises:
            PayloadError: If the answer does not match the method's return type.
        """
        if self.server is not None:
            valid = validate(
                answer, self.algorithm, method, sent, self.knowledge_of(self.server, client)
            )
            self._valid[client] = valid
            answer = self.cap_counts(answer, method, client, valid.claims)
        size = nbytes(answer) if size is None else size
        return self.wire.carry(answer, method, client, "up", size=size)

    def drop_outliers(
        self, method: str, answers: dict[int, Any], args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Failure]:
        """Remove answers from a call that are far larger than the others'.

        Only answers that `check_answer` has seen since the last call of this function are compared;
        without a server none is. Removed are those that `compare_answers` finds excessive, and
        uploaded networks that fail on random images or have far larger logits
        (`find_large_logits`).

        Args:
            method: The remote method.
            answers: The answers by client, which are modified.
            args: Client -> its arguments.

        Returns:
            The failures of the clients whose answers were removed; they are not recorded yet.
        """
        server = self.server
        valid = {k: self._valid[k] for k in sorted(answers) if k in self._valid}
        self._valid = {}
        if server is None:
            return {}
        comparisons = compare_answers(
            {k: answer.magnitudes for k, answer in valid.items()},
            lambda k: self.knowledge_of(server, k).initial,
            lambda k: args[k],
        )
        found: dict[int, str] = {}
        for k, comparison in comparisons.items():
            if comparison.is_excessive:
                limit = f"; at most {comparison.times:g} times are accepted"
                found[k] = f"{comparison}{limit}"
            else:
                self._note_extreme(k, method, comparison)
        rest = {k: answer for k, answer in valid.items() if k not in found}
        found |= self._find_unusable(server, rest)
        failures = {}
        for k, reason in found.items():
            del answers[k]
            failures[k] = self.failure(k, method, PayloadError(reason))
        return failures

    def _note_extreme(self, client: int, method: str, comparison: OutlierComparison) -> None:
        """Remember an accepted answer if none of this round has a larger `ratio`."""
        extreme = self._extreme
        if extreme is None or extreme[0] != self.round or comparison.ratio > extreme[3].ratio:
            self._extreme = (self.round, client, method, comparison)

    def suspect(self) -> str:
        """Describe the accepted answer of this round that stands out, for messages.

        It is the one that is the largest multiple of its reference. The text is empty if this is
        less than 5.
        """
        if self._extreme is None:
            return ""
        round, client, method, comparison = self._extreme
        if round != self.round or comparison.ratio < STANDS_OUT:
            return ""
        return f"; the answer that stands out is client {client}'s to {method!r}: {comparison}"

    def _find_unusable(self, server: Server, answers: Mapping[int, Valid]) -> dict[int, str]:
        """Return the clients whose uploaded network fails on random images, and why.

        A network fails if it raises, or its logits are far larger than those of the others (see
        `find_large_logits`). Parts of a network are not tried.
        """
        peaks: dict[int, torch.Tensor] = {}
        initial: dict[int, torch.Tensor] = {}
        errors: dict[int, str] = {}
        for k, answer in answers.items():
            for whose, weights in answer.networks:
                network = self._network(server, k, whose, weights)
                if network is None:
                    continue
                try:
                    peaks[k] = probe(network[0], weights, server.spec)
                    initial[k] = network[1]
                except Exception as error:  # Weights may make a network fail in any way.
                    errors[k] = (
                        f"the uploaded network fails on random images: {summarise_error(error)}"
                    )
        found = to_floats([*peaks.values(), *initial.values()])
        of_peaks = dict(zip(peaks, found, strict=False))
        of_initial = dict(zip(initial, found[len(peaks) :], strict=True))
        return errors | find_large_logits(of_peaks, of_initial)

    def _network(
        self, server: Server, client: int, whose: str, weights: State
    ) -> tuple[Classifier, torch.Tensor] | None:
        """Return a network to try out uploaded weights, and its largest initial logit.

        There is one for each architecture and number of weights, kept from call to call; `probe`
        changes its weights. None if the weights are only a part of a network.
        """
        size = sum(value.numel() for value in weights.values())
        key = ("server" if whose == "server" else server.names.get(client, str(client)), size)
        if key not in self._networks:
            is_server = whose == "server"
            network = copy.deepcopy(server.model) if is_server else server.architectures[client]()
            state = network.state_dict()
            if state.keys() != weights.keys():
                return None
            network.to(next(iter(weights.values())).device)
            self._networks[key] = network, probe(network, network.state_dict(), server.spec)
        return self._networks[key]

    def count_release(self, client: int, parts: Iterable[str]) -> None:
        """Count one more release of each of these parts by a client."""
        counts = self.crossed.setdefault(client, {})
        counts |= {part: counts.get(part, 0) + 1 for part in parts}

    def parts(self, method: str, answer: Payload) -> list[str]:
        """Return the names of an answer's parts that a client releases by sending it.

        They are those of `nonempty_parts`, or the test results of an evaluation. An evaluation
        without any releases nothing: it reports the privacy spent only.
        """
        if method == Algorithm.evaluate.__name__:
            return [RESULTS] if holds_metrics(answer) else []
        return nonempty_parts(self.algorithm, method, answer)

    def record_epsilon(self, client: int, epsilon: object) -> None:
        """Record the ε that a client reports for all its releases; the largest counts.

        Values that are negative, NaN or no numbers are ignored; infinity is not.
        """
        if isinstance(epsilon, int | float) and epsilon >= 0:
            self.reported_epsilon[client] = max(
                self.reported_epsilon.get(client, 0.0), float(epsilon)
            )

    def record_failure(self, client: int, method: str, error: Exception) -> Failure:
        """Record a client's failure in this round and return it."""
        failure = self.failure(client, method, error)
        self.failures.append(failure)
        return failure

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        """Return a failure of this round that describes an error, without recording it."""
        details = "".join(traceback.format_exception(error))
        return Failure(client, method, self.round, f"{type(error).__name__}: {error}", details)

    def tests_due(self, client: int, method: str) -> bool:
        """Return whether a client that runs this method is evaluated in this round.

        The client counts as a participant of the round, unless the method is the evaluation itself.
        """
        if not self.evaluation.is_due(self.round, self.last_round):
            return False
        # An evaluation by itself does not make a client a participant of the round.
        joining = set() if method == Algorithm.evaluate.__name__ else {client}
        return self.evaluation.includes(client, self.client_ids, self.participants | joining)

    def clients_due(self) -> Set[int]:
        """Return the clients that are evaluated in this round; none if it is not due.

        If only sampled clients are evaluated, they are those that have answered a call so far.
        """
        if not self.evaluation.is_due(self.round, self.last_round):
            return set()
        return self.evaluation.choose(self.client_ids, self.participants)

    def is_local_only(self) -> bool:
        """Return whether no client has uploaded anything yet, evaluation excepted.

        It is always False after round 1. While it is True, no client can have been influenced by
        others.
        """
        return self.round <= 1 and not self.wire.methods_with_uploads() - {
            Algorithm.evaluate.__name__
        }

    def stream(self, name: str) -> torch.Generator:
        """Return a random generator of the server for this round and purpose, on the CPU.

        Each call returns a new one in the same initial state.
        """
        return torch.Generator().manual_seed(seeds.stream_seed(self.seed, self.round, name))

    def count_call(self, method: str, client: int) -> int:
        """Count a client's call of a method; return the round's number of earlier ones.

        The number is part of the random stream's name, so that repeated calls draw anew.
        """
        calls = self._calls_in_round()
        before = calls[self.round, method, client]
        calls[self.round, method, client] += 1
        return before

    def _calls_in_round(self) -> Counter[tuple[int, str, int]]:
        """Return the numbers of calls in this round; those of earlier rounds are dropped."""
        if self._calls_round != self.round:
            self._calls.clear()
            self._calls_round = self.round
        return self._calls

    def repeat(self, method: str, client: int, before: int) -> None:
        """Set a client's number of earlier calls of a method in this round to `before`.

        The next call then draws from the random stream of the one that `count_call` returned
        `before` for.
        """
        self._calls_in_round()[self.round, method, client] = before

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[None]:
        """Time a phase and report it to the monitor.

        The time until the device has finished the block's work is added to `seconds[name]`.

        Args:
            name: The phase.
            total: The amount of progress at its end.
        """
        start = time.perf_counter()
        with self.watched.phase(name, total):
            try:
                yield
                lanes.wait_for_device()
            finally:
                self.seconds[name] += time.perf_counter() - start

    def advance(self, amount: float) -> None:
        """Report progress to the monitor; a client's call adds up to 1 at most.

        What exceeds 1 is not reported. Outside of a call, the amount is reported as it is.
        """
        lane = id(lanes.current_lane())
        amount = min(amount, self._credit.get(lane, math.inf))
        if lane in self._credit:
            self._credit[lane] -= amount
        self.watched.advance(amount)
