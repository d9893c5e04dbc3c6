"""Base class of engines: round, random streams, timing, failures, traffic and answer checks."""

from __future__ import annotations

import logging
import math
import statistics
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from barter.compute import lanes
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.answers import Known, Valid, shapes_of, validate
from barter.core.clients import Failure, Replies
from barter.core.errors import PayloadError, in_short
from barter.core.metrics import Evaluation
from barter.core.model import Classifier
from barter.core.nodes import Monitor, Server, Silence
from barter.core.outliers import find_large_logits, find_outliers, probe
from barter.core.payload import Payload, leaves, mapped, numbers
from barter.core.wire import Wire
from barter.privacy.parts import crossed
from barter.privacy.side_information import RESULTS, measured

__all__ = ["BaseEngine"]

TIMES = 10  # A client's claimed image count is capped at this multiple of the median.
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
    ) -> None:
        self.algorithm = algorithm
        self.seed = seed
        self.min_clients = min_clients
        self.wire = Wire(algorithm.may_be_infinite)
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
        # Client -> part of its answers, or side information -> number of uploads.
        self.crossed: dict[int, dict[str, int]] = {}
        # Client -> ε of everything it has released, as it reports with its answers.
        self.told: dict[int, float] = {}
        self.server: Server | None = None  # None in the engine of a single site.
        self._capped: set[int] = set()  # Clients whose claimed image count was capped.
        self._known: dict[int, Known] = {}
        # Client -> its answer to the current call, as its contract knows it.
        self._valid: dict[int, Valid] = {}
        # Architecture and width budget -> a network in which uploaded weights are tried out.
        self._networks: dict[tuple[str, int], Classifier] = {}
        # Lane -> fraction of its current call whose progress has not been reported yet.
        self._credit: dict[int, float] = {}

    @property
    def client_ids(self) -> Sequence[int]:
        """Return the ids of all clients."""
        raise NotImplementedError

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Run a method of the algorithm on clients.

        Args:
            method: The method's name.
            args: Client -> its arguments.
        """
        raise NotImplementedError

    def memory(self) -> dict[int, Payload]:
        """Return the state of the clients that the server's checkpoint stores."""
        raise NotImplementedError

    def recall(self, memory: Mapping[int, Payload]) -> None:
        """Restore the clients' state that `memory` returned."""
        raise NotImplementedError

    def at_home(self) -> AbstractContextManager[None]:
        """Run the server's work inside the block on the server's own CUDA stream, if any."""
        return nullcontext()

    def examples(self, client: int) -> int:
        """Return a client's number of images, as the client reports it."""
        raise NotImplementedError

    def counting(self, clients: Iterable[int]) -> dict[int, int]:
        """Return the clients' numbers of images as weights for means.

        The numbers are the clients' own claims, so each is capped at 10x the median. A warning
        names a client whose claim is capped, once.
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

    def believed(self, answer: Payload, method: str, client: int, claims: Set[str]) -> Payload:
        """Scale down the image counts in an answer if the client's number of images was capped.

        Args:
            answer: The client's answer.
            method: The remote method.
            client: The client's id.
            claims: The paths of image counts in the answer.
        """
        share = self.counting([client])[client] / self.examples(client) if claims else 1.0
        if share == 1.0:
            return answer

        def scale(path: str, value: Any) -> Any:
            return (value.double() * share).ceil().to(value.dtype) if path in claims else value

        return mapped(answer, scale, method)

    def meet(self, server: Server) -> None:
        """Set the server; from now on answers are checked against its knowledge of the clients."""
        self.server = server
        self._known.clear()

    def known(self, server: Server, client: int) -> Known:
        """Return the server's knowledge of a client, which contracts may refer to."""
        if client not in self._known:
            has_model = server.model_or_none is not None
            server_weights = shapes_of(server.model.state_dict()) if has_model else {}
            server_parameters = server.model.named_parameters() if has_model else ()
            parameters = frozenset(name for name, _ in server_parameters)
            known = Known(
                server.spec, self.examples(client), server=server_weights, parameters=parameters
            )
            if client in server.architectures:
                network = server.architectures[client]()
                outgoing = self.algorithm.outgoing(network)
                weights = shapes_of(outgoing)
                initial: dict[str, tuple[float, float]] = {}
                tables: dict[str, tuple[int, int]] = {}
                for name, value in outgoing.items():
                    if value.is_floating_point() and value.numel():
                        rms = value.double().square().mean().sqrt()
                        initial[name] = (float(value.abs().amax()), float(rms))
                    elif value.dtype == torch.int64 and value.numel() > 1:
                        smallest, largest = int(value.amin()), int(value.amax())
                        # Counters start from equal numbers and may grow.
                        if smallest < largest:
                            tables[name] = (smallest, largest)
                parameters |= {name for name, _ in network.named_parameters()}
                known = replace(
                    known,
                    features=network.feature_dim,
                    weights=weights,
                    parameters=parameters,
                    initial=initial,
                    tables=tables,
                )
            self._known[client] = known
        return self._known[client]

    def arrived(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        """Receive an answer: count its parts as released, check it, and return it isolated.

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
        self.note(client, self.parts(method, answer))
        return self.seen_to(answer, method, client, sent)

    def seen_to(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        """Check an answer whose parts were counted, and return it isolated.

        The engine of a single site has no server: there the answer passes and is checked by the
        server that receives it.
        """
        if self.server is not None:
            valid = validate(answer, self.algorithm, method, sent, self.known(self.server, client))
            self._valid[client] = valid
            answer = self.believed(answer, method, client, valid.claims)
        return self.wire.carry(answer, method, client, "up")

    def drop_outliers(
        self, method: str, answers: dict[int, Any], args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Failure]:
        """Remove answers from a call that are far larger than the others'.

        Args:
            method: The remote method.
            answers: The answers by client, which are modified.
            args: Client -> its arguments.

        Returns:
            The failures of the clients whose answers were removed.
        """
        server = self.server
        valid = {k: self._valid[k] for k in sorted(answers) if k in self._valid}
        self._valid = {}
        if server is None:
            return {}
        found = find_outliers(
            {k: answer.magnitudes for k, answer in valid.items()},
            lambda k: self.known(server, k).initial,
            lambda k: args[k],
        )
        if self.algorithm.replicas:
            rest = {k: answer for k, answer in valid.items() if k not in found}
            found |= self._find_unusable(server, rest)
        failures = {}
        for k, reason in found.items():
            del answers[k]
            failures[k] = self.failure(k, method, PayloadError(reason))
        return failures

    def _find_unusable(self, server: Server, answers: Mapping[int, Valid]) -> dict[int, str]:
        """Return the clients whose uploaded network fails on random images, and why."""
        peaks: dict[int, torch.Tensor] = {}
        errors: dict[int, str] = {}
        for k, answer in answers.items():
            for weights in answer.networks:
                size = sum(value.numel() for value in weights.values())
                key = (server.names.get(k, f"client {k}"), size)
                if key not in self._networks:
                    self._networks[key] = server.architectures[k]()
                device = next(iter(weights.values())).device
                network = self._networks[key].to(device)
                try:
                    peaks[k] = probe(network, weights, server.spec)
                except Exception as error:  # Weights may make a network fail in any way.
                    errors[k] = f"the uploaded network fails on random images: {in_short(error)}"
        large = find_large_logits(dict(zip(peaks, numbers(list(peaks.values())), strict=True)))
        return errors | large

    def note(self, client: int, parts: Iterable[str]) -> None:
        """Count one more release of these parts by a client."""
        counts = self.crossed.setdefault(client, {})
        counts |= {part: counts.get(part, 0) + 1 for part in parts}

    def parts(self, method: str, answer: Payload) -> list[str]:
        """Return the names of the parts that an answer releases.

        An evaluation without test results releases nothing: it reports the privacy spent only.
        """
        if method == Algorithm.evaluate.__name__:
            return [RESULTS] if measured(answer) else []
        return crossed(self.algorithm, method, answer)

    def hear(self, client: int, epsilon: object) -> None:
        """Record the ε that a client reports for all its releases; ignore invalid values."""
        if isinstance(epsilon, int | float) and epsilon >= 0:
            self.told[client] = max(self.told.get(client, 0.0), float(epsilon))

    def failed(self, client: int, method: str, error: Exception) -> Failure:
        """Record a client's failure in this round and return it."""
        failure = self.failure(client, method, error)
        self.failures.append(failure)
        return failure

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        """Return a failure that describes an error, without recording it."""
        details = "".join(traceback.format_exception(error))
        return Failure(client, method, self.round, f"{type(error).__name__}: {error}", details)

    def tests_due(self, client: int, method: str) -> bool:
        """Return whether a client that runs this method is evaluated in this round."""
        if not self.evaluation.is_due(self.round, self.last_round):
            return False
        # An evaluation alone does not make a client a participant of the round.
        joining = set() if method == Algorithm.evaluate.__name__ else {client}
        return self.evaluation.includes(client, self.client_ids, self.participants | joining)

    def alone(self) -> bool:
        """Return whether no client can have been influenced by others: nothing was uploaded yet."""
        return self.round <= 1 and not self.wire.told() - {Algorithm.evaluate.__name__}

    def stream(self, name: str) -> torch.Generator:
        """Return a random generator of the server for this round and purpose."""
        return torch.Generator().manual_seed(seeds.stream_seed(self.seed, self.round, name))

    def asked_before(self, method: str, client: int) -> int:
        """Return the number of earlier calls of a method in this round, and count this one.

        The number is part of the random stream's name, so that repeated calls draw anew.
        """
        for past in [call for call in self._calls if call[0] != self.round]:
            del self._calls[past]
        before = self._calls[self.round, method, client]
        self._calls[self.round, method, client] += 1
        return before

    def repeat(self, method: str, client: int, before: int) -> None:
        """Set the number of earlier calls of a method in this round, as when a call is repeated."""
        self._calls[self.round, method, client] = before

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[None]:
        """Time a phase and report it to the monitor."""
        start = time.perf_counter()
        with self.watched.phase(name, total):
            try:
                yield
                lanes.rest()
            finally:
                self.seconds[name] += time.perf_counter() - start

    def advance(self, amount: float) -> None:
        """Report progress to the monitor; a client's call adds up to 1 at most."""
        lane = id(lanes.current())
        amount = min(amount, self._credit.get(lane, math.inf))
        if lane in self._credit:
            self._credit[lane] -= amount
        self.watched.advance(amount)
