"""Check clients' answers against the contracts in the return types of remote methods.

`require_valid_answer` checks the structure of an answer and the shape, dtype and range of every value in it.
`largest_answer` derives from the same annotations how large a valid answer can be. The annotations are
explained in `core/contracts.py`.
"""

from __future__ import annotations

import math
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import EllipsisType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import torch
from torch import Tensor

from barter.core.contracts import (
    BOUND,
    EXACT_LIMIT,
    Counts,
    DistinctClasses,
    Entries,
    Floats,
    Named,
    Room,
    Size,
    Weights,
    When,
    Within,
)
from barter.core.errors import PayloadError
from barter.core.images import Spec
from barter.core.payload import Payload, State, leaves, nbytes, to_floats

__all__ = [
    "WORD",
    "Known",
    "Magnitude",
    "Shapes",
    "Valid",
    "largest_answer",
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
        """Return the weights of a network, with or without buffers; empty if unknown.

        Args:
            whose: "client" or "server".
            parameters_only: Leave out buffers.
        """
        weights = self.server if whose == "server" else self.weights
        if not parameters_only:
            return weights
        return {name: shape for name, shape in weights.items() if name in self.parameters}

    def nbytes(self, whose: str, *, parameters_only: bool = False) -> int | None:
        """Return the size of a network's weights in bytes; None if unknown."""
        weights = self.network(whose, parameters_only=parameters_only).values()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in weights) or None

    def sizes(self) -> dict[str, int]:
        """Return the sizes that contracts may refer to by name."""
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
        The paths inside the answer where the client claims a number of images.
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
    # Of all float tensors that must be finite and are not empty.
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
        The claims in the answer and the magnitudes of its tensors.

    Raises:
        PayloadError: If the answer does not match; the message names the path and the reason.
    """
    checker, sizes, returned = _prepare(algorithm, method, sent, known)
    list(leaves(answer, method))  # Raises with the path if the answer is not a payload.
    checker.match(answer, returned, method, sizes)
    magnitudes = checker.check_ranges()
    claims = {found.path for found in checker.ranges if found.claim}
    return Valid(claims, magnitudes, checker.networks)


def largest_answer(
    algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> int | None:
    """Return the largest size in bytes of a valid answer; None if the contract does not bound it.

    The arguments are those of `require_valid_answer`.
    """
    checker, sizes, returned = _prepare(algorithm, method, sent, known)
    return checker.max_bytes(returned, sizes)


def _prepare(
    algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> tuple[_Checker, Sizes, Any]:
    """Return a checker, the sizes known from the run and the arguments, and the return type."""
    hints = _hints(getattr(type(algorithm), method))
    checker = _Checker(algorithm, method, known)
    sizes: Sizes = ChainMap({}, known.sizes())
    parameters = [hints.get(name, Any) for name in _parameters(algorithm, method)]
    for value, hint in zip(sent, parameters, strict=False):
        checker.learn_sizes(value, hint, sizes)
    return checker, sizes, hints.get("return", Any)


def _parameters(algorithm: object, method: str) -> tuple[str, ...]:
    """Return the names of a remote method's parameters after `self` and `client`."""
    code = getattr(getattr(type(algorithm), method), "__code__", None)
    return () if code is None else code.co_varnames[2 : code.co_argcount]


