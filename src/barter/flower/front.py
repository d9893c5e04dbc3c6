"""What Flower starts at a site for every message: a thin front that hands it to the site's worker. Loads no torch."""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from barter.flower.frames import DONE, Blob, Frame, ask

__all__ = ["app", "from_records", "to_records"]

RAW = "barter.raw"  # bytes as they lie in memory
app = ClientApp()


def to_records(frame: Frame) -> RecordDict:
    """A frame as Flower carries it: arrays in chunks, and the header."""
    arrays = {name: Array(blob.dtype, blob.shape, RAW, bytes(blob.data)) for name, blob in frame.blobs.items()}
    return RecordDict({"arrays": ArrayRecord(arrays), "tree": ConfigRecord({"header": frame.header})})


def from_records(records: RecordDict) -> Frame:
    """The frame that Flower carried."""
    arrays, tree = records["arrays"], records["tree"]
    if not isinstance(arrays, ArrayRecord) or not isinstance(tree, ConfigRecord):
        raise TypeError("a message of another program")
    blobs = {name: Blob(array.dtype, tuple(array.shape), array.data) for name, array in arrays.items()}
    return Frame(str(tree["header"]), blobs)


@app.query("hello")
@app.train("call")
def hand_over(message: Message, context: Context) -> Message:
    """Ask the worker, and tell it when this process ends as it should."""
    deadline = time.monotonic() + message.metadata.ttl  # as a span: clocks of two machines may differ
    reply, worker = ask(Path(str(context.node_config["socket"])), from_records(message.content), deadline)

    @atexit.register
    def done() -> None:
        with suppress(OSError):
            worker.sendall(DONE)

    return Message(to_records(reply), reply_to=message)
