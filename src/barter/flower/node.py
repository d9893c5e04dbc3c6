"""A site's node: a process that stays, takes Flower's messages, and hands them to the site's worker. Loads no torch."""

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
from barter.flower.frames import DONE, Frame, ask
from barter.flower.heartbeat import LONGEST, NOT_LET_IN, SHORTEST, TURN, pause

__all__ = ["answer", "main", "serve"]

CALLS, PROGRESS = {"query.hello", "train.call"}, "query.progress"
APP_RAISED = 2  # Flower's code for what went wrong at a site
WORTH = 4  # times as long as a look takes are between two at least, or looks of many are most of a SuperLink's work


def answer(message: Message, door: Path) -> Message:
    """The worker's reply, or why there is none; the node itself says how far the worker is, for that one is busy."""
    try:
        if message.metadata.message_type == PROGRESS:
            done = float(door.with_name(TURN).read_text())
            return Message(
                to_records(Frame(json.dumps({"float": done.hex()}), {})), reply_to=message
            )
        if message.metadata.message_type not in CALLS:
            raise ValueError(f"{message.metadata.message_type} is nothing that a site is asked")
        deadline = (
            time.monotonic() + message.metadata.ttl
        )  # as a span: clocks of two machines may differ
        reply, worker = ask(door, from_records(message.content), deadline)
        with worker:
            worker.sendall(DONE)
        return Message(to_records(reply), reply_to=message)
    except Exception as error:
        return Message(Error(APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def serve(fleet: Fleet, door: Path) -> None:
    """Take messages, for ever; a call takes its time, and others are heard meanwhile, though not at once."""

    def call(message: Message) -> None:
        begin = time.monotonic()
        fleet.push(answer(message, door), time.monotonic() - begin)

    last, look, calls = time.monotonic(), 0.0, list[threading.Thread]()
    while True:
        begin = time.monotonic()
        message = fleet.pull()
        if message is None:
            look = time.monotonic() - begin
        else:
            calls.append(threading.Thread(target=call, args=(message,), daemon=True))
            calls[-1].start()
        if calls:
            calls[0].join(LONGEST)
            calls = [thread for thread in calls if thread.is_alive()]
            last = time.monotonic()  # who has answered is about to be asked again
        time.sleep(pause(time.monotonic() - last, max(SHORTEST, WORTH * look)))


def end_whole() -> None:
    """A node of which a thread dies ends, and is started again: Flower's heartbeat dies of one answer that it does not
    know, such as that of a SuperLink whose disk is full, and a node without it is taken for one that is gone."""
    before = threading.excepthook

    def died(what: threading.ExceptHookArgs) -> None:
        before(what)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.excepthook = died


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
    end_whole()
    try:
        with connect(args.superlink, args.certificate, args.key) as fleet:
            serve(fleet, args.door)
    except NotLetIn as refused:
        logging.getLogger("barter").error("the SuperLink refuses this site's key: %s", refused)
        sys.exit(NOT_LET_IN)  # the supervisor says what that means
    sys.exit(1)  # Flower has logged why


if __name__ == "__main__":
    main()
