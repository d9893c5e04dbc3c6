"""`barter site`: the client's worker and its node on Flower, kept alive."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
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
from barter.core.params import build
from barter.engines.forks import die_with
from barter.flower.codec import decode, encode
from barter.flower.consent import Consent
from barter.flower.flwr_internals import strange
from barter.flower.frames import Frame, serve
from barter.flower.handshake import Setup, make_site
from barter.flower.heartbeat import (
    BEGUN,
    NOT_LET_IN,
    TURN,
    Pulse,
    Turn,
    allow,
    overdue,
    since,
)
from barter.setup.config import read

__all__ = ["FLOWER", "Child", "free_port", "load_setup", "site", "work"]

LONGEST_PAUSE = 10.0  # seconds between two attempts to start what dies at once
LONGEST_CALL = 3600.0  # seconds, of calls that do not say how long they may take
PULSE = "pulse"
ROOMS = "barter-"  # how the names of folders for sockets begin
TOKEN = "token"  # the file in such a folder that says which site made it
SETTLED = 60.0  # seconds after which a start counts as a success
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    # What the run's folder holds can be imported by the processes that Flower starts too.
    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), os.getcwd()])),
}
log = logging.getLogger("barter")


class Child:
    """A process of ours, with all that it starts."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.command, self.env, self.log = name, list(command), dict(env), log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
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
        return None if self.process is None else self.process.poll()

    def stop(self, patience: float = 10.0) -> None:
        """Ask it to end; then make it."""
        if self.process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left behind


class Kept(Child):
    """A child that is started again whenever it ends, after a pause that grows while it keeps failing."""

    pause = 0.0
    due = 0.0
    started = 0.0

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(name, command, env, log)
        self.reasons = reasons or {}  # exit status -> what it means

    def tend(self) -> None:
        now, status = time.monotonic(), self.poll()
        if self.process is None or status is not None:
            if status is not None and not self.due:
                self.pause = (
                    1.0
                    if now - self.started > SETTLED
                    else min(LONGEST_PAUSE, 2 * self.pause or 1.0)
                )
                self.due = now + self.pause
                log.warning(
                    "%s ended with status %s: %s; starting it again in %g s",
                    self.name,
                    status,
                    self.reasons.get(status, f"see {self.log}"),
                    self.pause,
                )
            if now >= self.due:
                self.due, self.started = 0.0, now
                try:
                    self.start()
                except OSError as error:  # a full disk: there may be room again
                    self.process, self.due = None, now + LONGEST_PAUSE
                    log.warning(
                        "%s cannot be started: %s; once more in %g s",
                        self.name,
                        error,
                        LONGEST_PAUSE,
                    )

    def restart(self, patience: float = 10.0) -> None:
        self.stop(patience)
        self.process, self.due = None, 0.0


class Watched(Kept):
    """A child that is also started again when it is silent for longer than it said it would be.

    It is looked after from here: it may be stopped, or hold its interpreter for ever, and could not do so itself.
    """

    begin = 600.0  # seconds until it must be heard of for the first time

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
                "%s is silent for longer than it may be: it is ended and starts again from the disk",
                self.name,
            )
            self.restart(patience=1.0)
        super().tend()


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_setup(path: Path) -> Setup:
    """A site as its file describes it."""
    values = read(path)
    consent = values.get("consent", {})
    if not isinstance(consent, Mapping):
        raise ConfigError(f"{path}: consent={consent!r}: must be a table, [consent]")
    return build(Setup, {**values, "consent": build(Consent, consent, "consent.")})


def site(path: Path) -> None:
    """Be a site until this process is told to end."""
    setup, home = load_setup(path), path.absolute().parent
    for needed in [] if setup.insecure else [setup.certificate, setup.key]:
        if not (home / needed).is_file():
            raise ConfigError(
                f"{home / needed} is missing: copy the site's whole folder, or set insecure = true"
            )
    ended = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    with _only_one(setup, home), _rooms(home) as rooms:
        _look_after(setup, path, home, rooms, ended)


def _identity(setup: Setup, home: Path) -> str:
    """Name a site as its coordinator knows it: by its key, or without one by its name there."""
    known_by = (
        f"{setup.superlink} {setup.name}".encode()
        if setup.insecure
        else (home / setup.key).read_bytes()
    )
    return hashlib.sha256(known_by).hexdigest()[:32]


def _locks() -> Path:
    """Return the folder in which this user's running sites are known, whichever folders they run in."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "barter" / "sites"


@contextmanager
def _only_one(setup: Setup, home: Path) -> Iterator[None]:
    """Refuse to be a site that runs already, from this folder or from a copy of it.

    Two processes of one key take each other's messages and write different memories. A copied folder is another
    file to lock, so the lock is named after the site's identity.
    """
    path = _locks() / _identity(setup, home)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _locked(path)
    except OSError as error:
        log.warning(
            "site %s: a copy of its folder would not be noticed: %s; set XDG_STATE_HOME to a writable folder",
            setup.name,
            error,
        )
        yield
        return
    if lock is None:
        raise ConfigError(
            f"{home}: site {setup.name!r} is running already, {_holder(path)}; a copy of a site's folder is the same "
            f"site: end the other, or make a folder of its own with `barter flower init`"
        )
    with lock:
        record = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(home)}
        lock.write(json.dumps(record))
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> TextIO | None:
    """Open and lock a file; none where another process holds it."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # Who held it may have removed it in between, and then this lock is on a file that nobody else finds.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                return file
        file.close()


def _holder(path: Path) -> str:
    """Say which process holds a lock, as far as it has said so."""
    try:
        record = json.loads(path.read_text())
        return f"process {record['pid']} on {record['host']}, in {record['folder']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "in another process"


