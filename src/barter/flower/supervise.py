"""`barter site`: run a client's worker and Flower node, and restart them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from barter.core.errors import BarterError, ConfigError
from barter.core.params import build_dataclass
from barter.engines.forks import die_with
from barter.flower.codec import decode, encode
from barter.flower.consent import Consent
from barter.flower.flwr_internals import unsupported_reason
from barter.flower.frames import Frame, serve_frames
from barter.flower.handshake import Setup, make_site
from barter.flower.heartbeat import (
    BEGUN,
    NOT_LET_IN,
    TURN,
    ProgressFile,
    Pulse,
    allow,
    overdue,
    seconds_since,
)
from barter.setup.config import read_toml

__all__ = [
    "FLOWER",
    "Child",
    "free_port",
    "load_setup",
    "reports_progress",
    "run_site",
    "run_worker",
]

LONGEST_PAUSE = 10.0  # longest pause in seconds before a process that keeps dying is restarted
LONGEST_CALL = 3600.0  # seconds for a call that does not name its timeout
PULSE = "pulse"  # the worker's heartbeat file
ROOMS = "barter-"  # prefix of the temporary folders for sockets
TOKEN = "token"  # file in such a folder that proves which site created it
SETTLED = 60.0  # seconds of running after which a start counts as successful
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    # Modules in the current folder can be imported by the processes that Flower starts, too.
    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), os.getcwd()])),
}
log = logging.getLogger("barter")


class Child:
    """A child process in its own session, so that its children stop with it.

    Args:
        name: The process's name in messages.
        command: The command line.
        env: The environment.
        log: The file to which its output is appended.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.command = list(command)
        self.env = dict(env)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; on Linux it gets SIGTERM when this one ends.

        Its output is appended to the log.
        """
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            )

    def poll(self) -> int | None:
        """Return the exit status; none if the process is running or was not started."""
        return None if self.process is None else self.process.poll()

    def stop(self, patience: float = 10.0) -> None:
        """Send SIGTERM, and SIGKILL if the process runs on after `patience` seconds.

        Processes that it started are killed too. Nothing happens if it was not started.
        """
        if self.process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        # Processes that the child started may have outlived it.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class RestartingChild(Child):
    """A child that is restarted when it ends, after a pause that grows.

    Args:
        name: The process's name in messages.
        command: The command line.
        env: The environment.
        log: The file to which its output is appended.
        reasons: Exit status -> its meaning, for messages.
    """

    pause = 0.0  # seconds of the last pause before a restart
    due = 0.0  # time of the next start; 0: none is scheduled
    started = 0.0  # time of the last start

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(name, command, env, log)
        self.reasons = reasons or {}

    def tend(self) -> None:
        """Start the process if it does not run and its pause is over.

        Call this regularly.
        """
        now = time.monotonic()
        status = self.poll()
        if self.process is not None and status is None:
            return
        if status is not None and not self.due:
            self._schedule_restart(now, status)
        if now >= self.due:
            self.due = 0.0
            self.started = now
            try:
                self.start()
            except OSError as error:  # For example a full disk, which may have room again later.
                self.process = None
                self.due = now + LONGEST_PAUSE
                log.warning(
                    "%s cannot be started: %s; next attempt in %g s",
                    self.name,
                    error,
                    LONGEST_PAUSE,
                )

    def _schedule_restart(self, now: float, status: int) -> None:
        """Set the time of the next start, and log why the process ended.

        The pause is 1 s after a process that ran for more than `SETTLED` seconds; otherwise it
        doubles each time, up to `LONGEST_PAUSE`.
        """
        was_successful = now - self.started > SETTLED
        self.pause = 1.0 if was_successful else min(LONGEST_PAUSE, 2 * self.pause or 1.0)
        self.due = now + self.pause
        log.warning(
            "%s ended with status %s: %s; restarting it in %g s",
            self.name,
            status,
            self.reasons.get(status, f"see {self.log}"),
            self.pause,
        )

    def restart(self, patience: float = 10.0) -> None:
        """Stop the process as `stop` does; the next `tend` starts it without a pause."""
        self.stop(patience)
        self.process = None
        self.due = 0.0


class WatchedChild(RestartingChild):
    """A child that is also restarted when its heartbeat is overdue.

    The check is made here, because a child that is suspended, or whose interpreter hangs, cannot
    end itself.

    Args:
        name: The process's name in messages.
        command: The command line.
        env: The environment.
        log: The file to which its output is appended.
        pulse: The heartbeat file that the process writes.
    """

    begin = 600.0  # seconds within which the first heartbeat must come

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, pulse: Path
    ) -> None:
        super().__init__(name, command, env, log)
        self.pulse = pulse

    def start(self) -> None:
        allow(self.pulse, self.begin)
        super().start()

    def tend(self) -> None:
        if self.process is not None and self.poll() is None and overdue(self.pulse):
            log.warning(
                "%s: its heartbeat is overdue; it is ended and restarts from its memory on disk",
                self.name,
            )
            self.restart(patience=1.0)
        super().tend()


def free_port() -> int:
    """Return a port of 127.0.0.1 at which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_setup(path: Path) -> Setup:
    """Read a site's configuration from its site.toml.

    Raises:
        ConfigError: The file is missing or not TOML, a key is unknown, or a value is out of range.
    """
    values = read_toml(path)
    consent = values.get("consent", {})
    if not isinstance(consent, Mapping):
        raise ConfigError(f"{path}: consent={consent!r}: must be a table, [consent]")
    return build_dataclass(
        Setup, {**values, "consent": build_dataclass(Consent, consent, "consent.")}
    )


