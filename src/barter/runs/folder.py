"""The folder of a run: config.toml, metrics.jsonl and the checkpoints of the last rounds and of the best one."""

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
from barter.core.files import replace_text, understood, writing
from barter.core.payload import Payload
from barter.core.record import Round
from barter.runs.checkpoint import read, round_of, write
from barter.runs.selection import Stop, best_round

__all__ = [
    "RunFolder",
    "Which",
    "begun",
    "checkpoint_of",
    "early_stop",
    "ended",
    "finished",
    "has_checkpoint",
    "kept_rounds",
    "last_checkpoint",
    "records",
    "rounds_done",
    "stopped_early",
    "unborn",
]

log = logging.getLogger("barter")

METRICS = "metrics.jsonl"
PRIVACY = "privacy.json"
STOPPED = "stopped.json"  # when and why a run stopped before its last round

Which: TypeAlias = int | Literal["last", "best"]  # of a run's rounds that are kept

SETUP = "flower"  # what a run on Flower is set up with
UNBORN = {
    ".lock",
    "checkpoints",
    ".config.toml.tmp",
    SETUP,
    f".{SETUP}.new",
}  # of a run killed before it began
CHECKPOINT = re.compile(r"round-(\d{6})\.safetensors")
# a whole line of metrics.jsonl, and its round
RECORD = re.compile(rb'^\{[ \t]*"round":[ \t]*([0-9]+),.*\}[ \t\r]*$', re.MULTILINE)


class RunFolder:
    """Everything on disk is flushed and renamed into place: a kill at any instant leaves a run that can go on."""

    created = False  # whether the run in it is new
    made = False  # whether the folder itself is, too

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
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
        _held.add(self)

    @classmethod
    def create(
        cls, path: Path, config: str, prepare: Callable[[], None] = lambda: None
    ) -> RunFolder:
        """A folder for a new run; what is there already is never overwritten.

        The configuration is written last: a run that was killed while it was prepared can begin again.
        """
        if path.exists() and not unborn(path):
            raise CheckpointError(
                f"{path} exists and is not empty: choose another --out, or `barter resume {path}`"
            )
        made = not path.exists()
        folder = cls(path)
        folder.created, folder.made = True, made
        try:
            prepare()
            replace_text(folder.config, config)
        except BaseException:
            folder.release()  # now: the error's traceback holds the folder until it is collected
            raise
        return folder

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that was begun."""
        return cls(begun(path))

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def change(self, values: Mapping[str, int | str]) -> None:
        """From now on the run has these values of its configuration."""
        config = tomllib.loads(self.config.read_text())
        if config != {**config, **values}:
            replace_text(self.config, tomli_w.dumps({**config, **values}))

    def state(self, privacy: str) -> None:
        """What the run told of private images until now."""
        replace_text(self.path / PRIVACY, privacy)

    def note_stop(self, stop: Stop) -> None:
        """Record that the run stopped early, or that it was told to go on nevertheless."""
        replace_text(self.path / STOPPED, stop.to_json())

    def forget_stop(self) -> None:
        """Record that the run goes on as if it had not stopped."""
        (self.path / STOPPED).unlink(missing_ok=True)

    def release(self) -> None:
        """Let another experiment have the folder."""
        self._lock.close()

    def discard(self) -> None:
        """Remove the folder of a run that never began, if this process made it and nothing else is in it."""
        self.release()
        found = {child.name for child in self.path.iterdir()} if self.path.is_dir() else set()
        if not self.created or found - UNBORN - {self.config.name, PRIVACY} or SETUP in found:
            return
        with suppress(OSError):  # not empty, or taken by another run in the meantime
            self.checkpoints.rmdir()
            for name in (self.config.name, PRIVACY, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            if self.made:
                self.path.rmdir()

    def append(self, record: Round) -> None:
        """One more line of metrics.jsonl, on disk when this returns."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Round]:
        """The rounds that were recorded."""
        return records(self.path)

    def save(
        self,
        round: int,
        state: Payload,
        origin: Mapping[str, str],
        keep: Collection[int] = (),
        until_saved: Collection[int] = (),
    ) -> None:
        """Write the checkpoint of a finished round, and delete those that are not needed any more.

        What can go goes before the new one is written, so that the disk holds no more than is needed: the checkpoint
        of the round before stays until the new one is safe.

        Args:
            round: The finished round.
            state: What the checkpoint holds.
            origin: What the state was made of.
            keep: Earlier rounds whose checkpoints stay.
            until_saved: Earlier rounds whose checkpoints stay until the new one is safe.
        """
        wanted = {_file(self.path, kept) for kept in {round, *keep}}
        needed = {*wanted, *(_file(self.path, kept) for kept in until_saved)}
        self._clear(but={*needed, *_checkpoints(self.path)[-1:]})
        write(_file(self.path, round), state, {**origin, "round": str(round)})
        self._clear(but=wanted)

    def _clear(self, but: Collection[Path]) -> None:
        for path in self.checkpoints.iterdir():
            if path not in but:
                path.unlink()

    def go_on_after(self, round: int) -> None:
        """Drop checkpoints and records of later rounds; warn if earlier records are missing."""
        self._clear(but=[path for path in _checkpoints(self.path) if _round(path) <= round])
        kept = [record for record in self.records() if record.round <= round]
        known = {record.round for record in kept}
        if len(known) < round:
            # One after the other: a checkpoint can claim any number of rounds.
            first = next(t for t in range(1, round + 1) if t not in known)
            last = next(t for t in range(round, 0, -1) if t not in known)
            lost = f"round {first}" if first == last else f"rounds {first} to {last}"
            log.warning(
                "%s has no whole record of %s: tables and curves go on without%s",
                self.metrics,
                lost,
                self._aside(),
            )
        replace_text(self.metrics, "".join(record.to_json() + "\n" for record in kept))

    def _aside(self) -> str:
        """Keep damaged records beside the ones that go on."""
        if not self.metrics.exists():
            return ""
        aside = self.metrics.with_suffix(".damaged")
        with writing(aside):
            shutil.copyfile(
                self.metrics, aside
            )  # the metrics stay until what is to go on is on disk
        return f"; what there was is in {aside}"


