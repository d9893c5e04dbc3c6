"""A run on Flower: the app that its SuperLink starts, the folder of a deployment, and a coordinator on this machine."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import tomli_w
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from barter.core.errors import BarterError, CheckpointError, ConfigError, with_place
from barter.core.files import refused, replace_text, understood, whole
from barter.core.images import Spec
from barter.core.payload import Payload
from barter.experiment import Experiment
from barter.flower.address import Address, require_name
from barter.flower.engine import POLL_SECONDS, FlowerEngine, Hellos, Member
from barter.flower.flwr_internals import hurry
from barter.flower.handshake import Hello, agree, federation, new_attempt
from barter.flower.heartbeat import pause
from barter.flower.supervise import FLOWER, Child, free_port
from barter.runs.folder import RunFolder
from barter.runs.journal import Journal
from barter.setup.assembly import Federation
from barter.setup.config import Config, plain, read, resolve, to_toml
from barter.setup.hardware import with_threads
from barter.setup.participants import described

__all__ = ["Coordinator", "app", "conduct", "init", "init_simulation", "site_folder"]

ROSTER = "sites.json"
LARGEST = "largest"  # the file that says how many bytes answers can have now
SPARE = 10**6
PRIVATE = 0o700  # keys, and what sites send
HOUR = 3600.0  # seconds that a site has for a call, unless the run says otherwise
ORPHAN = 5.0  # seconds that a server whose SuperLink is gone has to end in order
PATIENCE = 120.0  # seconds that sites have to come at least: they load data first
log = logging.getLogger("barter")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What Flower's SuperLink runs."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))  # which `flwr run --stream` shows
    _end_with(os.getppid())
    folder = Path(str(context.run_config["folder"]))
    journal = Journal(folder / "journal.jsonl")
    try:
        config = resolve(read(folder / "run.toml"))
        hurry(config.timeout or HOUR)
        conduct(grid, config, Path(str(context.run_config["out"])), journal, folder / LARGEST)
    except Exception as error:
        if isinstance(error, BarterError):
            why = "\n".join([str(error), *getattr(error, "__notes__", [])]).strip()
        else:  # of nobody's in particular; Flower's database is also what a full disk refuses
            reason = refused(folder) or with_place(error)
            why = f"the server stopped: {reason}; finished rounds are kept, start again to continue"
        with suppress(
            CheckpointError
        ):  # where nothing can be written, whoever follows finds out himself
            journal.note("error", why)
        raise


def _end_with(parent: int) -> None:
    """End this process when the one that started it has ended.

    Flower tells it to, but whoever waits for Flower does not hear that; it would keep the run's folder for ever.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(ORPHAN)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def conduct(
    grid: Grid, config: Config, out: Path, journal: Journal, largest: Path | None = None
) -> Experiment:
    """Run a federation of the sites on a grid, from the start or from where it stopped; how large the next answers can
    be is said in a file, if one is named."""
    toml, timeout = to_toml(config), config.timeout or HOUR
    hellos = Hellos(grid, toml, max(timeout, PATIENCE))
    roster = Roster.read(out)
    here = _gathered(hellos, config, journal, roster)
    if roster is None:
        spec, ids = agree(config, list(here.values()))
        roster = Roster(secrets.token_hex(8), [], spec, list(ids.values()))
    ids = dict(enumerate(roster.members))
    server, test, validation = federation(config, roster.spec, ids)
    if not (out / "config.toml").is_file():
        RunFolder.create(out, toml).release()
    nodes = {said.name: node for node, said in here.items()}
    members = [
        Member(k, said.name, nodes.get(said.name, 0), said.examples, said.architecture)
        for k, said in ids.items()
    ]

    def session(member: Member) -> Payload:
        return {**about, "client": member.id, "architecture": member.architecture}

    engine = FlowerEngine(
        config.algorithm,
        grid,
        members,
        session,
        seed=config.seed,
        min_clients=config.min_clients,
        monitor=journal,
        timeout=timeout,
    )
    engine.telling, engine.crossed = hellos.telling, {k: said.tells() for k, said in ids.items()}
    if largest is not None:
        engine.expect = partial(_expect, largest)
    engine.rejoin = lambda strangers: _names(hellos, strangers)
    networks = described(
        roster.spec, ids[0].classes, {k: said.architecture for k, said in ids.items()}
    )
    config = with_threads(config, out, resume=True)
    parties = Federation(config, server, engine, test, networks, validation=validation)
    experiment = Experiment.of(parties, out, resume=True)
    about = roster.begin(out, experiment.round) | {"config": toml, "spec": roster.spec.plain()}
    journal.note("begin", experiment.round)
    for record in experiment.rounds(config.rounds):
        journal.note("round", record.to_json())
        log.info("round %d of %d: %.0f s", record.round, config.rounds, record.seconds["round"])
    if experiment.stopped is not None and experiment.round < config.rounds:
        journal.note("say", str(experiment.stopped))
    journal.note("done", experiment.round)
    return experiment


