"""An adversarial client, whose malformed or extreme answers must do no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.answers import Valid, validate
from barter.core.contracts import BOUND
from barter.core.errors import PayloadError
from barter.core.payload import Payload, isolate, leaves, map_leaves
from barter.engines.base import BaseEngine

__all__ = ["ATTACKS", "AdversarialClient", "malformed_answers"]

EVALUATE_METHOD = Algorithm.evaluate.__name__
MAX_MODIFIED_ENTRIES = 3  # number of entries of a dict or a list that are modified
MOST_ACCEPTED = 3  # number of malformed answers that a contract accepts and that are sent
MalformedAnswer: TypeAlias = tuple[
    str, Payload
]  # description of a malformed answer, and the answer
# (correct answer, the client's answer of an earlier round) -> an extreme answer of the same form;
# the correct one if it has nothing that could be extreme.
Attack: TypeAlias = Callable[[Payload, Payload], Payload]


def malformed_answers(answer: Payload, at: str = "answer") -> Iterator[MalformedAnswer]:
    """Yield descriptions and malformed variants of an answer, each with one change.

    The answer as a whole is modified first, then its parts recursively: of a dict or a list at most
    three entries, the first ones and the last. The answer itself is not changed.

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
    for place in dict.fromkeys([*places[: MAX_MODIFIED_ENTRIES - 1], *places[-1:]]):
        for wrong, other in malformed_answers(answer[place], f"{at}.{place}"):
            yield wrong, _put(answer, place, other)


def _put(tree: Payload, place: Any, value: Payload) -> Payload:
    """Return a copy of a dict, list or tuple with one entry replaced."""
    if isinstance(tree, dict):
        return {**tree, place: value}
    return type(tree)(value if i == place else old for i, old in enumerate(tree))


def _replacements(value: Payload) -> list[MalformedAnswer]:
    """Return wrong values to send instead of a value, each with a description."""
    other: list[MalformedAnswer] = [
        ("a word", "nonsense"),
        ("a list", [value]),
        ("10**400", 10**400),
    ]
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


def _tensors(value: Tensor) -> list[MalformedAnswer]:
    """Return tensors of other types, shapes and values than this one."""
    dtypes = [torch.float32, torch.int32]
    if value.is_floating_point():
        dtypes = [torch.float64, torch.float16, torch.int32]
    other: list[MalformedAnswer] = [(str(dtype), value.to(dtype)) for dtype in dtypes]
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


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _paths(answer: Payload) -> list[str]:
    return [path for path, _ in leaves(answer, "")]


def _is_variance(path: str) -> bool:
    return path.rpartition(".")[2] in ("running_var", "variances")


def _enlarge(answer: Payload, earlier: Payload, times: float = 1000.0) -> Payload:
    """Return the answer with float tensors times `times`, up to the contracts' bound."""

    def scale(path: str, value: Any) -> Any:
        return (value * times).clamp(-BOUND, BOUND) if _is_float(value) else value

    return map_leaves(answer, scale, "")


def _enlarge_less(answer: Payload, earlier: Payload) -> Payload:
    """Multiply all float tensors by a factor small enough that it may pass."""
    return _enlarge(answer, earlier, 9.0)


def _put_at_bound(answer: Payload, earlier: Payload) -> Payload:
    """Set the last float tensor to the contracts' bounds, and bytes to 255."""
    last = [path for path, value in leaves(answer, "") if _is_float(value)][-1:]

    def put(path: str, value: Any) -> Any:
        if path in last:
            signs = torch.ones_like(value).flatten()
            if not _is_variance(path):
                signs[::2] = -1
            return BOUND * signs.view_as(value)
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            return torch.full_like(value, 255)
        return value

    return map_leaves(answer, put, "")


def _negate_variances(answer: Payload, earlier: Payload) -> Payload:
    """Set all variances to a negative number."""
    return _set_variances(answer, -10.0)


def _clear_variances(answer: Payload, earlier: Payload) -> Payload:
    """Set all variances to zero."""
    return _set_variances(answer, 0.0)


def _set_variances(answer: Payload, number: float) -> Payload:
    def put(path: str, value: Any) -> Any:
        return torch.full_like(value, number) if _is_variance(path) else value

    return map_leaves(answer, put, "")


def _swap(answer: Payload, earlier: Payload) -> Payload:
    """Exchange float tensors of equal shape within the answer.

    Variances are exchanged with variances only. A tensor that is alone in its shape has its rows
    reversed. The earlier answer is not used.
    """
    by_shape: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
    for path, value in leaves(answer, ""):
        if _is_float(value):
            key = (value.shape, _is_variance(path))  # A variance stays one.
            by_shape.setdefault(key, []).append((path, value))
    swapped: dict[str, Tensor] = {}
    for members in by_shape.values():
        tensors = [value for _, value in members]
        turned = tensors[1:] + tensors[:1]
        if len(tensors) == 1 and tensors[0].ndim:
            turned = [tensors[0].flip(0)]
        swapped |= {path: value for (path, _), value in zip(members, turned, strict=True)}
    return map_leaves(answer, lambda path, value: swapped.get(path, value), "")


def _replay(answer: Payload, earlier: Payload) -> Payload:
    """Send the answer of an earlier round."""
    return earlier


# Description -> attack that must be refused if the answer holds the weights of a network.
REFUSED: Mapping[str, Attack] = {
    "variances are negative": _negate_variances,
    "numbers are 1000 times as large": _enlarge,
    "numbers are at the bounds of the contract": _put_at_bound,
}
# Attacks that may pass, because they resemble honest answers.
PLAUSIBLE: Mapping[str, Attack] = {
    "variances are zero": _clear_variances,
    "tensors are swapped": _swap,
    "answers are those of an earlier round": _replay,
    "numbers are 9 times as large": _enlarge_less,
}
ATTACKS: Mapping[str, Attack] = {**REFUSED, **PLAUSIBLE}


