from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barter.core.errors import PayloadError
from barter.core.payload import nbytes
from barter.ops.compress import compress_update, decompress_update, rank_for_energy


def test_energy_is_of_squares_and_one_value_always_stays() -> None:
    singular = torch.tensor([3.0, 1.0, 1.0])  # squares 9, 1, 1
    assert [rank_for_energy(singular, share) for share in (0.5, 0.81, 0.83, 0.95, 1.0)] == [
        1,
        1,
        2,
        3,
        3,
    ]
    assert rank_for_energy(torch.tensor([1.0, 1.0]), 0.98) == 2, "all are needed, and all are there"
    assert rank_for_energy(torch.zeros(4), 0.95) == 1


def test_a_head_with_a_flat_spectrum_does_not_vanish() -> None:
    head = torch.linalg.qr(torch.randn(40, 10, generator=torch.Generator().manual_seed(0)))[
        0
    ].T.contiguous()
    for energy in (0.5, 0.95, 0.98, 1.0):
        back = decompress_update(compress_update({"head": head}, energy), {"head": head})["head"]
        assert float(back.square().sum()) >= energy * float(head.square().sum()) - 1e-4


def test_what_is_of_low_rank_travels_in_fewer_bytes_and_comes_back() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 1, generator=draw) @ torch.randn(1, 20, generator=draw)
    kernel = (torch.randn(16, 1, generator=draw) @ torch.randn(1, 72, generator=draw)).view(
        16, 8, 3, 3
    )
    state = {
        "m": matrix,
        "k": kernel.to(memory_format=torch.channels_last),
        "b": torch.randn(5),
        "n": torch.tensor(7),
    }
    packed = compress_update(state, 0.98)
    assert nbytes(packed) == 4 * (30 + 20 + 16 + 72 + 5) + 8
    back = decompress_update(packed, state)
    assert back["n"].item() == 7
    for name in ("m", "k", "b"):
        assert torch.allclose(back[name], state[name], atol=1e-5)


def test_what_would_grow_travels_as_it_is() -> None:
    eye = {"w": torch.eye(6)}
    assert nbytes(compress_update(eye, 0.98)) == nbytes(eye)
    assert torch.equal(decompress_update(compress_update(eye, 0.98), eye)["w"], eye["w"])


def test_an_update_of_another_network_is_refused() -> None:
    packed = compress_update({"w": torch.ones(40, 30), "b": torch.ones(3)}, 0.95)
    with pytest.raises(
        PayloadError, match=r"does not fit the network: w is \(40, 1\) of torch.float32, \(1, 30\)"
    ):
        decompress_update(packed, {"w": torch.ones(30, 30), "b": torch.ones(3)})
    with pytest.raises(PayloadError, match="has 2 tensors, the network 1"):
        decompress_update(packed, {"w": torch.ones(40, 30)})
    like = {"w": torch.ones(40, 30), "b": torch.ones(3)}
    for part in (
        [],
        [torch.ones(40, 30).double()],
        [torch.ones(40, 31), torch.ones(31, 30)],
        [torch.ones(())] * 2,
    ):
        with pytest.raises(PayloadError, match="does not fit the network: w is"):
            decompress_update([part, packed[1]], like)


def test_few_numbers_choose_no_allocation() -> None:
    wide = torch.ones(1).expand(10**8)  # their product would have 10**16 entries
    with pytest.raises(PayloadError, match="does not fit the network"):
        decompress_update([[wide[:, None], wide[None]]], {"w": torch.ones(4, 4)})


@settings(max_examples=30)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    true_rank=st.integers(1, 40),
    noise=st.sampled_from([0.0, 1e-3, 1.0]),
    energy=st.sampled_from([0.5, 0.9, 0.95, 0.98]),
    seed=st.integers(0, 1000),
)
def test_factors_keep_what_those_of_an_svd_keep(
    rows: int, columns: int, true_rank: int, noise: float, energy: float, seed: int
) -> None:
    """Wide, tall and rank-deficient matrices alike."""
    draw = torch.Generator().manual_seed(seed)
    low = torch.randn(rows, true_rank, generator=draw) @ torch.randn(
        true_rank, columns, generator=draw
    )
    matrix = low + noise * torch.randn(rows, columns, generator=draw)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = rank_for_energy(s, energy)
    parts = compress_update({"w": matrix}, energy)[0]
    if kept * (rows + columns) >= rows * columns:
        assert len(parts) == 1
        return
    assert [part.shape for part in parts] == [(rows, kept), (kept, columns)]
    best = (u[:, :kept] * s[:kept]) @ v[:kept]
    whole = float(matrix.double().norm())
    assert float((parts[0].double() @ parts[1].double() - best).norm()) < 1e-5 * whole


def test_a_kernel_has_the_factors_of_its_matrix() -> None:
    draw = torch.Generator().manual_seed(0)
    kernel = torch.randn(160, 20, 3, 3, generator=draw).to(memory_format=torch.channels_last)
    kernel = kernel * torch.logspace(0, -3, 160).view(-1, 1, 1, 1)  # some outputs hardly change
    matrix = kernel.reshape(160, 180)
    singular = torch.linalg.svdvals(matrix.double())
    (parts,) = compress_update({"w": kernel}, 0.95)
    assert parts[0].shape[1] == rank_for_energy(singular, 0.95)
    assert parts[0].shape[1] * (160 + 180) < 160 * 180
    back = decompress_update([parts], {"w": kernel})["w"]
    lost = float((back - kernel).double().square().sum() / kernel.double().square().sum())
    kept = parts[0].shape[1]
    expected = float(singular[kept:].square().sum() / singular.square().sum())
    assert lost == pytest.approx(expected, rel=1e-4)


def test_a_change_of_nothing_travels_as_one_value() -> None:
    parts = compress_update({"w": torch.zeros(40, 30)}, 0.95)[0]
    assert [part.shape for part in parts] == [(40, 1), (1, 30)]
    assert not decompress_update([parts], {"w": torch.zeros(40, 30)})["w"].any()


def test_no_layer_is_decomposed_by_an_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes several times as long for the layers of usual networks."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("svd")

    monkeypatch.setattr(torch.linalg, "svd", refuse)
    for shape in ((8, 32), (32, 8)):
        compress_update({"w": torch.ones(shape)}, 0.95)
