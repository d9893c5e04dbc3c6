"""Fork one process per run from a process that has already loaded torch.

A comparison starts it as `python -m barter.cli.job_server` and writes a line of JSON for every run
to its standard input: `{"id": 1, "arguments": ["run", "config.toml"], "log": "run.log"}`. The server
answers with the process id, `{"id": 1, "pid": 77}`, and, when the run has ended, with its exit
status, `{"id": 1, "status": 0}`; a negative status is the signal that ended it. When its standard
input is closed, or it is terminated, it terminates all runs and ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from barter.cli.app import main

__all__ = ["serve_jobs"]

POLL = 0.05  # polling interval in seconds, for runs that may have ended


def serve_jobs() -> None:
    """Fork a process for every requested run, until standard input is closed.

    Requests come from standard input, answers go to standard output, as lines of JSON (see the
    module). At the end, runs that have not ended are terminated.
    """
    answers = os.dup(1)  # Runs redirect their standard output to their logs.
    os.set_inheritable(answers, False)
    running: dict[int, int] = {}  # process id -> the run's id
    unread = b""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            ready, _, _ = select.select([0], [], [], POLL)
            if ready:
                received = os.read(0, 65536)
                if not received:
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    process = _fork(request, answers)
                    running[process] = request["id"]
                    _send(answers, {"id": request["id"], "pid": process})
            for process in list(running):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    _send(answers, {"id": running.pop(process), "status": code})
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGTERM)
        for process in running:
            os.waitpid(process, 0)


def _send(answers: int, answer: Mapping[str, int]) -> None:
    """Write an answer as a line of JSON."""
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _fork(request: Mapping[str, Any], answers: int) -> int:
    """Start a run in its own process and session; return its process id."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # NumPy's BLAS has threads, which it stops before a fork and restarts after it.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process = os.fork()
    if not process:
        os.close(reader)
        _run(request, answers, writer)
    os.close(writer)
    # Wait until the run has its own session. Before, killing its group would kill this process.
    os.read(reader, 1)
    os.close(reader)
    return process


def _run(request: Mapping[str, Any], answers: int, begun: int) -> NoReturn:
    """Execute the run in the forked process; exit with its status.

    Its output goes to its log.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        os.close(answers)
        os.close(begun)
        status = main(request["arguments"])
        sys.stdout.flush()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)  # Skip the exit handlers, which belong to the server.


def _preload() -> None:
    """Import what takes long to load, without starting threads or using a GPU."""
    from torchvision import models  # noqa: F401

    from barter.cli import running  # noqa: F401


if __name__ == "__main__":
    _preload()
    serve_jobs()
