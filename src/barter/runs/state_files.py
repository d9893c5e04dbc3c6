"""States of single clients as files; a round writes only those that changed.

In a run with many clients, a checkpoint does not hold the clients' states. It names a file for each
client that has changed since the start, and the files of all kept checkpoints stay.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from barter.core.errors import CheckpointError
from barter.core.payload import Payload
from barter.runs.checkpoint import read_checkpoint, write_checkpoint

__all__ = ["StateFiles", "StoredStates", "parse_index"]

INITIAL = "initial.safetensors"
STATE_FILE = re.compile(r"client-(\d{6,})-round-(\d{6,})\.safetensors")


class StateFiles:
    """The files of clients' states in one folder.

    A file is never changed after the round that wrote it, so that a checkpoint can refer to it.

    Args:
        folder: The folder, which is created with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.round = 0  # The round that is being run.
        self.files: dict[int, Path] = {}  # Client -> the file of its current state.
        # Client -> its files in this folder. Only those of clients with several can be deleted.
        self._names: defaultdict[int, set[str]] = defaultdict(set)
        self._several: set[int] = set()
        # Round -> the names of the files that its checkpoint refers to, by client.
        self._index: dict[int, dict[int, str]] = {}

    def write(self, client: int, state: Payload) -> None:
        """Write a client's state in the current round (`round`) to a file of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"client-{client:06d}-round-{self.round:06d}.safetensors"
        write_checkpoint(path, state, {"client": str(client), "round": str(self.round)})
        self.files[client] = path
        self._names[client].add(path.name)
        if len(self._names[client]) > 1:
            self._several.add(client)

    def read(self, client: int) -> Payload | None:
        """Read the current state of a client; None if it has not changed since the start."""
        if client not in self.files:
            return None
        return _read_state(self.files[client], client)

    @property
    def has_initial(self) -> bool:
        """Return whether the initial states are written."""
        return (self.folder / INITIAL).exists()

    def write_initial(self, states: Mapping[str, Payload], kinds: Mapping[int, str]) -> None:
        """Write the initial states, so that checkpoints can be used without the data.

        Args:
            states: Name of a kind of client -> its state before round 1.
            kinds: Client -> name of its kind.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        initial = {"states": dict(states), "kinds": dict(kinds)}
        write_checkpoint(self.folder / INITIAL, initial, {})

    def index(self) -> str:
        """Return the names of the current files, for the checkpoint of the current round.

        They are JSON, which `parse_index` reads; clients that have not changed since the start are
        left out. `prune` keeps these files as long as this round is among those it is given.
        """
        names = {k: path.name for k, path in sorted(self.files.items())}
        self._index[self.round] = names
        return json.dumps(names)

    def prune(self, rounds: Iterable[int]) -> None:
        """Delete files that neither the current state nor these rounds' checkpoints need."""
        kept = set(rounds)
        self._index = {t: names for t, names in self._index.items() if t in kept}
        for k in list(self._several):
            needed = {names[k] for names in self._index.values() if k in names}
            if k in self.files:
                needed.add(self.files[k].name)
            for name in self._names[k] - needed:
                (self.folder / name).unlink(missing_ok=True)
            self._names[k] &= needed
            if len(self._names[k]) < 2:
                self._several.discard(k)

    def restore(self, states: StoredStates) -> None:
        """Continue with states that a checkpoint refers to, possibly in another folder.

        Raises:
            CheckpointError: A file is missing.
        """
        self.files = states.files()
        for k, path in self.files.items():
            if not path.exists():
                raise CheckpointError(f"{path} is missing: it holds the state of client {k}")

    def clean(self, indices: Mapping[int, Mapping[int, str]]) -> None:
        """Delete files that no kept checkpoint refers to, such as a killed run may leave.

        Args:
            indices: Kept round -> the names of the files that its checkpoint refers to, by client.
        """
        self._index = {t: dict(names) for t, names in indices.items()}
        needed = {name for names in self._index.values() for name in names.values()}
        needed |= {path.name for path in self.files.values()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            found = STATE_FILE.fullmatch(path.name)
            if path.name not in needed and path.name != INITIAL:
                path.unlink()
            elif found is not None:
                self._names[int(found[1])].add(path.name)
        self._several = {k for k, names in self._names.items() if len(names) > 1}

    def discard(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class StoredStates(Mapping[int, Payload]):
    """The clients' states that a checkpoint refers to; each is read when asked for.

    Args:
        folder: The folder of the files.
        names: Client -> the name of its file; other clients have their initial state.
    """

    def __init__(self, folder: Path, names: Mapping[int, str]) -> None:
        self.folder = folder
        self.names = dict(names)
        self._initial, _ = read_checkpoint(folder / INITIAL, torch.device("cpu"))

    @classmethod
    def parse(cls, folder: Path, index: str) -> StoredStates:
        """Return the states that the index of a checkpoint names.

        Raises:
            CheckpointError: The index or the initial states are damaged.
        """
        return cls(folder, parse_index(folder, index))

    def files(self) -> dict[int, Path]:
        """Return the files of the clients that have changed since the start."""
        return {k: self.folder / name for k, name in self.names.items()}

    def __getitem__(self, client: int) -> Payload:
        if client in self.names:
            return _read_state(self.folder / self.names[client], client)
        return self._initial["states"][self._initial["kinds"][client]]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._initial["kinds"]))

    def __len__(self) -> int:
        return len(self._initial["kinds"])


def parse_index(folder: Path, index: str) -> dict[int, str]:
    """Parse the index of a checkpoint: client -> name of the file with its state.

    Args:
        folder: The folder of the files, for messages.
        index: The text, as `StateFiles.index` returned it.

    Raises:
        CheckpointError: The index is damaged.
    """
    try:
        names = {int(k): str(name) for k, name in json.loads(index).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: the index of a checkpoint is damaged: {error}") from error
    for k, name in names.items():
        found = STATE_FILE.fullmatch(name)
        if found is None or int(found[1]) != k:
            raise CheckpointError(f"{folder}: {name[:60]!r} is not the state of client {k}")
    return names


def _read_state(path: Path, client: int) -> Payload:
    """Read the state of a client.

    Raises:
        CheckpointError: The file is missing, damaged, or another client's.
    """
    state, notes = read_checkpoint(path, torch.device("cpu"))
    if notes.get("client") != str(client) or not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold the state of client {client}")
    return state