def _expect(file: Path, most: int | None) -> None:
    """Tell the gate how many bytes answers can have from now on, with what Flower and an evaluation add to them."""
    text = "" if most is None else str(2 * most + SPARE)
    if not file.exists() or file.read_text() != text:
        replace_text(file, text)


def _gathered(
    hellos: Hellos, config: Config, journal: Journal, roster: Roster | None
) -> dict[int, Hello]:
    """The hellos of as many sites as the run is for, by node; a run that goes on can do with as many as must answer, if
    others stay away or are not what they were."""
    here: dict[int, Hello] = {}
    least = config.clients if roster is None else config.min_clients or config.clients
    last, deadline = time.monotonic(), time.monotonic() + hellos.timeout
    while len(here) + len(hellos.refused) < config.clients:
        new: dict[int, Hello] = {}
        for node, tree in hellos.poll(hellos.grid.get_node_ids()).items():
            try:
                new[node] = Hello.read(tree)
                if roster is not None:
                    roster.require_same(new[node])
            except ConfigError as error:
                new.pop(node, None)
                hellos.refuse(node, error)
        if config.clients - len(hellos.refused) < least:
            raise ConfigError("; ".join(hellos.refused.values()))
        here |= new
        names = ", ".join(sorted(site.name for site in here.values())) or "none"
        so_many = f"{len(here)} of {config.clients} sites"
        if new:
            last = time.monotonic()
            journal.note("say", f"{so_many} are here: {names}")
        if len(here) >= least and time.monotonic() > deadline - hellos.timeout + PATIENCE:
            break
        if time.monotonic() > deadline:
            silent = (
                f"; {len(hellos.pending)} more are connected and say nothing"
                if hellos.pending
                else ""
            )
            raise ConfigError(f"{so_many} came within {hellos.timeout:g} s ({names}){silent}")
        time.sleep(pause(time.monotonic() - last, POLL_SECONDS))
    return here


def _names(hellos: Hellos, strangers: set[int]) -> dict[int, str]:
    """What nodes not seen before call themselves, as far as they have said so by now."""
    hellos.poll(strangers)
    return {node: str(hellos.said[node].get("name")) for node in strangers if node in hellos.said}


