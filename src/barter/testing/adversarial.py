"""An adversarial client that sends malformed answers, which every method must tolerate."""

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
FEW = 3  # number of entries of a dict or a list that are modified
Lie: TypeAlias = tuple[str, Payload]  # description of a malformed answer, and the answer


def lies(answer: Payload, at: str = "answer") -> Iterator[Lie]:
    """Yield malformed variants of an answer, each with one modification.

    Args:
        answer: A correct answer.
        at: The path of the answer, for descriptions.
    """
    yield from ((f"{at} is {wrong}", other) for wrong, other in _replacements(answer))
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
    """Return a copy of a dict, list or tuple with one entry replaced."""
    if isinstance(tree, dict):
        return {**tree, place: value}
    return type(tree)(value if i == place else old for i, old in enumerate(tree))


def _replacements(value: Payload) -> list[Lie]:
    """Return wrong values to send instead of a value."""
    other: list[Lie] = [("a word", "nonsense"), ("a list", [value]), ("10**400", 10**400)]
    if value is not None:
        other.append(("nothing", None))
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
    """Return tensors of other types, shapes and values than this one."""
    dtypes = [torch.float32, torch.int32]
    if value.is_floating_point():
        dtypes = [torch.float64, torch.float16, torch.int32]
    other: list[Lie] = [(str(dtype), value.to(dtype)) for dtype in dtypes]
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
    """Replace answers of an engine's last client by malformed ones.

    It does so in every evaluation, and in one other method per round. All malformed answers are
    checked against the method's contract. Of each method, one that the contract rejects is sent,
    and then every one that it accepts, each once.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.client = engine.client_ids[-1]
        self.arrive = engine.arrived
        engine.arrived = self.arrived  # type: ignore[method-assign]
        self.told: set[tuple[str, str]] = set()  # (method, description) of answers that were sent
        # methods with an answer of this round that their contract rejects
        self.caught: list[str] = []
        self.said = ""  # description of this round's malformed answer

    def arrived(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        """Replace `BaseEngine.arrived`: pass on a malformed answer of the adversarial client."""
        if client == self.client and (method == EVALUATE or not self.said):
            answer = self.lie(answer, method, sent)
        return self.arrive(answer, method, client, sent)

    def lie(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> Payload:
        """Return a malformed answer that was not sent yet; the correct one if there is none."""
        accepted: list[Lie] = []
        rejected: list[Lie] = []
        for description, malformed in lies(isolate(answer)):
            passes = self.passes(malformed, method, sent)
            (accepted if passes else rejected).append((description, malformed))
        known = {description for name, description in self.told if name == method}
        # The first malformed answer of a method is one that its contract must reject.
        first = [] if known or answer is None else rejected[:1]
        candidates = first or [lie for lie in accepted if lie[0] not in known]
        if not candidates:
            return answer
        description, malformed = candidates[0]
        self.told.add((method, description))
        if first:
            self.caught.append(method)
        if method != EVALUATE:
            self.said = f"{description}, to {method!r}"
        return malformed

    def passes(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> bool:
        """Return whether the method's contract accepts an answer."""
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
        """Describe the adversarial client's answers of this round, for messages."""
        return f"beside a client whose {self.said or 'evaluations are nonsense'}"

    def done(self) -> bool:
        """Return whether all malformed answers were sent, and begin the next round."""
        finished = not self.said
        self.said = ""
        self.caught = []
        return finished
