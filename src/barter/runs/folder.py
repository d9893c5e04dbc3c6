"""Read and write the folder of a run: config.toml, metrics.jsonl and checkpoints."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tomllib
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import tomli_w
import torch

from barter.core.errors import CheckpointError
from barter.core.files import convert_disk_errors, parse_file, replace_text
from barter.core.payload import Payload
from barter.core.record import Round
from barter.runs.checkpoint import read_checkpoint, read_notes, round_of, write_checkpoint
from barter.runs.selection import Stop, best_round
from barter.runs.state_files import StateFiles, StoredStates, parse_index

__all__ = [
    "RunFolder",
    "Which",
    "checkpoint_of",
    "checkpoint_rounds",
    "count_rounds",
    "early_stop",
    "has_checkpoint",
    "has_ended",
    "has_stopped_early",
    "last_checkpoint",
    "never_began",
    "read_finished_round",
    "read_records",
    "require_run",
]

log = logging.getLogger("barter")

METRICS_FILE = "metrics.jsonl"
STATES_NOTE = "clients"  # note of a checkpoint: the files of clients' states
PRIVACY = "privacy.json"
STOPPED = "stopped.json"  # when and why a run stopped before its last round

Which: TypeAlias = int | Literal["last", "best"]  # a round whose checkpoint is kept

SETUP = "flower"  # the folder with the deployment of a run on Flower
# Names in the folder of a run that was killed before it began.
UNBORN = {".lock", "checkpoints", ".config.toml.tmp", SETUP, f".{SETUP}.new"}
CHECKPOINT = re.compile(r"round-(\d{6})\.safetensors")
# A complete line of metrics.jsonl, and its round.
RECORD = re.compile(rb'^\{[ \t]*"round":[ \t]*([0-9]+),.*\}[ \t\r]*$', re.MULTILINE)


class RunFolder:
    """The locked folder of a run.

    All files are flushed and renamed into place, so a run killed at any time can be resumed.
    """

    created = False  # whether the run is new
    made = False  # whether the folder itself is new

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{path} is in use by another process, or by another Experiment of this one"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from None
        _open_folders.add(self)

    @classmethod
    def create(
        cls, path: Path, config: str, prepare: Callable[[], None] = lambda: None
    ) -> RunFolder:
        """Create the folder of a new run; existing files are never overwritten.

        The configuration is written last, so a run killed during preparation can begin again.

        Args:
            path: The folder.
            config: The configuration as TOML.
            prepare: Called before the configuration is written.

        Raises:
            CheckpointError: The folder exists and is not empty (`never_began`), is in use, or
                cannot be written.
        """
        if path.exists() and not never_began(path):
            resume = f", or `barter resume {path}`" if (path / "config.toml").exists() else ""
            raise CheckpointError(f"{path} exists and is not empty: choose another --out{resume}")
        made = not path.exists()
        folder = cls(path)
        folder.created = True
        folder.made = made
        try:
            prepare()
            replace_text(folder.config, config)
        except BaseException:
            # At once: the error's traceback keeps the folder alive until it is collected.
            folder.release()
            raise
        return folder

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Open and lock the folder of a run that was begun.

        Raises:
            CheckpointError: It is not the folder of a run, or another process uses it.
        """
        return cls(require_run(path))

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    def change(self, values: Mapping[str, int | str]) -> None:
        """Change top-level values of the run's configuration; the file keeps no comments."""
        config = tomllib.loads(self.config.read_text())
        if config != {**config, **values}:
            replace_text(self.config, tomli_w.dumps({**config, **values}))

    def state(self, privacy: str) -> None:
        """Write the privacy statement, as JSON: what clients have released so far."""
        replace_text(self.path / PRIVACY, privacy)

    def note_stop(self, stop: Stop) -> None:
        """Record an early stop, or that it was overruled."""
        replace_text(self.path / STOPPED, stop.to_json())

    def forget_stop(self) -> None:
        """Remove the record of an early stop: the run continues as if it had not stopped."""
        (self.path / STOPPED).unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock, so that another experiment can use the folder."""
        self._lock.close()

    def discard(self) -> None:
        """Remove the folder of a run that never began, if this object created it.

        The lock is released in any case. A folder with other files in it, such as records or
        checkpoints, stays as it is. One that existed before the run is emptied and stays.
        """
        self.release()
        found = {child.name for child in self.path.iterdir()} if self.path.is_dir() else set()
        if not self.created or found - UNBORN - {self.config.name, PRIVACY} or SETUP in found:
            return
        with suppress(OSError):  # Not empty, or in use by another run in the meantime.
            self.checkpoints.rmdir()
            for name in (self.config.name, PRIVACY, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            if self.made:
                self.path.rmdir()

    def append(self, record: Round) -> None:
        """Append a record to metrics.jsonl; it is on disk when this returns.

        Raises:
            CheckpointError: The file cannot be written.
        """
        with convert_disk_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Round]:
        """Return the recorded rounds, see `read_records`."""
        return read_records(self.path)

    def save(
        self,
        round: int,
        state: Payload,
        origin: Mapping[str, str],
        keep: Collection[int] = (),
        until_saved: Collection[int] = (),
        states: StateFiles | None = None,
    ) -> None:
        """Write the checkpoint of a finished round; delete those no longer needed.

        To save disk space, checkpoints are deleted before the new one is written. The latest one and
        those in `until_saved` stay until the new one is on disk; those in `keep` stay.

        Args:
            round: The finished round.
            state: The contents of the checkpoint.
            origin: The configuration and data that the state was made with.
            keep: Earlier rounds whose checkpoints stay.
            until_saved: Earlier rounds whose checkpoints stay until the new one is on disk.
            states: The files that hold clients' states; those that no checkpoint needs are deleted.
                None: states are in `state`, and files from before the run was resumed are deleted
                once no checkpoint refers to them.
        """
        wanted = {_file(self.path, t) for t in {round, *keep}}
        needed = {*wanted, *(_file(self.path, t) for t in until_saved)}
        previous = _checkpoints(self.path)[-1:]
        self._clear(but={*needed, *previous})
        notes = {**origin, "round": str(round)}
        if states is not None:
            notes[STATES_NOTE] = states.index()
        write_checkpoint(_file(self.path, round), state, notes)
        self._clear(but=wanted)
        if states is not None:
            states.prune(checkpoint_rounds(self.path))
        elif self.clients.is_dir():
            # The states were in files before the run was resumed with states in memory.
            self._forget_states()

    @property
    def clients(self) -> Path:
        """Return the folder of clients' states, in a run that stores them in files."""
        return self.path / "clients"

    def clean_states(self, states: StateFiles) -> None:
        """Delete files of clients' states to which no checkpoint refers."""
        indices = {}
        for path in _checkpoints(self.path):
            index = read_notes(path).get(STATES_NOTE)
            if index is not None:
                indices[_round(path)] = parse_index(self.clients, index)
        states.clean(indices)

    def _forget_states(self) -> None:
        """Delete the folder of clients' states if no checkpoint refers to it."""
        if not any(STATES_NOTE in read_notes(path) for path in _checkpoints(self.path)):
            shutil.rmtree(self.clients, ignore_errors=True)

    def _clear(self, but: Collection[Path]) -> None:
        """Delete all files in the folder of checkpoints but these, temporary ones too."""
        for path in self.checkpoints.iterdir():
            if path not in but:
                path.unlink()

    def go_on_after(self, round: int) -> None:
        """Drop later rounds' checkpoints and records; warn of missing earlier ones.

        If records are missing, a copy of the damaged file is kept beside it.
        """
        self._clear(but=[path for path in _checkpoints(self.path) if _round(path) <= round])
        kept = [record for record in self.records() if record.round <= round]
        known = {record.round for record in kept}
        if len(known) < round:
            # Generators, not sets of rounds: a damaged checkpoint can claim any number of rounds.
            first = next(t for t in range(1, round + 1) if t not in known)
            last = next(t for t in range(round, 0, -1) if t not in known)
            lost = f"round {first}" if first == last else f"rounds {first} to {last}"
            log.warning(
                "%s has no complete record of %s: tables and curves have a gap there%s",
                self.metrics,
                lost,
                self._copy_damaged(),
            )
        replace_text(self.metrics, "".join(record.to_json() + "\n" for record in kept))

    def _copy_damaged(self) -> str:
        """Copy damaged metrics to metrics.damaged, and return where for the warning.

        Without metrics the text is empty.
        """
        if not self.metrics.exists():
            return ""
        copy = self.metrics.with_suffix(".damaged")
        with convert_disk_errors(copy):
            # A copy: the original stays until the repaired file is on disk.
            shutil.copyfile(self.metrics, copy)
        return f"; the damaged file is kept as {copy}"


