"""A client that answers nonsense: what a method must bear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.answers import require
from barter.core.errors import PayloadError
from barter.core.payload import Payload, isolate
from barter.engines.base import BaseEngine

__all__ = ["Liar", "lies"]

EVALUATE = Algorithm.evaluate.__name__
FEW = 3  # entries of a dict or a list that are lied about
Lie: TypeAlias = tuple[str, Payload]  # what is said, and the answer that says it


def lies(answer: Payload, at: str = "answer") -> Iterator[Lie]:
    """The answer with something wrong, one thing at a time."""
    yield from ((f"{at} is {wrong}", other) for wrong, other in _instead(answer))
    places: list[Any] = []
    if isinstance(answer, dict):
        places = list(answer)
        yield f"{at} has a key more", {**answer, "more": next(iter(answer.values()), 0)}
        for key in places[:1]:
            yield f"{at} lacks {key}", {name: answer[name] for name in places if name != key}
            yield (
                f"{at} calls {key} otherwise",
                {f"{name}x" if name == key else name: answer[name] for name in places},
            )
    elif isinstance(answer, list | tuple):
        places = list(range(len(answer)))
        yield f"{at} has an entry more", type(answer)([*answer, *answer[-1:]])
        yield f"{at} has an entry less", type(answer)(answer[:-1])
    for place in dict.fromkeys([*places[: FEW - 1], *places[-1:]]):
        for wrong, other in lies(answer[place], f"{at}.{place}"):
            yield wrong, _put(answer, place, other)


def _put(tree: Payload, place: Any, value: Payload) -> Payload:
    if isinstance(tree, dict):
        return {**tree, place: value}
    return type(tree)(value if i == place else old for i, old in enumerate(tree))


def _instead(value: Payload) -> list[Lie]:
    """Other values than this one."""
    other: list[Lie] = [("a word", "nonsense"), ("a list", [value]), ("10**400", 10**400)]
    other += [("nothing", None)] if value is not None else []
    if isinstance(value, Tensor):
        other += _tensors(value)
    elif isinstance(value, bool):
        other += [("a number", 2)]
    elif isinstance(value, int | float):
        other += [
            ("2**39", 2**39),
            ("-1", -1),
            ("NaN", float("nan")),
            ("1e300", 1e300),
            ("infinity", float("inf")),
        ]
    elif isinstance(value, str):
        other += [("a long word", "x" * 10_000)]
    return other


def _tensors(value: Tensor) -> list[Lie]:
    kinds = (
        [torch.float64, torch.float16, torch.int32]
        if value.is_floating_point()
        else [torch.float32, torch.int32]
    )
    other: list[Lie] = [(str(kind), value.to(kind)) for kind in kinds]
    other += [("a number", 1.0), ("nothing but an empty tensor", value.flatten()[:0])]
    if value.ndim:
        other += [("a row more", torch.cat([value, value[-1:]])), ("a row less", value[:-1])]
        other += [("one number", value.new_zeros(()))]
    if value.is_floating_point():
        other += [
            (f"{number}", torch.full_like(value, number))
            for number in (float("nan"), float("inf"), 1e30, -1e30)
        ]
    elif value.dtype == torch.int64:
        other += [(f"{number}", torch.full_like(value, number)) for number in (999_999, -1, 2**62)]
    return [(wrong, x) for wrong, x in other if not (isinstance(x, Tensor) and _same(x, value))]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


class Liar:
    """Sits on an engine, and has its last client lie: in every evaluation, and in one more method a round.

    All lies that a contract must catch are shown to it, and of each method one goes on its way; what contracts let pass
    is told to the server, each once.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine, self.client, self.arrive = engine, engine.client_ids[-1], engine.arrived
        engine.arrived = self.arrived  # type: ignore[method-assign]
        self.told: set[tuple[str, str]] = set()
        # in which methods a lie of this round was one that contracts catch
        self.caught: list[str] = []
        self.said = ""  # the round's lie

    def arrived(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        if client == self.client and (method == EVALUATE or not self.said):
            answer = self.lie(answer, method, sent)
        return self.arrive(answer, method, client, sent)

    def lie(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> Payload:
        """Something else than the answer, if there is anything left to say."""
        by_verdict: dict[bool, list[Lie]] = {True: [], False: []}
        for lie in lies(isolate(answer)):
            by_verdict[self.passes(lie[1], method, sent)].append(lie)
        known = {how for at, how in self.told if at == method}
        caught = [] if known or answer is None else by_verdict[False][:1]
        for how, other in caught or [lie for lie in by_verdict[True] if lie[0] not in known][:1]:
            self.told.add((method, how))
            self.caught += [method] if caught else []
            self.said = self.said if method == EVALUATE else f"{how}, to {method!r}"
            return other
        return answer

    def passes(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> bool:
        server = self.engine.server
        assert server is not None
        try:
            require(
                answer, self.engine.algorithm, method, sent, self.engine.known(server, self.client)
            )
        except PayloadError:
            return False
        return True

    @property
    def beside(self) -> str:
        return f"beside a client whose {self.said or 'evaluations are nonsense'}"

    def done(self) -> bool:
        """Whether there was nothing more to say; the next round begins."""
        quiet, self.said, self.caught = not self.said, "", []
        return quiet
