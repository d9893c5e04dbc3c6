"""Frozen dataclasses that check their fields and describe them from source.

Algorithms, partitions and the configuration of a run are such dataclasses. So an invalid value
gives the same message whether it comes from Python, from a file or from the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from barter.core.errors import BarterError, ConfigError, locate_error, summarise_error
from barter.core.field_comments import read_comments, read_headings

__all__ = [
    "BY_PYTHON",
    "DEVICES",
    "DEVICE_LIST",
    "Count",
    "DeviceList",
    "DeviceName",
    "Field",
    "Fraction",
    "Momentum",
    "NonNegative",
    "Positive",
    "Range",
    "Side",
    "Spelling",
    "Whole",
    "build_dataclass",
    "call_user_code",
    "check_fields",
    "describe_fields",
    "did_you_mean",
    "drop_retired_fields",
    "import_object",
    "is_utf8",
    "nearest_name",
]

# Placeholder in a configuration for an object that a file cannot store.
BY_PYTHON = "(given in Python)"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Allowed range of a numeric field, printed like "> 0 and <= 1" in messages."""

    gt: float = -math.inf
    ge: float = -math.inf
    lt: float = math.inf
    le: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.gt < value < self.lt and self.ge <= value <= self.le

    def __str__(self) -> str:
        bounds = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))


@dataclasses.dataclass(frozen=True)
class Spelling:
    """Allowed values of a string field: those that match a regular expression.

    Attributes:
        pattern: The regular expression.
        meaning: A description for messages.
    """

    pattern: str
    meaning: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.meaning


Fraction = Annotated[float, Range(gt=0, le=1)]
Positive = Annotated[float, Range(gt=0)]
NonNegative = Annotated[float, Range(ge=0)]
Momentum = Annotated[float, Range(ge=0, lt=1)]  # With 1 or more, SGD diverges.
Count = Annotated[int, Range(ge=1)]
Whole = Annotated[int, Range(ge=0)]
Side = Annotated[int, Range(ge=1, le=4096)]  # Height or width of an image in pixels.
_CUDA = r"cuda(:(0|[1-9][0-9]{0,2}))?"
DEVICES = Spelling(rf"auto|cpu|{_CUDA}", "one of auto, cpu, cuda, cuda:N")
DeviceName = Annotated[str, DEVICES]
DEVICE_LIST = Spelling(
    rf"auto|cpu(,cpu)*|{_CUDA}(,{_CUDA})*",
    f"{DEVICES}, or several of one kind such as cuda:0,cuda:1",
)
DeviceList = Annotated[str, DEVICE_LIST]


@dataclasses.dataclass(frozen=True)
class Field:
    """Description of a dataclass field for users."""

    name: str
    kind: str
    default: object
    meaning: str
    heading: str  # of the group of fields that it belongs to; empty if fields are not grouped


def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelled most similarly; None if no name is close.

    Close means a similarity of at least 0.6 by difflib. Case does not count, and a name may be
    close to a known one's last part alone: "lr" is close to "algorithm.lr".
    """
    known = sorted(known)
    full_names = {k.lower(): k for k in known}
    last_parts = {k.lower().rpartition(".")[2]: k for k in known}
    candidates = full_names | last_parts
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)
    if not close:
        last_part = wanted.rpartition(".")[2]
        close = difflib.get_close_matches(last_part, candidates, n=1, cutoff=0.6)
    return candidates[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name.

    It suggests the most similar known name ("did you mean 'x'?"), or lists all of them if none is
    similar ("there are: x, y"; "none" without any).
    """
    known = sorted(known)
    suggestion = nearest_name(name, known)
    if suggestion is None:
        return f"there are: {', '.join(known) or 'none'}"
    return f"did you mean {suggestion!r}?"