def run_site(path: Path) -> None:
    """Run a site until this process receives SIGTERM or SIGINT.

    Args:
        path: The site's site.toml; keys, logs and memory are in the same folder.

    Raises:
        ConfigError: If a file is missing, or if the site is running already.
    """
    setup = load_setup(path)
    site_folder = path.absolute().parent
    for needed in [] if setup.insecure else [setup.certificate, setup.key]:
        if not (site_folder / needed).is_file():
            raise ConfigError(
                f"{site_folder / needed} is missing: copy the site's whole folder, or set insecure = true"
            )
    ended = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    with _only_one(setup, site_folder), _rooms(site_folder) as rooms:
        _supervise(setup, path, site_folder, rooms, ended)


def _identity(setup: Setup, site_folder: Path) -> str:
    """Return 32 hexadecimal digits that identify a site.

    They are those of a SHA-256 hash of its key file; with `insecure`, where there are no keys, of
    the SuperLink's address and the site's name.
    """
    identity = f"{setup.superlink} {setup.name}".encode()
    if not setup.insecure:
        identity = (site_folder / setup.key).read_bytes()
    return hashlib.sha256(identity).hexdigest()[:32]


def _locks() -> Path:
    """Return the folder for the locks of all sites that this user runs."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "barter" / "sites"


@contextmanager
def _only_one(setup: Setup, site_folder: Path) -> Iterator[None]:
    """Hold the lock of a site, so that no second process runs it or a copy.

    Two processes with one key receive each other's messages, and their memories diverge. The lock
    is named after the site's identity, because a lock inside the folder would be copied with it.

    If the lock cannot be made, a warning says so, and the site runs without it.

    Raises:
        ConfigError: If the site is running already.
    """
    path = _locks() / _identity(setup, site_folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _lock_file(path)
    except OSError as error:
        log.warning(
            "site %s: a second process with a copy of its folder would not be noticed: %s; "
            "set XDG_STATE_HOME to a writable folder",
            setup.name,
            error,
        )
        yield
        return
    if lock is None:
        raise ConfigError(
            f"{site_folder}: site {setup.name!r} is running already, {_holder(path)}; a copy of a site's "
            "folder is the same site: end the other process, or create another site with "
            "`barter flower init`"
        )
    with lock:
        record = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(site_folder)}
        lock.write(json.dumps(record))
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_file(path: Path) -> TextIO | None:
    """Open and lock a file; return none if another process holds the lock."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # The earlier holder may have removed the file in between; then this lock is on a file that
        # no other process can find.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                return file
        file.close()


