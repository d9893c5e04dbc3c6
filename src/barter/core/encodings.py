"""Encodings of single tensors at the wire, which trade precision for bytes.

`encode_tensor` makes an `EncodedTensor`; `EncodedTensor.decode` restores a tensor of the same shape
and dtype. A coded tensor travels as a small dict of a payload (`EncodedTensor.to_payload`);
`EncodedTensor.from_payload` reads it from an untrusted party and checks every size before anything
is allocated.

| encoding | bytes per value | values |
|---|---|---|
| exact | as in memory | all |
| half | 2 | float16, with a power of two per tensor that prevents overflow and underflow |
| bfloat16 | 2 | bfloat16 |
| int8 | 1 | 256 levels of the largest magnitude of each row |
| int4 | 0.5 | 16 levels of the square root, so that small values have finer ones |
| uint8 | 1 | 256 levels between the extremes of each channel of images |
| webp | less | the same, as lossless WebP of sheets of many images |
| webp-7bit, webp-6bit | less | the same with 128 or 64 levels; images of bytes keep theirs |
| webp-90, webp-75 | less | as uint8, then lossy WebP of this quality |
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import torch
from PIL import Image
from torch import Tensor

from barter.core.errors import PayloadError, summarise_error
from barter.core.payload import DTYPES, Payload

__all__ = [
    "ENCODED",
    "ENCODINGS",
    "IMAGE_ENCODINGS",
    "EncodedTensor",
    "EncodingName",
    "RowAxis",
    "encode_tensor",
    "is_image_batch",
]

EncodingName: TypeAlias = Literal[
    "exact",
    "half",
    "bfloat16",
    "int8",
    "int4",
    "uint8",
    "webp",
    "webp-7bit",
    "webp-6bit",
    "webp-90",
    "webp-75",
]
# Which values of a tensor share a scale: those of an index of the first axis (the output channel of
# weights), those along the last axis (an embedding), or all.
RowAxis: TypeAlias = Literal["first", "last", "all"]
T = TypeVar("T")
R = TypeVar("R")

ENCODINGS: Final = get_args(EncodingName)
IMAGE_ENCODINGS: Final = ("uint8", "webp", "webp-7bit", "webp-6bit", "webp-90", "webp-75")
WEBP_QUALITY: Final = {"webp-90": 90, "webp-75": 75}  # The others are lossless.
LARGEST_PIXEL: Final = {"webp-7bit": 127, "webp-6bit": 63}  # The others have 256 levels.
# The key that distinguishes a coded tensor from other dicts of a payload.
ENCODED = "wire.encoding"
KEYS = frozenset(
    {ENCODED, "dtype", "shape", "order", "rows", "signed", "deflated", "scales", "data"}
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHEET_SIDE = 1024  # Largest side of a sheet of images in pixels, unless a single image is larger.
MAX_SIDE = 16383  # Largest side of a WebP image.
MAX_AXES = 16  # Largest number of axes of a coded tensor.
SHORT_ROW = 32  # Rows of fewer values share one scale, which would be many of their bytes.
OVERHEAD = 64  # Bytes of a tensor's description, which small tensors do not save.
LARGEST = 3e38  # Of a number that is encoded: larger ones would become infinite.
DEFLATE_LEVEL = 1
WEBP_METHOD = 2  # Effort from 0 to 6: more is slower and hardly smaller.
LOSSLESS_EFFORT = 20  # Effort from 0 to 100.


def is_image_batch(tensor: Tensor) -> bool:
    """Return whether a tensor has the shape of grey or colour images (n, C, H, W).

    C is 1 or 3, H and W at most 16383; dtype and values do not count.
    """
    return tensor.ndim == 4 and tensor.shape[1] in (1, 3) and max(tensor.shape[2:]) <= MAX_SIDE


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor as it is sent.

    Attributes:
        encoding: The name of the encoding.
        dtype: The dtype of the decoded tensor.
        shape: Its shape.
        order: Its axes in memory order; empty if it is contiguous.
        rows: Which values share a scale.
        signed: Whether int8 or int4 levels have a sign.
        deflated: Whether the data is compressed by zlib.
        scales: float32 numbers that the levels are multiplied by.
        data: One-dimensional uint8 tensors: the levels, or sheets of images.
    """

    encoding: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    rows: RowAxis
    signed: bool
    deflated: bool
    scales: Tensor
    data: tuple[Tensor, ...]
    # The levels before lossless compression, if this process has encoded the tensor.
    levels: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of data and scales; dtype, shape and names do not count."""
        return self.scales.numel() * 4 + sum(part.numel() for part in self.data)

    @property
    def decoded_nbytes(self) -> int:
        """Return the size in bytes of the decoded tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_payload(self) -> Payload:
        """Return the coded tensor as the dict that is sent; `from_payload` reads it."""
        return {
            ENCODED: self.encoding,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "order": list(self.order),
            "rows": self.rows,
            "signed": self.signed,
            "deflated": self.deflated,
            "scales": self.scales,
            "data": list(self.data),
        }

    @classmethod
    def from_payload(cls, tree: Payload, path: str = "payload") -> EncodedTensor:
        """Read and check a coded tensor of an untrusted party, without decoding it.

        Args:
            tree: What `to_payload` returned.
            path: Its place in the payload, for messages.

        Raises:
            PayloadError: If it is malformed, or its data do not fit its shape. Compressed data are
                checked when they are decoded.
        """
        _require(isinstance(tree, Mapping) and tree.keys() == KEYS, path, "keys")
        dtype = DTYPES.get(str(tree["dtype"]))
        shape = _read_integers(tree["shape"], path)
        order = _read_integers(tree["order"], path)
        data = tree["data"]
        scales = tree["scales"]
        _require(tree[ENCODED] in ENCODINGS[1:], path, f"encoding {str(tree[ENCODED])[:40]!r}")
        _require(dtype in (*FLOATS, torch.uint8), path, "dtype")
        assert dtype is not None
        _require(bool(shape) and all(shape), path, "shape")
        _require(not order or sorted(order) == list(range(len(shape))), path, "order of axes")
        _require(tree["rows"] in get_args(RowAxis), path, "rows")
        flags = (tree["signed"], tree["deflated"])
        _require(all(isinstance(flag, bool) for flag in flags), path, "flags")
        _require(isinstance(data, list), path, "data")
        tensors = all(isinstance(part, Tensor) and part.dtype == torch.uint8 for part in data)
        _require(tensors and all(part.ndim == 1 for part in data), path, "data")
        _require(
            isinstance(scales, Tensor) and scales.dtype == torch.float32 and scales.ndim == 1,
            path,
            "scales",
        )
        coded = cls(tree[ENCODED], dtype, shape, order, tree["rows"], *flags, scales, tuple(data))
        coded._require_sizes(path)
        return coded

    def _require_sizes(self, path: str) -> None:
        """Raise PayloadError if data or scales lack the sizes that the shape implies."""
        is_image = self.encoding in IMAGE_ENCODINGS
        if is_image:
            holds = len(self.shape) == 4 and self.shape[1] in (1, 3)
            _require(holds and max(self.shape[2:]) <= MAX_SIDE, path, "shape of images")
        else:
            _require(self.dtype in FLOATS, path, "dtype")
        _require(self.scales.numel() == self._scale_count(), path, "number of scales")
        if self.encoding.startswith("webp"):
            sheets = _sheet_sizes(self.shape)
            _require(len(self.data) == len(sheets) and not self.deflated, path, "sheets of images")
            for part, size in zip(self.data, sheets, strict=True):
                found = _webp_size(part, path)
                _require(found == size, path, f"a sheet of {found} pixels instead of {size}")
            return
        _require(len(self.data) == 1, path, "data")
        if not self.deflated:
            found_bytes = self.data[0].numel()
            expected = self._level_bytes()
            _require(found_bytes == expected, path, f"{found_bytes} bytes instead of {expected}")

    def _level_bytes(self) -> int:
        """Return the bytes of the levels before compression, by encoding and shape."""
        numel = math.prod(self.shape)
        if self.encoding in ("half", "bfloat16"):
            return 2 * numel
        return (numel + 1) // 2 if self.encoding == "int4" else numel

    def _scale_count(self) -> int:
        """Return the number of scales that encoding, shape, dtype and rows imply."""
        if self.encoding == "half":
            return 1
        if self.encoding in ("int8", "int4"):
            return _row_count(self.shape, self.rows)
        if self.encoding in IMAGE_ENCODINGS and self.dtype != torch.uint8:
            return 2 * self.shape[1]
        return 0

    @cached_property
    def value(self) -> Tensor:
        """Return the tensor that a receiver decodes, computed once.

        In the process that encoded it, lossless compression need not be undone.
        """
        if self.levels is not None and self.encoding not in WEBP_QUALITY:
            return self._restore(self.levels)
        return self.decode()

    def decode(self, path: str = "payload") -> Tensor:
        """Return the decoded tensor, on the device of the scales.

        Args:
            path: The tensor's place in the payload, for messages.

        Raises:
            PayloadError: If the data is damaged.
        """
        device = self.scales.device
        if self.encoding.startswith("webp"):
            levels = _read_sheets(self.data, self.shape, path)
        elif self.deflated:
            levels = _inflate(self.data[0], self._level_bytes(), path)
            if self.encoding in ("half", "bfloat16"):
                levels = levels.view(2, -1).T.contiguous().view(-1)
        else:
            levels = self.data[0]
        return self._restore(levels.to(device))

    def _restore(self, levels: Tensor) -> Tensor:
        """Return the tensor that uncompressed levels stand for."""
        tensor = self._scale(levels).reshape(self.shape)
        if not self.order:
            return tensor
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return tensor.permute(self.order).contiguous().permute(inverse)

    def _scale(self, levels: Tensor) -> Tensor:
        """Return the numbers that uncompressed levels stand for."""
        scales = self.scales.to(levels.device)
        if self.encoding == "half":
            # Received bytes may begin at any address; a copy is aligned for two bytes.
            halves = levels.clone().view(torch.float16)
            return (halves.float() * scales).to(self.dtype)
        if self.encoding == "bfloat16":
            return levels.clone().view(torch.bfloat16).to(self.dtype)
        if self.encoding in IMAGE_ENCODINGS:
            if self.dtype == torch.uint8:
                return levels.clone()
            least = scales[: self.shape[1]].unsqueeze(1)
            step = scales[self.shape[1] :].unsqueeze(1)
            values = levels.view(self.shape[0], self.shape[1], -1).float() * step + least
            return values.to(self.dtype)
        if self.encoding == "int4":
            numel = math.prod(self.shape)
            codes = torch.stack([levels & 15, levels >> 4], 1).view(-1)[:numel].float()
            roots = (codes - 7) / 7 if self.signed else codes / 15
            values = roots * roots.abs()
        elif self.signed:
            values = levels.view(torch.int8).float()
        else:
            values = levels.float()
        rows = values.view(len(scales), -1) if len(scales) else values.view(0, 0)
        return (rows * scales.unsqueeze(1)).to(self.dtype)