def is_utf8(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8.

    A file's name with bytes that are not UTF-8 cannot: Python holds them as lone surrogates.
    """
    return value.isascii() or value == value.encode(errors="ignore").decode()


def import_object(place: str, what: str) -> Any:
    """Import an object of user code.

    Args:
        place: Its location as "package.module:name".
        what: What the object is, for messages.

    Raises:
        ConfigError: If the module or the name cannot be imported.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # A user's module may raise anything.
        reason = summarise_error(error)
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            reason += (
                "; it is searched for in the current folder, next to the configuration "
                "and on PYTHONPATH"
            )
        raise ConfigError(f"{what} {place!r} cannot be imported: {reason}") from error


def call_user_code(place: str, make: Callable[[], T]) -> T:
    """Call user code; convert its exceptions to a one-line ConfigError.

    Args:
        place: The name of the code, for messages.
        make: The function to call.

    Returns:
        The function's result.

    Raises:
        ConfigError: The code raised; the message has the exception, file and line. Errors of barter
            pass unchanged.
    """
    try:
        return make()
    except BarterError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{place} failed: {locate_error(error)}") from error


def _describe_type(hint: Any) -> str:
    """Return a type hint as users see it, such as "float > 0" or "auto | cpu"."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        base, *extras = args
        spellings = [str(extra) for extra in extras if isinstance(extra, Spelling)]
        if spellings:
            return " ".join(spellings)
        ranges = [str(extra) for extra in extras if isinstance(extra, Range)]
        return " ".join([_describe_type(base), *ranges])
    if origin is Literal:
        return " | ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else _describe_type(arg) for arg in args)
    if origin is tuple:
        return f"a list of {_describe_type(args[0])}"
    if origin is dict:
        return "a table of " + " -> ".join(map(_describe_type, args))
    return str(getattr(hint, "__name__", hint))


def _accept(value: object, hint: Any) -> object:
    """Return a value converted to its type.

    An int becomes a float, a list a tuple, and the string "none" None, where the type asks for it;
    True and False are no numbers. Of a union, the first member that accepts the value converts it.

    Raises:
        ValueError: The value is not valid; the message says what would be.
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        base, *extras = args
        for extra in extras:
            if isinstance(extra, Spelling) and value not in extra:
                raise ValueError(f"must be {_describe_type(hint)}")
        value = _accept(value, base)
        if isinstance(value, int | float):
            for extra in extras:
                if isinstance(extra, Range) and value not in extra:
                    raise ValueError(f"must be {_describe_type(hint)}")
        return value
    if origin is Literal:
        if value in args and type(value) in {type(choice) for choice in args}:
            return value
        raise ValueError(f"must be one of {', '.join(map(str, args))}")
    if origin in (Union, types.UnionType):
        if value == "none" and type(None) in args:
            return None  # Files and the command line write None as "none".
        for arg in args:
            try:
                return _accept(value, arg)
            except ValueError:
                continue
        raise ValueError(f"must be {_describe_type(hint)}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_accept(item, args[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        key_hint, item_hint = args
        return {_accept(key, key_hint): _accept(item, item_hint) for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        return number
    if hint is str and isinstance(value, str):
        if not is_utf8(value):
            raise ValueError("must be text that UTF-8 can hold")
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is type(None) and value is None:
        return value
    is_other_class = isinstance(hint, type) and hint not in (bool, str, int, float, type(None))
    if is_other_class and isinstance(value, hint):
        return value
    raise ValueError(f"must be {_describe_type(hint)}")


def check_fields(instance: object, where: str = "") -> None:
    """Check the fields of a dataclass instance against their annotations.

    Values are converted where that loses nothing: an int to a float, a list to a tuple, "none" to
    None.

    Args:
        instance: The instance, whose fields are replaced by converted values, also if it is frozen.
        where: Prefix of the fields' names in messages, such as "algorithm.".

    Raises:
        ConfigError: If a value has another type or is out of its range; the message has the field's
            comment.
    """
    hints = _hints(type(instance))
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        try:
            accepted = _accept(value, hints[field.name])
        except ValueError as error:
            message = f"{where}{field.name}={value!r}: {error}"
            meaning = read_comments(type(instance)).get(field.name, "")
            if meaning:
                message += f" ({meaning})"
            raise ConfigError(message) from None
        object.__setattr__(instance, field.name, accepted)


def drop_retired_fields(
    cls: type[Any], values: Mapping[str, object], where: str = ""
) -> dict[str, object]:
    """Return the values without fields that the class had in an older version.

    Such fields are in `cls.retired`, with the one value that today's behaviour corresponds to. A
    class without `retired` keeps all values.

    Args:
        cls: The dataclass.
        values: Field -> value; not changed.
        where: Prefix of the fields' names in messages, such as "algorithm.".

    Raises:
        ConfigError: If such a field has another value.
    """
    retired: Mapping[str, object] = getattr(cls, "retired", {})
    for name, value in values.items():
        if name in retired and value != retired[name]:
            raise ConfigError(
                f"{where}{name}={value!r}: {cls.__name__} has no field {name!r} any more, and runs "
                f"as with {name}={retired[name]!r}"
            )
    return {name: value for name, value in values.items() if name not in retired}


def build_dataclass(cls: type[T], values: Mapping[str, object], where: str = "") -> T:
    """Build a dataclass from the values of a file or a command line.

    Fields that `cls.retired` names are dropped, see `drop_retired_fields`.

    Args:
        cls: The dataclass, whose `__post_init__` checks the values (`check_fields`).
        values: Field -> value. Fields that are missing have their defaults.
        where: Prefix of the fields' names in messages, such as "algorithm.".

    Raises:
        ConfigError: If a name is unknown, a field without a default is missing, or the class
            refuses a value.
    """
    values = drop_retired_fields(cls, values, where)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    renamed: Mapping[str, str] = getattr(cls, "former_names", {})
    for name in values:
        if name in renamed:
            raise ConfigError(f"unknown key {where + name!r}: it is called {renamed[name]!r} now")
        if name not in known:
            raise ConfigError(f"unknown key {where + name!r}: {did_you_mean(name, known)}")
    name = where.rstrip(".") or cls.__name__

    def instance() -> T:
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from None

    return call_user_code(name, instance)


def describe_fields(cls: type[Any]) -> list[Field]:
    """Return name, type, default, comment and heading of each dataclass field.

    Fields are in their order of definition. The default is `dataclasses.MISSING` if there is none,
    or if a factory makes it.
    """
    hints = _hints(cls)
    meanings = read_comments(cls)
    headings = read_headings(cls)
    return [
        Field(
            name=f.name,
            kind=_describe_type(hints[f.name]),
            default=f.default,
            meaning=meanings.get(f.name, ""),
            heading=headings.get(f.name, ""),
        )
        for f in dataclasses.fields(cls)
    ]
