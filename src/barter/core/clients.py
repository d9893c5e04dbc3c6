"""A group of clients as the server sees it: ask them all, ask each, hand something along."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import torch

from barter.core.errors import ClientError, ConfigError
from barter.core.nodes import Client

__all__ = ["Clients", "Engine", "Failure", "Replies"]

C = TypeVar("C", bound=Client)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A client that was asked and did not answer, and why."""

    client: int
    method: str
    round: int
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"client {self.client} failed in {self.method!r}, round {self.round}: {self.error}"


# Those whose answers made something go wrong, and who failed before; who has failed now.
Excuse: TypeAlias = Callable[
    [Mapping[int, Exception], Mapping[int, Failure]], Mapping[int, Failure]
]


class Replies(dict[int, R], Generic[R]):
    """Who answered, in the order of their ids; who did not, and why.

    >>> from barter import Replies
    >>> replies = Replies({2: 0.5, 0: 1.0}, num_examples={0: 30, 1: 20, 2: 10}, failures={})
    >>> sum(replies[k] * n for k, n in replies.num_examples.items()) / sum(replies.num_examples.values())
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

    def each(self, work: Callable[[int, R], T]) -> Replies[T]:
        """What the server makes of each answer; a client of whose answer it can make nothing has failed, like one that
        did not answer."""
        done: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        for k, answer in self.items():
            try:
                done[k] = work(k, answer)
            except Exception as error:
                if self.excuse is None:
                    raise
                errors[k] = error
        failures = self.failures if self.excuse is None else self.excuse(errors, self.failures)
        return Replies(done, self.num_examples, failures, self.excuse)


class Engine(Protocol):
    """Where clients live and how they are reached."""

    participants: set[int]  # clients that answered a call in this round

    @property
    def client_ids(self) -> Sequence[int]: ...

    @property
    def min_clients(self) -> int | None: ...

    def call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> Replies[Any]: ...

    def failed(self, client: int, method: str, error: Exception) -> Failure: ...

    def stream(self, name: str) -> torch.Generator: ...


class Clients(Sequence[int]):
    """A group of clients, seen from the server: `round` gets all of them.

    >>> from barter import Clients, Experiment, Local
    >>> experiment = Experiment(Local(), clients=4)
    >>> everybody = Clients(experiment.engine, range(4))
    >>> len(everybody.sample(0.5)), everybody.only([1, 3])
    (2, Clients(1, 3))
    >>> sorted(everybody.run(experiment.algorithm.evaluate)[0])
    ['global', 'local', 'local_images']
    """

    def __init__(self, engine: Engine, ids: Iterable[int]) -> None:
        self._engine, self._ids = engine, tuple(sorted(ids))

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
        """Those of the group that are among `ids`, such as those that answered."""
        wanted = set(ids)
        return Clients(self._engine, (k for k in self._ids if k in wanted))

    def sample(self, fraction: float) -> Clients:
        """A random share of the group, at least one; the same whenever it is asked for in one round."""
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction={fraction}: a share of the clients is > 0 and <= 1")
        size = max(1, round(fraction * len(self)))
        chosen = torch.randperm(len(self), generator=self._engine.stream("sample"))[:size]
        return Clients(self._engine, (self._ids[i] for i in chosen.tolist()))

    def run(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Replies[R]:
        """Every client runs the method with the same arguments."""
        bound = inspect.signature(method).bind(None, *args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(
                f"{method.__name__} has keyword-only parameters {list(bound.kwargs)}, which cannot cross"
            )
        return self._ask(method, dict.fromkeys(self._ids, bound.args[1:]))

    def scatter(self, method: Callable[[C, T], R], payloads: Mapping[int, T]) -> Replies[R]:
        """Every client runs the method with a payload of its own."""
        if set(payloads) != set(self._ids):
            raise ConfigError(
                f"scatter wants one payload for each of {list(self)}, got them for {sorted(payloads)}"
            )
        return self._ask(method, {k: (payloads[k],) for k in self._ids})

    def relay(self, method: Callable[[C, T], T], payload: T) -> T:
        """The payload goes from client to client, each hands on what it made of it."""
        failures: list[Failure] = []
        for k in self._ids:
            replies = self._engine.call(method.__name__, {k: (payload,)})
            self._engine.participants.update(replies)
            payload = replies.get(k, payload)
            failures += replies.failures.values()
        self._require_enough(method.__name__, len(self), failures)
        return payload

    def _ask(self, method: Callable[..., R], args: Mapping[int, tuple[Any, ...]]) -> Replies[R]:
        if not args:
            return Replies({}, {}, {})
        name = method.__name__
        replies = self._engine.call(name, args)
        self._engine.participants.update(replies)

        def excuse(
            errors: Mapping[int, Exception], before: Mapping[int, Failure]
        ) -> Mapping[int, Failure]:
            failures = {
                **before,
                **{k: self._engine.failed(k, name, error) for k, error in errors.items()},
            }
            self._require_enough(name, len(args), list(failures.values()))
            return failures

        return Replies(replies, replies.num_examples, excuse({}, replies.failures), excuse)

    def _require_enough(self, method: str, asked: int, failures: list[Failure]) -> None:
        least, answered = self._engine.min_clients, asked - len(failures)
        needed = asked if least is None else min(least, asked)
        if answered < needed:
            more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
            reasons = "; ".join(map(str, failures[:3])) + more
            error = ClientError(
                f"{answered} of {asked} clients answered {method!r}, {needed} must: {reasons}"
            )
            if (
                ConfigError.__name__ not in failures[0].error
            ):  # which says what to change, and need not say where
                error.add_note(failures[0].traceback)
            raise error