_open_folders: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _release_after_fork() -> None:
    """Release inherited locks, which a forked process could hold for too long."""
    for folder in list(_open_folders):
        folder.release()


os.register_at_fork(after_in_child=_release_after_fork)


def read_records(run: Path) -> list[Round]:
    """Return the recorded rounds of a run, in the order of their first record.

    Incomplete and damaged lines are skipped. Of several lines of one round, the last one counts.
    Without a file, there are none.
    """
    metrics = run / METRICS_FILE
    found: dict[int, Round] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        try:
            record = Round.from_json(line)
        except ValueError:
            continue
        if isinstance(record.round, int) and record.round > 0:
            found[record.round] = record
    return list(found.values())


def never_began(path: Path) -> bool:
    """Return whether a folder holds only files of a run killed before it began.

    An empty folder does too; a file or a missing folder does not.
    """
    return path.is_dir() and not {child.name for child in path.iterdir()} - UNBORN


def count_rounds(run: Path) -> int:
    """Count a run's recorded rounds without parsing the records; 0 without a file.

    It is called often and has to be fast. A round that was recorded twice counts once.
    """
    metrics = run / METRICS_FILE
    return len(set(RECORD.findall(metrics.read_bytes()))) if metrics.exists() else 0


def early_stop(run: Path) -> Stop | None:
    """Return the early stop of a run, also an overruled one; None if there was none.

    Raises:
        CheckpointError: Its file is damaged.
    """
    file = run / STOPPED
    return parse_file(file, Stop.from_json) if file.exists() else None


