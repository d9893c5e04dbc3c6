"""Simulated adversarial clients, for research on robust aggregation.

An adversarial client takes part in every round and changes what it uploads, or learns from wrong
labels. Its answers keep to their contracts: malformed answers are refused, these are not.

The attack "absent" is the base of comparison: the same honest clients without the adversarial ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.contracts import NonNegatives, Pixels
from barter.core.errors import ConfigError
from barter.core.images import Images
from barter.core.params import NonNegative, Positive, check_fields
from barter.core.payload import Payload, State
from barter.core.schema import (
    DictSchema,
    ListSchema,
    RecordSchema,
    Schema,
    StateSchema,
    TensorSchema,
    TupleSchema,
    UnionSchema,
    choose_member,
    compile_method,
)

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
    "scaled-weights", "flipped-labels", "random-logits", "extreme-prototypes", "absent"
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
    # upload random logits of `scale` times the spread, or prototypes scaled by -`scale`; "absent"
    # clients take no part, which is what a perfect defence could reach
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

        Nothing is required without adversarial clients (`fraction` of 0), nor of the attacks
        "flipped-labels" and "absent", which fit every algorithm.

        Raises:
            ConfigError: The message names the attacks that do.
        """
        if not self.fraction or self.attack not in TARGETS:
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
    """Return the ids of the adversarial clients, in ascending order.

    They are round(fraction * clients) of the ids from 0 on, chosen at random by the run's seed.
    """
    n = round(adversaries.fraction * clients)
    stream = torch.Generator().manual_seed(seeds.stream_seed(seed, "adversaries"))
    return tuple(sorted(torch.randperm(clients, generator=stream)[:n].tolist()))


def flip_labels(data: Images) -> Images:
    """Return images with each label y replaced by classes - 1 - y; pixels are shared."""
    return Images(data.pixels, data.spec.classes - 1 - data.labels, data.spec, data.augment)


def uploads(algorithm: Algorithm[Any, Any]) -> set[Part]:
    """Return kinds of parts in clients' answers: weights, logits, features, images.

    They follow from the methods' return types. All methods of `crosses` count, also those that a
    configuration does not call.
    """
    found: set[Part] = set()
    for method in algorithm.crosses:
        found |= set(_parts(compile_method(algorithm, method).answer))
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

    Only the parts that the attack targets change (`TARGETS`): weights w that started from s become
    s - scale (w - s), except for integers and batch-norm statistics; logits become random ones;
    images become black and white pixels at random; features become -scale times themselves.

    Args:
        answer: The honest answer.
        adversaries: The attack.
        algorithm: The algorithm.
        method: The remote method.
        references: States that the client's training may have started from: what it received, then
            its own network before the call. An update is the difference from the first that fits.
        stream: A CPU generator, which only random logits and images draw from.
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

    return _changed(answer, compile_method(algorithm, method).answer, change)


def _random_logits(value: Tensor, scale: float, stream: torch.Generator) -> Tensor:
    """Return random logits, or random probabilities where the values are such.

    Values are probabilities if none is negative and all rows sum to 1 within 1e-3; then the result
    is softmax(scale * noise). Logits are normal, with `scale` times the honest standard deviation,
    or times 1 if that is smaller.

    Args:
        value: The honest client's logits or probabilities.
        scale: Factor of the logits' standard deviation.
        stream: Source of random numbers.
    """
    noise = torch.randn(value.shape, generator=stream).to(value.device)
    sums = value.sum(-1)
    if bool((value >= 0).all()) and bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        return (scale * noise).softmax(-1)
    return scale * max(float(value.std()), 1.0) * noise if value.numel() > 1 else scale * noise


def _start(name: str, value: Tensor, references: list[State]) -> Tensor:
    """Return the tensor that an update of this name started from, else zeros.

    It is the first tensor of the same name and shape in the references; if there is none, the first
    whose name ends with ".NAME", the last one of a state. A head is uploaded as "weight" and
    "bias"; in a network its name ends with these.
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
    """Yield copies of a payload's non-empty dicts of tensors only, in order."""
    if isinstance(tree, Mapping):
        if tree and all(isinstance(value, Tensor) for value in tree.values()):
            yield dict(tree)
        for value in tree.values():
            yield from states_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from states_in(value)


def _part(schema: Schema, key: str) -> Part | None:
    """Return the kind of part that a type declares, such as "weights".

    Args:
        schema: The type.
        key: Its key in the answer's TypedDict.

    Returns:
        The kind; None if the type itself is no part that an attack changes.
    """
    if isinstance(schema, StateSchema):
        return "weights"
    values = schema.values if isinstance(schema, TensorSchema) else None
    if isinstance(values, Pixels):
        return "images"
    if values is None or values.dtype != torch.float32 or isinstance(values, NonNegatives):
        return None
    if key in ("weight", "bias"):
        return "weights"
    last_axis = values.shape[-1] if values.shape else None
    if last_axis == "classes":
        return "logits"
    if last_axis in FEATURES:
        return "features"
    return None


def _parts(schema: Schema, key: str = "") -> Iterator[Part]:
    """Yield the kinds of parts that a type declares: weights, logits and so on."""
    part = _part(schema, key)
    if part is not None:
        yield part
    elif isinstance(schema, RecordSchema):
        for name, field in schema.fields.items():
            yield from _parts(field, name)
    else:
        # A member of a union has the key of the union.
        inner_key = key if isinstance(schema, UnionSchema) else ""
        for child in schema.children():
            yield from _parts(child, inner_key)


def _changed(
    tree: Payload, schema: Schema, change: Callable[[Part, str, Tensor], Tensor], key: str = ""
) -> Payload:
    """Return a payload with the tensors of its declared parts changed.

    Args:
        tree: The payload.
        schema: Its type. Of a union, the member that the payload can be. Parts that do not match
            their type stay unchanged.
        change: Called with the kind of part, the tensor's name and the tensor; returns the new one.
        key: The payload's key in the TypedDict around it.
    """
    part = _part(schema, key)
    if part is not None and isinstance(tree, Tensor):
        return change(part, key, tree)
    if part is not None and isinstance(tree, Mapping):
        return {name: change(part, name, value) for name, value in tree.items()}
    match schema:
        case UnionSchema():
            member = choose_member(tree, schema)
            return tree if member is None else _changed(tree, member, change, key)
        case RecordSchema() if isinstance(tree, Mapping):
            return {
                name: _changed(value, schema.fields[name], change, name)
                for name, value in tree.items()
            }
        case DictSchema() if isinstance(tree, Mapping):
            return {name: _changed(value, schema.value, change) for name, value in tree.items()}
        case ListSchema() if isinstance(tree, list | tuple):
            return schema.container(_changed(value, schema.item, change) for value in tree)
        case TupleSchema() if isinstance(tree, tuple):
            pairs = zip(tree, schema.items, strict=True)
            return tuple(_changed(value, item, change) for value, item in pairs)
    return tree
