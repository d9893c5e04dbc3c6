"""Files and folders of ours: there whole or not at all, and what the disk refuses is an error of one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from barter.core.errors import CheckpointError, in_short

__all__ = ["flush", "refused", "replace_text", "replacing", "understood", "whole", "writing"]

T = TypeVar("T")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Inside, what the disk refuses is said of this file or folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A place to write what is to be in a file, which holds what it held until the new contents are on disk."""
    temporary = target.with_name(f".{target.name}.tmp")
    with writing(target):
        try:
            yield temporary
            flush(temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)  # a full disk needs the room
            raise
        flush(target.parent)


def replace_text(target: Path, text: str) -> None:
    """The file holds either what it held or the new text, never a part of it."""
    with replacing(target) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def whole(folder: Path, mode: int = 0o777) -> Iterator[Path]:
    """A place to write what is to be a folder: it is there whole, or not at all."""
    new = folder.with_name(f".{folder.name}.new")
    with writing(folder):
        shutil.rmtree(new, ignore_errors=True)  # of one who was killed
        new.mkdir(mode, parents=True)
        try:
            yield new
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def understood(path: Path, meaning: Callable[[str], T]) -> T:
    """What a file of ours says."""
    try:
        return meaning(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {in_short(error)}") from error


def refused(folder: Path) -> str:
    """Why nothing can be written to a folder now, such as that its disk is full; empty where something can."""
    probe = folder / ".room"
    try:
        with writing(folder):
            try:
                probe.write_bytes(bytes(2**16))
                flush(probe)
            finally:
                probe.unlink(missing_ok=True)
    except CheckpointError as error:
        return str(error)
    return ""


def flush(path: Path) -> None:
    """What was written to a file or folder is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