def _holder(path: Path) -> str:
    """Describe the process that holds a lock, if its record can be read."""
    try:
        record = json.loads(path.read_text())
        return f"process {record['pid']} on {record['host']}, in {record['folder']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "in another process"


@contextmanager
def _rooms(site_folder: Path) -> Iterator[Path]:
    """Create a temporary folder for a site's socket, and remove it at the end.

    It is not in the site's folder, because the path of a socket is limited to 108 characters. The
    folder of an earlier process that was killed is removed, too, if the site provably created it;
    see `_abandoned_folder`.

    Raises:
        ConfigError: If a site is running from this folder already.
    """
    with (site_folder / "rooms").open("a+") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{site_folder}: the site of this folder is running already"
            ) from None
        note.seek(0)
        abandoned = _abandoned_folder(note.read())
        if abandoned is not None:
            shutil.rmtree(abandoned, ignore_errors=True)
        rooms = Path(tempfile.mkdtemp(prefix=ROOMS))
        token = secrets.token_hex(16)
        try:
            with (rooms / TOKEN).open("w") as proof:
                fcntl.flock(proof, fcntl.LOCK_EX)  # until this process ends
                proof.write(token)
                proof.flush()
                note.truncate(0)
                note.write(json.dumps({"folder": str(rooms), "token": token}))
                note.flush()
                yield rooms
        finally:
            shutil.rmtree(rooms, ignore_errors=True)


