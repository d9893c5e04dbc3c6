"""Write and read a payload tree as a safetensors file with a JSON header."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from barter.core.errors import CheckpointError, summarise_error
from barter.core.files import replace_file
from barter.core.payload import Payload, mark, origin, pack, unpack

__all__ = ["read_checkpoint", "read_notes", "round_of", "write_checkpoint"]

ROUND = re.compile(r"[0-9]{1,9}")


def write_checkpoint(target: Path, state: Payload, notes: Mapping[str, str]) -> None:
    """Write a checkpoint atomically: a crash leaves the old file or the new one.

    Args:
        target: The file.
        state: The payload tree.
        notes: Strings to store in the file's metadata; "header", "alias" and "checksum" are taken.

    Raises:
        CheckpointError: The file cannot be written.
        PayloadError: The state is not a payload.
    """
    tensors, header = pack(state)
    unique: dict[tuple[object, ...], str] = {}
    stored: dict[str, Tensor] = {}
    alias: dict[str, str] = {}
    for name, tensor in tensors.items():
        # Tensors that parties share, as one storage or as unmodified copies, are written once.
        # data_ptr() would end the sharing of copies.
        address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        key = (origin(tensor) or address, tensor.shape, tensor.stride(), tensor.dtype)
        alias[name] = unique.setdefault(key, name)
        if alias[name] == name:
            stored[name] = tensor.cpu().clone().contiguous()
    metadata = {**notes, "header": header, "alias": json.dumps(alias)}
    metadata["checksum"] = _checksum(stored, metadata)
    with replace_file(target) as temporary:
        try:
            save_file(stored, temporary, metadata)
        except SafetensorError as error:  # Errors of the disk arrive wrapped.
            raise OSError(str(error)) from error


def read_checkpoint(path: Path, device: torch.device) -> tuple[Payload, dict[str, str]]:
    """Read a checkpoint; return its state, on a device, and its notes.

    Raises:
        CheckpointError: The file is missing, or its contents do not match its checksum.
    """
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata()
            alias = json.loads(notes["alias"])
            # Copied below into torch's own memory, which parties can share again.
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if notes.pop("checksum") != _checksum(stored, notes):
                raise ValueError("its contents are not what was written")
            stored = {name: tensor.to(device, copy=True) for name, tensor in stored.items()}
        for tensor in stored.values():
            mark(tensor)
        tensors = {name: stored[source] for name, source in alias.items()}
        return unpack(tensors, notes["header"]), notes
    except Exception as error:  # A damaged file may raise any error.
        raise CheckpointError(f"{path} is damaged: {summarise_error(error)}") from error


def read_notes(path: Path) -> dict[str, str]:
    """Read the notes of a checkpoint without its tensors, which are not verified.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata())
    except Exception as error:  # A damaged file may raise any error.
        raise CheckpointError(f"{path} is damaged: {summarise_error(error)}") from error


def round_of(path: Path, notes: Mapping[str, str]) -> int:
    """Return the round that a checkpoint is of, by its notes.

    Raises:
        CheckpointError: If its notes do not say a round.
    """
    text = notes.get("round", "")
    if not ROUND.fullmatch(text):
        raise CheckpointError(f"{path} is damaged: round {text[:40]!r} is no number of a round")
    return int(text)


def _checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """Return the CRC-32 of tensors and notes, by which damaged files are detected."""
    checksum = zlib.crc32(json.dumps([sorted(notes.items()), sorted(tensors)]).encode())
    for name in sorted(tensors):
        if tensors[name].numel():
            data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
            checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"
