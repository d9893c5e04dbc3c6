"""Start the runs of a comparison in processes that need not load torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from barter.core.errors import BarterError

__all__ = ["Launcher", "Started"]

JOB_SERVER = (sys.executable, "-m", "barter.cli.job_server")
LOST_STATUS = -signal.SIGKILL  # the exit status of a run whose job server was killed


class Started(Protocol):
    """A started process: the part of `subprocess.Popen` that a comparison needs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass
class Launched:
    """A run that a launcher has started."""

    launcher: Launcher
    pid: int = 0
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while running; a negative one is a signal."""
        self.launcher.receive_statuses(0.0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.launcher.receive_statuses(1.0)
        return self.returncode


@dataclass
class Launcher:
    """Starter of runs, by a job server that has loaded torch and forks.

    The job server starts with the first run and ends in `__exit__`. Runs are isolated as if each
    had been started separately: each has its own session, log and memory.
    """

    threads: int  # number of CPU threads of each run
    server: Sequence[str] = JOB_SERVER  # the command of the job server
    _server: subprocess.Popen[bytes] | None = None
    _launched: dict[int, Launched] = field(default_factory=dict)
    _unread: bytes = b""

    def start(self, arguments: Sequence[str], log: Path) -> Launched:
        """Start `barter ARGUMENTS`, and return when it has a pid.

        Its output is appended to the log.

        Raises:
            BarterError: The job server ended before the run had started.
        """
        server = self._running_server()
        number = len(self._launched) + 1
        run = Launched(self)
        self._launched[number] = run
        request = {"id": number, "arguments": list(arguments), "log": str(log)}
        assert server.stdin is not None
        with suppress(BrokenPipeError):  # A server that has ended is noticed below.
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
        while not run.pid:
            self.receive_statuses(1.0)
            if self._server is None:
                raise BarterError(
                    f"the process that starts runs ended before the first: {' '.join(self.server)}"
                )
        return run

    def _running_server(self) -> subprocess.Popen[bytes]:
        """Return the job server; start it if it is not running."""
        if self._server is None:
            threads = os.environ.get("OMP_NUM_THREADS", str(self.threads))
            # Runs find the same modules as this process.
            path = os.pathsep.join(filter(None, sys.path))
            self._server = subprocess.Popen(
                self.server,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the runs.
            )
        return self._server

    def receive_statuses(self, seconds: float) -> None:
        """Receive process ids and exit statuses of runs; wait for some at most this long.

        If the job server has ended, its runs are terminated, with the status `LOST_STATUS`.
        """
        server = self._server
        if server is None:
            return
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], seconds)[0]:
            return
        received = os.read(server.stdout.fileno(), 65536)
        if not received:
            self._lose()
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            run = self._launched[answer["id"]]
            run.pid = answer.get("pid", run.pid)
            run.returncode = answer.get("status", run.returncode)

    def _lose(self) -> None:
        """Terminate the runs of a dead server, as their exit statuses are unknown."""
        for run in self._launched.values():
            if run.returncode is None:
                if run.pid:
                    with suppress(ProcessLookupError):
                        os.killpg(run.pid, signal.SIGTERM)
                run.returncode = LOST_STATUS
        self._close()

    def _close(self) -> None:
        """Terminate the server, and with it all runs."""
        server = self._server
        self._server = None
        self._unread = b""
        if server is None:
            return
        assert server.stdin is not None
        assert server.stdout is not None
        server.terminate()
        server.wait()
        server.stdin.close()
        server.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