def has_ended(run: Path, rounds: int) -> bool:
    """Return whether a run has at least this number of rounds, or stopped early."""
    return count_rounds(run) >= rounds or has_stopped_early(run)


def has_stopped_early(run: Path) -> bool:
    """Return whether a run stopped early and the stop was not overruled."""
    stop = early_stop(run)
    return stop is not None and not stop.overruled


def checkpoint_rounds(run: Path) -> list[int]:
    """Return the rounds whose checkpoints a run's folder holds, in ascending order."""
    return [_round(path) for path in _checkpoints(run)]


def checkpoint_of(run: Path, which: Which) -> tuple[int, Payload, dict[str, str]]:
    """Read a round's checkpoint; return its number, state on the CPU, and notes.

    In a run that stores clients' states in files, state["clients"] is a `StoredStates`, which reads
    each of them when it is asked for.

    Args:
        run: The run's folder.
        which: A round, "last", or "best" for the one with the highest validation accuracy.

    Raises:
        CheckpointError: If that round is not kept, no round is the best, or the file is damaged.
    """
    kept = checkpoint_rounds(run)
    if not kept:
        raise CheckpointError(f"{run} holds no checkpoint of a finished round")
    title = f"round {which}"
    if which == "last":
        round = kept[-1]
    elif which == "best":
        best = best_round(read_records(run))
        if best is None:
            raise CheckpointError(
                f"{run} has no best round: it recorded no validation accuracy, which needs "
                "data.validation"
            )
        round = best.round
        title = f"round {round}, the best on validation,"
    else:
        round = which
    if round not in kept:
        there = f"round{'s' * (len(kept) > 1)} {', '.join(map(str, kept))}"
        raise CheckpointError(
            f"{run}: {title} is not kept, only {there}; keep=best keeps the best round, "
            "keep_rounds more of the last"
        )
    path = _file(run, round)
    state, notes = read_checkpoint(path, torch.device("cpu"))
    round = _checked_round(path, state, notes)
    if STATES_NOTE in notes:
        state["clients"] = StoredStates.parse(run / "clients", notes[STATES_NOTE])
    return round, state, notes