@dataclass
class Roster:
    """Who takes part in a run, written down at its first start; and which starts it had, each behind which round."""

    run: str  # the name under which sites keep their memory of it
    attempts: list[tuple[str, int]]
    spec: Spec
    members: list[Hello]

    @classmethod
    def read(cls, out: Path) -> Roster | None:
        path = out / ROSTER
        if not path.exists():
            return None
        return understood(path, cls._of)

    @classmethod
    def _of(cls, text: str) -> Roster:
        tree = json.loads(text)
        members = [Hello.read(member) for member in tree["members"]]
        return cls(
            tree["run"],
            [(a, n) for a, n in tree["attempts"]],
            Hello.read(tree["all"]).spec,
            members,
        )

    def begin(self, out: Path, finished: int) -> dict[str, Payload]:
        """One more start, behind so many finished rounds: what sites must know of it.

        Of an earlier start, a site may keep what it did until the round behind which the next one began.
        """
        self.attempts.append((new_attempt(), finished))
        history = {a: n for (a, _), (_, n) in pairwise(self.attempts)}
        everybody = replace(self.members[0], spec=self.spec)
        tree = {
            "run": self.run,
            "attempts": self.attempts,
            "members": [m.payload() for m in self.members],
        }
        replace_text(out / ROSTER, json.dumps({**tree, "all": everybody.payload()}))
        return {"run": self.run, "attempt": self.attempts[-1][0], "history": history}

    def require_same(self, hello: Hello) -> None:
        """Refuse a site that is not what it was when the run began."""
        if hello not in self.members:
            raise ConfigError(
                f"site {hello.name} is not what it was when the run began, or was not there: start a new run"
            )


def init(folder: Path, config: Config, sites: Sequence[Mapping[str, Any]], address: str) -> None:
    """A deployment folder: Flower's app, the run, certificates, and a folder with a key for each site."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not empty: choose another folder")
    names = [str(site["name"]) for site in sites]
    at = Address.read(address)
    if len(set(map(require_name, names))) < len(names):
        raise ConfigError(f"site names {', '.join(names)}: each needs one of its own")
    folder = folder.absolute()
    with whole(folder, PRIVATE) as new:
        (new / "sites").mkdir()
        _write_app(new, folder, config, "barter.flower.client_app:app")
        control = free_port()
        values = {
            "folder": folder,
            "address": at,
            "port": at.port,
            "control": control,
            "first": names[0],
        }
        (new / "README.md").write_text(Template(_template("README.md")).substitute(values))
        (new / "certificates.sh").write_text(_template("certificates.sh"))
        made = subprocess.run(
            ["sh", "certificates.sh", at.host, "localhost", "127.0.0.1"],
            cwd=new,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise ConfigError(
                f"certificates.sh failed, is openssl installed? {made.stderr.strip()}"
            )
        for site in sites:
            site_folder(new, {"superlink": str(at), **site})
        _write_connection(new, folder, control, insecure=False)


def init_simulation(folder: Path, config: Config) -> None:
    """The folder of a simulation: Flower's app and the run."""
    folder = folder.absolute()
    with whole(folder, PRIVATE) as new:
        _write_app(new, folder, config, "barter.flower.simulation:app")


def _write_app(place: Path, folder: Path, config: Config, client_app: str) -> None:
    """What Flower bundles, and the run that it is about, for a folder that is to be."""
    (place / "run.toml").write_text(tomli_w.dumps({**plain(config), "engine": "flower"}))
    values = {"folder": folder, "out": folder / "run", "client_app": client_app}
    (place / "pyproject.toml").write_text(Template(_template("pyproject.toml")).substitute(values))


def _write_connection(place: Path, folder: Path, port: int, *, insecure: bool) -> None:
    """How Flower's commands reach the SuperLink of this machine."""
    home = place / ".flower"
    home.mkdir(mode=0o700, exist_ok=True)
    certificate = {"root-certificates": str(folder / "certificates" / "ca.crt")}
    connection = {
        "address": f"127.0.0.1:{port}",
        **({"insecure": True} if insecure else certificate),
    }
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "barter", "barter": connection}})
    )


def _template(name: str) -> str:
    return (files("barter.flower") / "templates" / name).read_text()


