"""Atomic writing of files and folders; disk errors become a CheckpointError."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from barter.core.errors import CheckpointError, summarise_error

__all__ = [
    "convert_disk_errors",
    "create_folder",
    "flush",
    "parse_file",
    "replace_file",
    "replace_text",
    "write_obstacle",
]

T = TypeVar("T")


@contextmanager
def convert_disk_errors(target: Path) -> Iterator[None]:
    """Convert an OSError in the block to a CheckpointError that names `target`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


@contextmanager
def replace_file(target: Path) -> Iterator[Path]:
    """Replace a file atomically: its contents stay until the new ones are on disk.

    If the block raises, the target stays as it is and the temporary file is deleted.

    Yields:
        The temporary file to write to, `.NAME.tmp` in the same folder; it replaces the target at
        the end of the block.

    Raises:
        CheckpointError: If the disk refuses, also inside the block.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    with convert_disk_errors(target):
        try:
            yield temporary
            flush(temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)  # Frees the space if the disk is full.
            raise
        flush(target.parent)


def replace_text(target: Path, text: str) -> None:
    """Replace the text of a file atomically, see `replace_file`."""
    with replace_file(target) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def create_folder(folder: Path, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder atomically: it exists with all its files or not at all.

    If the block raises, the temporary folder is deleted.

    Args:
        folder: The folder, which must not exist or be empty; its parents are created.
        mode: Its permissions, less the process's umask.

    Yields:
        The temporary folder to fill; it is renamed at the end of the block.

    Raises:
        CheckpointError: If the disk refuses, also inside the block.
    """
    temporary = folder.with_name(f".{folder.name}.new")
    with convert_disk_errors(folder):
        # A process that was killed may have left the temporary folder.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode, parents=True)
        try:
            yield temporary
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def parse_file(path: Path, meaning: Callable[[str], T]) -> T:
    """Read a text file that barter wrote and parse it.

    Args:
        path: The file, in UTF-8.
        meaning: Parses the text; its result is returned.

    Raises:
        CheckpointError: If the file cannot be read, or `meaning` raises ValueError, LookupError,
            TypeError, AttributeError or RecursionError.
    """
    try:
        return meaning(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {summarise_error(error)}") from error


def write_obstacle(folder: Path) -> str:
    """Return why a folder cannot be written to, such as a full disk; "" if it can.

    To find out, a file of 64 KiB is written there and deleted.
    """
    probe = folder / ".room"
    try:
        with convert_disk_errors(folder):
            try:
                probe.write_bytes(bytes(2**16))
                flush(probe)
            finally:
                probe.unlink(missing_ok=True)
    except CheckpointError as error:
        return str(error)
    return ""


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on disk (fsync).

    Raises:
        OSError: If that fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
