"""Whether an answer is what was asked for: its structure, and shape, kind and range of all that is in it."""

from __future__ import annotations

import math
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import EllipsisType
from typing import Annotated, Any, NotRequired, TypeAlias, Union, get_args, get_origin, is_typeddict

import torch
from torch import Tensor

from barter.core.contracts import (
    BOUND,
    EXACT,
    Classes,
    Counts,
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
from barter.core.payload import Payload, leaves, nbytes, numbers

__all__ = ["WORD", "Known", "Shapes", "most_bytes", "require", "shapes_of"]

WORD = 200  # letters that a name may have; bytes that are left for one, or for a number, and what is around it
PLAIN = (
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bool,
)  # kinds of tensors of which nothing is said
# what to write where a dict of tensors is something else than a client's whole network
OTHER_STATES = (
    "; where it is something else, the method's return type must say so: "
    "Annotated[State, Weights(parameters_only=True)] for its parameters, Weights('server') for the server's network, "
    "Entries({name: shape}) for other tensors"
)
Shapes: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]
Sizes: TypeAlias = ChainMap[str, int]


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Shapes and kinds of a network's weights, by name."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


@dataclass(frozen=True)
class Known:
    """What the server knows of a client before it answers; of its network nothing, where it cannot build that."""

    spec: Spec
    examples: int
    features: int | None = None  # width of its network's features
    weights: Shapes = field(default_factory=dict)  # those of its network that may leave it
    server: Shapes = field(default_factory=dict)  # those of the server's network
    parameters: frozenset[str] = frozenset()  # names of both networks' weights that are no buffers

    def network(self, whose: str, *, parameters_only: bool = False) -> Shapes:
        """A network's weights, with or without its buffers; empty where they are not known."""
        weights = self.server if whose == "server" else self.weights
        if not parameters_only:
            return weights
        return {name: shape for name, shape in weights.items() if name in self.parameters}

    def nbytes(self, whose: str, *, parameters_only: bool = False) -> int | None:
        """Of a network's weights; none where they are not known."""
        weights = self.network(whose, parameters_only=parameters_only).values()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in weights) or None

    def sizes(self) -> dict[str, int]:
        images = {
            name: getattr(self.spec, name) for name in ("classes", "channels", "height", "width")
        }
        features = {} if self.features is None else {"features": self.features}
        return {
            **images,
            **features,
            "examples": self.examples,
            "last_class": self.spec.classes - 1,
        }