_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go() -> None:
    """A process that was forked off a run does not keep its folder from being used when the run is gone."""
    for folder in list(_held):
        folder.release()


os.register_at_fork(after_in_child=_let_go)


def records(run: Path) -> list[Round]:
    """Return the rounds that were recorded in a run's folder.

    A line that a kill cut short, or that is damaged, is none. Of several lines of one round the last counts.
    """
    metrics = run / METRICS
    found: dict[int, Round] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        try:
            record = Round.from_json(line)
        except ValueError:
            continue
        if isinstance(record.round, int) and record.round > 0:
            found[record.round] = record
    return list(found.values())


def unborn(path: Path) -> bool:
    """Whether this is all that is left of a run that was killed before it began: nothing of anybody's."""
    return path.is_dir() and not {child.name for child in path.iterdir()} - UNBORN


def rounds_done(run: Path) -> int:
    """Count the rounds that a run's folder has recorded; asked for often, so no record is parsed."""
    metrics = run / METRICS
    return len(set(RECORD.findall(metrics.read_bytes()))) if metrics.exists() else 0


def early_stop(run: Path) -> Stop | None:
    """Return the early stop of a run, also an overruled one; None if there was none."""
    file = run / STOPPED
    return understood(file, Stop.from_json) if file.exists() else None


def ended(run: Path, rounds: int) -> bool:
    """Whether a run has come to its end: as many rounds are done, or it stopped early."""
    return rounds_done(run) >= rounds or stopped_early(run)


