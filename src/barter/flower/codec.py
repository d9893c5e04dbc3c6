"""Payload trees as frames, and back: exact to the bit, and never pickled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from barter.core.errors import PayloadError, in_short
from barter.core.payload import DTYPES, Payload, pack, unpack
from barter.flower.frames import Blob, Frame

__all__ = ["decode", "encode"]


def encode(tree: Payload, blobs: Mapping[str, Blob] | None = None) -> Frame:
    """The tree as it travels: with views of its tensors, or the blobs that another tree of the same tensors has."""
    tensors, header = pack(tree)
    return Frame(
        header,
        {name: _blob(tensor) for name, tensor in tensors.items()} if blobs is None else blobs,
    )


def decode(frame: Frame) -> Payload:
    """The tree that travelled; whatever does not fit together is refused."""
    try:
        tensors = {name: _tensor(name, blob) for name, blob in frame.blobs.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PayloadError(f"tensors that are none: {in_short(error)}") from error
    return unpack(tensors, frame.header)


def _blob(tensor: Tensor) -> Blob:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _tensor(name: str, blob: Blob) -> Tensor:
    dtype = DTYPES.get(blob.dtype)
    if dtype is None or any(size < 0 for size in blob.shape):
        raise PayloadError(f"{name}: a tensor of {blob.dtype} and shape {blob.shape} is none")
    if len(blob.data) != math.prod(blob.shape) * dtype.itemsize:
        raise PayloadError(
            f"{name}: {len(blob.data)} bytes do not make {blob.shape} of {blob.dtype}"
        )
    if not blob.data:
        return torch.empty(blob.shape, dtype=dtype)
    # A clone in torch's own memory: parties share it copy on write.
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).clone().reshape(blob.shape)
