"""Messages between processes of one user."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from barter.core.errors import PayloadError
from barter.core.payload import DTYPES
from barter.flower.codec import decode, encode
from barter.flower.frames import DONE, Blob, Frame, ask_worker, receive, send, serve_frames

dtypes = st.sampled_from(list(DTYPES.values()))


@st.composite
def tensors(draw: Callable[[Any], Any]) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(-5, 5, shape, generator=generator).to(draw(dtypes))
    return values.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else values


trees = st.recursive(
    st.one_of(
        tensors(),
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        laid_out = (
            one.stride() == other.stride() or min(one.shape, default=0) < 2
        )  # where there is one way only
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and laid_out
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@given(trees)
def test_a_tree_arrives_as_it_left(tree: Any) -> None:
    here, there = socket.socketpair()
    sender = threading.Thread(target=send, args=(here, encode(tree)))
    sender.start()
    arrived = decode(receive(there))
    sender.join()
    assert equal(arrived, tree)


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (Blob("float32", (3,), b"1234"), "4 bytes do not make"),
        (Blob("object", (1,), b"1"), "no tensor has dtype object"),
        (Blob("float32", (-1,), b""), "shape"),
    ],
)
def test_what_does_not_fit_together_is_refused(blob: Blob, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        decode(Frame('{"tensor": "t0"}', {"t0": blob}))


@pytest.fixture
def door(tmp_path: Path) -> Path:
    return tmp_path / "door"


def serving(door: Path, answer: Callable[[Frame], Frame]) -> list[str]:
    lost: list[str] = []
    threading.Thread(
        target=serve_frames, args=(door, answer, lambda: lost.append("lost")), daemon=True
    ).start()
    while not door.exists():
        time.sleep(0.01)
    return lost


def test_who_leaves_without_a_word_is_missed(door: Path) -> None:
    lost = serving(door, lambda frame: Frame(frame.header.upper(), {}))
    reply, polite = ask_worker(door, Frame("hello", {}), time.monotonic() + 5)
    assert reply.header == "HELLO"
    polite.sendall(DONE)
    polite.close()
    time.sleep(0.2)
    assert lost == []
    _, killed = ask_worker(door, Frame("hello", {}), time.monotonic() + 5)
    killed.close()
    time.sleep(0.2)
    assert lost == ["lost"]


def test_only_this_user_may_open_the_door(door: Path) -> None:
    serving(door, lambda frame: frame)
    assert stat.S_IMODE(os.stat(door).st_mode) & 0o077 == 0


def test_a_worker_that_dies_is_asked_again_but_not_for_ever(door: Path) -> None:
    asked = []

    def dies(frame: Frame) -> Frame:
        asked.append(frame.header)
        if len(asked) < 3:
            raise ConnectionResetError
        return frame

    serving(door, dies)
    reply, _ = ask_worker(door, Frame("x", {}), time.monotonic() + 10)
    assert reply.header == "x"
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(ConnectionError, match="died 2 times over this call"):
        ask_worker(door, Frame("x", {}), time.monotonic() + 10, tries=2)


def test_nobody_is_there(door: Path) -> None:
    with pytest.raises(ConnectionError, match="is `barter site` running"):
        ask_worker(door, Frame("x", {}), time.monotonic() + 0.6)


@pytest.mark.parametrize("module", ["client_app", "node"])
def test_what_stands_between_flower_and_a_worker_loads_no_torch(module: str) -> None:
    pytest.importorskip("flwr")
    code = f"import sys, barter.flower.{module}; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