def require(
    answer: Payload, algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> set[str]:
    """Refuse an answer that is not what the method says it returns, for what was sent; where in it a client says how
    many images it has."""
    reader, sizes, returned = _asked(algorithm, method, sent, known)
    list(leaves(answer, method))  # what is no payload is refused with its place
    reader.match(answer, returned, method, sizes)
    reader.require_ranges()
    return {found.path for found in reader.ranges if found.claim}


def most_bytes(algorithm: object, method: str, sent: tuple[Any, ...], known: Known) -> int | None:
    """Bytes that an answer can have at most which is what the method says it returns; none where that is not said."""
    reader, sizes, returned = _asked(algorithm, method, sent, known)
    return reader.room(returned, sizes)


def _asked(
    algorithm: object, method: str, sent: tuple[Any, ...], known: Known
) -> tuple[_Reader, Sizes, Any]:
    """Who reads an answer, with the sizes that are known from what was sent, and of what type it is to be."""
    hints = _hints(getattr(type(algorithm), method))
    reader, sizes = _Reader(algorithm, method, known), ChainMap({}, known.sizes())
    # What is sent comes behind the method's self and client.
    for value, hint in zip(
        sent, [hints.get(name, Any) for name in _parameters(algorithm, method)], strict=False
    ):
        reader.learn(value, hint, sizes)
    return reader, sizes, hints.get("return", Any)


def _parameters(algorithm: object, method: str) -> tuple[str, ...]:
    code = getattr(getattr(type(algorithm), method), "__code__", None)
    return () if code is None else code.co_varnames[2 : code.co_argcount]


@lru_cache(maxsize=512)
def _hints(of: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a method or a TypedDict."""
    try:
        return typing.get_type_hints(of, include_extras=True)
    except NameError:  # what only its author can see; `barter check` says so
        return {}


def _unwrapped(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """What is annotated, and with what."""
    if get_origin(hint) is NotRequired:
        return _unwrapped(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        kind, marks = _unwrapped(hint.__origin__)
        return kind, (*marks, *hint.__metadata__)
    return hint, ()


@dataclass(frozen=True)
class Range:
    """Of a tensor at a path a number, the least or the most or the like, and where it must lie."""

    path: str
    which: str
    number: Tensor
    least: float | str
    most: float | str
    sizes: Sizes
    claim: bool = False  # that there are so many images


class _Reader:
    """Goes through an answer; which numbers are out of their range is asked in the end, once for all."""

    def __init__(self, algorithm: object, method: str, known: Known) -> None:
        self.algorithm, self.known = algorithm, known
        self.finite = method not in getattr(algorithm, "may_be_infinite", ())
        self.ranges: list[Range] = []

    def size(self, size: Size, sizes: Mapping[str, int]) -> int | None:
        """A size as a number; none if it is met for the first time."""
        if isinstance(size, int):
            return size
        said = sizes.get(size, getattr(self.algorithm, size, None))
        said = said(self.known) if callable(said) else said
        return said if isinstance(said, int) else None

    def bound(self, most: float | str, sizes: Mapping[str, int]) -> float:
        found = self.size(most, sizes) if isinstance(most, str) else most
        if found is None:
            raise PayloadError(f"{most!r} is the name of no size that is known")
        return found

    def said(self, marks: Iterable[object]) -> bool | None:
        """Whether something is to be there; none where it is not said."""
        wanted = [mark.says for mark in marks if isinstance(mark, When)]
        return bool(getattr(self.algorithm, wanted[0], True)) if wanted else None

    def learn(self, value: Payload, hint: Any, sizes: Sizes) -> None:
        """Take sizes from what was sent."""
        for mark in _unwrapped(hint)[1]:
            if isinstance(mark, Floats) and isinstance(value, Tensor):
                self.meet(mark, value, sizes)
            elif isinstance(mark, Within) and mark.name:
                sizes[mark.name] = int(value)

    def meet(self, mark: Floats, value: Tensor, sizes: Sizes) -> bool:
        """Whether the shape is the one that is wanted, where what is met for the first time may be anything."""
        for size, length in zip(mark.shape, value.shape, strict=False):
            if isinstance(size, EllipsisType):
                break
            known = self.size(size, sizes)
            if known is None:
                sizes[str(size)] = length
            elif known != length:
                return False
        return value.ndim == len(mark.shape) or (
            mark.shape[-1:] == (...,) and value.ndim >= len(mark.shape) - 1
        )

    def match(self, tree: Payload, hint: Any, path: str, sizes: Sizes) -> None:
        wanted, marks = _unwrapped(hint)
        for mark in marks:
            if isinstance(mark, Named):
                sizes = sizes.new_child({mark.name: int(self.bound(mark.size, sizes))})
            elif (
                isinstance(mark, Room)
                and (most := self.size(mark.most, sizes)) is not None
                and nbytes(tree) > most
            ):
                raise PayloadError(
                    f"{path} has {nbytes(tree)} bytes, asked for were at most {most}"
                )
        origin, args = get_origin(wanted), get_args(wanted)
        if wanted is Any:
            for at, value in leaves(tree, path):
                self.leaf(value, at, (), sizes)
        elif origin in (Union, types.UnionType):
            self.one_of(tree, args, path, sizes)
        elif is_typeddict(wanted):
            self.by_key(tree, wanted, path, sizes.new_child())
        elif origin is dict:
            self.by_name(tree, wanted, marks, path, sizes)
        elif origin is list:
            _require(isinstance(tree, list), tree, wanted, path)
            for i, value in enumerate(tree):
                self.match(value, args[0], f"{path}[{i}]", sizes)
        elif origin is tuple:
            kinds = (
                [args[0]] * len(tree)
                if args[1:] == (...,) and isinstance(tree, tuple)
                else list(args)
            )
            _require(isinstance(tree, tuple) and len(tree) == len(kinds), tree, wanted, path)
            for i, (value, kind) in enumerate(zip(tree, kinds, strict=True)):
                self.match(value, kind, f"{path}[{i}]", sizes)
        elif origin is typing.Literal:
            _require(isinstance(tree, str | int) and tree in args, tree, wanted, path)
        else:
            kinds = [int, float] if wanted is float else [type(None) if wanted is None else wanted]
            _require(
                isinstance(tree, Tensor) if wanted is Tensor else type(tree) in kinds,
                tree,
                wanted,
                path,
            )
            self.leaf(tree, path, marks, sizes)

    def one_of(self, tree: Payload, kinds: tuple[Any, ...], path: str, sizes: Sizes) -> None:
        met, before = dict(sizes.maps[0]), len(self.ranges)
        for i, kind in enumerate(kinds):
            try:
                return self.match(tree, kind, path, sizes)
            except PayloadError:
                if i == len(kinds) - 1:
                    raise
                del self.ranges[before:]
                sizes.maps[0] = dict(met)
        return None

    def by_key(self, tree: Payload, wanted: Any, path: str, sizes: Sizes) -> None:
        """A TypedDict."""
        _require(isinstance(tree, dict), tree, wanted, path)
        hints = _hints(wanted)
        said = {
            key: self.said(_unwrapped(hint)[1])
            for key, hint in hints.items()
            if get_origin(hint) is NotRequired
        }
        missing = {key for key in hints if said.get(key, True)} - tree.keys()
        unknown = tree.keys() - {key for key in hints if said.get(key) is not False}
        if missing or unknown:
            raise PayloadError(
                f"{path} {'lacks' if missing else 'has the unknown'} {_some(missing or unknown)}"
            )
        for key, value in tree.items():
            self.match(value, hints[key], f"{path}.{key}", sizes)

    def by_name(
        self, tree: Payload, wanted: Any, marks: tuple[object, ...], path: str, sizes: Sizes
    ) -> None:
        """A dict of any names, or the state of a network, which has its names."""
        _require(isinstance(tree, dict), tree, wanted, path)
        key_kind, kind = get_args(wanted)
        for key in tree:
            _require(isinstance(key, key_kind), key, key_kind, f"{path}: key")
            if isinstance(key, str):
                _require_word(key, f"{path}: key")
        entries = next((mark.shapes for mark in marks if isinstance(mark, Entries)), None)
        declared = next((mark for mark in marks if isinstance(mark, Weights)), Weights())
        whose = declared.of
        state = (key_kind, kind) == (str, Tensor)
        network = (
            self.known.network(whose, parameters_only=declared.parameters_only) if state else {}
        )
        names = network if entries is None else entries
        odd = tree.keys() ^ names.keys() if names else ()
        if odd or (state and not tree):
            # Without a marker, the author may not have meant a network's weights at all.
            marked = entries is not None or any(isinstance(mark, Weights) for mark in marks)
            raise PayloadError(
                f"{path} is not the {whose}'s weights: {_some(odd) or 'all'} too much or missing"
                f"{'' if marked else OTHER_STATES}"
            )
        for key, value in tree.items():
            at = f"{path}.{key}"
            if not network or entries is not None:
                self.match(
                    value,
                    kind if entries is None else Annotated[kind, Floats(*entries[key])],
                    at,
                    sizes,
                )
                continue
            _require(isinstance(value, Tensor), value, kind, at)
            if (value.shape, value.dtype) != network[key]:
                shape, dtype = network[key]
                raise PayloadError(
                    f"{at} is {_look(value)}, the {whose}'s is {_kind(dtype)} {tuple(shape)}"
                )
            self.bounded(value, at, None, sizes)

    def room(self, hint: Any, sizes: Sizes) -> int | None:
        """How many bytes something of this type can have."""
        wanted, marks = _unwrapped(hint)
        origin, args = get_origin(wanted), get_args(wanted)
        if self.said(marks) is False or wanted in (None, type(None)):
            return 0
        for mark in marks:
            if isinstance(mark, Named):
                sizes = sizes.new_child({mark.name: int(self.bound(mark.size, sizes))})
            elif isinstance(mark, Room):
                return self.size(mark.most, sizes)
        if origin in (Union, types.UnionType):
            return _all(max, [self.room(kind, sizes) for kind in args])
        if origin is tuple and ... not in args:
            return _all(sum, [self.room(kind, sizes) for kind in args])
        if is_typeddict(wanted):
            parts = _hints(wanted).values()
            sizes = sizes.new_child(
                {name: n for part in parts for name, n in self.limits(_unwrapped(part)[1], sizes)}
            )
            return _all(sum, [self.room(part, sizes) for part in parts])
        if wanted is Tensor:
            return next(
                (self.product(mark, sizes) for mark in marks if isinstance(mark, Floats)), None
            )
        if (origin, args) == (dict, (str, Tensor)):
            for mark in marks:
                if isinstance(mark, Entries):
                    return _all(
                        sum, [self.product(Floats(*shape), sizes) for shape in mark.shapes.values()]
                    )
            declared = next((mark for mark in marks if isinstance(mark, Weights)), Weights())
            return self.known.nbytes(declared.of, parameters_only=declared.parameters_only)
        return WORD if wanted in (int, float, bool, str) or origin is typing.Literal else None

    def limits(self, marks: Iterable[object], sizes: Sizes) -> Iterator[tuple[str, int]]:
        """How large sizes can be that are first met here."""
        for mark in marks:
            if isinstance(mark, Within) and mark.name:
                yield mark.name, int(self.bound(mark.most, sizes))
            elif isinstance(mark, Counts) and mark.total:
                yield mark.total, int(self.bound(mark.most, sizes))
            elif isinstance(mark, Classes) and self.size(str(mark.shape[0]), sizes) is None:
                yield str(mark.shape[0]), self.known.spec.classes

    def product(self, mark: Floats, sizes: Sizes) -> int | None:
        """How many bytes a tensor of these sizes has."""
        lengths = [
            None if isinstance(size, EllipsisType) else self.size(size, sizes)
            for size in mark.shape
        ]
        return _all(lambda known: mark.dtype.itemsize * math.prod(known), lengths)

    def leaf(self, value: Payload, path: str, marks: tuple[object, ...], sizes: Sizes) -> None:
        """A value by itself. Of which nothing is said: a tensor holds decimal numbers of up to a million (float32),
        whole ones (int64), bytes or truth values; a number is finite, a word short."""
        if isinstance(value, Tensor):
            self.tensor(value, path, marks, sizes)
        elif type(value) is int or (type(value) is float and self.finite):
            within = next(
                (mark for mark in marks if isinstance(mark, Within)), Within(-EXACT, EXACT)
            )
            most = self.bound(within.most, sizes)
            if not math.isfinite(value):
                raise PayloadError(f"{path} holds NaN or infinity")
            if not within.least <= value <= most:
                raise PayloadError(
                    f"{path} is {value:.4g}, not from {within.least:.4g} to {most:.4g}"
                )
            if within.name and sizes.setdefault(within.name, int(value)) != value:
                raise PayloadError(
                    f"{path} is {value}, and of {within.name} there are {sizes[within.name]}"
                )
        elif isinstance(value, str):
            _require_word(value, path)

    def tensor(self, value: Tensor, path: str, marks: tuple[object, ...], sizes: Sizes) -> None:
        mark = next((mark for mark in marks if isinstance(mark, Floats)), None)
        if mark is None:
            if value.dtype not in PLAIN:
                raise PayloadError(f"{path} is {_look(value)}, asked for was float32")
        else:
            empty = self.said(marks) is False
            if value.dtype != mark.dtype or (
                value.numel() if empty else not self.meet(mark, value, sizes)
            ):
                shape = "empty" if empty else self.shape(mark, sizes)
                raise PayloadError(
                    f"{path} is {_look(value)}, asked for was {_kind(mark.dtype)} {shape}"
                )
        self.bounded(value, path, mark, sizes)

    def bounded(self, value: Tensor, path: str, mark: Floats | None, sizes: Sizes) -> None:
        """Note in which ranges its numbers must lie."""
        if value.dtype in (torch.uint8, torch.bool) or (
            value.is_floating_point() and not self.finite
        ):
            return
        if isinstance(mark, Counts):
            total = value.double().sum()
            self.ranges.append(
                Range(path, "the sum", total, 0, mark.most, sizes, claim=not mark.total)
            )
            self.ranges += (
                [Range(path, "the sum", total, mark.total, mark.total, sizes)] if mark.total else []
            )
        if not value.numel():
            return
        bound = BOUND if value.is_floating_point() else EXACT
        least, most = (-bound, bound) if mark is None else (mark.least, mark.most)
        for which, number in zip(
            ("the least", "the most"), torch.aminmax(value.detach()), strict=True
        ):
            self.ranges.append(Range(path, which, number, least, most, sizes))
        if isinstance(mark, Classes) and len(value) > 1:
            self.ranges.append(Range(path, "a step", value.diff().amin(), 1, EXACT, sizes))

    def shape(self, mark: Floats, sizes: Sizes) -> str:
        """As a message says it."""
        said = [
            "..." if isinstance(s, EllipsisType) else str(self.size(s, sizes) or s)
            for s in mark.shape
        ]
        return f"({', '.join(said)})"

    def require_ranges(self) -> None:
        for found, number in zip(
            self.ranges, numbers([found.number for found in self.ranges]), strict=True
        ):
            least, most = (self.bound(end, found.sizes) for end in (found.least, found.most))
            if not math.isfinite(number):
                raise PayloadError(f"{found.path} holds NaN or infinity")
            if not least <= number <= most:
                where = f"not from {least:.7g} to {most:.7g}"
                raise PayloadError(
                    f"{found.path}: {found.which} of its numbers is {number:.7g}, {where}"
                )


def _all(make: Callable[[list[int]], int], found: list[int | None]) -> int | None:
    """What is made of numbers that are all known."""
    known = [n for n in found if n is not None]
    return make(known) if len(known) == len(found) else None


def _require(holds: bool, tree: Payload, wanted: Any, path: str) -> None:
    if not holds:
        name = getattr(wanted, "__name__", str(wanted)) if not get_args(wanted) else str(wanted)
        raise PayloadError(f"{path} is a {type(tree).__name__}, asked for was {name}")


def _require_word(word: str, path: str) -> None:
    if len(word) > WORD or not word.isprintable():
        raise PayloadError(
            f"{path} is {word[:20]!r}..., asked for was a word of at most {WORD} letters"
        )


def _some(names: Iterable[object]) -> str:
    said = sorted(str(name)[:40] for name in names)
    return ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _look(value: Tensor) -> str:
    return f"{_kind(value.dtype)} {tuple(value.shape)}"