def site_folder(folder: Path, setup: Mapping[str, Any]) -> None:
    """What a site needs: its key, the certificate that vouches for the coordinator, and site.toml."""
    home = folder / "sites" / str(setup["name"])
    home.mkdir(mode=0o700)
    (home / "site.toml").write_text(tomli_w.dumps(setup))
    (home / "ca.crt").write_bytes((folder / "certificates" / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (home / "key").touch(mode=0o600)
    (home / "key").write_bytes(private)
    (home / "key.pub").write_bytes(public + b"\n")


class Coordinator:
    """A SuperLink of this machine for a deployment folder; or for a simulation of so many clients."""

    def __init__(
        self,
        folder: Path,
        host: str,
        *,
        insecure: bool = False,
        simulation: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.insecure, self.simulation = folder.absolute(), insecure, simulation
        self.port = free_port() if simulation else _port(self.folder)  # where sites come to
        self.control = free_port()  # for this machine only
        self.home, certificates = self.folder / ".flower", self.folder / "certificates"
        self.env = {**os.environ, **FLOWER, "FLWR_HOME": str(self.home)}
        _write_connection(self.folder, self.folder, self.control, insecure=insecure)
        (self.folder / "logs").mkdir(exist_ok=True)
        most = int(1e6 * resolve(read(self.folder / "run.toml")).answer_mb)
        command = [
            sys.executable,
            "-m",
            "barter.flower.gateway",
            "--sites",
            str(Address(host, self.port)),
        ]
        command += [
            "--port",
            str(self.control),
            "--most",
            str(most),
            "--largest",
            str(self.folder / LARGEST),
        ]
        command += ["--disable-runtime-dependency-installation"]
        if simulation is not None:
            command.append("--simulation")
        else:
            command += ["--database", str(self.folder / "superlink.db")]
        if insecure:
            command.append("--insecure")
        else:
            command += [
                "--enable-supernode-auth",
                "--ssl-ca-certfile",
                str(certificates / "ca.crt"),
            ]
            command += ["--ssl-certfile", str(certificates / "server.pem")]
            command += ["--ssl-keyfile", str(certificates / "server.key")]
        self.superlink = Child(
            "SuperLink", command, self.env, self.folder / "logs" / "superlink.log"
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """The SuperLink is up inside."""
        self.superlink.start()
        try:
            deadline = time.monotonic() + 60
            while not _listens(self.control):
                self.check()
                if time.monotonic() > deadline:
                    raise BarterError(f"the SuperLink does not come up: see {self.superlink.log}")
                time.sleep(0.2)
            yield
        finally:
            self.superlink.stop()

    def check(self) -> None:
        """An error if the SuperLink is gone."""
        if self.superlink.poll() is not None:
            raise BarterError(
                f"the SuperLink ended: {refused(self.folder) or f'see {self.superlink.log}'}"
            )

    def register(self) -> None:
        """Let the sites of the folder in, by their public keys; without encryption anybody may come."""
        if self.insecure:
            return
        for home in sorted((self.folder / "sites").iterdir()):
            done = self._flwr(
                "supernode", "register", str(home / "key.pub"), "barter", "--name", home.name
            )
            if done.returncode and "already" not in (done.stdout + done.stderr):
                raise BarterError(f"site {home.name} cannot be registered: {_reason(done)}")

    def submit(self, out: Path) -> str:
        """Start the run; its Flower id."""
        (self.folder / "journal.jsonl").unlink(missing_ok=True)
        # the folder may have moved since
        settings = f'folder="{self.folder}" out="{out.absolute()}"'
        command = ["run", str(self.folder), "barter", "--format", "json", "-c", settings]
        if self.simulation is not None:
            command += [
                "--federation-config",
                " ".join(f"{key}={value}" for key, value in self.simulation.items()),
            ]
        done = self._flwr(*command)
        try:
            return str(json.loads(done.stdout[done.stdout.index("{") :])["run-id"])
        except (ValueError, KeyError):
            raise BarterError(f"Flower did not take the run: {_reason(done)}") from None

    def stop(self, run: str) -> None:
        """End a run that goes on."""
        with suppress(subprocess.TimeoutExpired):
            self._flwr("stop", run, "barter")

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["flwr", *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )


def _port(folder: Path) -> int:
    site = next(iter(sorted(folder.glob("sites/*/site.toml"))), None)
    if site is None:
        raise ConfigError(
            f"{folder} is not the folder of a deployment: there is no sites/*/site.toml in it"
        )
    return Address.read(str(read(site)["superlink"])).port


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
