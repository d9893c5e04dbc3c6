"""The folder of a run: config.toml, metrics.jsonl and the checkpoint of the last finished round."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tomllib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w
import torch

from barter.core.errors import CheckpointError
from barter.core.files import replace_text, writing
from barter.core.payload import Payload
from barter.core.record import Round
from barter.runs.checkpoint import read, write

__all__ = [
    "RunFolder",
    "begun",
    "finished",
    "has_checkpoint",
    "last_checkpoint",
    "records",
    "rounds_done",
    "unborn",
]

log = logging.getLogger("barter")

METRICS = "metrics.jsonl"
PRIVACY = "privacy.json"

SETUP = "flower"  # what a run on Flower is set up with
UNBORN = {
    ".lock",
    "checkpoints",
    ".config.toml.tmp",
    SETUP,
    f".{SETUP}.new",
}  # of a run killed before it began
CHECKPOINT = re.compile(r"round-(\d{6})\.safetensors")


class RunFolder:
    """Everything on disk is flushed and renamed into place: a kill at any instant leaves a run that can go on."""

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
        folder = cls(path)
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

    def change(self, values: Mapping[str, int]) -> None:
        """From now on the run has these values of its configuration."""
        config = tomllib.loads(self.config.read_text())
        if config != {**config, **values}:
            replace_text(self.config, tomli_w.dumps({**config, **values}))

    def state(self, privacy: str) -> None:
        """What the run told of private images until now."""
        replace_text(self.path / PRIVACY, privacy)

    def release(self) -> None:
        """Let another experiment have the folder."""
        self._lock.close()

    def append(self, record: Round) -> None:
        """One more line of metrics.jsonl, on disk when this returns."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Round]:
        """The rounds that were recorded."""
        return records(self.path)

    def save(self, round: int, state: Payload, origin: Mapping[str, str]) -> None:
        """The checkpoint of a finished round and what it is made of; the one before goes only when this one is safe."""
        target = self.checkpoints / f"round-{round:06d}.safetensors"
        write(target, state, {**origin, "round": str(round)})
        for old in self.checkpoints.iterdir():
            if old != target:
                old.unlink()

    def go_on_after(self, round: int) -> None:
        """Drop the records of later rounds, which no checkpoint holds; say so if earlier ones are not there."""
        kept = [record for record in self.records() if record.round <= round]
        missing = sorted(set(range(1, round + 1)) - {record.round for record in kept})
        if missing:
            lost = (
                f"round {missing[0]}"
                if len(missing) == 1
                else f"rounds {missing[0]} to {missing[-1]}"
            )
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
    """The rounds that were recorded in a run's folder; a line that a kill cut short, or that is damaged, is none."""
    metrics = run / METRICS
    found: list[Round] = []
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        try:
            found.append(Round.from_json(line))
        except ValueError:
            continue
    return found


def unborn(path: Path) -> bool:
    """Whether this is all that is left of a run that was killed before it began: nothing of anybody's."""
    return path.is_dir() and not {child.name for child in path.iterdir()} - UNBORN


def rounds_done(run: Path) -> int:
    """How many rounds a run's folder has recorded."""
    metrics = run / METRICS
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def last_checkpoint(run: Path) -> tuple[int, Payload, dict[str, str]] | None:
    """The last finished round of a run's folder, its state and what it is made of; nothing if no round was finished."""
    found = _checkpoints(run)
    if not found:
        return None
    state, notes = read(found[-1], torch.device("cpu"))
    return int(notes["round"]), state, notes


def begun(run: Path) -> Path:
    """The folder of a run; an error if it is something else."""
    if not (run / "config.toml").exists():
        runs = sorted(path.parent for path in run.glob("*/seed-*/config.toml"))
        below = f"; it is a comparison, give one of its runs, such as {runs[0]}" if runs else ""
        raise CheckpointError(
            f"{run} is not the folder of a run: there is no config.toml in it{below}"
        )
    return run


def finished(run: Path) -> tuple[int, Payload]:
    """The last finished round of a run's folder and its state, to look at; an error if there is none."""
    found = last_checkpoint(begun(run))
    if found is None:
        raise CheckpointError(f"{run} holds no checkpoint of a finished round")
    return found[:2]


def has_checkpoint(run: Path) -> bool:
    """Whether a run has finished a round."""
    return bool(_checkpoints(run))


def _checkpoints(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    return (
        sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))
        if folder.is_dir()
        else []
    )
