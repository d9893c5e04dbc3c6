"""Groups of clients as the server sees them: remote calls, replies and failures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import torch

from barter.core.errors import ClientError, ConfigError, PayloadError
from barter.core.nodes import Client

__all__ = ["Clients", "Engine", "Failure", "Replies"]

C = TypeVar("C", bound=Client)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A client's failure to answer a call, with the reason."""

    client: int
    method: str
    round: int
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"client {self.client} failed in {self.method!r}, round {self.round}: {self.error}"


# (errors by client, earlier failures) -> all failures. Raises if too few clients are left.
Excuse: TypeAlias = Callable[
    [Mapping[int, Exception], Mapping[int, Failure]], Mapping[int, Failure]
]


class Replies(dict[int, R], Generic[R]):
    """Answers by client id, in ascending order, and other clients' failures.

    Attributes:
        num_examples: The number of images of each client that answered.
        failures: The failure of each client that did not answer.
        deferred: True if the clients run the method when they next take part.

    >>> from barter import Replies
    >>> replies = Replies({2: 0.5, 0: 1.0}, num_examples={0: 30, 1: 20, 2: 10}, failures={})
    >>> total = sum(replies.num_examples.values())
    >>> sum(replies[k] * n for k, n in replies.num_examples.items()) / total
    0.875
    """

    def __init__(
        self,
        answers: Mapping[int, R],
        num_examples: Mapping[int, int],
        failures: Mapping[int, Failure],
        excuse: Excuse | None = None,
    ) -> None:
        super().__init__(sorted(answers.items()))
        self.num_examples = {k: num_examples[k] for k in self}
        self.failures = dict(sorted(failures.items()))
        self.excuse = excuse
        self.deferred = False

    def map(self, work: Callable[[int, R], T]) -> Replies[T]:
        """Apply a function to every answer and return the results.

        If the function raises for a client's answer, that client counts as failed, as if it had
        not answered.

        Args:
            work: Called with the client's id and its answer.

        Returns:
            One result for each remaining client, and the updated failures.

        Raises:
            ClientError: If fewer than `min_clients` clients remain. Replies that were not returned
                by `Clients` (`excuse` is None) raise the function's own error instead.
        """
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        for k, answer in self.items():
            try:
                results[k] = work(k, answer)
            except Exception as error:
                if self.excuse is None:
                    raise
                errors[k] = error
        failures = self.failures if self.excuse is None else self.excuse(errors, self.failures)
        return Replies(results, self.num_examples, failures, self.excuse)

    def only(self, clients: Collection[int]) -> Replies[R]:
        """Return the answers of some clients; ids that did not answer are ignored.

        The failures stay the same.
        """
        answers = {k: answer for k, answer in self.items() if k in clients}
        return Replies(answers, self.num_examples, self.failures, self.excuse)

    def each(self, work: Callable[[int, R], T]) -> NoReturn:
        """Raise: this is the former name of `map`."""
        raise AttributeError("Replies.each is called Replies.map now")


class Engine(Protocol):
    """Interface to the clients, wherever they run."""

    participants: set[int]  # Clients that answered a call in this round.

    @property
    def client_ids(self) -> Sequence[int]: ...

    @property
    def min_clients(self) -> int | None: ...

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]: ...

    def record_failure(self, client: int, method: str, error: Exception) -> Failure: ...

    def stream(self, name: str) -> torch.Generator: ...


