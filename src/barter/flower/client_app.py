"""Flower's ClientApp of a site, which passes messages to the site's worker.

Does not load torch.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from barter.core.errors import PayloadError, summarise_error
from barter.flower.frames import DONE, Blob, Frame, ask_worker

__all__ = ["app", "from_records", "pack_blobs", "record_sizes", "to_records"]

RAW = "barter.raw"  # the array format: raw bytes as in memory
# Payloads of fewer bytes travel as one value; Flower's chunks are not much larger.
IN_A_PIECE = 4_000_000
app = ClientApp()


def pack_blobs(blobs: Mapping[str, Blob]) -> ArrayRecord | ConfigRecord:
    """Concatenate the blobs' bytes, in order, under the key "bulk" of one record.

    Every object of a message costs Flower requests. Flower sends an array in chunks, at least three
    of them, so fewer than `IN_A_PIECE` bytes are one value of a ConfigRecord instead.
    """
    data = b"".join(blob.data for blob in blobs.values())
    if len(data) < IN_A_PIECE:
        return ConfigRecord({"bulk": data})
    return ArrayRecord({"bulk": Array("uint8", (len(data),), RAW, data)})


def to_records(frame: Frame, bulk: ArrayRecord | ConfigRecord | None = None) -> RecordDict:
    """Convert a frame to Flower's records.

    Args:
        frame: The message.
        bulk: The frame's blobs as returned by `pack_blobs`, if they were concatenated before.
    """
    table = [
        [name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.blobs.items()
    ]
    records = RecordDict(
        {"tree": ConfigRecord({"header": frame.header, "table": json.dumps(table)})}
    )
    if any(blob.data for blob in frame.blobs.values()):
        records["bulk"] = pack_blobs(frame.blobs) if bulk is None else bulk
    return records


def record_sizes(records: RecordDict) -> tuple[int, int]:
    """Return the bytes of a message's structure and its tensors, without parsing it.

    Arrays and values of type bytes count as tensors, everything else as structure.
    """
    structure = 0
    tensors = 0
    for record in records.values():
        if isinstance(record, ArrayRecord):
            tensors += sum(len(array.data) for array in record.values())
        else:
            for value in record.values():
                if isinstance(value, bytes):
                    tensors += len(value)
                else:
                    structure += _length(value)
    return structure, tensors


def _length(value: object) -> int:
    """Return the bytes of a record's value: a number, a string, or a list."""
    if isinstance(value, list):
        texts = value[:1] and isinstance(value[0], str | bytes)
        return sum(map(len, value)) if texts else 8 * len(value)
    return len(value) if isinstance(value, str | bytes) else 8


def from_records(records: RecordDict) -> Frame:
    """Convert Flower's records back to a frame.

    Raises:
        PayloadError: If the records are not what `to_records` makes.
    """
    tree = records.get("tree")
    bulk = records.get("bulk")
    data: object = b""
    if isinstance(bulk, ArrayRecord) and "bulk" in bulk:
        data = bulk["bulk"].data
    elif isinstance(bulk, ConfigRecord):
        data = bulk.get("bulk")
    if not isinstance(tree, ConfigRecord) or not isinstance(data, bytes):
        raise PayloadError("a message of another program")
    try:
        header = str(tree["header"])
        rows = [
            (str(name), str(dtype), tuple(map(int, shape)), int(size))
            for name, dtype, shape, size in json.loads(str(tree["table"]))
        ]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PayloadError(f"a malformed message: {summarise_error(error)}") from error
    view = memoryview(data)
    blobs = {}
    offset = 0
    for name, dtype, shape, size in rows:
        blobs[name] = Blob(dtype, shape, view[offset : offset + size])
        offset += len(blobs[name].data)
    if offset != len(data):
        raise PayloadError(
            f"a message of {len(data)} bytes, {len(data) - offset} more than its tensors have"
        )
    return Frame(header, blobs)


@app.query("hello")
@app.train("call")
def hand_over(message: Message, context: Context) -> Message:
    """Pass a message to the site's worker and return the worker's reply.

    The worker is notified when this process exits normally.
    """
    # Metadata gives a duration, not a time of day: clocks of two machines may differ.
    deadline = time.monotonic() + message.metadata.ttl
    reply, worker = ask_worker(
        Path(str(context.node_config["socket"])), from_records(message.content), deadline
    )

    @atexit.register
    def done() -> None:
        with suppress(OSError):
            worker.sendall(DONE)

    return Message(to_records(reply), reply_to=message)
