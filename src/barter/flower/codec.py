"""Convert payload trees to frames and back: bitwise exact, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from barter.core.errors import PayloadError, summarise_error
from barter.core.payload import DTYPES, Payload, pack, unpack
from barter.flower.frames import Blob, Frame

__all__ = ["decode", "encode"]


def encode(tree: Payload, blobs: Mapping[str, Blob] | None = None) -> Frame:
    """Convert a payload tree to a frame.

    Its blobs are views of the tree's tensors where these are contiguous and on the CPU, otherwise
    copies.

    Args:
        tree: The payload.
        blobs: The blobs of another frame with the same tensors, to be used instead of encoding
            them again.

    Raises:
        PayloadError: If the tree is not a payload.
    """
    tensors, header = pack(tree)
    if blobs is None:
        blobs = {name: _blob(tensor) for name, tensor in tensors.items()}
    return Frame(header, blobs)


def decode(frame: Frame) -> Payload:
    """Convert a frame back to its payload tree, with copies of tensors on the CPU.

    Raises:
        PayloadError: If the blobs are not valid tensors, or do not match the header.
    """
    try:
        tensors = {name: _tensor(name, blob) for name, blob in frame.blobs.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PayloadError(f"invalid tensors: {summarise_error(error)}") from error
    return unpack(tensors, frame.header)


def _blob(tensor: Tensor) -> Blob:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _tensor(name: str, blob: Blob) -> Tensor:
    dtype = DTYPES.get(blob.dtype)
    if dtype is None or any(size < 0 for size in blob.shape):
        raise PayloadError(f"{name}: no tensor has dtype {blob.dtype} and shape {blob.shape}")
    if len(blob.data) != math.prod(blob.shape) * dtype.itemsize:
        raise PayloadError(
            f"{name}: {len(blob.data)} bytes do not make {blob.shape} of {blob.dtype}"
        )
    if not blob.data:
        return torch.empty(blob.shape, dtype=dtype)
    # The clone is in torch's own memory, which client and server share copy-on-write.
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).clone().reshape(blob.shape)