def _bind_arguments(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return a remote method's arguments after the client by position, with defaults.

    Raises:
        TypeError: If they do not fit the method, or it has keyword-only parameters.
    """
    bound = inspect.signature(method).bind(None, *args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"{method.__name__} has keyword-only parameters {list(bound.kwargs)}, "
            "which cannot be sent"
        )
    return bound.args[1:]


class Clients(Sequence[int]):
    """A group of clients as the server sees it.

    `Algorithm.round` receives the group of all clients.

    >>> from barter import Clients, Experiment, Local
    >>> experiment = Experiment(Local(), clients=4)
    >>> group = Clients(experiment.engine, range(4))
    >>> len(group.sample(0.5)), group.only([1, 3])
    (2, Clients(1, 3))
    >>> sorted(group.run(experiment.algorithm.evaluate)[0])
    ['global', 'local', 'local_images']
    """

    def __init__(self, engine: Engine, ids: Iterable[int]) -> None:
        self._engine = engine
        self._ids = tuple(sorted(ids))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._ids[index]

    def __repr__(self) -> str:
        return f"Clients{self._ids}"

    def only(self, ids: Iterable[int]) -> Clients:
        """Return the clients of the group that are in `ids`, such as those that answered.

        Their order is the group's; ids outside of the group are ignored.
        """
        wanted = set(ids)
        return Clients(self._engine, (k for k in self._ids if k in wanted))

    def sample(self, fraction: float) -> Clients:
        """Return a random fraction of the group, at least one client.

        It has round(fraction * size) clients without repetition. All calls within one round on the
        same group with the same fraction return the same sample.

        Raises:
            ConfigError: If the fraction is not in (0, 1].
        """
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction={fraction}: must be a share of the clients, > 0 and <= 1")
        size = max(1, round(fraction * len(self)))
        chosen = torch.randperm(len(self), generator=self._engine.stream("sample"))[:size]
        return Clients(self._engine, (self._ids[i] for i in chosen.tolist()))

    def run(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Replies[R]:
        """Run a method on every client with the same arguments.

        An empty group gives no answers and no failures.

        Args:
            method: A bound method of the algorithm whose first parameter is the client.
            *args: Its arguments after the client.
            **kwargs: The same by name; keyword-only parameters are not supported.

        Returns:
            The clients' answers and failures.

        Raises:
            ClientError: If fewer than the run's `min_clients` clients answer. All of the group must
                if that is None, or the group is smaller.
            TypeError: If the arguments do not fit the method, or it has keyword-only parameters.
        """
        arguments = _bind_arguments(method, args, kwargs)
        return self._ask(method, dict.fromkeys(self._ids, arguments))

    def run_missing(
        self,
        method: Callable[Concatenate[C, P], R],
        answered: Collection[int],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Replies[R]:
        """Run a method on the clients that have not answered it in earlier rounds.

        Earlier answers count towards `min_clients`, so that a client that fails again and again
        does not stop a run that continues without it.

        Args:
            method: A bound method of the algorithm whose first parameter is the client.
            answered: The clients whose earlier answers are still used.
            *args: Its arguments after the client.
            **kwargs: The same by name; keyword-only parameters are not supported.

        Returns:
            The new answers only; none if no client is missing.

        Raises:
            ClientError: If fewer than `min_clients` clients have answered now or earlier.
        """
        missing = [k for k in self._ids if k not in answered]
        arguments = _bind_arguments(method, args, kwargs)
        return self._ask(method, dict.fromkeys(missing, arguments), earlier=len(answered))

    def scatter(self, method: Callable[[C, T], R], payloads: Mapping[int, T]) -> Replies[R]:
        """Run a method on every client, each with its own payload.

        Args:
            method: A bound method of the algorithm that takes the client and a payload.
            payloads: One payload for each client of the group.

        Raises:
            ClientError: If fewer than `min_clients` clients answer.
            ConfigError: If a client of the group has no payload, or another has one.
        """
        if set(payloads) != set(self._ids):
            raise ConfigError(
                f"scatter needs one payload for each of {list(self)}, "
                f"got payloads for {sorted(payloads)}"
            )
        return self._ask(method, {k: (payloads[k],) for k in self._ids})

    def relay(self, method: Callable[[C, T], T], payload: T) -> T:
        """Pass a payload from client to client and return the last client's answer.

        Clients are called in ascending order of their ids. The first receives `payload`, each
        other one the previous client's answer; a client that fails is skipped. An empty group
        returns `payload`.

        Raises:
            ClientError: If fewer than `min_clients` clients answered, after all were called.
        """
        failures: list[Failure] = []
        for k in self._ids:
            replies = self._engine.call(method.__name__, {k: (payload,)})
            self._engine.participants.update(replies)
            payload = replies.get(k, payload)
            failures += replies.failures.values()
        self._require_enough(method.__name__, len(self), failures)
        return payload

    def _ask(
        self, method: Callable[..., R], args: Mapping[int, tuple[Any, ...]], earlier: int = 0
    ) -> Replies[R]:
        """Call the engine, record the participants, and require enough answers.

        Without clients to ask, the engine is not called and nothing is required.

        Args:
            method: The remote method.
            args: Client -> its arguments.
            earlier: Number of other clients whose earlier answers count too.
        """
        if not args:
            return Replies({}, {}, {})
        name = method.__name__
        replies = self._engine.call(name, args)
        if not replies.deferred:
            self._engine.participants.update(replies)

        def excuse(
            errors: Mapping[int, Exception], before: Mapping[int, Failure]
        ) -> Mapping[int, Failure]:
            """Merge new errors with earlier failures; return all, or raise ClientError."""
            failures = dict(before)
            for k, error in errors.items():
                failures[k] = self._engine.record_failure(k, name, error)
            self._require_enough(name, len(args), list(failures.values()), earlier)
            return failures

        return Replies(replies, replies.num_examples, excuse({}, replies.failures), excuse)

    def _require_enough(
        self, method: str, asked: int, failures: list[Failure], earlier: int = 0
    ) -> None:
        """Raise ClientError if fewer clients answered than `min_clients` requires.

        With `min_clients` of None all that were asked must answer; otherwise `min_clients` less
        `earlier`, but no more than were asked.

        Args:
            method: The remote method.
            asked: The number of clients that were asked now.
            failures: Their failures.
            earlier: The number of clients whose earlier answers count too.
        """
        min_clients = self._engine.min_clients
        answered = asked - len(failures)
        needed = asked if min_clients is None else min(min_clients - earlier, asked)
        if answered >= needed:
            return
        more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        reasons = "; ".join(map(str, failures[:3])) + more
        error = ClientError(
            f"{answered} of {asked} clients answered {method!r}, {needed} must: {reasons}"
        )
        error.answered = answered
        # These two say what is wrong and where, so their tracebacks are not needed.
        explained = (ConfigError.__name__, PayloadError.__name__)
        if not any(name in failures[0].error for name in explained):
            error.add_note(failures[0].traceback)
        raise error
