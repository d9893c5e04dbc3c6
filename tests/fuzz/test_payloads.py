"""Messages of strangers: a tree, or an error of one line; and no memory that did not come with it."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from barter.core.payload import leaves, pack, unpack
from barter.flower.codec import decode, encode
from barter.flower.frames import FRAME_LENGTH, Blob, Frame, receive, send
from tests.fuzz.limits import EDGES, Cases, damaged, one_line

TREE = {
    "ask": "call",
    "args": ({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}, [1, 2.5, None, True]),
    "image": torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last),
    7: "seven",
}
STRANGE = (
    None,
    True,
    -1,
    2**70,
    0.5,
    "x",
    "float",
    [],
    {},
    [["a", 1]],
    {"tensor": "t9"},
    {"float": "0x1p9999"},
    "\ud800",
)


def swapped(rng: random.Random, tree: Any) -> Any:
    """The tree of a header with a value in another one's place."""
    if not isinstance(tree, dict | list) or not tree or not rng.randrange(6):
        return rng.choice(STRANGE)
    if isinstance(tree, list):
        at = rng.randrange(len(tree))
        return [*tree[:at], swapped(rng, tree[at]), *tree[at + 1 :]]
    key = rng.choice(sorted(tree))
    if rng.randrange(6):
        return {**tree, key: swapped(rng, tree[key])}
    return {rng.choice(("tensor", "dict", "list", "tuple", "float", "set")): tree[key]}


def understood(frame: Frame) -> None:
    with one_line():
        tree = decode(frame)
        for _, leaf in leaves(tree):
            assert not isinstance(leaf, torch.Tensor) or leaf.numel() < 100


def test_headers(cases: Cases) -> None:
    frame = encode(TREE)
    for rng in cases(600):
        header = json.dumps(swapped(rng, json.loads(frame.header)))
        understood(
            Frame(
                header if rng.randrange(3) else damaged(rng, header.encode()).decode("latin-1"),
                frame.blobs,
            )
        )


def test_tensors(cases: Cases) -> None:
    frame = encode(TREE)
    for rng in cases(600):
        blobs: dict[str, Blob] = dict(frame.blobs)
        name = rng.choice(sorted(blobs))
        shape: tuple[Any, ...] = tuple(
            rng.choice((*EDGES, -1, 3, 0)) for _ in range(rng.randrange(5))
        )
        dtype = rng.choice(
            ("float32", "bool", "object", "complex64", "", "bfloat16", blobs[name].dtype)
        )
        blobs[name] = Blob(
            dtype, shape, rng.choice((blobs[name].data, b"", rng.randbytes(rng.randrange(40))))
        )
        understood(Frame(frame.header, blobs))


def test_frames(cases: Cases) -> None:
    """What comes in over a socket; who goes away in the middle has gone away."""
    here, there = socket.socketpair()
    send(here, encode(TREE))
    whole = there.recv(2**20)
    for rng in cases(400):
        here, there = socket.socketpair()
        with here, there:
            here.sendall(damaged(rng, whole))
            here.shutdown(socket.SHUT_WR)
            with one_line():
                try:
                    frame = receive(there)
                except ConnectionResetError:
                    continue
                decode(frame)


@pytest.mark.parametrize("length", [2**40, 2**63])
def test_a_few_bytes_do_not_choose_how_much_memory_is_taken(length: int) -> None:
    table = [["t0", "float32", [length // 4], length]]
    head = json.dumps(['{"tensor": "t0"}', table]).encode()
    for message in (
        FRAME_LENGTH.pack(length) + b"[",
        FRAME_LENGTH.pack(len(head)) + head + b"1234",
    ):
        here, there = socket.socketpair()
        with here, there, one_line():
            here.sendall(message)
            here.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionResetError):
                receive(there)


DEEP: list[Callable[[int], str]] = [lambda n: "[" * n, lambda n: '{"list": [' * n + "1" + "]}" * n]


@pytest.mark.parametrize("deep", DEEP)
def test_deep_trees(deep: Callable[[int], str]) -> None:
    for depth in (100, 300, 900, 100_000):
        understood(Frame(deep(depth), {}))


def test_what_is_whole_arrives() -> None:
    tensors, header = pack(TREE)
    assert unpack(tensors, header).keys() == TREE.keys()
