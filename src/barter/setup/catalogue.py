"""List algorithms, models, data sets and keys without loading torch.

The names are parsed from the source of the registries. Importing those would load torch, which
takes seconds, and `barter list`, help and error messages should not wait for it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

from barter.models.families import FAMILIES

__all__ = ["CHOICES", "LISTINGS", "known_keys"]

PACKAGE = Path(__file__).parent.parent

# The key to suggest when only its table is named.
CHOICES = {
    "algorithm": "algorithm.name",
    "partition": "partition.name",
    "data": "data.source",
    "privacy": "privacy.epsilon",
    "evaluate": "evaluate.every",
    "adversaries": "adversaries.fraction",
    "network": "network.preset",
    "wire": "wire.profile",
}


def _source(*parts: str) -> ast.Module:
    """Parse a module of this package, such as ("core", "metrics"), unimported."""
    return ast.parse(PACKAGE.joinpath(*parts).with_suffix(".py").read_text())


def _registry(tree: ast.Module, name: str) -> dict[str, ast.expr]:
    """Return the entries of a module's annotated dict literal, values unevaluated.

    Raises:
        LookupError: If the module has none of this name.
    """
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.target) == name
        ):
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(keys, node.value.values, strict=True))
    raise LookupError(name)


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _algorithms() -> list[tuple[str, str]]:
    tree = _source("algorithms", "__init__")
    modules = {
        node.names[0].name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
    }
    rows = []
    for name, value in _registry(tree, "ALGORITHMS").items():
        class_name = ast.unparse(value)
        module = _source(*modules[class_name].split(".")[1:])
        docstring = ast.get_docstring(_class(module, class_name)) or ""
        rows.append((name, docstring.split("\n")[0]))
    return rows


def _models() -> list[tuple[str, str]]:
    zoo = _registry(_source("models", "zoo"), "ZOO")
    rows = []
    for name in zoo:
        families = ", ".join(family for family, members in FAMILIES.items() if name in members)
        rows.append((name, f"in {families}" if families else ""))
    return rows


def _families() -> list[tuple[str, str]]:
    return [(name, ", ".join(members)) for name, members in FAMILIES.items()]


def _datasets() -> list[tuple[str, str]]:
    tree = _source("data", "sources")
    rows = {**_registry(tree, "SOURCES"), **_registry(tree, "PATH_SOURCES")}
    return [
        (name, ast.literal_eval(row.elts[1]))
        for name, row in rows.items()
        if isinstance(row, ast.Tuple)
    ]


def _partitions() -> list[tuple[str, str]]:
    return [(name, _text(kind, "summary")) for name, kind in _partition_classes().items()]


def _partition_classes() -> dict[str, ast.ClassDef]:
    tree = _source("data", "partition")
    return {
        name: _class(tree, ast.unparse(kind))
        for name, kind in _registry(tree, "PARTITIONS").items()
    }


def _text(kind: ast.ClassDef, name: str) -> str:
    """Return a class attribute that is a string literal.

    Raises:
        IndexError: The class has no such attribute.
    """
    values = [
        node.value
        for node in kind.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return str(ast.literal_eval(values[0]))


@cache
def known_keys() -> frozenset[str]:
    """Return every configuration key.

    Those of all of barter's algorithms and partitions are included. Keys of tables are TABLE.KEY;
    the tables' own names are not among them. They are read from source, so that nothing is
    imported.
    """
    algorithms = [ast.parse(file.read_text()) for file in PACKAGE.glob("algorithms/*.py")]
    kinds = {
        "": [_class(_source("setup", "config"), "Config")],
        "algorithm.": [
            _class(_source("core", "algorithm"), "Algorithm"),
            *(kind for tree in algorithms for kind in _dataclasses(tree)),
        ],
        "partition.": [
            _class(_source("data", "partition"), "Partition"),
            *_partition_classes().values(),
        ],
        "data.": [_class(_source("data", "task"), "Data")],
        "privacy.": [_class(_source("privacy", "settings"), "Privacy")],
        "evaluate.": [_class(_source("core", "metrics"), "Evaluation")],
        "adversaries.": [_class(_source("engines", "adversaries"), "Adversaries")],
        "network.": [_class(_source("engines", "network"), "Network")],
        "wire.": [_class(_source("core", "wire_settings"), "WireSettings")],
    }
    found = {
        table + name
        for table, members in kinds.items()
        for kind in members
        for name in _fields(kind)
    }
    tables = {table.rstrip(".") for table in kinds}
    choices = {"algorithm.name", "algorithm.preset", "partition.name", "network.preset"}
    return frozenset((found - tables) | choices)


def _dataclasses(tree: ast.Module) -> list[ast.ClassDef]:
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [
        kind
        for kind in kinds
        if any("dataclass" in ast.unparse(mark) for mark in kind.decorator_list)
    ]


def _fields(kind: ast.ClassDef) -> list[str]:
    """Return the names of a dataclass's fields without ClassVar and inherited ones."""
    annotated = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    return [
        ast.unparse(node.target)
        for node in annotated
        if not ast.unparse(node.annotation).startswith("ClassVar")
    ]


LISTINGS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "algorithms": _algorithms,
    "models": _models,
    "families": _families,
    "datasets": _datasets,
    "partitions": _partitions,
}
