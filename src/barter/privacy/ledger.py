"""A site's ledger: every release of every run, and how it was protected.

The ledger is a file of JSON lines that only grows. Two kinds of lines exist. A run begins with its
configuration, which it must keep:

    {"run": "9f...", "time": "...", "hash": "3a...", "config": {...}}

and each answer that leaves the site adds its releases, before it leaves:

    {"run": "9f...", "time": "...", "round": 2, "method": "client_update", "images": 700,
     "data": "51...", "delta": 1e-05, "releases": {"client_update: gaussian clip=5.0 noise=3.7": 1}}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from barter.core.errors import CheckpointError, PrivacyError, summarise_error
from barter.core.files import convert_disk_errors, flush, parse_file
from barter.privacy.prices import ROUNDING, Account, merge_accounts, total_epsilon

__all__ = ["LEDGER", "Ledger", "RunAccount", "ledger_file"]

LEDGER = "ledger.jsonl"
FORMER_FILE = (
    "released.json"  # an older version's file in each run's folder: name -> number of releases
)
MEMORY = "memory"  # the folder of a site that holds the ledger


@dataclass
class RunAccount:
    """The entries of one run in the ledger."""

    began: str = ""  # time of the first line
    config: dict[str, Any] | None = None  # configuration that the run is bound to
    delta: float = 0.0  # smallest δ of its releases; 0 without releases
    data: list[str] = field(default_factory=list)  # fingerprints of the images it used
    released: dict[str, int] = field(default_factory=dict)


class Ledger:
    """The ledger in a file; several processes may use it at the same time.

    Args:
        path: The file, which need not exist.
        memory: The folder with the memory of each run, in which older versions kept their
            accounts. None if there is none.
    """

    def __init__(self, path: Path, memory: Path | None = None) -> None:
        self.path = path
        self.memory = memory
        self._known: tuple[object, dict[str, RunAccount]] | None = None

    def runs(self) -> dict[str, RunAccount]:
        """Return the account of each run, in the order in which they began.

        Accounts of older versions come first. They count releases by name, so that the price of
        all but private training is unknown. The result is cached until the file changes: do not
        modify it.

        Raises:
            CheckpointError: If the file is damaged. An incomplete last line is not damage: it was
                being written when the process ended, and nothing left the site after it.
        """
        status = self.path.stat() if self.path.exists() else None
        former = self.former_accounts()
        version = (status and (status.st_size, status.st_mtime_ns), former)
        if self._known is not None and self._known[0] == version:
            return self._known[1]
        runs: dict[str, RunAccount] = {}
        for path in former:
            counts = parse_file(path, _read_counts)
            runs[path.parent.name] = RunAccount(released=counts)
        for number, line in enumerate(self._lines(), 1):
            try:
                _add_line(runs, json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged in line {number}: {summarise_error(error)}"
                ) from error
        self._known = (version, runs)
        return runs

    def account(self) -> dict[str, int]:
        """Count the releases of all runs by description, older versions' included.

        Raises:
            CheckpointError: If the file is damaged.
        """
        return merge_accounts(*(account.released for account in self.runs().values()))

    def former_accounts(self) -> list[Path]:
        """Return the files of older versions' accounts; none without a memory folder."""
        return sorted(self.memory.glob(f"*/{FORMER_FILE}")) if self.memory is not None else []

    def bind(self, run: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Bind a run to a configuration, unless it is bound; return its configuration.

        A run that is bound keeps its first configuration, and `config` is ignored.

        Args:
            run: The run's id.
            config: The configuration as plain values.

        Raises:
            CheckpointError: If the file is damaged or cannot be written.
        """
        with self._locked():
            known = self.runs().get(run, RunAccount()).config
            if known is not None:
                return known
            tree = dict(config)
            digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
            self._append({"run": run, "hash": digest[:16], "config": tree})
            return tree

    def add(
        self,
        run: str,
        releases: Account,
        about: Mapping[str, Any],
        budget: tuple[float, float] | None = None,
    ) -> None:
        """Append releases; they are on disk when this returns.

        Args:
            run: The run's id.
            releases: Description of each release -> number of releases.
            about: Further fields of the line. "delta" and "data" are required: without them the
                ledger counts as damaged.
            budget: (ε, δ) that all runs together may not exceed; None for no limit.

        Raises:
            PrivacyError: If they would exceed it, as when another site that shares this ledger
                has spent the rest in the meantime. Nothing is appended.
            CheckpointError: If the file is damaged or cannot be written.
        """
        with self._locked():
            if budget is not None:
                total = total_epsilon(merge_accounts(self.account(), releases), budget[1])
                if total > budget[0] * ROUNDING:
                    raise PrivacyError(
                        f"all runs together would have spent epsilon = {total:.4g} then, of the "
                        f"total budget of {budget[0]:g}"
                    )
            self._append({"run": run, **about, "releases": dict(releases)})

    def _lines(self) -> list[bytes]:
        """Return the complete lines of the file.

        A line that is still being written is left out. Without a file, there are none.

        Raises:
            CheckpointError: The file cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            *complete, _ = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        return complete

    def _append(self, line: Mapping[str, Any]) -> None:
        """Append a line, in place of an incomplete one that a killed process left."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"time": now, **line}, ensure_ascii=False) + "\n"
        complete = sum(len(line) + 1 for line in self._lines())
        self._known = None
        is_new = not self.path.exists()
        with convert_disk_errors(self.path), self.path.open("ab") as file:
            file.truncate(complete)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            if is_new:
                flush(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing inside the block; wait for one that does."""
        with convert_disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_name(f".{self.path.name}.lock").open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _read_counts(text: str) -> dict[str, int]:
    """Parse an older version's account."""
    return {str(name): int(count) for name, count in json.loads(text).items()}


def _add_line(runs: dict[str, RunAccount], line: Mapping[str, Any]) -> None:
    """Add a line of the ledger to the account of its run.

    The smallest δ of a run counts.

    Raises:
        ValueError: If a number of releases is negative. Missing fields raise LookupError.
    """
    account = runs.setdefault(str(line["run"]), RunAccount())
    account.began = account.began or str(line["time"])
    if "config" in line:
        account.config = dict(line["config"])
    if "releases" not in line:
        return
    counts = {str(text): int(count) for text, count in line["releases"].items()}
    if any(count < 0 for count in counts.values()):
        raise ValueError("a negative number of releases")
    account.released = merge_accounts(account.released, counts)
    delta = float(line["delta"])
    account.delta = min(account.delta or delta, delta)
    if line["data"] not in account.data:
        account.data.append(line["data"])


def ledger_file(path: Path) -> Path:
    """Return the ledger at a path: a file, a site's folder, or its memory's folder.

    Raises:
        CheckpointError: If there is none.
    """
    for file in (path, path / LEDGER, path / MEMORY / LEDGER):
        if file.is_file():
            return file
    raise CheckpointError(
        f"{path} has no ledger: a site writes {LEDGER} into its folder {MEMORY}/ with its first answer"
    )