@lru_cache(maxsize=512)
def _hints(of: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a method or a TypedDict."""
    try:
        return typing.get_type_hints(of, include_extras=True)
    except NameError:  # A name that is not visible at module level; `barter check` reports it.
        return {}


def _unwrap(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Split a type hint into the bare type and its annotations."""
    if get_origin(hint) is NotRequired:
        return _unwrap(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        kind, marks = _unwrap(hint.__origin__)
        return kind, (*marks, *hint.__metadata__)
    return hint, ()


@dataclass(frozen=True)
class RangeCheck:
    """A statistic of a tensor, such as its minimum, and the range in which it must lie."""

    path: str
    which: str  # The statistic, as messages name it.
    number: Tensor
    least: float | str
    most: float | str
    sizes: Sizes
    claim: bool = False  # True if the number is a claimed number of images.


class _Checker:
    """Walks through an answer and its type.

    Ranges of tensors are collected during the walk and compared at its end, so that a GPU is
    waited for only once per answer.
    """

    def __init__(self, algorithm: object, method: str, known: Known) -> None:
        self.algorithm = algorithm
        self.known = known
        self.finite = method not in getattr(algorithm, "may_be_infinite", ())
        self.ranges: list[RangeCheck] = []
        self.floats: list[tuple[str, str, AnswerKind, Tensor]] = []  # path, group, kind, tensor
        self.networks: list[tuple[str, State]] = []

    def resolve(self, size: Size, sizes: Mapping[str, int]) -> int | None:
        """Return a size as a number; None if its name has not occurred yet."""
        if isinstance(size, int):
            return size
        value = sizes.get(size, getattr(self.algorithm, size, None))
        if callable(value):
            value = value(self.known)
        return value if isinstance(value, int) else None

    def resolve_bound(self, bound: float | str, sizes: Mapping[str, int]) -> float:
        """Return a bound as a number; raise if it is the name of an unknown size."""
        value = self.resolve(bound, sizes) if isinstance(bound, str) else bound
        if value is None:
            raise PayloadError(f"{bound!r} is not the name of a known size")
        return value

    def is_present(self, marks: Iterable[object]) -> bool | None:
        """Return whether an optional part must be present; None if no `When` decides it."""
        for mark in marks:
            if isinstance(mark, When):
                return bool(getattr(self.algorithm, mark.says, True))
        return None

    def learn_sizes(self, value: Payload, hint: Any, sizes: Sizes) -> None:
        """Record the sizes that an argument of the call defines."""
        _, marks = _unwrap(hint)
        for mark in marks:
            if isinstance(mark, Floats) and isinstance(value, Tensor):
                self.match_shape(mark, value, sizes)
            elif isinstance(mark, Within) and mark.name:
                sizes[mark.name] = int(value)

    def match_shape(self, mark: Floats, value: Tensor, sizes: Sizes) -> bool:
        """Return whether a tensor has the declared shape; record sizes that occur first here."""
        for size, length in zip(mark.shape, value.shape, strict=False):
            if isinstance(size, EllipsisType):
                break
            known = self.resolve(size, sizes)
            if known is None:
                sizes[str(size)] = length
            elif known != length:
                return False
        if mark.shape[-1:] == (...,):
            return value.ndim >= len(mark.shape) - 1
        return value.ndim == len(mark.shape)

    def match(self, tree: Payload, hint: Any, path: str, sizes: Sizes) -> None:
        """Check a part of an answer against its type.

        Args:
            tree: The part.
            hint: Its type, with annotations.
            path: Its place in the answer, for messages.
            sizes: The sizes known so far; sizes that occur first here are added.
        """
        wanted, marks = _unwrap(hint)
        for mark in marks:
            if isinstance(mark, Named):
                sizes = self.add_name(mark, sizes)
            elif isinstance(mark, Room):
                most = self.resolve(mark.most, sizes)
                if most is not None and nbytes(tree) > most:
                    raise PayloadError(f"{path} has {nbytes(tree)} bytes, expected at most {most}")
        origin = get_origin(wanted)
        args = get_args(wanted)
        if wanted is Any:
            for at, value in leaves(tree, path):
                self.check_leaf(value, at, (), sizes)
        elif origin in (Union, types.UnionType):
            self.match_union(tree, args, path, sizes)
        elif is_typeddict(wanted):
            self.match_typed_dict(tree, wanted, path, sizes.new_child())
        elif origin is dict:
            self.match_dict(tree, wanted, marks, path, sizes)
        elif origin is list:
            _require(isinstance(tree, list), tree, wanted, path)
            for i, value in enumerate(tree):
                self.match(value, args[0], f"{path}[{i}]", sizes)
        elif origin is tuple:
            any_length = args[1:] == (...,) and isinstance(tree, tuple)
            kinds = [args[0]] * len(tree) if any_length else list(args)
            _require(isinstance(tree, tuple) and len(tree) == len(kinds), tree, wanted, path)
            for i, (value, kind) in enumerate(zip(tree, kinds, strict=True)):
                self.match(value, kind, f"{path}[{i}]", sizes)
        elif origin is typing.Literal:
            _require(isinstance(tree, str | int) and tree in args, tree, wanted, path)
        else:
            if wanted is Tensor:
                holds = isinstance(tree, Tensor)
            elif wanted is float:
                holds = type(tree) in (int, float)
            else:
                holds = type(tree) is (type(None) if wanted is None else wanted)
            _require(holds, tree, wanted, path)
            self.check_leaf(tree, path, marks, sizes)

    def add_name(self, mark: Named, sizes: Sizes) -> Sizes:
        """Return the sizes with the further name that `Named` gives to one of them."""
        return sizes.new_child({mark.name: int(self.resolve_bound(mark.size, sizes))})

    def match_union(self, tree: Payload, kinds: tuple[Any, ...], path: str, sizes: Sizes) -> None:
        """Check a part against the members of a union; raise the last one's error if none fits."""
        sizes_before = dict(sizes.maps[0])
        ranges_before = len(self.ranges)
        floats_before = len(self.floats)
        networks_before = len(self.networks)
        for i, kind in enumerate(kinds):
            try:
                return self.match(tree, kind, path, sizes)
            except PayloadError:
                if i == len(kinds) - 1:
                    raise
                # Forget the sizes and ranges of the member that did not fit.
                del self.ranges[ranges_before:]
                del self.floats[floats_before:]
                del self.networks[networks_before:]
                sizes.maps[0] = dict(sizes_before)
        return None

    def match_typed_dict(self, tree: Payload, wanted: Any, path: str, sizes: Sizes) -> None:
        """Check a part against a TypedDict."""
        _require(isinstance(tree, dict), tree, wanted, path)
        hints = _hints(wanted)
        required = set()
        allowed = set()
        for key, hint in hints.items():
            present: bool | None = True
            if get_origin(hint) is NotRequired:
                _, marks = _unwrap(hint)
                present = self.is_present(marks)
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
            self.match(value, hints[key], f"{path}.{key}", sizes)

    def match_dict(
        self, tree: Payload, wanted: Any, marks: tuple[object, ...], path: str, sizes: Sizes
    ) -> None:
        """Check a part against a dict type: arbitrary keys, or the weights of a network."""
        _require(isinstance(tree, dict), tree, wanted, path)
        key_kind, kind = get_args(wanted)
        for key in tree:
            _require(isinstance(key, key_kind), key, key_kind, f"{path}: key")
            if isinstance(key, str):
                _require_word(key, f"{path}: key")
        entries = next((mark.shapes for mark in marks if isinstance(mark, Entries)), None)
        weights = next((mark for mark in marks if isinstance(mark, Weights)), Weights())
        is_state = (key_kind, kind) == (str, Tensor)
        network: Shapes = {}
        if is_state:
            network = self.expected_weights(weights)
        names = network if entries is None else entries
        odd = tree.keys() ^ names.keys() if names else ()
        if odd or (is_state and not tree):
            # Without a marker, the author may not have meant a network's weights at all.
            marked = entries is not None or any(isinstance(mark, Weights) for mark in marks)
            raise PayloadError(
                f"{path} is not the {weights.of}'s weights: "
                f"{_list_some(odd) or 'all'} unexpected or missing"
                f"{'' if marked else OTHER_STATES}"
            )
        if network and entries is None and not weights.parameters_only:
            self.networks.append((weights.of, tree))
        for key, value in tree.items():
            at = f"{path}.{key}"
            if entries is not None:
                self.match(value, Annotated[kind, Floats(*entries[key])], at, sizes)
            elif not network:
                if is_state and isinstance(value, Tensor):
                    self.check_buffer(value, key, at, sizes)
                self.match(value, kind, at, sizes)
            else:
                _require(isinstance(value, Tensor), value, kind, at)
                shape, dtype = network[key]
                if (value.shape, value.dtype) != (shape, dtype):
                    raise PayloadError(
                        f"{at} is {_describe(value)}, "
                        f"the {weights.of}'s is {_dtype_name(dtype)} {tuple(shape)}"
                    )
                self.check_buffer(value, key, at, sizes)
                is_parameter = key in self.known.parameters
                of_network: AnswerKind = "weight" if is_parameter else "statistic"
                self.add_ranges(value, at, None, sizes, (path, of_network))

    def check_buffer(self, value: Tensor, name: str, path: str, sizes: Sizes) -> None:
        """Note the range of a buffer that is not any number.

        A variance of batch normalisation is not negative: with a negative one a network computes
        NaN. An index beyond those of the initial network may not exist.
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

    def max_bytes(self, hint: Any, sizes: Sizes) -> int | None:
        """Return the largest size in bytes of a value of this type; None if unbounded."""
        wanted, marks = _unwrap(hint)
        origin = get_origin(wanted)
        args = get_args(wanted)
        if self.is_present(marks) is False or wanted in (None, type(None)):
            return 0
        for mark in marks:
            if isinstance(mark, Named):
                sizes = self.add_name(mark, sizes)
            elif isinstance(mark, Room):
                return self.resolve(mark.most, sizes)
        if origin in (Union, types.UnionType):
            return _if_all_known(max, [self.max_bytes(kind, sizes) for kind in args])
        if origin is tuple and ... not in args:
            return _if_all_known(sum, [self.max_bytes(kind, sizes) for kind in args])
        if is_typeddict(wanted):
            parts = _hints(wanted).values()
            limits: dict[str, int] = {}
            for part in parts:
                limits |= self.size_limits(_unwrap(part)[1], sizes)
            sizes = sizes.new_child(limits)
            return _if_all_known(sum, [self.max_bytes(part, sizes) for part in parts])
        if wanted is Tensor:
            shapes = (mark for mark in marks if isinstance(mark, Floats))
            return next((self.tensor_bytes(mark, sizes) for mark in shapes), None)
        if (origin, args) == (dict, (str, Tensor)):
            return self.state_bytes(marks, sizes)
        return WORD if wanted in (int, float, bool, str) or origin is typing.Literal else None

    def state_bytes(self, marks: tuple[object, ...], sizes: Sizes) -> int | None:
        """Return the size of a State in bytes; None if unknown."""
        for mark in marks:
            if isinstance(mark, Entries):
                tensors = [Floats(*shape) for shape in mark.shapes.values()]
                return _if_all_known(sum, [self.tensor_bytes(tensor, sizes) for tensor in tensors])
        weights = next((mark for mark in marks if isinstance(mark, Weights)), Weights())
        shapes = self.expected_weights(weights).values()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes) or None

    def expected_weights(self, weights: Weights) -> Shapes:
        """Return the shapes and dtypes of the weights that a State must hold; empty if unknown."""
        shapes = self.known.network(weights.of, parameters_only=weights.parameters_only)
        if not (weights.half and getattr(self.algorithm, weights.half)):
            return shapes
        return {
            name: (shape, torch.float16 if dtype == torch.float32 else dtype)
            for name, (shape, dtype) in shapes.items()
        }

    def size_limits(self, marks: Iterable[object], sizes: Sizes) -> Iterator[tuple[str, int]]:
        """Yield upper bounds of the sizes that occur first in a part with these annotations."""
        for mark in marks:
            if isinstance(mark, Within) and mark.name:
                yield mark.name, int(self.resolve_bound(mark.most, sizes))
            elif isinstance(mark, Counts) and mark.total:
                yield mark.total, int(self.resolve_bound(mark.most, sizes))
            elif (
                isinstance(mark, DistinctClasses)
                and self.resolve(str(mark.shape[0]), sizes) is None
            ):
                yield str(mark.shape[0]), self.known.spec.classes

    def tensor_bytes(self, mark: Floats, sizes: Sizes) -> int | None:
        """Return the size of a tensor in bytes; None if an axis is unknown."""
        lengths = [
            None if isinstance(size, EllipsisType) else self.resolve(size, sizes)
            for size in mark.shape
        ]
        return _if_all_known(lambda known: mark.dtype.itemsize * math.prod(known), lengths)

    def check_leaf(
        self, value: Payload, path: str, marks: tuple[object, ...], sizes: Sizes
    ) -> None:
        """Check a single value.

        Without annotations, a tensor may hold float32 of up to a million, int64, uint8 or bool; a
        number must be finite and a string short.
        """
        if isinstance(value, Tensor):
            self.check_tensor(value, path, marks, sizes)
        elif type(value) is int or (type(value) is float and self.finite):
            self.check_number(value, path, marks, sizes)
        elif isinstance(value, str):
            _require_word(value, path)

    def check_number(
        self, value: int | float, path: str, marks: tuple[object, ...], sizes: Sizes
    ) -> None:
        """Check a number against its range and against the size that it defines."""
        ranges = (mark for mark in marks if isinstance(mark, Within))
        within = next(ranges, Within(-EXACT_LIMIT, EXACT_LIMIT))
        most = self.resolve_bound(within.most, sizes)
        if not math.isfinite(value):
            raise PayloadError(f"{path} holds NaN or infinity")
        if not within.least <= value <= most:
            raise PayloadError(f"{path} is {value:.4g}, expected {within.least:.4g} to {most:.4g}")
        if within.name and sizes.setdefault(within.name, int(value)) != value:
            raise PayloadError(f"{path} is {value}, but {within.name} is {sizes[within.name]}")

    def check_tensor(
        self, value: Tensor, path: str, marks: tuple[object, ...], sizes: Sizes
    ) -> None:
        """Check a tensor's dtype and shape and note the ranges of its values."""
        mark = next((mark for mark in marks if isinstance(mark, Floats)), None)
        if mark is None:
            if value.dtype not in PLAIN_DTYPES:
                raise PayloadError(f"{path} is {_describe(value)}, expected float32")
        else:
            must_be_empty = self.is_present(marks) is False
            holds = value.dtype == mark.dtype
            if holds and must_be_empty:
                holds = value.numel() == 0
            elif holds:
                holds = self.match_shape(mark, value, sizes)
            if not holds:
                shape = "empty" if must_be_empty else self.format_shape(mark, sizes)
                raise PayloadError(
                    f"{path} is {_describe(value)}, expected {_dtype_name(mark.dtype)} {shape}"
                )
        self.add_ranges(value, path, mark, sizes)

    def add_ranges(
        self,
        value: Tensor,
        path: str,
        mark: Floats | None,
        sizes: Sizes,
        origin: tuple[str, AnswerKind] | None = None,
    ) -> None:
        """Note the ranges in which a tensor's values must lie, for `check_ranges`.

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
        if value.is_floating_point():
            value_of_its_own: tuple[str, AnswerKind] = (path, "value")
            group, kind = origin or value_of_its_own
            self.floats.append((path, group, kind, value.detach()))
        if isinstance(mark, DistinctClasses) and len(value) > 1:
            step = value.diff().amin()
            self.ranges.append(RangeCheck(path, "smallest step", step, 1, EXACT_LIMIT, sizes))

    def format_shape(self, mark: Floats, sizes: Sizes) -> str:
        """Return a declared shape as messages show it, with known sizes as numbers."""
        axes = [
            "..." if isinstance(size, EllipsisType) else str(self.resolve(size, sizes) or size)
            for size in mark.shape
        ]
        return f"({', '.join(axes)})"

    def check_ranges(self) -> list[Magnitude]:
        """Check the collected statistics, and return the magnitudes of all float tensors.

        Raises:
            PayloadError: If a statistic is out of its range.
        """
        norms = _norms([value for _, _, _, value in self.floats])
        found_numbers = to_floats([found.number for found in self.ranges] + norms)
        peaks: dict[str, float] = {}
        for found, value in zip(self.ranges, found_numbers, strict=False):
            least = self.resolve_bound(found.least, found.sizes)
            most = self.resolve_bound(found.most, found.sizes)
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
            Magnitude(path, group, kind, value.shape, peaks[path], norm)
            for (path, group, kind, value), norm in zip(self.floats, norm_values, strict=True)
        ]


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, on a GPU with few kernels for all of them."""
    by_device: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for members in by_device.values():
        norms |= zip(members, torch._foreach_norm([tensors[i] for i in members]), strict=True)
    return [norms[i] for i in range(len(tensors))]


def _if_all_known(combine: Callable[[list[int]], int], values: list[int | None]) -> int | None:
    """Return the combination of numbers if all of them are known, otherwise None."""
    known = [n for n in values if n is not None]
    return combine(known) if len(known) == len(values) else None


def _require(holds: bool, tree: Payload, wanted: Any, path: str) -> None:
    """Raise PayloadError with the expected type if a condition does not hold."""
    if not holds:
        name = getattr(wanted, "__name__", str(wanted)) if not get_args(wanted) else str(wanted)
        raise PayloadError(f"{path} is a {type(tree).__name__}, expected {name}")


def _require_word(word: str, path: str) -> None:
    """Raise PayloadError if a string is long or not printable."""
    if len(word) > WORD or not word.isprintable():
        raise PayloadError(
            f"{path} is {word[:20]!r}..., expected a string of at most {WORD} printable characters"
        )


def _list_some(names: Iterable[object]) -> str:
    """Return the first three names in alphabetical order and the number of the others."""
    texts = sorted(str(name)[:40] for name in names)
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Tensor) -> str:
    """Return a tensor's dtype and shape for messages."""
    return f"{_dtype_name(value.dtype)} {tuple(value.shape)}"
