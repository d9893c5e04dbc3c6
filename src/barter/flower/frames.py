"""Messages over a unix socket: a JSON header and blobs of bytes.

The socket connects processes of one user. Does not load torch.
"""

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

from barter.core.errors import PayloadError, summarise_error

__all__ = ["Blob", "Frame", "ask_worker", "serve_frames"]

FRAME_LENGTH = struct.Struct(">Q")
FRAME_CHUNK = 2**20
DONE = b"."  # sent by a caller before it disconnects normally


@dataclass(frozen=True)
class Blob:
    """A tensor's bytes, with its dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    """An encoded payload tree: the header made by `pack`, and the tensors as bytes."""

    header: str
    blobs: Mapping[str, Blob]


def send(peer: socket.socket, frame: Frame) -> None:
    """Write a frame: length of the head, head, bytes of the blobs.

    The head is JSON of the header and a table of the blobs.
    """
    table = [
        [name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.blobs.items()
    ]
    head = json.dumps([frame.header, table]).encode()
    peer.sendall(FRAME_LENGTH.pack(len(head)) + head)
    for blob in frame.blobs.values():
        peer.sendall(blob.data)


def receive(peer: socket.socket) -> Frame:
    """Read one frame, its header and its blobs, from a socket.

    Raises:
        PayloadError: If the head is malformed.
        ConnectionError: If the other side disconnects before the end.
    """
    (size,) = FRAME_LENGTH.unpack(_exactly(peer, FRAME_LENGTH.size))
    try:
        header, table = json.loads(_exactly(peer, size))
        rows = [
            (str(name), str(dtype), tuple(map(int, shape)), int(n))
            for name, dtype, shape, n in table
        ]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PayloadError(f"a malformed message: {summarise_error(error)}") from error
    blobs = {name: Blob(dtype, shape, _exactly(peer, n)) for name, dtype, shape, n in rows}
    return Frame(str(header), blobs)


def _exactly(peer: socket.socket, size: int) -> bytearray:
    """Read this number of bytes from a socket.

    Raises:
        ConnectionResetError: The other side disconnects before.
    """
    data = bytearray()
    # Memory grows with the bytes received; the announced size is not trusted.
    while len(data) < size:
        received = peer.recv(min(size - len(data), FRAME_CHUNK))
        if not received:
            raise ConnectionResetError("the other side disconnected in the middle of a message")
        data += received
    return data


def ask_worker(
    path: Path, frame: Frame, deadline: float, tries: int = 3
) -> tuple[Frame, socket.socket]:
    """Send a request to the process that serves at `path`, and wait for its answer.

    If that process dies during the request, the request is sent again once it is back.

    Args:
        path: The unix socket.
        frame: The request.
        deadline: Time of the monotonic clock until which to wait.
        tries: Number of times that the process may die before this gives up.

    Returns:
        The answer, and the open connection, on which the caller sends `DONE` when all is well.

    Raises:
        ConnectionError: If no process serves at `path` in time, or if it died `tries` times.
        TimeoutError: If there is no answer in time.
        PayloadError: If the answer is malformed.
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


def serve_frames(path: Path, answer: Callable[[Frame], Frame], lost: Callable[[], None]) -> None:
    """Answer one caller after the other, without end.

    Callers of other users, and requests that are no frames, are disconnected without an answer. An
    old socket file at the path is replaced.

    Args:
        path: The unix socket to listen on.
        answer: Makes the answer to a request. What it raises ends the serving, except PayloadError
            and ConnectionError, after which the caller is disconnected.
        lost: Called for every caller that disconnected without sending `DONE`.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        old = os.umask(0o077)  # only this user may connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(16)
        while True:
            peer, _ = listener.accept()
            if not _same_user(peer):
                peer.close()
                continue
            try:
                send(peer, answer(receive(peer)))
            except PayloadError:  # not a process that Flower started
                peer.close()
                continue
            except (ConnectionError, BrokenPipeError):
                peer.close()
                lost()
                continue
            threading.Thread(target=_await_done, args=(peer, lost), daemon=True).start()


def _await_done(peer: socket.socket, lost: Callable[[], None]) -> None:
    """Wait until the caller disconnects; call `lost` if it did not send `DONE` first."""
    with peer:
        try:
            last = peer.recv(len(DONE))
        except ConnectionError:
            last = b""
    if last != DONE:
        lost()


def _same_user(peer: socket.socket) -> bool:
    """Return whether the caller is a process of this user."""
    # Only Linux reports the peer's user; elsewhere the socket file's mode protects it.
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(uid == os.getuid())
