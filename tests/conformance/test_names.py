"""One public name has one meaning, and says what a function does or returns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import barter

ROOT = Path(barter.__file__).parent
# The same thing in every module that has it: the logger, the entry point of a process, the
# application that Flower or the command line starts, and a message type of two ends of a channel.
SAME_EVERYWHERE = {"log", "main", "app", "PROGRESS"}
# Sizes that contracts of answers refer to by name.
SIZES = {"PartialTraining.seen", "PartialTraining.normalised"}
IRREGULAR = re.compile(
    r"begun|bought|bound|broken|brought|built|caught|chosen|cut|done|drawn|driven|fed|felt|found|"
    r"frozen|given|gone|grown|heard|held|hidden|kept|known|laid|led|left|lost|made|meant|met|paid|"
    r"put|said|seen|sent|shown|sold|sought|spent|spoken|spread|stood|taken|taught|thought|thrown|"
    r"told|torn|understood|won|worn|written"
)
REGULAR = re.compile(r"[a-z]{2,}ed")
NO_PARTICIPLES = {"embed", "feed", "need", "proceed", "seed", "shed", "speed"}
PREDICATES = {"are", "can", "has", "is", "may", "was"}  # is_documented says that it returns a bool
PARTICLES = {"at", "before", "by", "early", "itself", "of", "on", "to", "up", "with"}


def public(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public names that the statements of a module or class define."""
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            ]
        yield from ((name, node) for name in names if not name.startswith("_"))


@cache
def definitions(path: Path) -> list[tuple[str, ast.stmt]]:
    """Return the public names of a module with the statements that define them."""
    return list(public(ast.parse(path.read_text()).body))


def is_participle(name: str) -> bool:
    """Return whether a name leaves open if something is done, is returned or was done."""
    words = name.split("_")
    if words[0] in PREDICATES:
        return False
    while len(words) > 1 and words[-1] in PARTICLES:
        words.pop()
    last = words[-1]
    if IRREGULAR.fullmatch(last):
        return True
    return REGULAR.fullmatch(last) is not None and last not in NO_PARTICIPLES


def defined_twice(root: Path) -> dict[str, set[str]]:
    """Return the public names that more than one module defines, with these modules."""
    modules = defaultdict(set)
    for path in root.rglob("*.py"):
        for name, _ in definitions(path):
            modules[name].add(path.relative_to(root).as_posix())
    # A single capital letter is a type variable.
    return {
        name: where
        for name, where in modules.items()
        if len(where) > 1 and name not in SAME_EVERYWHERE and not re.fullmatch("[A-Z]", name)
    }


def participles(root: Path) -> list[str]:
    """Return the public functions and methods that are named by a participle.

    A property may have one: `run.finished` states what is.
    """
    found = []
    for path in sorted(root.rglob("*.py")):
        for name, node in definitions(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(name):
                found.append(f"{path.relative_to(root)}: {name}")
            if not isinstance(node, ast.ClassDef):
                continue
            for member, method in public(node.body):
                if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                is_property = any("property" in ast.unparse(d) for d in method.decorator_list)
                if is_participle(member) and not is_property and f"{name}.{member}" not in SIZES:
                    found.append(f"{path.relative_to(root)}: {name}.{member}")
    return found


def test_no_public_name_is_defined_in_two_modules() -> None:
    assert defined_twice(ROOT) == {}


def test_no_public_function_is_named_by_a_participle() -> None:
    assert participles(ROOT) == []


def test_the_checks_of_names_find_what_they_look_for(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("log = 1\nT = 2\nCHUNK = 3\n\ndef drawn(): ...\n")
    (tmp_path / "two.py").write_text(
        "log = 1\nT = 2\nCHUNK: int = 3\n\n"
        "class Row:\n    def told_of(self): ...\n\n    @property\n    def finished(self): ...\n\n"
        "def is_listed(): ...\n\ndef seed(): ...\n\ndef trimmed_mean(): ...\n\ndef _made(): ...\n"
    )
    assert defined_twice(tmp_path) == {"CHUNK": {"one.py", "two.py"}}
    assert participles(tmp_path) == ["one.py: drawn", "two.py: Row.told_of"]