def encode_tensor(
    tensor: Tensor,
    encoding: str,
    *,
    rows: RowAxis = "last",
    deflate: bool = False,
    noise: torch.Generator | None = None,
) -> EncodedTensor | None:
    """Encode a tensor, or return None if it is to be sent as it is.

    Args:
        tensor: The tensor, which is not changed.
        encoding: One of `ENCODINGS`; not checked.
        rows: Which values share a scale, for int8 and int4. With "last", rows of fewer than 32
            values all share one.
        deflate: Compress the levels by zlib where that makes them smaller; not for webp.
        noise: Rounds int8 and int4 at random to one of the two nearest levels, so that the mean of
            decoded values is the value; None rounds to the nearest.

    Returns:
        The coded tensor. None for "exact", and if the tensor is empty, has fewer than two axes, has
        a dtype or shape that does not fit the encoding, holds NaN, infinity or a magnitude of 3e38
        or more, or would not be at least 64 bytes smaller.
    """
    values = tensor.detach()
    if encoding == "exact" or values.ndim < 2 or not values.numel():
        return None
    is_image = encoding in IMAGE_ENCODINGS
    if is_image and not is_image_batch(values):
        return None
    if values.dtype not in ((*FLOATS, torch.uint8) if is_image else FLOATS):
        return None
    if values.is_floating_point() and not float(values.abs().amax()) < LARGEST:
        return None
    coded = _quantise(values.contiguous(), encoding, rows, noise)
    if coded.encoding.startswith("webp"):
        assert coded.levels is not None
        sheets = _write_sheets(coded.levels, coded.shape, coded.encoding)
        coded = replace(coded, data=tuple(sheets))
    elif deflate:
        coded = _deflate(coded)
    if coded.nbytes + OVERHEAD >= values.numel() * values.element_size():
        return None
    if values.is_contiguous():
        return coded
    order = sorted(range(values.ndim), key=lambda axis: -values.stride()[axis])
    return replace(coded, order=tuple(order))


