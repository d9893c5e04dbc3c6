"""A payload tree in a file: safetensors with a JSON header, flushed and renamed into place."""

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

from barter.core.errors import CheckpointError, in_short
from barter.core.files import replacing
from barter.core.payload import Payload, mark, origin, pack, unpack

__all__ = ["read", "round_of", "write"]

ROUND = re.compile(r"[0-9]{1,9}")


def write(target: Path, state: Payload, notes: Mapping[str, str]) -> None:
    """The file holds either what it held or the new state, never a part of it."""
    tensors, header = pack(state)
    unique: dict[tuple[object, ...], str] = {}
    stored, alias = {}, {}
    for name, tensor in tensors.items():
        # What parties share, as one storage or as copies nobody has written to, is written once.
        address = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # data_ptr() would end the sharing
        key = (origin(tensor) or address, tensor.shape, tensor.stride(), tensor.dtype)
        alias[name] = unique.setdefault(key, name)
        if alias[name] == name:
            stored[name] = tensor.cpu().clone().contiguous()
    metadata = {**notes, "header": header, "alias": json.dumps(alias)}
    metadata["checksum"] = _checksum(stored, metadata)
    with replacing(target) as temporary:
        try:
            save_file(stored, temporary, metadata)
        except SafetensorError as error:  # what the disk refuses, in its words
            raise OSError(str(error)) from error


def read(path: Path, device: torch.device) -> tuple[Payload, dict[str, str]]:
    """The state in a file, and the notes beside it."""
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata()
            alias = json.loads(notes["alias"])
            # Copies in torch's own memory, which parties can share again.
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if notes.pop("checksum") != _checksum(stored, notes):
                raise ValueError("its contents are not what was written")
            stored = {name: tensor.to(device, copy=True) for name, tensor in stored.items()}
        for tensor in stored.values():
            mark(tensor)
        return unpack({name: stored[a] for name, a in alias.items()}, notes["header"]), notes
    except Exception as error:  # whatever a damaged file makes go wrong
        raise CheckpointError(f"{path} is damaged: {in_short(error)}") from error


def round_of(path: Path, notes: Mapping[str, str]) -> int:
    """Return the round that a checkpoint is of.

    Raises:
        CheckpointError: If its notes do not say a round.
    """
    said = notes.get("round", "")
    if not ROUND.fullmatch(said):
        raise CheckpointError(f"{path} is damaged: round {said[:40]!r} is no number of a round")
    return int(said)


def _checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """What tells damaged contents from whole ones."""
    found = zlib.crc32(json.dumps([sorted(notes.items()), sorted(tensors)]).encode())
    for name in sorted(tensors):
        if tensors[name].numel():
            found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