class AdversarialClient:
    """An engine's last client, whose answers become malformed or extreme.

    It does so in every evaluation, and in one other method per round. Of each method, an answer is
    sent that its contract rejects, then malformed ones that it accepts, then attacks that must be
    refused. At the end come attacks that may pass, each in all methods of one round. The
    constructor replaces the engine's `receive_answer`; call `next_round` after each round.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.client = engine.client_ids[-1]
        self.arrive = engine.receive_answer
        engine.receive_answer = self.receive_answer  # type: ignore[method-assign]
        self.plan: dict[str, list[str]] = {}  # method -> descriptions of answers to be sent
        self.last = list(PLAUSIBLE)  # attacks on all methods, after all plans
        self.possible: set[str] = set()  # those of them that change some method's answer
        self.attack = ""  # that of this round, if it is one of the last
        self.earlier: dict[str, Payload] = {}  # method -> the client's first correct answer
        # methods with an answer of this round that must be refused
        self.caught: list[str] = []
        self.description = ""  # description of this round's malformed answer

    def receive_answer(
        self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]
    ) -> Payload:
        """Replace the adversarial client's answer, then receive it as the engine does.

        It stands in for `BaseEngine.receive_answer`.
        """
        if client == self.client:
            correct = isolate(answer)
            if method not in self.plan:
                self.plan[method] = self.prepare(correct, method, sent)
                self.earlier[method] = correct
            if method == EVALUATE_METHOD or method == self.target():
                answer = self.malform(correct, method, sent)
            elif self.attack:
                answer = PLAUSIBLE[self.attack](correct, self.earlier[method])
        return self.arrive(answer, method, client, sent)

    def target(self) -> str:
        """Return the method whose answer is malformed next: the one with the most left.

        Empty if none is left, or if this round has had its malformed answer. `evaluate` is not
        among the methods.
        """
        if self.description:
            return ""
        left = {
            method: len(plan)
            for method, plan in self.plan.items()
            if plan and method != EVALUATE_METHOD
        }
        return max(left, key=lambda method: left[method], default="")

    def prepare(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> list[str]:
        """Describe malformed answers and attacks on a method, in sending order.

        There are at most one malformed answer that the contract rejects and three that it accepts.
        Attacks that may pass and change this answer are added to `possible` instead.

        Args:
            answer: The client's correct answer.
            method: The method.
            sent: The arguments that the client was sent.
        """
        accepted: list[str] = []
        rejected: list[str] = []
        if answer is not None:
            for description, malformed in malformed_answers(answer):
                passes = self.check(malformed, method, sent) is not None
                (accepted if passes else rejected).append(description)
        attacks = []
        if method != EVALUATE_METHOD:
            for description, attack in REFUSED.items():
                if _differs(attack(answer, answer), answer):
                    attacks.append(description)
            for description, attack in PLAUSIBLE.items():
                # An earlier round's answer differs if anything was trained.
                replayed = attack is _replay and any(_is_float(x) for _, x in leaves(answer, ""))
                # Of other values, nine times as much is within the usual.
                usual = attack is _enlarge_less and not any(map(_is_variance, _paths(answer)))
                if replayed or (not usual and _differs(attack(answer, answer), answer)):
                    self.possible.add(description)
        step = max(1, len(accepted) // MOST_ACCEPTED)
        # Negative variances are rejected by the contract too.
        first = [] if "variances are negative" in attacks else rejected[:1]
        return first + accepted[::step][:MOST_ACCEPTED] + attacks

    def malform(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> Payload:
        """Return the next malformed answer in the method's plan, or else the correct one.

        It is removed from the plan. If it must be refused, the method is added to `caught`.
        """
        plan = self.plan[method]
        if not plan:
            return answer
        description = plan.pop(0)
        attack = ATTACKS.get(description)
        if attack is not None:
            malformed = attack(answer, self.earlier[method])
        else:
            variants = (tree for name, tree in malformed_answers(answer) if name == description)
            malformed = next(variants, answer)
        valid = self.check(malformed, method, sent)
        at_bound = attack is _put_at_bound and valid is not None and bool(valid.magnitudes)
        if valid is None or at_bound or (attack is not None and valid.networks):
            self.caught.append(method)
        if method != EVALUATE_METHOD:
            self.description = f"{description}, to {method!r}"
        return malformed

    def check(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> Valid | None:
        """Return an answer as the method's contract accepts it; None if it does not."""
        server = self.engine.server
        assert server is not None
        known = self.engine.knowledge_of(server, self.client)
        try:
            return validate(answer, self.engine.algorithm, method, sent, known)
        except PayloadError:
            return None

    @property
    def situation(self) -> str:
        """Describe the adversarial client's answers of this round, for messages."""
        return f"with a client whose {self.description or 'evaluations are nonsense'}"

    def next_round(self) -> bool:
        """Prepare the next round; return True if there is nothing left to send in it."""
        self.description = ""
        self.caught = []
        self.attack = ""
        if self.target():
            return False
        self.last = [description for description in self.last if description in self.possible]
        if not self.last:
            return True
        self.attack = self.last.pop(0)
        self.description = self.attack
        return False


def _differs(answer: Payload, other: Payload) -> bool:
    """Return whether two answers of the same form have a tensor that differs."""
    pairs = zip(leaves(answer, ""), leaves(other, ""), strict=True)
    return any(isinstance(x, Tensor) and not torch.equal(x, y) for (_, x), (_, y) in pairs)
