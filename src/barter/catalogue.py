"""What there is to choose from, read from the registries' sources: who asks for names need not wait for torch."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from barter.models.families import FAMILIES

__all__ = ["LISTINGS"]

HERE = Path(__file__).parent


def _source(*place: str) -> ast.Module:
    return ast.parse(HERE.joinpath(*place).with_suffix(".py").read_text())


def _registry(tree: ast.Module, name: str) -> dict[str, ast.expr]:
    """The entries of a dict that is written out."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == name:
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(keys, node.value.values, strict=True))
    raise LookupError(name)


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _algorithms() -> list[tuple[str, str]]:
    tree = _source("algorithms", "__init__")
    modules = {node.names[0].name: node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    kinds = {name: ast.unparse(kind) for name, kind in _registry(tree, "ALGORITHMS").items()}
    classes = {name: _class(_source(*modules[kind].split(".")[1:]), kind) for name, kind in kinds.items()}
    return [(name, (ast.get_docstring(kind) or "").split("\n")[0]) for name, kind in classes.items()]


def _models() -> list[tuple[str, str]]:
    zoo = _registry(_source("models", "zoo"), "ZOO")
    owners = {name: ", ".join(family for family, members in FAMILIES.items() if name in members) for name in zoo}
    return [(name, f"in {owner}" if owner else "") for name, owner in owners.items()]


def _families() -> list[tuple[str, str]]:
    return [(name, ", ".join(members)) for name, members in FAMILIES.items()]


def _datasets() -> list[tuple[str, str]]:
    tree = _source("data", "sources")
    rows = {**_registry(tree, "SOURCES"), **_registry(tree, "PATH_SOURCES")}
    return [(name, ast.literal_eval(row.elts[1])) for name, row in rows.items() if isinstance(row, ast.Tuple)]


def _partitions() -> list[tuple[str, str]]:
    tree = _source("data", "partition")
    kinds = {name: _class(tree, ast.unparse(kind)) for name, kind in _registry(tree, "PARTITIONS").items()}
    return [(name, _text(kind, "summary")) for name, kind in kinds.items()]


def _text(kind: ast.ClassDef, name: str) -> str:
    values = [node.value for node in kind.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return str(ast.literal_eval(values[0]))


LISTINGS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "algorithms": _algorithms,
    "models": _models,
    "families": _families,
    "datasets": _datasets,
    "partitions": _partitions,
}