@contextmanager
def _rooms(home: Path) -> Iterator[Path]:
    """Make a folder for a site's socket, whose path may have 108 characters at most, and remove it at the end.

    What a killed process left is removed too, but only what the site provably made: see `_abandoned`.
    """
    with (home / "rooms").open("a+") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{home}: the site of this folder is running already") from None
        note.seek(0)
        if (left := _abandoned(note.read())) is not None:
            shutil.rmtree(left, ignore_errors=True)
        rooms = Path(tempfile.mkdtemp(prefix=ROOMS))
        token = secrets.token_hex(16)
        try:
            with (rooms / TOKEN).open("w") as proof:
                fcntl.flock(proof, fcntl.LOCK_EX)  # as long as this process lives
                proof.write(token)
                proof.flush()
                note.truncate(0)
                note.write(json.dumps({"folder": str(rooms), "token": token}))
                note.flush()
                yield rooms
        finally:
            shutil.rmtree(rooms, ignore_errors=True)


def _abandoned(note: str) -> Path | None:
    """Return the folder that a note names if a process that is gone made it for the writer of this note.

    A note is a file that anybody may have copied or edited. It counts if the folder is this user's, holds the token
    of the note, and no living process holds that token's lock.
    """
    try:
        record = json.loads(note)
        folder, token = Path(record["folder"]), str(record["token"])
        with (folder / TOKEN).open() as proof:
            fcntl.flock(proof, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if mine and folder.name.startswith(ROOMS) and proof.read() == token:
                return folder
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def _look_after(setup: Setup, path: Path, home: Path, rooms: Path, ended: threading.Event) -> None:
    """Keep the worker and the node of a site alive until it is to end."""
    door, logs = rooms / "door", home / "logs"
    logs.mkdir(exist_ok=True)
    often = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}  # how Flower's SuperNode looks at itself
    env = {**os.environ, **FLOWER, **often, "FLWR_HOME": str(home / ".flower")}
    me = [sys.executable, "-m", "barter", "site", str(path), "--worker", str(door)]
    worker = Watched(f"site {setup.name}: worker", me, env, logs / "worker.log", rooms / PULSE)
    flowers = by_flower(setup)
    refused = (
        f"{setup.superlink} does not let in the key {home / setup.key}: the coordinator has to register it "
        f"(`barter flower start FOLDER`), or it is still connected from elsewhere, such as a copy of this folder"
    )
    reasons = {NOT_LET_IN: refused}
    node = Kept(f"site {setup.name}: node", [], env, logs / "node.log", reasons)
    try:
        while not ended.wait(0.2):
            if (rooms / "lost").exists():
                (rooms / "lost").unlink()
                if flowers:
                    # Flower would give the next healthy message the blame, and be one reply behind from then on.
                    log.warning(
                        "site %s: a client process was killed in the middle; its node restarts",
                        setup.name,
                    )
                    node.restart()
            if node.process is None or node.due:
                node.command = (
                    _supernode(setup, home, door) if flowers else _node(setup, home, door)
                )
            worker.tend()
            node.tend()
    finally:
        node.stop()
        worker.stop()


def by_flower(setup: Setup) -> bool:
    """Whether Flower's own SuperNode is the node: where it is wanted, or the Flower that is here is not known."""
    if setup.supernode:
        return True
    if why := strange():
        log.warning(
            "site %s: Flower's own SuperNode is used, which takes seconds for every call: %s",
            setup.name,
            why,
        )
    return bool(why)


def _node(setup: Setup, home: Path, door: Path) -> list[str]:
    """Barter's own node."""
    command = [
        sys.executable,
        "-m",
        "barter.flower.node",
        "--superlink",
        setup.superlink,
        "--door",
        str(door),
    ]
    if setup.insecure:
        return command
    return [
        *command,
        "--certificate",
        str(home / setup.certificate),
        "--key",
        str(home / setup.key),
    ]


def _supernode(setup: Setup, home: Path, door: Path) -> list[str]:
    """Flower's."""
    node = f"socket={json.dumps(str(door))} name={json.dumps(setup.name)}"
    command = [
        "flower-supernode",
        "--superlink",
        setup.superlink,
        "--port",
        str(free_port()),
        "--node-config",
        node,
    ]
    if setup.insecure:
        return [*command, "--insecure"]
    trust = ["--root-certificates", str(home / setup.certificate)]
    return [*command, *trust, "--auth-supernode-private-key", str(home / setup.key)]


def work(path: Path, door: Path) -> None:
    """The client itself: a process that lives as long as the site."""
    setup, home = load_setup(path), path.absolute().parent
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    os.chdir(home)  # paths in site.toml start at the file
    member, pulse = make_site(setup, home / "memory"), Pulse(door.with_name(PULSE))
    member.monitor = turn = Turn(door.with_name(TURN))
    begun = door.with_name(BEGUN)
    tells = {"tells": not by_flower(setup)}  # whether the node says how far a call is

    def answer(frame: Frame) -> Frame:
        try:
            request = decode(frame)
            seconds = float(request.get("timeout", LONGEST_CALL))
        except (BarterError, AttributeError, TypeError, ValueError) as error:
            return encode({"error": f"not understood: {error}", "traceback": ""})
        if request.get("ask") == "call":
            try:
                spent = since(
                    begun, hashlib.sha256(frame.header.encode(errors="replace")).hexdigest()
                )
                seconds = setup.consent.within(setup.name, seconds, spent)
            except ConfigError as error:
                return encode({"error": str(error), "traceback": ""})
        turn.begin()
        with pulse.call(
            seconds
        ):  # after that, the server has given up, or the site does not want to go on
            reply = member.answer(request)
            answered = encode({**reply, **tells} if "hello" in reply else reply)
        begun.unlink(missing_ok=True)
        return answered

    serve(door, answer, (door.parent / "lost").touch)
