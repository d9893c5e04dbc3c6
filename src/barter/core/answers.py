"""Check clients' answers against the return types of remote methods.

`require_valid_answer` checks the structure of an answer and the shape, dtype and range of every
value in it. `largest_answer` derives from the same annotations how large a valid answer can be. The
annotations are explained in `core/contracts.py`; `core/schema.py` compiles them.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from barter.core.contracts import (
    BOUND,
    EXACT_LIMIT,
    Counts,
    DistinctClasses,
    Floats,
    Size,
    Weights,
    Within,
)
from barter.core.errors import PayloadError
from barter.core.images import Spec
from barter.core.payload import Payload, State, leaves, nbytes, to_floats
from barter.core.schema import (
    AnySchema,
    DictSchema,
    ListSchema,
    MethodSchema,
    NoneSchema,
    NumberSchema,
    RecordSchema,
    Schema,
    StateSchema,
    TensorSchema,
    TupleSchema,
    UnionSchema,
    WordSchema,
    compile_method,
)

__all__ = [
    "WORD",
    "Known",
    "Magnitude",
    "Shapes",
    "Valid",
    "largest_answer",
    "largest_fields",
    "require_valid_answer",
    "shapes_of",
    "validate",
]

# Largest length of a string in an answer, and the bytes reserved for a string or a number together
# with its encoding.
WORD = 200
# Allowed dtypes of tensors without annotation.
PLAIN_DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool)
# Advice for authors of algorithms whose dict of tensors is not the client's complete network.
OTHER_STATES = (
    "; where it is something else, the method's return type must say so: "
    "Annotated[State, Weights(parameters_only=True)] for its parameters, "
    "Weights('server') for the server's network, Entries({name: shape}) for other tensors"
)
# Names of the buffers of batch normalisation that have a range of their own.
VARIANCE_NAME = "running_var"
COUNTER = "num_batches_tracked"
# Largest number of batches that a network can have seen.
MOST_BATCHES = 1e9
Shapes: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]
# "weight": a parameter of a network that the server knows. "statistic": a buffer of it.
# "value": anything else, such as logits, embeddings or gradients.
AnswerKind: TypeAlias = Literal["weight", "statistic", "value"]
Sizes: TypeAlias = ChainMap[str, int]
# Schemas of values without annotations.
ANY_TENSOR = TensorSchema()
ANY_NUMBER = NumberSchema(hint=float)


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Return the shape and dtype of each tensor in a state dict."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


@dataclass(frozen=True)
class Known:
    """The server's knowledge of a client before it answers.

    What concerns the client's network is empty if the server cannot build it.
    """

    spec: Spec
    examples: int
    features: int | None = None  # Feature width of the client's network.
    weights: Shapes = field(default_factory=dict)  # The client's weights that may be uploaded.
    server: Shapes = field(default_factory=dict)  # The weights of the server's network.
    parameters: frozenset[str] = frozenset()  # Weights of both networks that are not buffers.
    # Largest absolute value and root mean square of each tensor of the client's initial weights.
    initial: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # Smallest and largest number of the client's integer buffers that are tables, such as indices.
    tables: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def network(self, whose: str, *, parameters_only: bool = False) -> Shapes:
        """Return shape and dtype of each weight of a network, by name; empty if unknown.

        Args:
            whose: "client" or "server".
            parameters_only: Leave out buffers.
        """
        weights = self.server if whose == "server" else self.weights
        if not parameters_only:
            return weights
        return {name: shape for name, shape in weights.items() if name in self.parameters}

    def nbytes(self, whose: str, *, parameters_only: bool = False) -> int | None:
        """Return the size of a network's weights in bytes; None if unknown or empty."""
        weights = self.network(whose, parameters_only=parameters_only).values()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in weights) or None

    def sizes(self) -> dict[str, int]:
        """Return the run's sizes that contracts may refer to, by name (`RUN_SIZES`).

        "features" is missing if the feature width is not known.
        """
        sizes = {
            "classes": self.spec.classes,
            "channels": self.spec.channels,
            "height": self.spec.height,
            "width": self.spec.width,
            "examples": self.examples,
            "last_class": self.spec.classes - 1,
        }
        if self.features is not None:
            sizes["features"] = self.features
        return sizes


