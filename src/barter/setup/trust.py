"""Ask for consent before code that a run's folder names is imported.

A configuration may name code: an algorithm, a partition, networks or data as `module:name`, or a
TorchScript file. The user who starts a run names that code. A folder may come from elsewhere,
so what its files name is imported only with consent: `--trust`, `trust=True` in Python, or a record
that this user started or resumed the run in this folder with the same code.

The records are in the user's state folder and not in the run's, so they cannot be sent along with
a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from barter.core.errors import CheckpointError, ConfigError
from barter.core.files import replace_text
from barter.data.sources import PATH_SOURCES
from barter.setup.config import Config, read_run_values, resolve

__all__ = [
    "DEPLOYMENT",
    "code_names",
    "note_consent",
    "read_run",
    "require_consent",
    "trusting",
]

log = logging.getLogger("barter")

# Stands for the programs that resuming a run on Flower starts from the run's folder.
DEPLOYMENT = "its Flower deployment"
GENERATOR = "generator"  # a field of algorithms that may also name a TorchScript file
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """With `trust`, consent inside the block to the code that run folders name.

    If it is False nothing changes: consent of an outer block still holds.
    """
    token = _trusted.set(trust or _trusted.get())
    try:
        yield
    finally:
        _trusted.reset(token)


def code_names(tree: Mapping[str, Any]) -> list[str]:
    """Return the names of all code that a configuration would import.

    These are strings with a colon in the algorithm, the partition and the models, sources of data
    with a colon that are not paths, and the generator of an algorithm. Each name occurs once.

    Args:
        tree: The plain values of a configuration, which need not be valid.
    """
    names: list[str] = []
    for section in ("algorithm", "partition"):
        names += [text for text in _texts(tree.get(section)) if ":" in text]
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, Mapping):
        names += [text for text in _texts(algorithm.get(GENERATOR)) if text]
    for models in _texts(tree.get("models")):
        names += [part.strip() for part in models.split(",") if ":" in part]
    data = tree.get("data")
    for key in ("source", "public"):
        for source in _texts(data.get(key) if isinstance(data, Mapping) else None):
            kind, colon, _ = source.partition(":")
            if colon and kind not in PATH_SOURCES:
                names.append(source)
    return list(dict.fromkeys(names))


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a value, its lists and its tables, at any depth; no keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def read_run(run: Path, granted: Collection[str] = ()) -> Config:
    """Read a run's configuration; first require consent to the code it names.

    Args:
        run: The run's folder.
        granted: Names of code to which no consent is needed, since the user has named them.

    Raises:
        ConfigError: The configuration is not valid, or names code without consent.
    """
    tree = read_run_values(run)
    require_consent(run, [name for name in code_names(tree) if name not in granted])
    return resolve(tree)


def require_consent(run: Path, names: Collection[str]) -> None:
    """Raise unless there is consent to all code of these names.

    Consent is given by `trusting`, or was recorded for this folder by `note_consent`.

    Raises:
        ConfigError: There is none; the message has the names and the option.
    """
    if not names or _trusted.get():
        return
    unknown = [name for name in names if name not in _consent(run)]
    if unknown:
        listed = ", ".join(name[:200] for name in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"{run} was not started here and would run code: {listed}{more}; if you trust it, add "
            "--trust (in Python trust=True)"
        )


def note_consent(run: Path, names: Collection[str]) -> None:
    """Record that this user consents to code of these names in a run's folder.

    It is then not asked for again. Records of deleted folders are removed. If the record cannot be
    written, a warning says so and nothing is raised.
    """
    if not names or set(names) <= set(_consent(run)):
        return
    known = dict.fromkeys([*_consent(run), *names])
    place = str(run.absolute().resolve())
    try:
        folder = _records()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(_record(run), json.dumps({"run": place, "code": list(known)}))
    except (OSError, RuntimeError, CheckpointError) as error:
        log.warning(
            "%s names code of its own, and resuming it will need --trust: %s; set XDG_STATE_HOME "
            "to a writable folder",
            run,
            error,
        )
        return
    _forget_deleted(folder)


def _records() -> Path:
    """Return the folder for the records of this user.

    It is in XDG_STATE_HOME if that is set, otherwise in ~/.local/state.

    Raises:
        RuntimeError: It is not set, and the user has no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "barter" / "runs"


def _record(run: Path) -> Path:
    place = str(run.absolute().resolve())
    return _records() / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"


def _consent(run: Path) -> list[str]:
    """Return the names of code that this user has run in a folder.

    They are empty without a record, or with a damaged one.
    """
    try:
        names = json.loads(_record(run).read_text())["code"]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return []  # Without a record, or with a damaged one, there is no consent.
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _forget_deleted(folder: Path) -> None:
    """Remove the records of runs whose folders are no more."""
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if not Path(json.loads(path.read_text())["run"]).exists():
                path.unlink(missing_ok=True)
