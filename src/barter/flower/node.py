"""A site's node: a long-running process between SuperLink and worker.

It passes Flower's messages to the site's worker. Does not load torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from flwr.app import Error, Message

from barter.flower.client_app import from_records, to_records
from barter.flower.flwr_internals import Fleet, NotLetIn, connect
from barter.flower.frames import DONE, Frame, ask_worker
from barter.flower.heartbeat import HOLD, LONGEST, NOT_LET_IN, SHORTEST, TURN, poll_interval

__all__ = ["answer_message", "main", "serve_messages"]

CALLS = {"query.hello", "train.call"}
PROGRESS = "query.progress"
APP_RAISED = 2  # Flower's code for an error at a site
# Wait at least 4x the last poll's duration, so that many sites do not saturate the SuperLink.
WORTH = 4


def answer_message(message: Message, door: Path) -> Message:
    """Return the worker's reply to a message, or an error reply.

    Questions for progress are answered by the node itself, because the worker is busy.

    Args:
        message: Flower's message.
        door: The worker's unix socket.
    """
    try:
        if message.metadata.message_type == PROGRESS:
            done = float(door.with_name(TURN).read_text())
            # As `encode` would do it, which needs torch.
            frame = Frame(json.dumps({"float": done.hex()}), {})
            return Message(to_records(frame), reply_to=message)
        if message.metadata.message_type not in CALLS:
            raise ValueError(
                f"{message.metadata.message_type} is not a message type that a site answers"
            )
        # Metadata gives a duration, not a time of day: clocks of two machines may differ.
        deadline = time.monotonic() + message.metadata.ttl
        reply, worker = ask_worker(door, from_records(message.content), deadline)
        with worker:
            worker.sendall(DONE)
        return Message(to_records(reply), reply_to=message)
    except Exception as error:
        return Message(Error(APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def serve_messages(fleet: Fleet, door: Path) -> None:
    """Answer messages without end, each in a thread of its own.

    Other messages are thus answered during a call.

    Args:
        fleet: The connection to the SuperLink.
        door: The worker's unix socket.
    """

    def call(message: Message) -> None:
        begin = time.monotonic()
        fleet.push(answer_message(message, door), time.monotonic() - begin)

    last = time.monotonic()  # when the node was last busy
    poll_seconds = 0.0  # duration of the last poll that found no message
    calls: list[threading.Thread] = []
    while True:
        begin = time.monotonic()
        message = fleet.pull()
        if message is None:
            poll_seconds = time.monotonic() - begin
        else:
            calls.append(threading.Thread(target=call, args=(message,), daemon=True))
            calls[-1].start()
        if calls:
            calls[0].join(LONGEST)
            calls = [thread for thread in calls if thread.is_alive()]
            last = time.monotonic()  # After an answer, the next request comes soon.
        # A poll that was held cost the SuperLink nothing meanwhile, and the next one will be, too.
        if message is not None or poll_seconds < HOLD / 2:
            time.sleep(poll_interval(time.monotonic() - last, max(SHORTEST, WORTH * poll_seconds)))


def exit_if_thread_dies() -> None:
    """Install a hook that sends this process SIGTERM if an exception ends a thread.

    Without it the node would run on without a heartbeat: Flower's heartbeat thread ends at a single
    unknown answer, such as that of a SuperLink whose disk is full, and the SuperLink then takes the
    node for offline. The supervisor restarts this process whatever its exit status is.
    """
    previous_hook = threading.excepthook

    def end_process(args: threading.ExceptHookArgs) -> None:
        previous_hook(args)
        if args.exc_type is not SystemExit:  # sys.exit() ends a thread on purpose.
            os.kill(os.getpid(), signal.SIGTERM)

    threading.excepthook = end_process


def main() -> None:
    """Run the node of a site until this process receives SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--superlink", required=True, help="the coordinator's address")
    parser.add_argument("--door", type=Path, required=True, help="unix socket of the site's worker")
    parser.add_argument("--certificate", type=Path, help="CA certificate of the coordinator")
    parser.add_argument("--key", type=Path, help="private key of this site")
    args = parser.parse_args()
    logging.getLogger("barter").addHandler(logging.StreamHandler())
    # Leaving the context below deactivates the node at the SuperLink.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    exit_if_thread_dies()
    try:
        with connect(args.superlink, args.certificate, args.key) as fleet:
            serve_messages(fleet, args.door)
    except NotLetIn as refused:
        logging.getLogger("barter").error("the SuperLink refuses this site's key: %s", refused)
        sys.exit(NOT_LET_IN)  # The supervisor logs what this status means.
    sys.exit(1)  # Flower has logged the reason.


if __name__ == "__main__":
    main()
