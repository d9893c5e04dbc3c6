"""Whether a tree that came from elsewhere is what was asked for."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import torch
from torch import Tensor

from barter.core.errors import PayloadError
from barter.core.payload import Payload

__all__ = ["require_kind", "require_weights"]


def require_kind(tree: Payload, method: Callable[..., Any]) -> None:
    """Refuse what does not have the structure that the method says it returns."""
    wanted = get_type_hints(method).get("return", Any)
    _match(tree, wanted, method.__name__)


def _match(tree: Payload, wanted: Any, path: str) -> None:
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return
    if origin in (Union, types.UnionType):
        _one_of(tree, args, path)
    elif is_typeddict(wanted):
        _require(isinstance(tree, dict), tree, wanted, path)
        hints = get_type_hints(wanted)
        # From the annotations, for a class does not know of keys that are not required if they are written as strings.
        extras = get_type_hints(wanted, include_extras=True)
        missing = {key for key, hint in extras.items() if get_origin(hint) is not NotRequired} - tree.keys()
        if missing or tree.keys() - hints.keys():
            odd = sorted(map(str, missing or tree.keys() - hints.keys()))
            raise PayloadError(f"{path} {'lacks' if missing else 'has the unknown'} {', '.join(odd)}")
        for key, value in tree.items():
            _match(value, hints[key], f"{path}.{key}")
    elif origin is dict:
        _require(isinstance(tree, dict), tree, wanted, path)
        if not tree and args == (str, Tensor):
            raise PayloadError(f"{path} is empty, asked for were weights")
        for key, value in tree.items():
            _require(isinstance(key, args[0]), key, args[0], f"{path}: key")
            _match(value, args[1], f"{path}.{key}")
    elif origin is list:
        _require(isinstance(tree, list), tree, wanted, path)
        for i, value in enumerate(tree):
            _match(value, args[0], f"{path}[{i}]")
    elif origin is tuple:
        kinds = [args[0]] * len(tree) if args[1:] == (...,) and isinstance(tree, tuple) else list(args)
        _require(isinstance(tree, tuple) and len(tree) == len(kinds), tree, wanted, path)
        for i, (value, kind) in enumerate(zip(tree, kinds, strict=True)):
            _match(value, kind, f"{path}[{i}]")
    elif origin is typing.Literal:
        _require(tree in args, tree, wanted, path)
    elif wanted is float:
        _require(type(tree) in (int, float), tree, wanted, path)
    else:
        kind = type(None) if wanted is None else wanted
        _require(isinstance(tree, Tensor) if kind is Tensor else type(tree) is kind, tree, wanted, path)


def _one_of(tree: Payload, kinds: tuple[Any, ...], path: str) -> None:
    for i, kind in enumerate(kinds):
        try:
            return _match(tree, kind, path)
        except PayloadError:
            if i == len(kinds) - 1:
                raise
    return None


def _require(holds: bool, tree: Payload, wanted: Any, path: str) -> None:
    if not holds:
        name = getattr(wanted, "__name__", str(wanted)) if not get_args(wanted) else str(wanted)
        raise PayloadError(f"{path} is a {type(tree).__name__}, asked for was {name}")


def require_weights(tree: Payload, own: Mapping[str, tuple[torch.Size, torch.dtype]], path: str) -> None:
    """Refuse weights of a network that are not exactly those it has: names, shapes and kinds."""
    if isinstance(tree, dict):
        if tree.keys() & own.keys():
            odd = sorted(map(str, tree.keys() ^ own.keys()))
            if odd:
                raise PayloadError(f"{path} is not the network's weights: {', '.join(odd[:3])} too much or missing")
            for name, value in tree.items():
                shape, dtype = own[name]
                if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
                    got = (
                        f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                    )
                    raise PayloadError(f"{path}.{name} is {got}, the network's is {tuple(shape)} of {dtype}")
            return
        for key, value in tree.items():
            require_weights(value, own, f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            require_weights(value, own, f"{path}[{i}]")