def _quantise(
    values: Tensor, encoding: str, rows: RowAxis, noise: torch.Generator | None
) -> EncodedTensor:
    """Return a contiguous tensor as levels and scales, not compressed yet.

    Rows along the last axis that are shorter than 32 values get one scale together.
    """
    signed = False
    scales = values.new_zeros(0, dtype=torch.float32)
    if encoding == "half":
        # A power of two, so that multiplying by it is exact.
        _, exponent = math.frexp(float(values.abs().amax()))
        scales = scales.new_full((1,), math.ldexp(1.0, min(max(exponent, -120), 127)))
        levels = (values.float() / scales).half().view(-1).view(torch.uint8)
    elif encoding == "bfloat16":
        levels = values.bfloat16().view(-1).view(torch.uint8)
    elif encoding in IMAGE_ENCODINGS:
        levels, scales = _to_pixels(values, LARGEST_PIXEL.get(encoding, 255))
    else:
        row_length = values.numel() // _row_count(tuple(values.shape), rows)
        if rows == "last" and row_length < SHORT_ROW:
            rows = "all"
        matrix = values.float().view(_row_count(tuple(values.shape), rows), -1)
        signed = bool(matrix.amin() < 0)
        to_levels = _to_int4 if encoding == "int4" else _to_int8
        levels, scales = to_levels(matrix, signed, noise)
    shape = tuple(values.shape)
    return EncodedTensor(
        encoding, values.dtype, shape, (), rows, signed, False, scales, (levels,), levels=levels
    )