def last_checkpoint(run: Path) -> tuple[int, Payload, dict[str, str]] | None:
    """Read the last checkpoint as `checkpoint_of` does; None before round 1 ends."""
    return checkpoint_of(run, "last") if has_checkpoint(run) else None


def _checked_round(path: Path, state: Payload, notes: Mapping[str, str]) -> int:
    """Return a checkpoint's round by its notes.

    Raises:
        CheckpointError: The notes have no round, the file's name has another, or the contents are
            not the state of a run.
    """
    round = round_of(path, notes)
    named = CHECKPOINT.fullmatch(path.name)
    if named is not None and int(named[1]) != round:
        raise CheckpointError(f"{path} is damaged: its header says that it is of round {round}")
    if not _is_state(state):
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a run")
    return round


def _is_state(state: Payload) -> bool:
    """Return whether a tree has the structure of a run's state; keys may be missing.

    Ids must be integers, counts of releases non-negative integers, and ε non-negative.
    """
    if not isinstance(state, dict):
        return False
    tables = [state.get(key, {}) for key in ("server", "clients", "crossed", "told", "networks")]
    if not all(isinstance(table, dict) for table in tables):
        return False
    _, clients, crossed, epsilons, networks = tables
    parts = [*clients.values(), *crossed.values()]
    parts += [networks[key] for key in ("spec", "architectures") if key in networks]
    if not all(isinstance(part, dict) for part in parts):
        return False
    counts = [count for seen in crossed.values() for count in seen.values()]
    names = [part for seen in crossed.values() for part in seen]
    return (
        all(type(k) is int for k in (*clients, *crossed, *epsilons))
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(name, str) for name in names)
        and all(type(epsilon) in (int, float) and epsilon >= 0 for epsilon in epsilons.values())
    )


def require_run(run: Path) -> Path:
    """Return a folder if it is that of a run that was begun, one with a config.toml.

    Raises:
        CheckpointError: It is not. For a comparison, the message names one of its runs.
    """
    if not run.exists():
        raise CheckpointError(f"there is no folder {run}")
    if not (run / "config.toml").exists():
        runs = sorted(path.parent for path in run.glob("*/seed-*/config.toml"))
        hint = f"; it is a comparison, give one of its runs, such as {runs[0]}" if runs else ""
        raise CheckpointError(
            f"{run} is not the folder of a run: there is no config.toml in it{hint}"
        )
    return run


def read_finished_round(run: Path, which: Which = "last") -> tuple[int, Payload]:
    """Read a finished round; return its number and state as `checkpoint_of` does.

    Raises:
        CheckpointError: It is not the folder of a run, or that round is not kept, is damaged, or
            lacks the server or the clients.
    """
    round, state, _ = checkpoint_of(require_run(run), which)
    if not {"server", "clients"} <= state.keys():
        raise CheckpointError(f"{run}: the checkpoint of round {round} does not hold all parties")
    return round, state


def has_checkpoint(run: Path) -> bool:
    """Return whether a run has a checkpoint of a finished round."""
    return bool(_checkpoints(run))


def _file(run: Path, round: int) -> Path:
    return run / "checkpoints" / f"round-{round:06d}.safetensors"


def _round(checkpoint: Path) -> int:
    found = CHECKPOINT.fullmatch(checkpoint.name)
    assert found is not None
    return int(found[1])


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run in order of rounds; none without the folder."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))
