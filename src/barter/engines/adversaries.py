"""Simulated adversarial clients, for research on robust aggregation.

An adversarial client takes part in every round and changes what it uploads, or learns from wrong
labels. Its answers keep to their contracts: malformed answers are refused, these are not.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, get_args, get_origin

import torch
from torch import Tensor

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.contracts import Entries, Floats, NonNegatives, Pixels, Weights
from barter.core.errors import ConfigError
from barter.core.images import Images
from barter.core.params import NonNegative, Positive, check_fields
from barter.core.payload import Payload, State

__all__ = [
    "Adversaries",
    "AttackName",
    "choose",
    "flip_labels",
    "poison",
    "states_in",
    "uploads",
]

AttackName: TypeAlias = Literal[
    "scaled-weights", "flipped-labels", "random-logits", "extreme-prototypes"
]
Part: TypeAlias = Literal["weights", "logits", "features", "images"]
# The parts of answers that each attack changes; flipped labels change the client's data.
TARGETS: dict[str, tuple[Part, ...]] = {
    "scaled-weights": ("weights",),
    "random-logits": ("logits",),
    "extreme-prototypes": ("features", "images"),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Names of the last axis of tensors that hold features: of networks, class means, or codes.
FEATURES = ("features", "vector", "code_dim")


@dataclass(frozen=True, kw_only=True)
class Adversaries:
    """Simulated adversarial clients of a run."""

    fraction: NonNegative = 0.0  # share of clients that are adversarial, chosen by the run's seed
    # what they do: upload the update scaled by -`scale`, learn from labels y -> classes - 1 - y,
    # upload random logits of `scale` times the spread, or prototypes scaled by -`scale`
    attack: AttackName = "scaled-weights"
    scale: Positive = 10.0  # factor of updates, logits and prototypes

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fraction >= 0.5:
            raise ConfigError(
                f"adversaries.fraction={self.fraction:g}: must be below 0.5, the share at which no "
                "aggregate can be robust"
            )

    def require(self, algorithm: Algorithm[Any, Any]) -> None:
        """Raise if the attack changes no answer of an algorithm's clients.

        Raises:
            ConfigError: The message names the attacks that do.
        """
        if not self.fraction or self.attack == "flipped-labels":
            return
        uploaded = uploads(algorithm)
        if not uploaded & set(TARGETS[self.attack]):
            others = [name for name, parts in TARGETS.items() if uploaded & set(parts)]
            raise ConfigError(
                f"adversaries.attack={self.attack!r}: clients of {type(algorithm).__name__} upload "
                f"no {' or '.join(TARGETS[self.attack])}; choose "
                f"{' or '.join([*others, 'flipped-labels'])}"
            )


def choose(adversaries: Adversaries, clients: int, seed: int) -> tuple[int, ...]:
    """Return the ids of the adversarial clients, chosen at random by the run's seed."""
    n = round(adversaries.fraction * clients)
    stream = torch.Generator().manual_seed(seeds.stream_seed(seed, "adversaries"))
    return tuple(sorted(torch.randperm(clients, generator=stream)[:n].tolist()))


def flip_labels(data: Images) -> Images:
    """Return images with the label y of each replaced by classes - 1 - y."""
    return Images(data.pixels, data.spec.classes - 1 - data.labels, data.spec, data.augment)


def uploads(algorithm: Algorithm[Any, Any]) -> set[Part]:
    """Return which parts the answers of an algorithm's clients have, by their return types."""
    found: set[Part] = set()
    for method in algorithm.crosses:
        function = getattr(type(algorithm), method, None)
        if function is not None:
            found |= set(_parts(_return_type(function)))
    return found


def poison(
    answer: Payload,
    adversaries: Adversaries,
    algorithm: Algorithm[Any, Any],
    method: str,
    references: list[State],
    stream: torch.Generator,
) -> Payload:
    """Return an adversarial client's answer instead of the honest one.

    Args:
        answer: The honest answer.
        adversaries: The attack.
        algorithm: The algorithm.
        method: The remote method.
        references: States that the client's training may have started from: what it received, then
            its own network before the call. An update is the difference from the first that fits.
        stream: Random numbers of this client and call.
    """
    targets = TARGETS.get(adversaries.attack, ())
    scale = adversaries.scale

    def change(part: Part, name: str, value: Tensor) -> Tensor:
        if part not in targets or not value.numel():
            return value
        if part == "weights":
            if not value.is_floating_point() or name.rpartition(".")[2] in STATISTICS:
                return value
            start = _start(name, value, references)
            return start - scale * (value - start)
        if part == "logits":
            return _random_logits(value, scale, stream)
        if part == "images":
            extreme = torch.randint(2, value.shape, generator=stream) * 255
            return extreme.to(value.device, value.dtype)
        return -scale * value

    function = getattr(type(algorithm), method)
    return _changed(answer, _return_type(function), change)


