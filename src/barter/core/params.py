"""Typed fields of frozen dataclasses: checked when built, described from their own source.

An algorithm, a partition and the configuration of a run are all such dataclasses, so that a wrong value is refused
with the same words whether it came from Python, from a file or from the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import re
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from barter.core.errors import BarterError, ConfigError, in_short, with_place

__all__ = [
    "BY_PYTHON",
    "DEVICES",
    "Count",
    "DeviceName",
    "Field",
    "Fraction",
    "NonNegative",
    "Positive",
    "Range",
    "Side",
    "Spelling",
    "Whole",
    "build",
    "check",
    "describe",
    "did_you_mean",
    "imported",
    "made",
    "nearest",
    "text",
]

BY_PYTHON = "(given in Python)"  # stands in a configuration for what a file cannot hold

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers a field may hold; printed as a reader would say it."""

    gt: float = -math.inf
    ge: float = -math.inf
    le: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.gt < value and self.ge <= value <= self.le

    def __str__(self) -> str:
        bounds = ((">", self.gt), (">=", self.ge), ("<=", self.le))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))


@dataclasses.dataclass(frozen=True)
class Spelling:
    """The texts a field may hold: those that match a pattern, printed as a reader would say it."""

    pattern: str
    meaning: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.meaning


Fraction = Annotated[float, Range(gt=0, le=1)]
Positive = Annotated[float, Range(gt=0)]
NonNegative = Annotated[float, Range(ge=0)]
Count = Annotated[int, Range(ge=1)]
Whole = Annotated[int, Range(ge=0)]
Side = Annotated[int, Range(ge=1, le=4096)]  # of an image, in pixels
DEVICES = Spelling(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,2}))?", "one of auto, cpu, cuda, cuda:N")
DeviceName = Annotated[str, DEVICES]


@dataclasses.dataclass(frozen=True)
class Field:
    """What a reader wants to know about one field."""

    name: str
    kind: str
    default: object
    meaning: str


def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelled most like this one; none if no name is close."""
    known = sorted(known)
    lowered = {k.lower(): k for k in known} | {k.lower().rpartition(".")[2]: k for k in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(name.lower().rpartition(".")[2], lowered, n=1, cutoff=0.6)
    return lowered[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: its nearest neighbour, or all there is."""
    known = sorted(known)
    near = nearest(name, known)
    return f"there are: {', '.join(known) or 'none'}" if near is None else f"did you mean {near!r}?"


def text(value: str) -> bool:
    """Whether a string can be written down: a name of a file that is not UTF-8 cannot."""
    return value.isascii() or value == value.encode(errors="ignore").decode()


def imported(place: str, what: str) -> Any:
    """What package.module:name leads to."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever somebody's module does
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        where = (
            "; it is looked for in the current folder, beside the configuration and on PYTHONPATH"
        )
        raise ConfigError(
            f"{what} {place!r} cannot be imported: {in_short(error)}{where * absent}"
        ) from error


def made(place: str, make: Callable[[], T]) -> T:
    """What somebody's code makes; whatever it raises is said in one line, with the place where."""
    try:
        return make()
    except BarterError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{place} failed: {with_place(error)}") from error


def _kind(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        spelled = [str(e) for e in extras if isinstance(e, Spelling)]
        return " ".join(spelled or [_kind(base), *(str(e) for e in extras if isinstance(e, Range))])
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("none" if arm is type(None) else _kind(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a table of " + " -> ".join(map(_kind, get_args(hint)))
    return str(getattr(hint, "__name__", hint))


def _accept(value: object, hint: Any) -> object:
    """The value in the hinted type; ValueError says what would be right."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *extras = get_args(hint)
        if any(isinstance(e, Spelling) and value not in e for e in extras):
            raise ValueError(f"must be {_kind(hint)}")
        value = _accept(value, base)
        if any(
            isinstance(e, Range) and isinstance(value, int | float) and value not in e
            for e in extras
        ):
            raise ValueError(f"must be {_kind(hint)}")
        return value
    if origin is Literal:
        if value in get_args(hint) and type(value) in {type(choice) for choice in get_args(hint)}:
            return value
        raise ValueError(f"must be one of {', '.join(map(str, get_args(hint)))}")
    if origin in (Union, types.UnionType):
        if value == "none" and type(None) in get_args(hint):
            return None  # as a file and a command line write it
        for arm in get_args(hint):
            try:
                return _accept(value, arm)
            except ValueError:
                continue
        raise ValueError(f"must be {_kind(hint)}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_accept(item, get_args(hint)[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        key, item = get_args(hint)
        return {_accept(name, key): _accept(held, item) for name, held in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        return number
    if hint is str and isinstance(value, str):
        if not text(value):
            raise ValueError("must be text that UTF-8 can hold")
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is type(None) and value is None:
        return value
    if (
        isinstance(hint, type)
        and hint not in (bool, str, int, float, type(None))
        and isinstance(value, hint)
    ):
        return value
    raise ValueError(f"must be {_kind(hint)}")


def check(instance: object, where: str = "") -> None:
    """Refuse a dataclass instance whose fields hold what their annotations do not allow."""
    hints = _hints(type(instance))
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        try:
            accepted = _accept(value, hints[field.name])
        except ValueError as error:
            meaning = _comments(type(instance)).get(field.name, "")
            reason = f"{where}{field.name}={value!r}: {error}" + (
                f" ({meaning})" if meaning else ""
            )
            raise ConfigError(reason) from None
        object.__setattr__(instance, field.name, accepted)


def build(cls: type[T], values: Mapping[str, object], where: str = "") -> T:
    """An instance of a checked dataclass from plain values, as a file or a command line gives them."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {where + name!r}: {did_you_mean(name, known)}")
    name = where.rstrip(".") or cls.__name__

    def instance() -> T:
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from None

    return made(name, instance)


def _comments(cls: type[Any]) -> dict[str, str]:
    """Return the comment of each annotated field: behind it, or else in the lines directly above it."""
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(ancestor):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(ancestor))
        except (OSError, TypeError):  # typed at a prompt: there is no file to read
            continue
        comments = {
            token.start[0]: token.string.lstrip("# ").strip()
            for token in tokenize.generate_tokens(StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        above: list[str] = []
        for number, line in enumerate(source.splitlines(), start=1):
            if line.strip().startswith("#"):
                above.append(comments.get(number, ""))
                continue
            name = line.strip().split(":")[0]
            if name in ancestor.__annotations__:
                meaning = comments.get(number) or " ".join(above)
                if meaning:
                    found[name] = meaning
            above = []
    return found


def describe(cls: type[Any]) -> list[Field]:
    """The fields of a checked dataclass with type, default and the comment that stands behind them."""
    hints, meanings = _hints(cls), _comments(cls)
    return [
        Field(f.name, _kind(hints[f.name]), f.default, meanings.get(f.name, ""))
        for f in dataclasses.fields(cls)
    ]
