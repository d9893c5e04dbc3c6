"""Messages over a unix socket, for processes of one user: a JSON header and blobs of bytes. Needs no torch."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from barter.core.errors import PayloadError, in_short

__all__ = ["Blob", "Frame", "ask", "serve"]

LENGTH = struct.Struct(">Q")
CHUNK = 2**20
DONE = b"."  # what a caller says before it leaves


@dataclass(frozen=True)
class Blob:
    """A tensor's bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    """A payload tree on its way: the header that `pack` made, and its tensors as bytes."""

    header: str
    blobs: Mapping[str, Blob]


def send(peer: socket.socket, frame: Frame) -> None:
    table = [
        [name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.blobs.items()
    ]
    head = json.dumps([frame.header, table]).encode()
    peer.sendall(LENGTH.pack(len(head)) + head)
    for blob in frame.blobs.values():
        peer.sendall(blob.data)


def receive(peer: socket.socket) -> Frame:
    (size,) = LENGTH.unpack(_exactly(peer, LENGTH.size))
    try:
        header, table = json.loads(_exactly(peer, size))
        blobs = [
            (str(name), str(dtype), tuple(map(int, shape)), int(n))
            for name, dtype, shape, n in table
        ]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PayloadError(f"a message that is not understood: {in_short(error)}") from error
    return Frame(
        str(header),
        {name: Blob(dtype, shape, _exactly(peer, n)) for name, dtype, shape, n in blobs},
    )


def _exactly(peer: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:  # memory is taken as bytes come, not as somebody says that they will
        got = peer.recv(min(size - len(data), CHUNK))
        if not got:
            raise ConnectionResetError("the other side went away in the middle of a message")
        data += got
    return data


def ask(path: Path, frame: Frame, deadline: float, tries: int = 3) -> tuple[Frame, socket.socket]:
    """The answer of whoever serves at `path`, and the open connection: say `DONE` there when all is well.

    Someone who died over the question is asked again when he is back, but not for ever.
    """
    deaths = 0
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            peer.connect(str(path))
            try:
                send(peer, frame)
                return receive(peer), peer
            except (ConnectionError, BrokenPipeError) as error:
                deaths += 1
                if deaths == tries:
                    raise ConnectionError(
                        f"the site's worker died {tries} times over this call"
                    ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > deadline - 0.5:
                raise ConnectionError(
                    "the site's worker is not there: is `barter site` running?"
                ) from error
        except TimeoutError as error:
            raise TimeoutError("the site's worker did not answer in time") from error
        peer.close()
        time.sleep(0.3)


def serve(path: Path, answer: Callable[[Frame], Frame], lost: Callable[[], None]) -> None:
    """Answer one caller after the other, for ever; `lost` hears of callers that went without a word."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        old = os.umask(0o077)  # only this user may open it
        try:
            door.bind(str(path))
        finally:
            os.umask(old)
        door.listen(16)
        while True:
            peer, _ = door.accept()
            if not _same_user(peer):
                peer.close()
                continue
            try:
                send(peer, answer(receive(peer)))
            except PayloadError:  # nobody whom Flower started
                peer.close()
                continue
            except (ConnectionError, BrokenPipeError):
                peer.close()
                lost()
                continue
            threading.Thread(target=_see_off, args=(peer, lost), daemon=True).start()


def _see_off(peer: socket.socket, lost: Callable[[], None]) -> None:
    with peer:
        try:
            farewell = peer.recv(len(DONE))
        except ConnectionError:
            farewell = b""
    if farewell != DONE:
        lost()


def _same_user(peer: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):  # only Linux tells; elsewhere the file's mode decides
        return True
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(uid == os.getuid())
