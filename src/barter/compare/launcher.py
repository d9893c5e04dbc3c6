"""Start the runs of a comparison, each in a process of its own that need not load torch first."""

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

SERVER = (sys.executable, "-m", "barter.cli.job_server")
LOST = -signal.SIGKILL  # the exit status of a run whose server was killed


class Started(Protocol):
    """A process that runs: what `subprocess.Popen` has, as far as a comparison needs it."""

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
        """Return the exit status, or none while the run goes on; a negative one is the signal that ended it."""
        self.launcher.hear(0.0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.launcher.hear(1.0)
        return self.returncode


@dataclass
class Launcher:
    """Forks runs off a process that has loaded everything; that one starts with the first run and ends in `__exit__`.

    Runs are isolated as if each had been started by itself: they have a session, a log and a memory of their own.
    """

    threads: int  # of the CPU, for each run
    server: Sequence[str] = SERVER  # the command of the process that forks
    _server: subprocess.Popen[bytes] | None = None
    _launched: dict[int, Launched] = field(default_factory=dict)
    _unread: bytes = b""

    def start(self, arguments: Sequence[str], log: Path) -> Launched:
        """Start `barter ARGUMENTS`, whose output is appended to the log."""
        server = self._serving()
        number, run = len(self._launched) + 1, Launched(self)
        self._launched[number] = run
        request = {"id": number, "arguments": list(arguments), "log": str(log)}
        assert server.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
        while not run.pid:
            self.hear(1.0)
            if self._server is None:
                raise BarterError(
                    f"the process that starts runs ended before the first: {' '.join(self.server)}"
                )
        return run

    def _serving(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            threads = os.environ.get("OMP_NUM_THREADS", str(self.threads))
            # Modules that this process finds, its runs find too.
            path = os.pathsep.join(filter(None, sys.path))
            self._server = subprocess.Popen(
                self.server,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches the runs through us
            )
        return self._server

    def hear(self, seconds: float) -> None:
        """Take in what the server says of its runs, and wait this long for it."""
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
        """The server is gone, and with it the exit statuses of its runs: end those that go on."""
        for run in self._launched.values():
            if run.returncode is None:
                if run.pid:
                    with suppress(ProcessLookupError):
                        os.killpg(run.pid, signal.SIGTERM)
                run.returncode = LOST
        self._close()

    def _close(self) -> None:
        server, self._server, self._unread = self._server, None, b""
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
