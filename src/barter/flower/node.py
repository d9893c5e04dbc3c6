"""A site's node: a process that stays, takes Flower's messages, and hands them to the site's worker. Loads no torch."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path

from flwr.app import Error, Message

from barter.flower.frames import DONE, Frame, ask
from barter.flower.front import from_records, to_records
from barter.flower.inside import Fleet, connect
from barter.flower.pulse import TURN, pause

__all__ = ["answer", "main", "serve"]

CALLS, PROGRESS = {"query.hello", "train.call"}, "query.progress"
APP_RAISED = 2  # Flower's code for what went wrong at a site


def answer(message: Message, door: Path) -> Message:
    """The worker's reply, or why there is none; the node itself says how far the worker is, for that one is busy."""
    try:
        if message.metadata.message_type == PROGRESS:
            done = float(door.with_name(TURN).read_text())
            return Message(to_records(Frame(json.dumps({"float": done.hex()}), {})), reply_to=message)
        if message.metadata.message_type not in CALLS:
            raise ValueError(f"{message.metadata.message_type} is nothing that a site is asked")
        deadline = time.monotonic() + message.metadata.ttl  # as a span: clocks of two machines may differ
        reply, worker = ask(door, from_records(message.content), deadline)
        with worker:
            worker.sendall(DONE)
        return Message(to_records(reply), reply_to=message)
    except Exception as error:
        return Message(Error(APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def serve(fleet: Fleet, door: Path) -> None:
    """Take messages, for ever; a call takes its time, and others are heard meanwhile."""
    done = threading.Event()

    def call(message: Message) -> None:
        begin = time.monotonic()
        reply = answer(message, door)
        fleet.push(reply, time.monotonic() - begin)
        done.set()

    last = time.monotonic()
    while True:
        message = fleet.pull()
        if message is not None:
            threading.Thread(target=call, args=(message,), daemon=True).start()
        elif done.wait(pause(time.monotonic() - last)):
            done.clear()
            last = time.monotonic()  # who has answered is about to be asked again


def main() -> None:
    """Be the node of a site until this process is told to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--superlink", required=True, help="the coordinator's address")
    parser.add_argument("--door", type=Path, required=True, help="where the site's worker answers")
    parser.add_argument("--certificate", type=Path, help="who vouches for the coordinator")
    parser.add_argument("--key", type=Path, help="the private key that this site is known by")
    args = parser.parse_args()
    logging.getLogger("barter").addHandler(logging.StreamHandler())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the SuperLink is told
    with connect(args.superlink, args.certificate, args.key) as fleet:
        serve(fleet, args.door)
    sys.exit(1)  # Flower has logged why


if __name__ == "__main__":
    main()
