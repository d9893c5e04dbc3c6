"""What the server has wherever its clients live: the round, random streams, seconds, failures, counted bytes."""

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
from barter.core.answers import Known, require, shapes_of
from barter.core.clients import Failure, Replies
from barter.core.metrics import Evaluation
from barter.core.nodes import Monitor, Server, Silence
from barter.core.payload import Payload, leaves, mapped
from barter.core.wire import Wire
from barter.privacy.parts import crossed
from barter.privacy.side_information import RESULTS, measured

__all__ = ["BaseEngine"]

TIMES = 10  # as many images as the client in the middle has may count of any other
log = logging.getLogger("barter")


class BaseEngine:
    """A subclass says who the clients are and how they are called."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        *,
        seed: int,
        min_clients: int | None,
        monitor: Monitor | None,
    ) -> None:
        self.algorithm, self.seed, self.min_clients = algorithm, seed, min_clients
        self.wire = Wire(algorithm.may_be_infinite)
        self.watched = monitor or Silence()
        self.round = 0
        self.evaluation = Evaluation()  # which tests clients run, and when
        self.last_round = 0  # of the run, which is always evaluated; 0: not known
        self.participants: set[int] = set()  # clients that answered a call in this round
        self.failures: list[Failure] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[tuple[int, str, int]] = Counter()
        # client -> part of its answers, or beside -> how often it came up
        self.crossed: dict[int, dict[str, int]] = {}
        # client -> ε of all that has left it, as it says with its answers
        self.told: dict[int, float] = {}
        self.server: Server | None = None  # whose clients these are
        self._capped: set[int] = set()  # who says of more images than count
        self._known: dict[int, Known] = {}
        # how much of each lane's current turn is still to be shown
        self._credit: dict[int, float] = {}

    @property
    def client_ids(self) -> Sequence[int]:
        raise NotImplementedError

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]:
        """Run a method of the algorithm at each of these clients."""
        raise NotImplementedError

    def memory(self) -> dict[int, Payload]:
        """What the server's checkpoint keeps of its clients."""
        raise NotImplementedError

    def recall(self, memory: Mapping[int, Payload]) -> None:
        """Clients take up where `memory` was taken."""
        raise NotImplementedError

    def at_home(self) -> AbstractContextManager[None]:
        """The server's place: inside, its work goes to its own stream."""
        return nullcontext()

    def examples(self, client: int) -> int:
        """How many images a client has."""
        raise NotImplementedError

    def counting(self, clients: Iterable[int]) -> dict[int, int]:
        """How many images of these clients count in means, which the clients themselves say: not more than ten times as
        many as the client in the middle has."""
        said = {k: self.examples(k) for k in self.client_ids}
        most = max(1, int(TIMES * statistics.median(said.values())))
        for k in sorted(k for k, n in said.items() if n > most and k not in self._capped):
            log.warning(
                "client %d says that it has %d images: in means it counts as one of %d",
                k,
                said[k],
                most,
            )
            self._capped.add(k)
        return {k: min(said[k], most) for k in clients}

    def believed(self, answer: Payload, method: str, client: int, claims: Set[str]) -> Payload:
        """An answer in which no more images are spoken of than count of this client; of each kind as large a share."""
        share = self.counting([client])[client] / self.examples(client) if claims else 1.0
        if share == 1.0:
            return answer

        def less(path: str, value: Any) -> Any:
            return (value.double() * share).ceil().to(value.dtype) if path in claims else value

        return mapped(answer, less, method)

    def meet(self, server: Server) -> None:
        """From now on, answers are held against what this server knows of its clients."""
        self.server = server
        self._known.clear()

    def known(self, server: Server, client: int) -> Known:
        """What the server knows of a client."""
        if client not in self._known:
            central = {} if server.model_or_none is None else shapes_of(server.model.state_dict())
            trained = () if server.model_or_none is None else server.model.named_parameters()
            parameters = frozenset(name for name, _ in trained)
            known = Known(server.spec, self.examples(client), server=central, parameters=parameters)
            if client in server.architectures:
                network = server.architectures[client]()
                weights = shapes_of(self.algorithm.outgoing(network))
                parameters |= {name for name, _ in network.named_parameters()}
                known = replace(
                    known, features=network.feature_dim, weights=weights, parameters=parameters
                )
            self._known[client] = known
        return self._known[client]

    def arrived(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        """A client's answer to what was sent as it arrives at the server, is counted and seen to."""
        list(leaves(answer, method))  # what is no payload cannot travel
        self.note(
            client, self.parts(method, answer)
        )  # what is refused has left its client all the same
        return self.seen_to(answer, method, client, sent)

    def seen_to(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        """An answer that was counted, held against what the method says it is.

        Where there is no server but one client's own engine, the answer goes on to where it is looked at.
        """
        if self.server is not None:
            claims = require(answer, self.algorithm, method, sent, self.known(self.server, client))
            answer = self.believed(answer, method, client, claims)
        return self.wire.carry(answer, method, client, "up")

    def note(self, client: int, parts: Iterable[str]) -> None:
        """These parts have left a client, once more."""
        seen = self.crossed.setdefault(client, {})
        seen |= {part: seen.get(part, 0) + 1 for part in parts}

    def parts(self, method: str, answer: Payload) -> list[str]:
        """What is said in an answer; an evaluation may say no more than what its client has spent."""
        if method == Algorithm.evaluate.__name__:
            return [RESULTS] if measured(answer) else []
        return crossed(self.algorithm, method, answer)

    def hear(self, client: int, epsilon: object) -> None:
        """What a client says that all it has told costs; nonsense counts as if it had said nothing."""
        if isinstance(epsilon, int | float) and epsilon >= 0:
            self.told[client] = max(self.told.get(client, 0.0), float(epsilon))

    def failed(self, client: int, method: str, error: Exception) -> Failure:
        """A client's failure, as the round's record has it."""
        failure = self.failure(client, method, error)
        self.failures.append(failure)
        return failure

    def failure(self, client: int, method: str, error: Exception) -> Failure:
        """What an error says of a client."""
        told = "".join(traceback.format_exception(error))
        return Failure(client, method, self.round, f"{type(error).__name__}: {error}", told)

    def tests_due(self, client: int, method: str) -> bool:
        """Whether a client that is asked for a method runs its tests in this round."""
        if not self.evaluation.is_due(self.round, self.last_round):
            return False
        takes_part = set() if method == Algorithm.evaluate.__name__ else {client}
        return self.evaluation.includes(client, self.client_ids, self.participants | takes_part)

    def alone(self) -> bool:
        """Whether nothing of one client can have reached another: the server has not been told anything yet."""
        return self.round <= 1 and not self.wire.told() - {Algorithm.evaluate.__name__}

    def stream(self, name: str) -> torch.Generator:
        """A random stream of the server's own in this round."""
        return torch.Generator().manual_seed(seeds.stream_seed(self.seed, self.round, name))

    def asked_before(self, method: str, client: int) -> int:
        """How often this client was asked this in this round; a method asked for again draws anew."""
        for past in [call for call in self._calls if call[0] != self.round]:
            del self._calls[past]
        before = self._calls[self.round, method, client]
        self._calls[self.round, method, client] += 1
        return before

    def repeat(self, method: str, client: int, before: int) -> None:
        """The next call of a method is the one that comes after so many."""
        self._calls[self.round, method, client] = before

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[None]:
        """Time a phase and show it to whoever watches."""
        start = time.perf_counter()
        with self.watched.phase(name, total):
            try:
                yield
                lanes.rest()
            finally:
                self.seconds[name] += time.perf_counter() - start

    def advance(self, amount: float) -> None:
        """A part of a client's turn, or a step of the server's, is done."""
        lane = id(lanes.current())
        amount = min(amount, self._credit.get(lane, math.inf))
        if lane in self._credit:
            self._credit[lane] -= amount
        self.watched.advance(amount)
