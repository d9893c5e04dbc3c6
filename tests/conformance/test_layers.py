"""Who may import whom, read from the source itself."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import barter
from barter.data.splits import PICKLE_NAMES

ROOT = Path(barter.__file__).parent
MAY_IMPORT = {
    "compute": {"compute"},
    "core": {"core", "compute"},
    "ops": {"ops", "models", "core", "compute"},
    "models": {"models", "core", "compute"},
    "data": {"data", "core"},
    "runs": {"runs", "core"},
    "algorithms": {"algorithms", "models", "ops", "core", "compute"},
    "privacy": {"privacy", "core"},
    "engines": {"engines", "privacy", "core", "compute"},
    "setup": {
        "setup",
        "algorithms",
        "engines",
        "privacy",
        "runs",
        "data",
        "models",
        "core",
        "compute",
    },
    "experiment": {"setup", "engines", "privacy", "runs", "data", "models", "core", "compute"},
    "testing": {"testing", "experiment", "engines", "data", "core", "compute"},
    "trained": {"trained", "setup", "runs", "data", "models", "core", "version"},
    "attacks": {
        "attacks",
        "experiment",
        "setup",
        "engines",
        "privacy",
        "runs",
        "ops",
        "models",
        "core",
        "compute",
    },
    "compare": {"compare", "setup", "runs", "data", "core"},
    "recipes": {"recipes", "compare", "setup", "runs", "core", "version"},
    "report": {
        "report",
        "compare",
        "experiment",
        "setup",
        "engines",
        "privacy",
        "runs",
        "data",
        "core",
        "version",
    },
    "flower": {
        "flower",
        "experiment",
        "setup",
        "engines",
        "privacy",
        "runs",
        "data",
        "core",
        "compute",
    },
    "cli": {
        "cli",
        "report",
        "compare",
        "recipes",
        "trained",
        "testing",
        "attacks",
        "experiment",
        "setup",
        "privacy",
    }
    | {"runs", "data", "core", "compute", "version"},
    "__init__": {"experiment", "trained", "algorithms", "core", "version"},
    "__main__": {"cli"},
    "version": set(),
}
TOP = {
    "__init__.py",
    "__main__.py",
    "experiment.py",
    "version.py",
}  # modules that belong to no package
MAY_USE = {
    "compute": {"torch", "torchvision", "triton"},
    "core": {"torch", "typing_extensions", "PIL"},
}
OPTIONAL = {
    "flwr": "flower",
    "cryptography": "flower",
    "starlette": "flower",
    "triton": "compute",
}  # and in which room


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what a file's syntax tree consists of; several tests read it."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return found


def test_layers() -> None:
    for path in ROOT.rglob("*.py"):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for module in imports(path):
            if module.split(".")[0] == "barter" and module != "barter":
                assert module.split(".")[1] in MAY_IMPORT[layer], (
                    f"{path.relative_to(ROOT)} imports {module}"
                )


def test_modules_belong_to_packages() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == TOP


@pytest.mark.parametrize("room", MAY_USE)
def test_the_lowest_rooms_use_little_of_others(room: str) -> None:
    for path in (ROOT / room).glob("*.py"):
        foreign = (
            {m.split(".")[0] for m in imports(path)}
            - set(sys.stdlib_module_names)
            - MAY_USE[room]
            - {"barter"}
        )
        assert not foreign, f"{path.name} imports {foreign}"


def test_rooms_have_an_order() -> None:
    """Whom a file imports can be loaded before it: nobody imports in a circle, not even inside of a function."""
    files = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in ROOT.rglob("*.py")
    }
    needs = {name: imports(path) | named(path) for name, path in files.items()}
    rooms = {name: name.split(".")[1] for name in files if name.count(".")}
    for graph in (
        {
            name: {other for other in found if other in files and other != name}
            for name, found in needs.items()
        },
        {
            room: {
                rooms[m] for name in rooms if rooms[name] == room for m in needs[name] if m in rooms
            }
            - {room}
            for room in rooms.values()
        },
    ):
        list(TopologicalSorter(graph).static_order())


def named(path: Path) -> set[str]:
    """Modules that are imported as names of their package."""
    found = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names}


def test_what_is_optional_is_used_in_one_room() -> None:
    for path in ROOT.rglob("*.py"):
        for module in {m.split(".")[0] for m in imports(path)} & set(OPTIONAL):
            assert path.relative_to(ROOT).parts[0] == OPTIONAL[module], (
                f"{path.relative_to(ROOT)} imports {module}"
            )


def test_public_names() -> None:
    assert len(barter.__all__) <= 15
    for name in barter.__all__:
        assert hasattr(barter, name)


def test_no_print_no_pickle_no_eval() -> None:
    for path in ROOT.rglob("*.py"):
        calls = [
            n.func.id
            for n in nodes(path)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        assert not {"print", "eval", "exec"} & set(calls), path
        assert "pickle" not in imports(path) or path == ROOT / "data" / "splits.py", path


def test_of_others_pickles_nothing_but_arrays_is_read() -> None:
    """There is one place that reads them at all: through a class that looks up what makes arrays and nothing else."""
    tree = ast.parse((ROOT / "data" / "splits.py").read_text())
    named = [
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pickle"
    ]
    assert set(named) == {"Unpickler", "UnpicklingError"}
    (reader,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert [ast.unparse(base) for base in reader.bases] == ["pickle.Unpickler"]
    assert {module.partition(".")[0] for module, _ in PICKLE_NAMES} == {"numpy"}
    assert {name for _, name in PICKLE_NAMES} == {
        "_reconstruct",
        "scalar",
        "ndarray",
        "dtype",
        "_frombuffer",
    }