def _to_int8(matrix: Tensor, signed: bool, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return levels as bytes, and the scale of each row.

    Levels are from -127 to 127 if `signed`, otherwise from 0 to 255. A scale is the row's largest
    magnitude divided by 127 or 255.
    """
    most = 127 if signed else 255
    peaks = matrix.abs().amax(1)
    scales = peaks / most
    # Decoded values must not exceed the largest one, which may be a bound that a contract checks.
    scales = torch.where(scales * most > peaks, scales.nextafter(torch.zeros_like(scales)), scales)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    levels = _round(matrix / divisors.unsqueeze(1), noise).clamp_(-most if signed else 0, most)
    dtype = torch.int8 if signed else torch.uint8
    return levels.to(dtype).view(-1).view(torch.uint8), scales


def _to_int4(matrix: Tensor, signed: bool, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return levels of square roots, two per byte, and each row's largest magnitude.

    Levels are from -7 to 7, stored as 0 to 14, if `signed`; otherwise from 0 to 15.
    """
    most = 7 if signed else 15
    peaks = matrix.abs().amax(1)
    divisors = torch.where(peaks > 0, peaks, torch.ones_like(peaks))
    roots = (matrix.abs() / divisors.unsqueeze(1)).sqrt() * most
    levels = (_round_roots(roots, noise) * matrix.sign()).clamp_(-most, most).view(-1)
    codes = (levels + 7 if signed else levels).to(torch.uint8)
    if len(codes) % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4), peaks


