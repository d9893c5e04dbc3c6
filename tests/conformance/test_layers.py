"""Who may import whom, read from the source itself."""

from __future__ import annotations

import ast
from pathlib import Path

import barter
from barter.data.splits import HARMLESS

ROOT = Path(barter.__file__).parent
MAY_IMPORT = {
    "core": {"core"},
    "ops": {"ops", "models", "core"},
    "models": {"models", "core"},
    "data": {"data", "core"},
    "runs": {"runs", "core"},
    "algorithms": {"algorithms", "models", "ops", "core"},
    "engines": {"engines", "runs", "core"},
    "config": {"core", "data", "algorithms"},
    "parties": {"config", "data", "models", "core"},
    "experiment": {"parties", "config", "engines", "runs", "data", "models", "algorithms", "core"},
    "sites": {"parties", "config", "engines", "data", "models", "core"},
    "simulation": {"config", "sites", "engines"},
    "supervise": {"config", "sites", "engines", "core"},
    "deploy": {"parties", "config", "experiment", "sites", "supervise", "engines", "runs", "core"},
    "loopback": {"config", "data", "deploy", "supervise", "runs", "core"},
    "conformance": {"experiment", "engines", "data", "core"},
    "kept": {"parties", "config", "runs", "data", "models", "core"},
    "export": {"kept", "core", "version"},
    "gallery": {"config", "experiment", "engines", "runs", "core"},
    "comparison": {"config", "runs", "data", "core"},
    "report": {"parties", "report", "comparison", "gallery", "config", "runs", "data", "core", "version"},
    "gate": set(),
    "commands": {"config", "runs", "data", "models", "algorithms", "core"}
    | {"experiment", "parties", "comparison", "conformance", "export", "gallery", "kept"},
    "catalogue": {"models"},
    "cli": {"catalogue", "commands", "config", "core", "version"},
    "__init__": {"experiment", "kept", "runs", "algorithms", "core", "version"},
    "__main__": {"cli"},
    "version": set(),
}
CORE_MAY_USE = {"torch", "typing_extensions"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
                assert module.split(".")[1] in MAY_IMPORT[layer], f"{path.relative_to(ROOT)} imports {module}"


def test_core_is_torch_and_the_standard_library() -> None:
    import sys

    for path in (ROOT / "core").glob("*.py"):
        foreign = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names) - CORE_MAY_USE - {"barter"}
        assert not foreign, f"{path.name} imports {foreign}"


def test_public_names() -> None:
    assert len(barter.__all__) <= 15
    for name in barter.__all__:
        assert hasattr(barter, name)


def test_no_print_no_pickle_no_eval() -> None:
    for path in ROOT.rglob("*.py"):
        calls = [
            n.func.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        assert not {"print", "eval", "exec"} & set(calls), path
        assert "pickle" not in imports(path) or path == ROOT / "data" / "splits.py", path


def test_of_others_pickles_nothing_but_arrays_is_read() -> None:
    """There is one place that reads them at all: through a class that looks up what makes arrays and nothing else."""
    tree = ast.parse((ROOT / "data" / "splits.py").read_text())
    named = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pickle"]
    assert set(named) == {"Unpickler", "UnpicklingError"}
    (reader,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert [ast.unparse(base) for base in reader.bases] == ["pickle.Unpickler"]
    assert {module.partition(".")[0] for module, _ in HARMLESS} == {"numpy"}
    assert {name for _, name in HARMLESS} == {"_reconstruct", "scalar", "ndarray", "dtype", "_frombuffer"}