def require_valid_answer(
    answer: Payload, algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> set[str]:
    """Check an answer against the method's return type, see `validate`.

    Returns:
        The paths inside the answer, METHOD.KEY, where the client claims numbers of images: tensors
        that are annotated as `Counts`, unless another size gives their sum.

    Raises:
        PayloadError: If the answer does not match.
    """
    return validate(answer, algorithm, method, sent, known).claims


@dataclass(frozen=True)
class Magnitude:
    """The size of the numbers in one float tensor of an answer."""

    path: str
    group: str  # The path of the state to which the tensor belongs, otherwise its own.
    kind: AnswerKind
    shape: torch.Size
    peak: float  # Largest absolute value.
    norm: float  # Euclidean norm.
    rare_peaks: bool = False  # Whether single values may be far larger than usual, see `Floats`.

    @property
    def name(self) -> str:
        """Return the tensor's name inside of its group; empty if it is the whole group."""
        return self.path[len(self.group) + 1 :]

    @property
    def rms(self) -> float:
        """Return the root mean square."""
        return self.norm / math.sqrt(self.shape.numel())


@dataclass(frozen=True)
class Valid:
    """An answer that matches its contract."""

    claims: set[str]  # Paths where the client claims a number of images.
    # Of all float tensors that must be finite, are not empty and are compared (`Floats`).
    magnitudes: list[Magnitude] = field(default_factory=list)
    # The states in the answer that are whole networks, and whose: the client's or the server's.
    networks: list[tuple[str, State]] = field(default_factory=list)


def validate(
    answer: Payload, algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> Valid:
    """Check an answer against the method's return type, and measure its tensors.

    Args:
        answer: The client's answer.
        algorithm: The algorithm.
        method: The name of the remote method.
        sent: The arguments that the client received.
        known: What the server knows of the client.

    Returns:
        The claims in the answer, the magnitudes of its tensors, and the networks in it.

    Raises:
        PayloadError: If the answer does not match; the message names the path and the reason.
        TypeError: If the method's annotations contradict each other, see `compile_method`.
    """
    schema = compile_method(algorithm, method)
    sizes = _collect_sizes(algorithm, schema, sent, known)
    checker = _Checker(algorithm, method, known)
    list(leaves(answer, method))  # Raises with the path if the answer is not a payload.
    checker.match(answer, schema.answer, method, sizes)
    magnitudes = checker.check_ranges()
    claims = {found.path for found in checker.ranges if found.claim}
    return Valid(claims, magnitudes, checker.networks)


def largest_answer(
    algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> int | None:
    """Return the largest size in bytes of a valid answer.

    The arguments are those of `require_valid_answer`.

    Returns:
        The size, or None if the contract does not bound it.
    """
    schema = compile_method(algorithm, method)
    sizes = _collect_sizes(algorithm, schema, sent, known)
    return _ByteLimit(algorithm, known).of(schema.answer, sizes)


def largest_fields(algorithm: object, method: str, known: Known) -> dict[str, int | None]:
    """Return the largest size in bytes of each field of a valid answer, by its path.

    A path is METHOD.KEY for a key of a TypedDict, METHOD for an answer that is no TypedDict, as in
    `core/wire_settings.py`. None stands for a size that the contract does not bound before the
    call.
    """
    schema = compile_method(algorithm, method)
    sizes = _collect_sizes(algorithm, schema, (), known)
    return dict(_ByteLimit(algorithm, known).fields(schema.answer, method, sizes))


def _collect_sizes(
    algorithm: object, schema: MethodSchema, sent: tuple[Any, ...], known: Known
) -> Sizes:
    """Return the sizes known before the answer: the run's, algorithm's, arguments'.

    A declared size that is None, or a method that returns None, is left out. Arguments that do not
    match their annotations are not reported here.

    Raises:
        TypeError: If a declared size is neither an integer nor None.
    """
    own: dict[str, int] = {}
    for name in schema.own_sizes:
        value = getattr(algorithm, name)
        if callable(value):
            value = value(known)
        if isinstance(value, int):
            own[name] = value
        elif value is not None:
            raise TypeError(f"the size {name} is {value!r}, expected an integer or None")
    sizes: Sizes = ChainMap({}, {**known.sizes(), **own})
    for value, parameter in zip(sent, schema.parameters, strict=False):
        if isinstance(parameter, TensorSchema) and parameter.values and isinstance(value, Tensor):
            _match_shape(parameter.values, value, sizes)
        elif isinstance(parameter, NumberSchema) and parameter.within and parameter.within.name:
            sizes[parameter.within.name] = int(value)
    return sizes


def _resolve(size: Size, sizes: Sizes) -> int | None:
    """Return a size as a number; None if its name has not occurred yet."""
    return size if isinstance(size, int) else sizes.get(size)


def _resolve_bound(bound: float | str, sizes: Sizes) -> float:
    """Return a bound as a number; raise PayloadError if it names an unknown size."""
    value = sizes.get(bound) if isinstance(bound, str) else bound
    if value is None:
        raise PayloadError(f"{bound!r} is not the name of a known size")
    return value


def _add_names(schema: Schema, sizes: Sizes) -> Sizes:
    """Return the sizes with the further names that `Named` gives to some of them.

    Raises:
        PayloadError: If such a size is not known.
    """
    for named in schema.names:
        sizes = sizes.new_child({named.name: int(_resolve_bound(named.size, sizes))})
    return sizes


def _match_shape(declared: Floats, value: Tensor, sizes: Sizes) -> bool:
    """Return whether a tensor has the declared shape.

    A named size that is not known yet is recorded in `sizes`, also if a later axis does not match.
    After a final `...` any number of axes may follow, also none.
    """
    for size, length in zip(declared.shape, value.shape, strict=False):
        if isinstance(size, EllipsisType):
            break
        known = _resolve(size, sizes)
        if known is None:
            sizes[str(size)] = length
        elif known != length:
            return False
    if declared.shape[-1:] == (...,):
        return value.ndim >= len(declared.shape) - 1
    return value.ndim == len(declared.shape)


def _expected_dtype(declared: Floats, algorithm: object) -> torch.dtype:
    """Return the dtype that a tensor must have: float16 if its field `half` is true."""
    if declared.half and getattr(algorithm, declared.half):
        return torch.float16
    return declared.dtype


def _is_compared(declared: Floats, algorithm: object) -> bool:
    """Return whether a tensor's size is compared with other clients' (`Floats`)."""
    if isinstance(declared.compared, str):
        return bool(getattr(algorithm, declared.compared))
    return declared.compared


def _expected_weights(schema: StateSchema, algorithm: object, known: Known) -> Shapes:
    """Return the shape and dtype of each tensor that a State must hold.

    Returns:
        By name of the tensor; empty if the network is unknown.
    """
    weights = schema.weights or Weights()
    shapes = known.network(weights.of, parameters_only=weights.parameters_only)
    if not (weights.half and getattr(algorithm, weights.half)):
        return shapes
    return {
        name: (shape, torch.float16 if dtype == torch.float32 else dtype)
        for name, (shape, dtype) in shapes.items()
    }


@dataclass(frozen=True)
class RangeCheck:
    """A statistic of a tensor, such as its minimum, and its allowed range."""

    path: str
    which: str  # The statistic, as messages name it.
    number: Tensor
    least: float | str
    most: float | str
    sizes: Sizes
    claim: bool = False  # True if the number is a claimed number of images.


class _Checker:
    """Check of an answer against its schema, part by part.

    Ranges of tensors are collected during the walk and compared at its end, so that a GPU is
    waited for only once per answer.
    """

    def __init__(self, algorithm: object, method: str, known: Known) -> None:
        self.algorithm = algorithm
        self.known = known
        self.finite = method not in getattr(algorithm, "may_be_infinite", ())
        self.ranges: list[RangeCheck] = []
        # path, group, kind, rare_peaks, tensor
        self.floats: list[tuple[str, str, AnswerKind, bool, Tensor]] = []
        self.networks: list[tuple[str, State]] = []

    def match(self, tree: Payload, schema: Schema, path: str, sizes: Sizes) -> None:
        """Check a part of an answer against its schema.

        Ranges of tensors are only collected; `check_ranges` compares them.

        Args:
            tree: The part.
            schema: Its type and annotations.
            path: Its place in the answer, for messages.
            sizes: The sizes known so far; sizes that occur first here are added.

        Raises:
            PayloadError: If type, keys, shape, dtype or number of bytes differ from the schema.
        """
        sizes = _add_names(schema, sizes)
        if schema.room is not None:
            most = _resolve(schema.room, sizes)
            if most is not None and nbytes(tree) > most:
                raise PayloadError(f"{path} has {nbytes(tree)} bytes, expected at most {most}")
        match schema:
            case AnySchema():
                for at, value in leaves(tree, path):
                    self.check_leaf(value, at, sizes)
            case UnionSchema():
                self.match_union(tree, schema, path, sizes)
            case RecordSchema():
                self.match_record(tree, schema, path, sizes.new_child())
            case StateSchema():
                self.match_state(tree, schema, path, sizes)
            case DictSchema():
                _require_keys(tree, schema, schema.key, path)
                for key, value in tree.items():
                    self.match(value, schema.value, f"{path}.{key}", sizes)
            case ListSchema():
                _require(isinstance(tree, schema.container), tree, schema.hint, path)
                for i, value in enumerate(tree):
                    self.match(value, schema.item, f"{path}[{i}]", sizes)
            case TupleSchema():
                holds = isinstance(tree, tuple) and len(tree) == len(schema.items)
                _require(holds, tree, schema.hint, path)
                for i, (value, item) in enumerate(zip(tree, schema.items, strict=True)):
                    self.match(value, item, f"{path}[{i}]", sizes)
            case TensorSchema():
                _require(isinstance(tree, Tensor), tree, schema.hint, path)
                self.check_tensor(tree, schema, path, sizes)
            case NumberSchema():
                kinds = (int, float) if schema.hint is float else (schema.hint,)
                _require(type(tree) in kinds, tree, schema.hint, path)
                self.check_number(tree, schema, path, sizes)
            case WordSchema(choices=()):
                _require(type(tree) is str, tree, schema.hint, path)
                _require_word(tree, path)
            case WordSchema():
                holds = isinstance(tree, str | int) and tree in schema.choices
                _require(holds, tree, schema.hint, path)
            case NoneSchema():
                _require(tree is None, tree, schema.hint, path)
            case _:
                _require(type(tree) is schema.hint, tree, schema.hint, path)
                self.check_leaf(tree, path, sizes)

    def match_union(self, tree: Payload, schema: UnionSchema, path: str, sizes: Sizes) -> None:
        """Check a part against each member of a union until one fits.

        What a member that does not fit had defined or collected is forgotten. Ranges of values are
        checked later, and do not decide which member fits.

        Raises:
            PayloadError: The last member's error, if none fits.
        """
        sizes_before = dict(sizes.maps[0])
        ranges_before = len(self.ranges)
        floats_before = len(self.floats)
        networks_before = len(self.networks)
        for member in schema.members:
            try:
                return self.match(tree, member, path, sizes)
            except PayloadError:
                if member is schema.members[-1]:
                    raise
                # Forget the sizes and ranges of the member that did not fit.
                del self.ranges[ranges_before:]
                del self.floats[floats_before:]
                del self.networks[networks_before:]
                sizes.maps[0] = dict(sizes_before)
        return None

    def match_record(self, tree: Payload, schema: RecordSchema, path: str, sizes: Sizes) -> None:
        """Check a part against a TypedDict.

        Required are all keys without NotRequired, and those whose `When` holds. A key whose `When`
        does not hold must be absent.

        Raises:
            PayloadError: If a required key is missing, a key is unknown, or a value does not match.
        """
        _require(isinstance(tree, dict), tree, schema.hint, path)
        required = set()
        allowed = set()
        for key, part in schema.fields.items():
            present = part.is_present(self.algorithm) if part.optional else True
            if present:
                required.add(key)
            if present is not False:
                allowed.add(key)
        missing = required - tree.keys()
        if missing:
            raise PayloadError(f"{path} lacks {_list_some(missing)}")
        unknown = tree.keys() - allowed
        if unknown:
            raise PayloadError(f"{path} has the unknown {_list_some(unknown)}")
        for key, value in tree.items():
            self.match(value, schema.fields[key], f"{path}.{key}", sizes)

    def match_state(self, tree: Payload, schema: StateSchema, path: str, sizes: Sizes) -> None:
        """Check a part against declared entries or against a network's weights.

        If the server does not know the network, any names and shapes of tensors pass.

        Raises:
            PayloadError: If the part is empty, lacks a name, has another one, or a tensor does not
                match.
        """
        _require_keys(tree, schema, str, path)
        weights = schema.weights or Weights()
        network = _expected_weights(schema, self.algorithm, self.known)
        names = network.keys() if schema.entries is None else schema.entries.keys()
        odd = tree.keys() ^ names if names else ()
        if odd or not tree:
            # Without a marker, the author may not have meant a network's weights at all.
            marked = schema.entries is not None or schema.weights is not None
            raise PayloadError(
                f"{path} is not the {weights.of}'s weights: "
                f"{_list_some(odd) or 'all'} unexpected or missing"
                f"{'' if marked else OTHER_STATES}"
            )
        if schema.entries is not None:
            for key, value in tree.items():
                self.match(value, schema.entries[key], f"{path}.{key}", sizes)
        elif network:
            if not weights.parameters_only:
                self.networks.append((weights.of, tree))
            for key, value in tree.items():
                self.match_weight(value, key, network[key], weights.of, path, sizes)
        else:
            for key, value in tree.items():
                if isinstance(value, Tensor):
                    self.check_buffer(value, key, f"{path}.{key}", sizes)
                self.match(value, ANY_TENSOR, f"{path}.{key}", sizes)

    def match_weight(
        self,
        value: Payload,
        name: str,
        expected: tuple[torch.Size, torch.dtype],
        whose: str,
        path: str,
        sizes: Sizes,
    ) -> None:
        """Check one of the weights of a network that the server knows.

        Args:
            value: The weight.
            name: Its name in the network.
            expected: Its shape and dtype in the network.
            whose: The network's owner, for messages: "client" or "server".
            path: The place of the network's state in the answer.
            sizes: The sizes known so far.

        Raises:
            PayloadError: If it is no tensor of this shape and dtype.
        """
        at = f"{path}.{name}"
        _require(isinstance(value, Tensor), value, Tensor, at)
        if (value.shape, value.dtype) != expected:
            shape, dtype = expected
            raise PayloadError(
                f"{at} is {_describe(value)}, the {whose}'s is {_dtype_name(dtype)} {tuple(shape)}"
            )
        self.check_buffer(value, name, at, sizes)
        kind: AnswerKind = "weight" if name in self.known.parameters else "statistic"
        self.add_ranges(value, at, None, sizes, (path, kind))

    def check_buffer(self, value: Tensor, name: str, path: str, sizes: Sizes) -> None:
        """Note the range of a buffer that is not any number, for `check_ranges`.

        A variance of batch normalisation (`running_var`) is not negative: with a negative one a
        network computes NaN. A counter of batches is from 0 to 1e9. A table of integers has no
        number outside of the initial network's range, since such an index may not exist.
        Parameters, empty tensors and other buffers have no further range.
        """
        if name in self.known.parameters or not value.numel():
            return
        last = name.rpartition(".")[2]
        if last == VARIANCE_NAME and value.is_floating_point():
            least = value.detach().amin()
            self.ranges.append(RangeCheck(path, "minimum", least, 0, BOUND, sizes))
        elif last == COUNTER and value.dtype == torch.int64:
            least, most = torch.aminmax(value.detach())
            self.ranges.append(RangeCheck(path, "minimum", least, 0, MOST_BATCHES, sizes))
            self.ranges.append(RangeCheck(path, "maximum", most, 0, MOST_BATCHES, sizes))
        elif name in self.known.tables:
            smallest, largest = self.known.tables[name]
            least, most = torch.aminmax(value.detach())
            self.ranges.append(RangeCheck(path, "minimum", least, smallest, largest, sizes))
            self.ranges.append(RangeCheck(path, "maximum", most, smallest, largest, sizes))

    def check_leaf(self, value: Payload, path: str, sizes: Sizes) -> None:
        """Check a single value without annotations.

        A tensor may hold float32 of up to a million, int64 of up to 2^53, uint8 or bool; a number
        must be finite and at most 2^53, a string printable and at most 200 characters long. None
        passes. Ranges of tensors are only collected. Floats of a method in `may_be_infinite` have
        no range.

        Raises:
            PayloadError: If the value is none of these.
        """
        if isinstance(value, Tensor):
            self.check_tensor(value, ANY_TENSOR, path, sizes)
        elif isinstance(value, int | float):
            self.check_number(value, ANY_NUMBER, path, sizes)
        elif isinstance(value, str):
            _require_word(value, path)

    def check_number(
        self, value: int | float, schema: NumberSchema, path: str, sizes: Sizes
    ) -> None:
        """Check a number against its range and against the size that it defines.

        Without a declared range it is -2^53 to 2^53. A bool passes, and so does any float of a
        method that may send NaN. A size that is not known yet takes the number's value.

        Raises:
            PayloadError: If the number is out of range or not the size's value.
        """
        if isinstance(value, bool) or (isinstance(value, float) and not self.finite):
            return
        within = schema.within or Within(-EXACT_LIMIT, EXACT_LIMIT)
        most = _resolve_bound(within.most, sizes)
        if not math.isfinite(value):
            raise PayloadError(f"{path} holds NaN or infinity")
        if not within.least <= value <= most:
            raise PayloadError(f"{path} is {value:.4g}, expected {within.least:.4g} to {most:.4g}")
        if within.name and sizes.setdefault(within.name, int(value)) != value:
            raise PayloadError(f"{path} is {value}, but {within.name} is {sizes[within.name]}")

    def check_tensor(self, value: Tensor, schema: TensorSchema, path: str, sizes: Sizes) -> None:
        """Check a tensor's dtype and shape; note the ranges of its values.

        Without annotation, float32, int64, uint8 or bool of any shape passes. An annotated tensor
        whose `When` does not hold must be empty.

        Raises:
            PayloadError: If dtype or shape are not those of the schema.
        """
        declared = schema.values
        if declared is None:
            if value.dtype not in PLAIN_DTYPES:
                raise PayloadError(f"{path} is {_describe(value)}, expected float32")
        else:
            must_be_empty = schema.is_present(self.algorithm) is False
            dtype = _expected_dtype(declared, self.algorithm)
            holds = value.dtype == dtype
            if holds and must_be_empty:
                holds = value.numel() == 0
            elif holds:
                holds = _match_shape(declared, value, sizes)
            if not holds:
                shape = "empty" if must_be_empty else _format_shape(declared, sizes)
                raise PayloadError(
                    f"{path} is {_describe(value)}, expected {_dtype_name(dtype)} {shape}"
                )
        self.add_ranges(value, path, declared, sizes)

    def add_ranges(
        self,
        value: Tensor,
        path: str,
        mark: Floats | None,
        sizes: Sizes,
        origin: tuple[str, AnswerKind] | None = None,
    ) -> None:
        """Note the ranges in which a tensor's values must lie, for `check_ranges`.

        Nothing is noted of uint8 and bool, nor of floats of a method that may send NaN.

        Args:
            value: The tensor.
            path: Its place in the answer.
            mark: What its annotation declares, if anything.
            sizes: The sizes known so far.
            origin: The path of the state to which it belongs and its kind; None for other tensors.
        """
        if value.dtype in (torch.uint8, torch.bool):
            return
        if value.is_floating_point() and not self.finite:
            return
        if isinstance(mark, Counts):
            total = value.double().sum()
            claim = not mark.total
            self.ranges.append(RangeCheck(path, "sum", total, 0, mark.most, sizes, claim=claim))
            if mark.total:
                self.ranges.append(RangeCheck(path, "sum", total, mark.total, mark.total, sizes))
        if not value.numel():
            return
        bound = BOUND if value.is_floating_point() else EXACT_LIMIT
        least, most = (-bound, bound) if mark is None else (mark.least, mark.most)
        minimum, maximum = torch.aminmax(value.detach())
        self.ranges.append(RangeCheck(path, "minimum", minimum, least, most, sizes))
        self.ranges.append(RangeCheck(path, "maximum", maximum, least, most, sizes))
        if value.is_floating_point() and (mark is None or _is_compared(mark, self.algorithm)):
            value_of_its_own: tuple[str, AnswerKind] = (path, "value")
            group, kind = origin or value_of_its_own
            rare_peaks = mark is not None and mark.rare_peaks
            self.floats.append((path, group, kind, rare_peaks, value.detach()))
        if isinstance(mark, DistinctClasses) and len(value) > 1:
            step = value.diff().amin()
            self.ranges.append(RangeCheck(path, "smallest step", step, 1, EXACT_LIMIT, sizes))

    def check_ranges(self) -> list[Magnitude]:
        """Check the collected statistics, and return the magnitudes of all float tensors.

        Raises:
            PayloadError: If a statistic is NaN, infinite or out of its range.
        """
        norms = _norms([value for *_, value in self.floats])
        found_numbers = to_floats([found.number for found in self.ranges] + norms)
        peaks: dict[str, float] = {}
        for found, value in zip(self.ranges, found_numbers, strict=False):
            least = _resolve_bound(found.least, found.sizes)
            most = _resolve_bound(found.most, found.sizes)
            if not math.isfinite(value):
                raise PayloadError(f"{found.path} holds NaN or infinity")
            if not least <= value <= most:
                raise PayloadError(
                    f"{found.path}: the {found.which} of its values is {value:.7g}, "
                    f"expected {least:.7g} to {most:.7g}"
                )
            peaks[found.path] = max(peaks.get(found.path, 0.0), abs(value))
        norm_values = found_numbers[len(self.ranges) :]
        return [
            Magnitude(path, group, kind, value.shape, peaks[path], norm, rare_peaks)
            for (path, group, kind, rare_peaks, value), norm in zip(
                self.floats, norm_values, strict=True
            )
        ]


@dataclass(frozen=True)
class _ByteLimit:
    """Largest sizes of valid answers in bytes, by schema."""

    algorithm: object
    known: Known

    def of(self, schema: Schema, sizes: Sizes) -> int | None:
        """Return the most bytes a value with this schema can have; None if unbounded.

        A part whose `When` does not hold has 0 bytes; a number or string counts 200; a union counts
        as its largest member. Lists and dicts of any length are bounded only by `Room`.
        """
        if schema.is_present(self.algorithm) is False:
            return 0
        sizes = _add_names(schema, sizes)
        if schema.room is not None:
            return _resolve(schema.room, sizes)
        match schema:
            case NoneSchema():
                return 0
            case NumberSchema() | WordSchema():
                return WORD
            case TensorSchema(values=Floats() as declared):
                return _tensor_bytes(declared, sizes)
            case StateSchema(entries=None):
                shapes = _expected_weights(schema, self.algorithm, self.known).values()
                return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes) or None
            case StateSchema() | TupleSchema():
                return self.total(schema.children(), sizes)
            case RecordSchema():
                limits: dict[str, int] = {}
                for part in schema.children():
                    limits |= self.size_limits(part, sizes)
                return self.total(schema.children(), sizes.new_child(limits))
            case UnionSchema():
                return _if_all_known(max, [self.of(member, sizes) for member in schema.members])
            case _:
                return None

    def total(self, schemas: Iterable[Schema], sizes: Sizes) -> int | None:
        """Return the sum of the largest sizes; None if one of them is not bounded."""
        return _if_all_known(sum, [self.of(schema, sizes) for schema in schemas])

    def fields(self, schema: Schema, path: str, sizes: Sizes) -> Iterator[tuple[str, int | None]]:
        """Yield the path of each field of an answer and its largest size in bytes.

        TypedDicts are divided into their keys; anything else is one field. None stands for a size
        that is not bounded, as of lists and dicts without `Room`.
        """
        sizes = _add_names(schema, sizes)
        if isinstance(schema, RecordSchema) and schema.is_present(self.algorithm) is not False:
            limits: dict[str, int] = {}
            for part in schema.children():
                limits |= self.size_limits(part, sizes)
            for key, part in schema.fields.items():
                yield from self.fields(part, f"{path}.{key}", sizes.new_child(limits))
        else:
            yield path, self.of(schema, sizes)

    def size_limits(self, schema: Schema, sizes: Sizes) -> Iterator[tuple[str, int]]:
        """Yield name and upper bound of each size that occurs first in this schema.

        They are those of numbers with a name, of counts with a given sum, and of the number of
        distinct classes; sizes of other tensors have no bound.
        """
        match schema:
            case NumberSchema(within=Within(name=name, most=most)) if name:
                yield name, int(_resolve_bound(most, sizes))
            case TensorSchema(values=Counts() as counts) if counts.total:
                yield counts.total, int(_resolve_bound(counts.most, sizes))
            case TensorSchema(values=DistinctClasses() as classes):
                size = str(classes.shape[0])
                if _resolve(size, sizes) is None:
                    yield size, self.known.spec.classes


def _tensor_bytes(declared: Floats, sizes: Sizes) -> int | None:
    """Return the size of a tensor in bytes; None if an axis is unknown or `...`.

    A tensor with `half` counts at full precision.
    """
    lengths = [
        None if isinstance(size, EllipsisType) else _resolve(size, sizes) for size in declared.shape
    ]
    return _if_all_known(lambda known: declared.dtype.itemsize * math.prod(known), lengths)


def _format_shape(declared: Floats, sizes: Sizes) -> str:
    """Return a declared shape as messages show it, such as "(20, n, ...)".

    Known sizes are numbers, others names.
    """
    axes = [
        "..." if isinstance(size, EllipsisType) else str(_resolve(size, sizes) or size)
        for size in declared.shape
    ]
    return f"({', '.join(axes)})"


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor.

    Tensors of one device and dtype share kernels, so a GPU launches few.
    """
    by_device: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for members in by_device.values():
        norms |= zip(members, torch._foreach_norm([tensors[i] for i in members]), strict=True)
    return [norms[i] for i in range(len(tensors))]


def _if_all_known(combine: Callable[[list[int]], int], values: list[int | None]) -> int | None:
    """Return `combine(values)` if no value is None, otherwise None."""
    known = [n for n in values if n is not None]
    return combine(known) if len(known) == len(values) else None


def _require(holds: bool, tree: Payload, wanted: Any, path: str) -> None:
    """Raise PayloadError if a condition does not hold.

    Args:
        holds: The condition.
        tree: The part of the answer, whose type the message names.
        wanted: The expected type.
        path: The part's place in the answer.
    """
    if not holds:
        name = getattr(wanted, "__name__", str(wanted)) if not get_args(wanted) else str(wanted)
        raise PayloadError(f"{path} is a {type(tree).__name__}, expected {name}")


def _require_keys(tree: Payload, schema: Schema, kind: type, path: str) -> None:
    """Raise PayloadError unless a part is a dict with keys of type `kind`.

    Strings have at most 200 printable characters.
    """
    _require(isinstance(tree, dict), tree, schema.hint, path)
    for key in tree:
        _require(isinstance(key, kind), key, kind, f"{path}: key")
        if isinstance(key, str):
            _require_word(key, f"{path}: key")


def _require_word(word: str, path: str) -> None:
    """Raise PayloadError if a string has over 200 characters or unprintable ones."""
    if len(word) > WORD or not word.isprintable():
        raise PayloadError(
            f"{path} is {word[:20]!r}..., expected a string of at most {WORD} printable characters"
        )


def _list_some(names: Iterable[object]) -> str:
    """Return the first three names, sorted, and the number of the others."""
    texts = sorted(str(name)[:40] for name in names)
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Tensor) -> str:
    """Return a tensor's dtype and shape for messages."""
    return f"{_dtype_name(value.dtype)} {tuple(value.shape)}"
