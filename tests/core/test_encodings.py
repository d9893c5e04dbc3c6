"""Encodings of single tensors: how far values move, how large they are, and what damage does."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from barter.core import encodings
from barter.core.encodings import EncodedTensor, encode_tensor
from barter.core.errors import PayloadError
from barter.core.payload import pack, unpack
from barter.core.wire_codec import decode_payload

SCALES = [1e-30, 1.0, 1e5, 1e30]
LOSSY = [name for name in encodings.ENCODINGS if name != "exact"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse(*shape: int) -> Tensor:
    """Values of which most are zero, so that zlib makes their levels much smaller."""
    return normal(*shape).sub(1).clamp(min=0)


def photos(count: int = 40, channels: int = 3, side: int = 16) -> Tensor:
    """Smooth images, as bytes."""
    coarse = normal(count, channels, 4, 4).mul(40).add(128)
    size = (side, side)
    smooth = torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=True)
    return smooth.clamp(0, 255).round().to(torch.uint8)


def code(tensor: Tensor, encoding: str, **options: Any) -> EncodedTensor:
    coded = encode_tensor(tensor, encoding, **options)
    assert coded is not None
    return coded


def sent(coded: EncodedTensor) -> Tensor:
    """Decode a tensor from the bytes of its payload, as another process does."""
    tree = unpack(*pack(coded.to_payload()))
    decoded: Tensor = decode_payload(tree, coded.decoded_nbytes)
    assert torch.equal(decoded, coded.value), "one process and two decode the same"
    return decoded


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize("times", SCALES)
@pytest.mark.parametrize(
    ("encoding", "step", "times_smaller"),
    [("half", 2**-11, 1.9), ("bfloat16", 2**-8, 1.9), ("int8", 1 / 253, 3.8), ("int4", 0.16, 7)],
)
def test_values_move_by_less_than_a_step_of_their_row(
    encoding: str, step: float, times_smaller: float, times: float, deflate: bool
) -> None:
    tensor = normal(50, 200) * torch.linspace(0.02, 1, 50)[:, None] * times
    coded = code(tensor, encoding, deflate=deflate)
    decoded = sent(coded)
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    peaks = tensor.abs().amax(1, keepdim=True)
    assert ((decoded - tensor).abs() <= step * peaks).all()
    # No value leaves the range that a contract may check.
    assert (decoded.abs().amax(1) <= tensor.abs().amax(1) * (1 + 2**-8)).all()
    if encoding.startswith("int"):
        assert (decoded.abs().amax(1) <= tensor.abs().amax(1)).all()
    assert times_smaller <= tensor.numel() * 4 / coded.nbytes
    assert coded.deflated == (deflate and coded.nbytes < code(tensor, encoding).nbytes)


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_what_is_not_negative_stays_so_with_twice_the_levels(encoding: str) -> None:
    tensor = normal(30, 64).clamp(min=0)
    signed = normal(30, 64)
    decoded = sent(code(tensor, encoding))
    assert (decoded >= 0).all()
    assert (decoded[tensor == 0] == 0).all()
    error = (decoded - tensor).abs().mean()
    assert error < (sent(code(signed, encoding)) - signed).abs().mean() / 1.5


def test_weights_have_a_scale_for_each_output_channel_and_keep_their_memory_format() -> None:
    weight = (normal(8, 4, 3, 3) * torch.logspace(-6, 0, 8).view(-1, 1, 1, 1)).to(
        memory_format=torch.channels_last
    )
    coded = code(weight, "int8", rows="first")
    decoded = sent(coded)
    assert decoded.stride() == weight.stride()
    peaks = weight.abs().amax((1, 2, 3), keepdim=True)
    assert ((decoded - weight).abs() <= peaks / 253).all()
    assert coded.nbytes == 8 * 36 + 8 * 4


def test_short_rows_share_a_scale() -> None:
    assert code(normal(50, 10), "int8").nbytes == 50 * 10 + 4


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average_and_repeats(encoding: str) -> None:
    tensor = normal(1, 64)

    def rounded(seed: int) -> Tensor:
        return sent(code(tensor, encoding, noise=torch.Generator().manual_seed(seed)))

    assert torch.equal(rounded(1), rounded(1))
    assert not torch.equal(rounded(1), rounded(2))
    # Between the two least levels of int4, 0 and 1/225, a mean of roots would be twice too large.
    small = torch.full((1, 20_000), 0.001)
    small[0, 0] = 1
    decoded = sent(code(small, encoding, noise=torch.Generator().manual_seed(0)))
    assert float(decoded[0, 1:].mean()) == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_bytes_are_lossless_or_nearly_so(channels: int) -> None:
    images = photos(channels=channels)
    lossless = code(images, "webp")
    assert torch.equal(sent(lossless), images)
    assert torch.equal(sent(code(images, "webp-7bit")), images)
    assert torch.equal(sent(code(images, "webp-6bit")), images)
    assert lossless.nbytes < images.numel() / 1.5
    errors = []
    for encoding in ("webp-90", "webp-75"):
        lossy = code(images, encoding)
        assert lossy.nbytes < lossless.nbytes
        errors.append(float((sent(lossy).float() - images.float()).square().mean()))
    assert 0 < errors[0] < errors[1] < 100
    assert encode_tensor(images, "uint8") is None, "they have no fewer bytes"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("encoding", "most"), [("uint8", 255), ("webp", 255), ("webp-7bit", 127), ("webp-6bit", 63)]
)
def test_images_of_floats_have_levels_of_each_channel(
    encoding: str, most: int, dtype: torch.dtype
) -> None:
    images = (photos().float() / 100 * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1) - 1).to(dtype)
    decoded = sent(code(images, encoding))
    assert decoded.dtype == dtype
    low, high = images.float().amin((0, 2, 3)), images.float().amax((0, 2, 3))
    limit = ((high - low) / most * 0.51 + images.float().abs().amax() * 1e-3).view(3, 1, 1)
    assert ((decoded.float() - images.float()).abs() <= limit).all()
    assert 32 < len(decoded[:, 0].unique()) <= most + 1


def test_many_images_have_several_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "SHEET_SIDE", 40)
    images = photos(count=23)
    coded = code(images, "webp")
    assert len(coded.data) == 6
    assert torch.equal(sent(coded), images)
    torch.set_num_threads(2)
    try:
        assert torch.equal(sent(code(images, "webp")), images)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("tensor", "encoding"),
    [
        (torch.arange(100).view(10, 10), "int8"),
        (torch.ones(10, 10, dtype=torch.bool), "half"),
        (torch.ones(10, 10, dtype=torch.float64), "half"),
        (torch.ones(100), "int8"),
        (torch.ones(0, 10), "int8"),
        (torch.tensor([[1.0, float("nan")]]).expand(9, 2), "int8"),
        (torch.tensor([[1.0, float("inf")]]).expand(9, 2), "half"),
        (torch.full((9, 9), 3.4e38), "bfloat16"),
        (torch.ones(9, 9).half(), "half"),
        (torch.ones(2, 2), "int8"),
        (torch.ones(9, 9), "webp"),
        (torch.ones(2, 5, 8, 8), "webp"),
    ],
)
def test_what_cannot_be_encoded_is_sent_as_it_is(tensor: Tensor, encoding: str) -> None:
    assert encode_tensor(tensor, encoding) is None


def changed(tree: Any, **fields: Any) -> Any:
    return {**tree, **fields}


def cut(tree: Any) -> Any:
    return changed(tree, data=[tree["data"][0][:-9], *tree["data"][1:]])


def scratched(tree: Any) -> Any:
    data = tree["data"][0].clone()
    data[40:] = 255 - data[40:]
    return changed(tree, data=[data])


DAMAGES: list[Callable[[Any], Any]] = [
    cut,
    lambda tree: changed(tree, data=[]),
    lambda tree: changed(tree, data=tree["data"][0]),
    lambda tree: changed(tree, data=[tree["data"][0].float()]),
    lambda tree: changed(tree, scales=torch.ones(7)),
    lambda tree: changed(tree, scales=None),
    lambda tree: changed(tree, shape=[2**30, 2**30]),
    lambda tree: changed(tree, shape=[-1, 4]),
    lambda tree: changed(tree, shape=[True, 4]),
    lambda tree: changed(tree, shape=[0, *tree["shape"][1:]]),
    lambda tree: changed(tree, shape=[2, *tree["shape"]]),
    lambda tree: changed(tree, shape="ab"),
    lambda tree: changed(tree, order=[0, 0, 0, 0]),
    lambda tree: changed(tree, rows="none"),
    lambda tree: changed(tree, signed=2),
    lambda tree: changed(tree, dtype="int64"),
    lambda tree: changed(tree, **{encodings.ENCODED: "zip"}),
    lambda tree: changed(tree, more=1),
]


def example(encoding: str) -> tuple[Tensor, EncodedTensor]:
    """Return a tensor and its encoding; "deflated" is int8 with zlib."""
    is_image = encoding == "uint8" or encoding.startswith("webp")
    tensor = photos().float() if is_image else sparse(20, 50)
    deflate = encoding == "deflated"
    return tensor, code(tensor, "int8" if deflate else encoding, deflate=deflate)


@pytest.mark.parametrize("encoding", [*LOSSY, "deflated"])
def test_a_damaged_encoding_is_refused(encoding: str) -> None:
    _, coded = example(encoding)
    tree = coded.to_payload()
    refused = 0
    for damage in DAMAGES:
        damaged = damage(tree)
        if all(damaged[key] is tree.get(key, damaged) for key in damaged):
            continue  # It has no scales that could be missing.
        with pytest.raises(PayloadError, match=r"learn\.x"):
            decode_payload({"x": damaged}, None, "learn")
        refused += 1
    assert refused >= len(DAMAGES) - 1


@pytest.mark.parametrize("encoding", [*LOSSY, "deflated"])
def test_no_encoding_is_decoded_beyond_the_limit(encoding: str) -> None:
    tensor, coded = example(encoding)
    size = tensor.numel() * tensor.element_size()
    assert decode_payload(coded.to_payload(), size).shape == tensor.shape
    with pytest.raises(PayloadError, match=r"MB when decoded, expected at most"):
        decode_payload(coded.to_payload(), size - 1)


@pytest.mark.parametrize("encoding", ["webp", "webp-90", "deflated"])
def test_scratched_data_is_refused_or_has_the_right_shape(encoding: str) -> None:
    deflate = encoding == "deflated"
    tensor = sparse(20, 50) if deflate else photos()
    coded = code(tensor, "int8" if deflate else encoding, deflate=deflate)
    try:
        decoded = decode_payload(scratched(coded.to_payload()))
    except PayloadError:
        return
    assert decoded.shape == tensor.shape


def test_a_small_message_cannot_claim_a_large_tensor() -> None:
    """All sizes are compared before memory is allocated."""
    tree = code(sparse(20, 50), "int8", deflate=True).to_payload()
    bomb = zlib.compress(bytes(50_000_000), 9)
    full = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    tracemalloc.start()
    with pytest.raises(PayloadError, match="does not have 1000 bytes"):
        decode_payload(changed(tree, data=[full]))
    claim = changed(tree, shape=[20, 10_000_000], data=[full])
    with pytest.raises(PayloadError, match=r"800\.0 MB when decoded, expected at most 1\.0"):
        decode_payload(claim, 10**6)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["webp", "webp-90"])
def test_a_large_webp_image_is_refused_by_its_header(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = code(photos(), encoding).to_payload()
    # One image of the largest size, of which a few bytes are enough.
    large = code(torch.zeros(1, 1, 2000, 2000, dtype=torch.uint8), encoding).to_payload()
    monkeypatch.setattr(encodings.Image, "open", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(PayloadError, match=r"a sheet of \(2000, 2000\) pixels"):
        decode_payload(changed(small, data=large["data"]))
    with pytest.raises(PayloadError, match=r"4\.0 MB when decoded"):
        decode_payload(large, 10**6)
    for head in (b"RIFF0000WEBPVP8X" + bytes(20), b"GIF89a" + bytes(30), b""):
        other = torch.tensor(list(head), dtype=torch.uint8)
        with pytest.raises(PayloadError, match="no WebP image"):
            decode_payload(changed(small, data=[other]))
