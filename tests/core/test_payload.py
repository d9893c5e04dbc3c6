from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from barter.core.errors import PayloadError
from barter.core.images import Spec
from barter.core.payload import DEPTH, DTYPES, isolate, leaves, nbytes, pack, unpack
from barter.models.generators import Decoder
from tests.conftest import same


def _tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(dtype)


tensors = st.builds(
    _tensor,
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(),
    st.floats(allow_nan=False),
)
trees = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(equal(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@given(trees)
def test_pack_and_unpack_are_inverse(tree: Any) -> None:
    tensors, header = pack(tree)
    assert all(isinstance(t, torch.Tensor) for t in tensors.values())
    json.loads(header)
    assert equal(unpack(tensors, header), tree)


@given(trees)
def test_isolated_trees_are_equal_and_apart(tree: Any) -> None:
    before = unpack({k: v.clone() for k, v in pack(tree)[0].items()}, pack(tree)[1])
    copy = isolate(tree)
    assert equal(copy, tree)
    assert nbytes(copy) == nbytes(tree)
    for _, leaf in leaves(copy):
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(1)
    assert equal(tree, before)


def test_the_sender_cannot_change_what_was_sent() -> None:
    sent = {"w": torch.zeros(3)}
    arrived = isolate(sent)
    sent["w"] += 1
    sent["more"] = torch.ones(1)
    assert arrived.keys() == {"w"}
    assert arrived["w"].tolist() == [0, 0, 0]


def test_a_model_that_goes_on_training_does_not_change_the_weights_it_sent() -> None:
    layer = nn.Linear(2, 1)
    sent = isolate(layer.state_dict())
    before = sent["weight"].clone()
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(sent["weight"], before)
    assert not torch.equal(layer.weight, before)


def test_memory_that_is_not_torchs_own_is_copied() -> None:
    array = np.zeros(3, dtype=np.float32)
    arrived = isolate(torch.from_numpy(array))
    array[0] = 7
    assert arrived.tolist() == [0, 0, 0]


def test_a_slice_does_not_keep_the_whole_alive() -> None:
    whole = torch.arange(1000.0)
    arrived = isolate(whole[:2])
    assert arrived.untyped_storage().nbytes() == 8


def test_bytes_by_hand() -> None:
    tree = {
        "a": torch.zeros(2, 3),
        "b": [torch.zeros(5, dtype=torch.uint8), 7, 0.5],
        "c": ("é", True, None),
    }
    assert nbytes(tree) == 2 * 3 * 4 + 5 + 8 + 8 + 2 + 1 + 0


def test_the_decoder_of_the_paper_has_its_size() -> None:
    decoder = Decoder(512, Spec(3, 32, 32, 100, (0.5,) * 3, (0.5,) * 3))
    assert sum(p.numel() for p in decoder.parameters()) == 4_426_051
    assert nbytes(decoder.state_dict()) == 17_706_820


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": {"b": object()}}, "payload.a.b"),
        ([1, {2, 3}], r"payload\[1\]"),
        ({"x": np.float32(1)}, "payload.x"),
        ({"x": np.zeros(2)}, "payload.x"),
        ({(1, 2): 3}, "key"),
        ({"x": 2**63}, "payload.x: an integer of more than 64 bits"),
        ({"x": -(10**400)}, "payload.x"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "payload.x"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "payload.x"),
        (lambda: 1, "payload"),
        (b"bytes", "payload"),
    ],
)
def test_what_is_no_payload_is_refused_and_located(tree: Any, place: str) -> None:
    for function in (isolate, pack, nbytes):
        with pytest.raises(PayloadError, match=place):
            function(tree)


def test_an_ordered_dict_travels_as_a_dict() -> None:
    assert type(isolate(OrderedDict(a=1))) is dict


def test_damaged_headers_are_refused() -> None:
    for header in ('{"tensor": "t9"}', "{", '{"strange": 1}', '{"float": "x"}', '{"a": 1, "b": 2}'):
        with pytest.raises(PayloadError):
            unpack({}, header)


def test_integers_that_do_not_fit_into_64_bits_are_refused_on_arrival() -> None:
    header = pack({"x": 1})[1]
    assert unpack({}, header) == {"x": 1}
    for number in (2**63, -(2**63) - 1, 10**400):
        with pytest.raises(PayloadError, match="more than 64 bits"):
            unpack({}, header.replace("1", str(number)))


def test_a_state_dict_round_trips() -> None:
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    assert same(dict(unpack(*pack(state))), dict(state))


def test_a_tensor_without_values_does_not_travel() -> None:
    with pytest.raises(PayloadError, match=r"answer\.w: a tensor on the meta device"):
        list(leaves({"w": torch.zeros(2, device="meta")}, "answer"))


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_a_tree_that_arrives_is_of_limited_depth(kind: str) -> None:
    def nested(depth: int) -> str:
        start, end = ('{"dict": [["a", ', "]]}") if kind == "dict" else (f'{{"{kind}": [', "]}")
        return start * depth + "1" + end * depth

    tree = unpack({}, nested(DEPTH))
    assert [leaf for _, leaf in leaves(tree)] == [1]
    with pytest.raises(PayloadError, match=f"nested more than {DEPTH} deep"):
        unpack({}, nested(DEPTH + 2))


@pytest.mark.parametrize("tree", [{"a": "\ud800"}, {"\ud800": 1}, ["ok", "x\udfff"]])
def test_text_that_no_message_can_hold_is_refused(tree: Any) -> None:
    """It ended the run where the bytes of an answer were counted."""
    with pytest.raises(PayloadError, match="it is no valid text"):
        nbytes(tree)
    assert nbytes({"a": "ü"}) == 2