def _abandoned_folder(note: str) -> Path | None:
    """Return the folder that a note names, if its process is gone; else None.

    The note may have been copied or edited. It is valid if the folder belongs to this user and
    holds the token of the note, and if no process holds the lock of the token's file.
    """
    try:
        record = json.loads(note)
        folder = Path(record["folder"])
        token = str(record["token"])
        with (folder / TOKEN).open() as proof:
            fcntl.flock(proof, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if mine and folder.name.startswith(ROOMS) and proof.read() == token:
                return folder
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def _supervise(
    setup: Setup, path: Path, site_folder: Path, rooms: Path, ended: threading.Event
) -> None:
    """Run the worker and the node of a site, and restart them, until `ended` is set.

    Args:
        setup: The site.
        path: The site's site.toml.
        site_folder: The site's folder.
        rooms: The folder for the worker's socket.
        ended: Set when the site is to end.
    """
    door = rooms / "door"
    logs = site_folder / "logs"
    logs.mkdir(exist_ok=True)
    env = {
        **os.environ,
        **FLOWER,
        "FLWR_HOME": str(site_folder / ".flower"),
        # Flower's SuperNode polls its own task queue at this interval in seconds.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    }
    command = [sys.executable, "-m", "barter", "site", str(path), "--worker", str(door)]
    worker = WatchedChild(
        f"site {setup.name}: worker", command, env, logs / "worker.log", rooms / PULSE
    )
    use_supernode = uses_supernode(setup)
    refused = (
        f"{setup.superlink} refuses the key {site_folder / setup.key}: the coordinator has to register it "
        "(`barter flower start FOLDER`), or it is still connected from elsewhere, such as a copy "
        "of this folder"
    )
    reasons = {NOT_LET_IN: refused}
    node = RestartingChild(f"site {setup.name}: node", [], env, logs / "node.log", reasons)
    try:
        while not ended.wait(0.2):
            if (rooms / "lost").exists():
                (rooms / "lost").unlink()
                if use_supernode:
                    # Flower would report the error for the next message, and be one reply behind
                    # from then on.
                    log.warning(
                        "site %s: a client process was killed during a message; its node restarts",
                        setup.name,
                    )
                    node.restart()
            if node.process is None or node.due:
                make_command = _supernode_command if use_supernode else _node_command
                node.command = make_command(setup, site_folder, door)
            worker.tend()
            node.tend()
    finally:
        node.stop()
        worker.stop()


def uses_supernode(setup: Setup) -> bool:
    """Return whether to use Flower's own SuperNode instead of barter's node.

    It is used if the site's configuration says so, or if the installed Flower is not supported,
    with a warning.
    """
    if setup.supernode:
        return True
    if why := unsupported_reason():
        log.warning(
            "site %s: Flower's own SuperNode is used, which takes seconds for every call: %s",
            setup.name,
            why,
        )
    return bool(why)


def reports_progress(setup: Setup) -> bool:
    """Return whether a site reports the progress of a call to the server.

    Flower's SuperNode does not. Neither does a site that requires a privacy guarantee, because when
    a training ends may depend on its images.
    """
    return setup.epsilon is None and not uses_supernode(setup)


def _node_command(setup: Setup, site_folder: Path, door: Path) -> list[str]:
    """Return the command line of barter's node, with the site's key."""
    command = [sys.executable, "-m", "barter.flower.node"]
    command += ["--superlink", setup.superlink]
    command += ["--door", str(door)]
    if not setup.insecure:
        command += ["--certificate", str(site_folder / setup.certificate)]
        command += ["--key", str(site_folder / setup.key)]
    return command


def _supernode_command(setup: Setup, site_folder: Path, door: Path) -> list[str]:
    """Return the command line of Flower's SuperNode, with the site's key."""
    node_config = f"socket={json.dumps(str(door))} name={json.dumps(setup.name)}"
    command = ["flower-supernode", "--superlink", setup.superlink]
    command += ["--port", str(free_port())]
    command += ["--node-config", node_config]
    if setup.insecure:
        return [*command, "--insecure"]
    command += ["--root-certificates", str(site_folder / setup.certificate)]
    command += ["--auth-supernode-private-key", str(site_folder / setup.key)]
    return command


def run_worker(path: Path, door: Path) -> None:
    """Run a site's worker, the client's own process: answer requests without end.

    The working directory becomes the site's folder, and torch uses the site's number of threads.

    Args:
        path: The site's site.toml.
        door: The unix socket to listen on.
    """
    setup = load_setup(path)
    site_folder = path.absolute().parent
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    os.chdir(site_folder)  # Paths in site.toml are relative to its folder.
    member = make_site(setup, site_folder / "memory")
    pulse = Pulse(door.with_name(PULSE))
    progress = ProgressFile(door.with_name(TURN))
    begun = door.with_name(BEGUN)
    reporting = reports_progress(setup)
    if reporting:
        member.monitor = progress

    def answer(frame: Frame) -> Frame:
        try:
            request = decode(frame)
            seconds = float(request.get("timeout", LONGEST_CALL))
            if math.isnan(seconds):
                raise ValueError("the timeout is not a number")
        except (BarterError, AttributeError, TypeError, ValueError) as error:
            return encode({"error": f"malformed request: {error}", "traceback": "", "quiet": True})
        if request.get("ask") == "call":
            try:
                header = frame.header.encode(errors="replace")
                spent = seconds_since(begun, hashlib.sha256(header).hexdigest())
                seconds = setup.consent.within(setup.name, seconds, spent)
            except ConfigError as error:
                return encode({"error": str(error), "traceback": "", "quiet": True})
        if reporting:
            progress.begin()
        # After these seconds the server has given up, or the site's consent is used up.
        with pulse.call(seconds):
            reply = member.answer(request)
            if "hello" in reply:
                reply = {**reply, "tells": reporting}
            encoded = encode(reply)
        begun.unlink(missing_ok=True)
        return encoded

    serve_frames(door, answer, (door.parent / "lost").touch)