def stopped_early(run: Path) -> bool:
    """Whether a run stopped early and was not told to go on."""
    stop = early_stop(run)
    return stop is not None and not stop.overruled


def kept_rounds(run: Path) -> list[int]:
    """The rounds whose checkpoints a run's folder holds."""
    return [_round(path) for path in _checkpoints(run)]


def checkpoint_of(run: Path, which: Which) -> tuple[int, Payload, dict[str, str]]:
    """Read the checkpoint of a round: its number, its state and what it is made of.

    Args:
        run: The run's folder.
        which: A round, "last", or "best" for the one with the highest validation accuracy.

    Raises:
        CheckpointError: If that round is not kept, or no round is the best.
    """
    kept = kept_rounds(run)
    if not kept:
        raise CheckpointError(f"{run} holds no checkpoint of a finished round")
    title = f"round {which}"
    if which == "last":
        round = kept[-1]
    elif which == "best":
        best = best_round(records(run))
        if best is None:
            raise CheckpointError(
                f"{run} has no best round: it recorded no validation accuracy, which takes data.validation"
            )
        round, title = best.round, f"round {best.round}, the best on validation,"
    else:
        round = which
    if round not in kept:
        there = f"round{'s' * (len(kept) > 1)} {', '.join(map(str, kept))}"
        raise CheckpointError(
            f"{run}: {title} is not kept, only {there}; keep=best keeps the best round, keep_rounds more of the last"
        )
    path = _file(run, round)
    state, notes = read(path, torch.device("cpu"))
    return _checked_round(path, state, notes), state, notes


def last_checkpoint(run: Path) -> tuple[int, Payload, dict[str, str]] | None:
    """The last finished round of a run's folder, its state and what it is made of; nothing if no round was finished."""
    return checkpoint_of(run, "last") if has_checkpoint(run) else None


def _checked_round(path: Path, state: Payload, notes: Mapping[str, str]) -> int:
    """Return the round of a run's checkpoint, which its name says too, if it holds what a run writes."""
    round = round_of(path, notes)
    named = CHECKPOINT.fullmatch(path.name)
    if named is not None and int(named[1]) != round:
        raise CheckpointError(f"{path} is damaged: its header says that it is of round {round}")
    if not _is_state(state):
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a run")
    return round


def _is_state(state: Payload) -> bool:
    """Whether a tree can be a run's state, as far as the kinds of its parts say."""
    if not isinstance(state, dict):
        return False
    tables = [state.get(key, {}) for key in ("server", "clients", "crossed", "told", "networks")]
    if not all(isinstance(table, dict) for table in tables):
        return False
    _, clients, crossed, _, networks = tables
    parts = [*clients.values(), *crossed.values()]
    parts += [networks[key] for key in ("spec", "architectures") if key in networks]
    return all(isinstance(part, dict) for part in parts)


def begun(run: Path) -> Path:
    """The folder of a run; an error if it is something else."""
    if not (run / "config.toml").exists():
        runs = sorted(path.parent for path in run.glob("*/seed-*/config.toml"))
        below = f"; it is a comparison, give one of its runs, such as {runs[0]}" if runs else ""
        raise CheckpointError(
            f"{run} is not the folder of a run: there is no config.toml in it{below}"
        )
    return run


def finished(run: Path, which: Which = "last") -> tuple[int, Payload]:
    """A finished round of a run's folder and its state, to look at; an error if it is not kept."""
    return checkpoint_of(begun(run), which)[:2]


def has_checkpoint(run: Path) -> bool:
    """Whether a run has finished a round."""
    return bool(_checkpoints(run))


def _file(run: Path, round: int) -> Path:
    return run / "checkpoints" / f"round-{round:06d}.safetensors"


def _round(checkpoint: Path) -> int:
    found = CHECKPOINT.fullmatch(checkpoint.name)
    assert found is not None
    return int(found[1])


def _checkpoints(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    return (
        sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))
        if folder.is_dir()
        else []
    )