def _round(values: Tensor, noise: torch.Generator | None) -> Tensor:
    """Round to the nearest integer, or at random to one of the two next to a value."""
    if noise is None:
        return values.round()
    return (values + torch.rand(values.shape, generator=noise).to(values.device)).floor()


def _round_roots(roots: Tensor, noise: torch.Generator | None) -> Tensor:
    """Round to the nearest integer, or at random so that squares have the right mean."""
    if noise is None:
        return roots.round()
    lower = roots.floor()
    # Squares of the two levels next to a root are 2 * lower + 1 apart.
    share = (roots.square() - lower.square()) / (2 * lower + 1)
    return lower + (torch.rand(roots.shape, generator=noise).to(roots.device) < share)


def _to_pixels(images: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return images as bytes from 0 to `most`, and the scales that restore them.

    The scales are the least value of each channel over all images, then the step of each channel.
    Images that are bytes already stay as they are, also above `most`, and have no scales.
    """
    if images.dtype == torch.uint8:
        return images.view(-1), torch.zeros(0, device=images.device)
    values = images.float()
    least = values.amin((0, 2, 3))
    step = (values.amax((0, 2, 3)) - least) / most
    divisors = torch.where(step > 0, step, torch.ones_like(step)).view(1, -1, 1, 1)
    levels = ((values - least.view(1, -1, 1, 1)) / divisors).round().clamp_(0, most)
    return levels.to(torch.uint8).view(-1), torch.cat([least, step])


def _row_count(shape: Sequence[int], rows: RowAxis) -> int:
    """Return the number of rows that have a scale of their own."""
    if rows == "all":
        return 1
    return shape[0] if rows == "first" else math.prod(shape[:-1])


def _to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a one-dimensional uint8 tensor."""
    return tensor.cpu().contiguous().numpy().tobytes()


def _from_bytes(data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _deflate(coded: EncodedTensor) -> EncodedTensor:
    """Compress levels by zlib, or return them unchanged if that saves under 5 %.

    All first bytes of half-precision numbers come before all second ones, since only those with
    the exponents have frequent values. Levels have no patterns that repeat, only frequent and
    rare values, so Huffman codes alone are as small as zlib's best effort and much faster.
    """
    (levels,) = coded.data
    if coded.encoding in ("half", "bfloat16"):
        # The bytes with the exponents have frequent values, those of the mantissas do not.
        levels = levels.view(-1, 2).T.contiguous().view(-1)
    compressor = zlib.compressobj(DEFLATE_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    data = compressor.compress(_to_bytes(levels)) + compressor.flush()
    if len(data) > 0.95 * levels.numel():
        return coded
    return replace(coded, data=(_from_bytes(data),), deflated=True)


def _inflate(data: Tensor, size: int, path: str) -> Tensor:
    """Decompress data to exactly `size` bytes.

    Larger data are not decompressed, so that they cannot fill the memory.

    Raises:
        PayloadError: If the data are damaged or have another size.
    """
    inflater = zlib.decompressobj()
    try:
        levels = inflater.decompress(_to_bytes(data), size + 1)
    except zlib.error as error:
        raise PayloadError(f"{path} is damaged: {summarise_error(error)}") from error
    if len(levels) != size or not inflater.eof or inflater.unused_data:
        raise PayloadError(f"{path} is damaged: it does not have {size} bytes")
    return _from_bytes(levels)


def _sheet_sizes(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return (width, height) of each sheet that holds images of shape (n, C, H, W)."""
    images, _, height, width = shape
    columns = max(1, SHEET_SIDE // width)
    per_sheet = columns * max(1, SHEET_SIDE // height)
    sizes = []
    for start in range(0, images, per_sheet):
        count = min(per_sheet, images - start)
        in_a_row = min(columns, count)
        sizes.append((in_a_row * width, -(-count // in_a_row) * height))
    return sizes


def _write_sheets(levels: Tensor, shape: Sequence[int], encoding: str) -> list[Tensor]:
    """Return the WebP file of each sheet of `_sheet_sizes`; empty places are black."""
    _, channels, height, width = shape
    images = levels.view(*shape).cpu()
    sheets: list[tuple[tuple[int, int], bytes]] = []
    start = 0
    for size in _sheet_sizes(shape):
        columns, rows = size[0] // width, size[1] // height
        part = images[start : start + columns * rows]
        start += len(part)
        if len(part) < columns * rows:
            filler = part.new_zeros(columns * rows - len(part), *part.shape[1:])
            part = torch.cat([part, filler])
        grid = part.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
        sheets.append((size, grid.contiguous().numpy().tobytes()))
    mode = "L" if channels == 1 else "RGB"

    def write(sheet: tuple[tuple[int, int], bytes]) -> Tensor:
        size, pixels = sheet
        file = io.BytesIO()
        quality = WEBP_QUALITY.get(encoding)
        Image.frombytes(mode, size, pixels).save(
            file,
            "WEBP",
            lossless=quality is None,
            quality=LOSSLESS_EFFORT if quality is None else quality,
            method=WEBP_METHOD,
        )
        return _from_bytes(file.getvalue())

    return _in_threads(write, sheets)


def _read_sheets(data: Sequence[Tensor], shape: Sequence[int], path: str) -> Tensor:
    """Return all pixels of images in WebP files, in one axis, on the CPU.

    The files' sizes must have been compared with the shape (`_require_sizes`).

    Raises:
        PayloadError: If a file is damaged.
    """
    count, channels, height, width = shape

    def read(part: Tensor) -> Tensor:
        try:
            with Image.open(io.BytesIO(_to_bytes(part)), formats=["WEBP"]) as image:
                if image.mode != "RGB":
                    raise PayloadError(f"{path} is damaged: an image of mode {image.mode}")
                (columns, rows) = image.width // width, image.height // height
                pixels = _from_bytes(image.tobytes())
        except (OSError, ValueError, SyntaxError) as error:
            raise PayloadError(f"{path} is damaged: {summarise_error(error)}") from error
        grid = pixels.view(rows, height, columns, width, 3).permute(0, 2, 4, 1, 3)
        return grid.reshape(rows * columns, 3, height, width)

    images = torch.cat(_in_threads(read, data))[:count]
    # A grey image has three equal channels, of which lossy WebP may change the outer two.
    return (images if channels == 3 else images[:, 1:2]).contiguous().view(-1)


def _in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to all items, with as many threads as torch computes with."""
    workers = min(torch.get_num_threads(), len(items))
    if workers < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def _webp_size(file: Tensor, path: str) -> tuple[int, int]:
    """Return width and height from the header of a WebP file.

    Decoders allocate memory for an image as soon as they read its header.

    Raises:
        PayloadError: If it is not the file of a single image without transparency and metadata.
    """
    head = _to_bytes(file[:30])
    if len(head) == 30 and head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
            sides = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
            return sides[0] & 0x3FFF, sides[1] & 0x3FFF
        if head[12:16] == b"VP8L" and head[20] == 0x2F:
            bits = int.from_bytes(head[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise PayloadError(f"{path} is damaged: no WebP image")


def _read_integers(values: Any, path: str) -> tuple[int, ...]:
    """Return a list of at most 16 integers from 0 to 2**40 - 1 as a tuple.

    Raises:
        PayloadError: If it is anything else.
    """
    holds = isinstance(values, list) and len(values) <= MAX_AXES
    holds = holds and all(type(value) is int and 0 <= value < 2**40 for value in values)
    _require(holds, path, "shape")
    return tuple(values)


def _require(holds: bool, path: str, what: str) -> None:
    """Raise PayloadError unless a condition holds; `what` names what is malformed."""
    if not holds:
        raise PayloadError(f"{path} is no valid encoding: {what}")