def _random_logits(value: Tensor, scale: float, stream: torch.Generator) -> Tensor:
    """Return random numbers instead of logits, or random probabilities instead of these."""
    noise = torch.randn(value.shape, generator=stream).to(value.device)
    sums = value.sum(-1)
    if bool((value >= 0).all()) and bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        return (scale * noise).softmax(-1)
    return scale * max(float(value.std()), 1.0) * noise if value.numel() > 1 else scale * noise


def _start(name: str, value: Tensor, references: list[State]) -> Tensor:
    """Return the tensor that an update of this name started from; zeros if there is none.

    A head is uploaded as "weight" and "bias"; in a network its name ends with these.
    """
    for state in references:
        if name in state and state[name].shape == value.shape:
            return state[name].to(value.device)
    for state in references:
        for other in reversed(state):
            if other.endswith(f".{name}") and state[other].shape == value.shape:
                return state[other].to(value.device)
    return torch.zeros_like(value)


def states_in(tree: Payload) -> Iterator[State]:
    """Yield all dicts of tensors in a payload."""
    if isinstance(tree, Mapping):
        if tree and all(isinstance(value, Tensor) for value in tree.values()):
            yield dict(tree)
        for value in tree.values():
            yield from states_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from states_in(value)


def _return_type(function: Callable[..., Any]) -> Any:
    """Return a method's return annotation with its marks; None if it cannot be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True).get("return")
    except NameError:
        return None


def _unwrap(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Split a type hint into the bare type and its annotations."""
    if get_origin(hint) is NotRequired:
        return _unwrap(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        kind, marks = _unwrap(hint.__origin__)
        return kind, (*marks, *hint.__metadata__)
    return hint, ()


def _part(hint: Any, key: str) -> Part | None:
    """Return which part of an answer a type declares; None for any other."""
    wanted, marks = _unwrap(hint)
    if get_origin(wanted) is dict and get_args(wanted)[1:] == (Tensor,):
        return "weights"
    if any(isinstance(mark, Weights | Entries) for mark in marks):
        return "weights"
    for mark in marks:
        if isinstance(mark, Pixels):
            return "images"
        if isinstance(mark, Floats) and mark.dtype == torch.float32:
            if isinstance(mark, NonNegatives):
                return None
            if key in ("weight", "bias"):
                return "weights"
            if mark.shape[-1] == "classes":
                return "logits"
            if mark.shape[-1] in FEATURES:
                return "features"
    return None


def _inner(hint: Any) -> list[tuple[Any, Any]]:
    """Return the types inside of a type, with their keys in a TypedDict."""
    wanted, _ = _unwrap(hint)
    if typing.is_typeddict(wanted):
        return list(typing.get_type_hints(wanted, include_extras=True).items())
    return [("", inner) for inner in get_args(wanted) if inner is not ...]


def _parts(hint: Any, key: str = "") -> Iterator[Part]:
    """Yield the parts that a type declares."""
    part = _part(hint, key)
    if part is not None:
        yield part
        return
    for inner_key, inner in _inner(hint):
        yield from _parts(inner, inner_key)


def _changed(
    tree: Payload, hint: Any, change: Callable[[Part, str, Tensor], Tensor], key: str = ""
) -> Payload:
    """Return a payload with the tensors of its declared parts changed."""
    part = _part(hint, key)
    if part is not None:
        if isinstance(tree, Tensor):
            return change(part, key, tree)
        if isinstance(tree, Mapping):
            return {name: change(part, name, value) for name, value in tree.items()}
        return tree
    wanted, _ = _unwrap(hint)
    args = get_args(wanted)
    if typing.is_typeddict(wanted) and isinstance(tree, Mapping):
        hints = typing.get_type_hints(wanted, include_extras=True)
        return {name: _changed(value, hints[name], change, name) for name, value in tree.items()}
    if isinstance(tree, list) and args:
        return [_changed(value, args[0], change) for value in tree]
    if isinstance(tree, tuple) and args:
        kinds = [args[0]] * len(tree) if args[1:] == (...,) else list(args)
        return tuple(_changed(value, kind, change) for value, kind in zip(tree, kinds, strict=True))
    if isinstance(tree, Mapping) and len(args) == 2:
        return {name: _changed(value, args[1], change) for name, value in tree.items()}
    return tree
