"""What Flower starts at a site for every message: a thin front that hands it to the site's worker. Loads no torch."""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from barter.core.errors import PayloadError, in_short
from barter.flower.frames import DONE, Blob, Frame, ask

__all__ = ["app", "from_records", "in_bulk", "to_records"]

RAW = "barter.raw"  # bytes as they lie in memory
IN_A_PIECE = 4_000_000  # fewer bytes than that are one piece: Flower's chunks are not much larger
app = ClientApp()


def in_bulk(blobs: Mapping[str, Blob]) -> ArrayRecord | ConfigRecord:
    """Blobs one behind the other: everything that Flower can tell from the rest costs it requests.

    An array travels in chunks, and is three of them at least; little is better off in a piece.
    """
    data = b"".join(blob.data for blob in blobs.values())
    if len(data) < IN_A_PIECE:
        return ConfigRecord({"bulk": data})
    return ArrayRecord({"bulk": Array("uint8", (len(data),), RAW, data)})


def to_records(frame: Frame, bulk: ArrayRecord | ConfigRecord | None = None) -> RecordDict:
    """A frame as Flower carries it; its blobs may be in bulk already."""
    table = [
        [name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.blobs.items()
    ]
    records = RecordDict(
        {"tree": ConfigRecord({"header": frame.header, "table": json.dumps(table)})}
    )
    if any(blob.data for blob in frame.blobs.values()):
        records["bulk"] = in_bulk(frame.blobs) if bulk is None else bulk
    return records


def from_records(records: RecordDict) -> Frame:
    """The frame that Flower carried; what is none is refused."""
    tree, bulk = records.get("tree"), records.get("bulk")
    data: object = b""
    if isinstance(bulk, ArrayRecord) and "bulk" in bulk:
        data = bulk["bulk"].data
    elif isinstance(bulk, ConfigRecord):
        data = bulk.get("bulk")
    if not isinstance(tree, ConfigRecord) or not isinstance(data, bytes):
        raise PayloadError("a message of another program")
    try:
        header, table = str(tree["header"]), json.loads(str(tree["table"]))
        rows = [
            (str(name), str(dtype), tuple(map(int, shape)), int(size))
            for name, dtype, shape, size in table
        ]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PayloadError(f"a message that is not understood: {in_short(error)}") from error
    view, blobs, at = memoryview(data), {}, 0
    for name, dtype, shape, size in rows:
        blobs[name] = Blob(dtype, shape, view[at : at + size])
        at += len(blobs[name].data)
    if at != len(data):
        raise PayloadError(
            f"a message of {len(data)} bytes, {len(data) - at} more than its tensors have"
        )
    return Frame(header, blobs)


@app.query("hello")
@app.train("call")
def hand_over(message: Message, context: Context) -> Message:
    """Ask the worker, and tell it when this process ends as it should."""
    # as a span: clocks of two machines may differ
    deadline = time.monotonic() + message.metadata.ttl
    reply, worker = ask(
        Path(str(context.node_config["socket"])), from_records(message.content), deadline
    )

    @atexit.register
    def done() -> None:
        with suppress(OSError):
            worker.sendall(DONE)

    return Message(to_records(reply), reply_to=message)
