"""A run on Flower: the ServerApp, deployment folders, and the SuperLink."""

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

from barter.core.errors import BarterError, CheckpointError, ConfigError, locate_error
from barter.core.files import create_folder, parse_file, replace_text, write_obstacle
from barter.core.images import Spec
from barter.core.payload import Payload
from barter.experiment import Experiment
from barter.flower.address import Address, require_name
from barter.flower.engine import POLL_SECONDS, SPARE, FlowerEngine, Hellos, Member
from barter.flower.flwr_internals import poll_faster
from barter.flower.handshake import Hello, agree, build_server, new_attempt
from barter.flower.heartbeat import poll_interval
from barter.flower.supervise import FLOWER, Child, free_port
from barter.runs.folder import RunFolder
from barter.runs.journal import Journal
from barter.setup.assembly import Federation, make_codec
from barter.setup.config import Config, read_run_values, read_toml, resolve, to_plain, to_toml
from barter.setup.hardware import with_threads
from barter.setup.participants import describe_networks

__all__ = [
    "Coordinator",
    "app",
    "conduct",
    "create_deployment",
    "create_simulation",
    "create_site_folder",
]

ROSTER = "sites.json"
LARGEST_FILE = "largest"  # file with the largest size of the next answers, which the gateway reads
PRIVATE = 0o700  # mode of folders with keys and with answers of sites
HOUR = 3600.0  # default seconds that a site has for a call
ORPHAN = 5.0  # seconds that a server has to end in order after its SuperLink ended
CONNECT_SECONDS = 120.0  # least seconds that sites have to connect: they load their data first
log = logging.getLogger("barter")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of a federation; Flower's SuperLink starts this process.

    Errors are written to the run's journal, as far as the disk allows, and raised.
    """
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))  # which `flwr run --stream` shows
    _end_with(os.getppid())
    folder = Path(str(context.run_config["folder"]))
    journal = Journal(folder / "journal.jsonl")
    try:
        config = resolve(read_run_values(folder, "run.toml"))
        poll_faster(config.timeout or HOUR)
        conduct(grid, config, Path(str(context.run_config["out"])), journal, folder / LARGEST_FILE)
    except Exception as error:
        if isinstance(error, BarterError):
            why = "\n".join([str(error), *getattr(error, "__notes__", [])]).strip()
        else:
            # A full disk may appear as any error, such as one of Flower's database.
            reason = write_obstacle(folder) or locate_error(error)
            why = f"the server stopped: {reason}; finished rounds are kept, start again to continue"
        # If nothing can be written, the process that follows the journal finds out itself.
        with suppress(CheckpointError):
            journal.note("error", why)
        raise


def _end_with(parent: int) -> None:
    """End this process when the one that started it has ended.

    Flower's request to end does not reach a process that waits for Flower, and such a process
    would keep the run's folder locked for ever.
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
    """Run a federation of a grid's sites, from the start or the last checkpoint.

    Args:
        grid: Flower's grid.
        config: The run's configuration.
        out: The run's folder.
        journal: Receives the progress of the run.
        largest: The file for the largest size of the next answers, for the gateway; none: no file.

    Returns:
        The finished run, which may have stopped early.

    Raises:
        ConfigError: If the sites do not come, do not fit together, or the server cannot be built.
        BarterError: If a round fails.
    """
    toml = to_toml(config)
    timeout = config.timeout or HOUR
    hellos = Hellos(grid, toml, max(timeout, CONNECT_SECONDS))
    roster = Roster.read(out)
    if largest is not None:
        _expect(largest, 0)  # for hellos
    present = _wait_for_sites(hellos, config, journal, roster)
    if roster is None:
        spec, ids = agree(config, list(present.values()))
        roster = Roster(secrets.token_hex(8), [], spec, list(ids.values()))
    ids = dict(enumerate(roster.members))
    server, task = build_server(config, roster.spec, ids)
    if not (out / "config.toml").is_file():
        RunFolder.create(out, toml).release()
    nodes = {hello.name: node for node, hello in present.items()}
    members = [
        Member(k, hello.name, nodes.get(hello.name, 0), hello.examples, hello.architecture)
        for k, hello in ids.items()
    ]

    def session(member: Member) -> Payload:
        return {**run_info, "client": member.id, "architecture": member.architecture}

    engine = FlowerEngine(
        config.algorithm,
        grid,
        members,
        session,
        seed=config.seed,
        min_clients=config.min_clients,
        monitor=journal,
        timeout=timeout,
        codec=make_codec(config),
        answer_bytes=int(1e6 * config.answer_mb),
    )
    engine.reporting = hellos.reporting
    engine.crossed = {k: hello.revealed_facts() for k, hello in ids.items()}
    if largest is not None:
        engine.expect = partial(_expect, largest)
    engine.rejoin = partial(_names, hellos)
    architectures = {k: hello.architecture for k, hello in ids.items()}
    networks = describe_networks(roster.spec, ids[0].classes, architectures)
    config = with_threads(config, out, resume=True)
    # Whether sites with their own data have public images among them, they check themselves.
    shared = task is not None and all(hello.share is not None for hello in ids.values())
    parties = Federation(
        config,
        server,
        engine,
        None if task is None else task.global_test,
        networks,
        validation=None if task is None else task.global_validation,
        overlap=task.overlap if task is not None and shared else 0,
        tests_by_labels=task.tests_by_labels if task is not None and shared else False,
    )
    experiment = Experiment.of(parties, out, resume=True)
    attempt = roster.begin(out, experiment.round)
    run_info = {**attempt, "config": toml, "spec": roster.spec.plain()}
    journal.note("begin", experiment.round)
    for record in experiment.rounds(config.rounds):
        journal.note("round", record.to_json())
        log.info("round %d of %d: %.0f s", record.round, config.rounds, record.seconds["round"])
    if experiment.stopped is not None and experiment.round < config.rounds:
        journal.note("say", str(experiment.stopped))
    journal.note("done", experiment.round)
    return experiment


def _expect(file: Path, most: int | None) -> None:
    """Write the largest size of the next answers to a file, for the gateway.

    The size, 2 * most + `SPARE`, has room for what Flower and an evaluation add to an answer. None
    writes an empty file, which is no limit.
    """
    text = "" if most is None else str(2 * most + SPARE)
    if not file.exists() or file.read_text() != text:
        replace_text(file, text)


def _wait_for_sites(
    hellos: Hellos, config: Config, journal: Journal, roster: Roster | None
) -> dict[int, Hello]:
    """Wait for the run's sites and return their hellos by node.

    A new run needs all of its sites. A run that is resumed waits `CONNECT_SECONDS` seconds for all of
    them; then `min_clients` sites suffice, if others stay away or have changed.

    Raises:
        ConfigError: If too few sites come in time, or too many are refused.
    """
    present: dict[int, Hello] = {}
    least = config.clients if roster is None else config.min_clients or config.clients
    last = time.monotonic()  # when the last site came
    deadline = time.monotonic() + hellos.timeout
    while len(present) + len(hellos.refused) < config.clients:
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
        present |= new
        names = ", ".join(sorted(site.name for site in present.values())) or "none"
        count = f"{len(present)} of {config.clients} sites"
        if new:
            last = time.monotonic()
            journal.note("say", f"{count} are connected: {names}")
        if len(present) >= least and time.monotonic() > deadline - hellos.timeout + CONNECT_SECONDS:
            break
        if time.monotonic() > deadline:
            silent = ""
            if hellos.pending:
                silent = f"; {len(hellos.pending)} more are connected and do not answer"
            raise ConfigError(f"{count} came within {hellos.timeout:g} s ({names}){silent}")
        time.sleep(poll_interval(time.monotonic() - last, POLL_SECONDS))
    return present


def _names(hellos: Hellos, nodes: set[int]) -> dict[int, str]:
    """Return the site names of those nodes whose hello has arrived by now."""
    hellos.poll(nodes)
    return {
        node: str(hellos.received[node].get("name")) for node in nodes if node in hellos.received
    }


@dataclass
class Roster:
    """The sites of a run, fixed at its first start, and the starts of its server.

    It is saved in the run's folder as sites.json.
    """

    run: str  # the run's id, under which sites save their memory of it
    attempts: list[tuple[str, int]]  # name of each start, number of rounds finished before it
    spec: Spec
    members: list[Hello]

    @classmethod
    def read(cls, out: Path) -> Roster | None:
        """Return the roster in a run's folder; None if the run has not begun.

        Raises:
            CheckpointError: If its file is damaged.
        """
        path = out / ROSTER
        if not path.exists():
            return None
        return parse_file(path, cls._of)

    @classmethod
    def _of(cls, text: str) -> Roster:
        tree = json.loads(text)
        return cls(
            run=tree["run"],
            members=[Hello.read(member) for member in tree["members"]],
            attempts=[(attempt, finished) for attempt, finished in tree["attempts"]],
            spec=Hello.read(tree["all"]).spec,
        )

    def begin(self, out: Path, finished: int) -> dict[str, Payload]:
        """Record a start of the server in sites.json; return what sites must know of it.

        Args:
            out: The run's folder.
            finished: Number of finished rounds.

        Returns:
            "run", the run's id; "attempt", the name of this start; and "history": name of each
            earlier start -> its last round that counts, the number of rounds that were finished
            when the next one began.
        """
        self.attempts.append((new_attempt(), finished))
        history = {
            attempt: finished_before_next
            for (attempt, _), (_, finished_before_next) in pairwise(self.attempts)
        }
        tree = {
            "run": self.run,
            "attempts": self.attempts,
            "members": [member.payload() for member in self.members],
            "all": replace(self.members[0], spec=self.spec).payload(),
        }
        replace_text(out / ROSTER, json.dumps(tree))
        return {"run": self.run, "attempt": self.attempts[-1][0], "history": history}

    def require_same(self, hello: Hello) -> None:
        """Raise ConfigError if a hello is not equal to one of those the run began with."""
        if hello not in self.members:
            raise ConfigError(
                f"site {hello.name} has changed since the run began, or was not there: "
                "start a new run"
            )


def create_deployment(
    folder: Path, config: Config, sites: Sequence[Mapping[str, Any]], address: str
) -> None:
    """Create a deployment folder: app, run, certificates, a folder for each site.

    Args:
        folder: The folder, which must not exist or be empty.
        config: The run's configuration.
        sites: The fields of each site's site.toml; "name" is required.
        address: The coordinator's address, HOST:PORT, as the sites reach it.

    Raises:
        ConfigError: If the folder is not empty, a name or the address is not valid, or openssl
            fails.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not empty: choose another folder")
    names = [str(site["name"]) for site in sites]
    coordinator = Address.read(address)
    if len(set(map(require_name, names))) < len(names):
        raise ConfigError(f"site names {', '.join(names)}: names must be unique")
    folder = folder.absolute()
    with create_folder(folder, PRIVATE) as new:
        (new / "sites").mkdir()
        _write_app(new, folder, config, "barter.flower.client_app:app")
        control = free_port()
        values = {
            "folder": folder,
            "address": coordinator,
            "port": coordinator.port,
            "control": control,
            "first": names[0],
        }
        (new / "README.md").write_text(Template(_template("README.md")).substitute(values))
        (new / "certificates.sh").write_text(_template("certificates.sh"))
        process = subprocess.run(
            ["sh", "certificates.sh", coordinator.host, "localhost", "127.0.0.1"],
            cwd=new,
            capture_output=True,
            text=True,
        )
        if process.returncode:
            raise ConfigError(
                f"certificates.sh failed, is openssl installed? {process.stderr.strip()}"
            )
        for site in sites:
            create_site_folder(new, {"superlink": str(coordinator), **site})
        _write_connection(new, folder, control, insecure=False)


def create_simulation(folder: Path, config: Config) -> None:
    """Create the folder of a simulation: Flower's app and the run's configuration.

    Args:
        folder: The folder, which must not exist or be empty.
        config: The run's configuration.
    """
    folder = folder.absolute()
    with create_folder(folder, PRIVATE) as new:
        _write_app(new, folder, config, "barter.flower.simulation:app")


def _write_app(place: Path, folder: Path, config: Config, client_app: str) -> None:
    """Write run.toml and Flower's pyproject.toml.

    Args:
        place: The temporary folder to write to.
        folder: The folder's final path, which the files name.
        config: The run's configuration.
        client_app: The ClientApp, as module:name.
    """
    (place / "run.toml").write_text(tomli_w.dumps({**to_plain(config), "engine": "flower"}))
    values = {"folder": folder, "out": folder / "run", "client_app": client_app}
    (place / "pyproject.toml").write_text(Template(_template("pyproject.toml")).substitute(values))


def _write_connection(place: Path, folder: Path, port: int, *, insecure: bool) -> None:
    """Write the configuration by which Flower's commands reach the SuperLink.

    Args:
        place: The folder to write to.
        folder: The folder's final path, which the configuration names.
        port: The SuperLink's control port.
        insecure: Whether the connection is without TLS.
    """
    flower_folder = place / ".flower"
    flower_folder.mkdir(mode=0o700, exist_ok=True)
    connection: dict[str, Any] = {"address": f"127.0.0.1:{port}"}
    if insecure:
        connection["insecure"] = True
    else:
        connection["root-certificates"] = str(folder / "certificates" / "ca.crt")
    (flower_folder / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "barter", "barter": connection}})
    )


def _template(name: str) -> str:
    return (files("barter.flower") / "templates" / name).read_text()


def create_site_folder(folder: Path, setup: Mapping[str, Any]) -> None:
    """Create sites/<name>: a new key pair (key, key.pub), the CA's ca.crt, site.toml.

    Args:
        folder: The deployment folder, with sites/ and certificates/ca.crt.
        setup: The fields of site.toml, with the site's "name".

    Raises:
        FileExistsError: The site's folder exists.
    """
    site_folder = folder / "sites" / str(setup["name"])
    site_folder.mkdir(mode=0o700)
    (site_folder / "site.toml").write_text(tomli_w.dumps(setup))
    (site_folder / "ca.crt").write_bytes((folder / "certificates" / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (site_folder / "key").touch(mode=0o600)
    (site_folder / "key").write_bytes(private)
    (site_folder / "key.pub").write_bytes(public + b"\n")


class Coordinator:
    """The SuperLink of a deployment folder or simulation, as a local process.

    Args:
        folder: The deployment folder.
        host: The host or address on which to listen for sites.
        insecure: Whether sites connect without TLS and keys.
        simulation: Flower's federation options for a simulation; none: a deployment.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        *,
        insecure: bool = False,
        simulation: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.insecure = insecure
        self.simulation = simulation
        self.port = free_port() if simulation else _port(self.folder)  # for sites
        self.control = free_port()  # for this machine only
        self.flower_folder = self.folder / ".flower"
        self.env = {**os.environ, **FLOWER, "FLWR_HOME": str(self.flower_folder)}
        _write_connection(self.folder, self.folder, self.control, insecure=insecure)
        (self.folder / "logs").mkdir(exist_ok=True)
        answer_bytes = int(1e6 * resolve(read_run_values(self.folder, "run.toml")).answer_mb)
        command = [sys.executable, "-m", "barter.flower.gateway"]
        command += ["--sites", str(Address(host, self.port))]
        command += ["--port", str(self.control)]
        command += ["--most", str(answer_bytes)]
        command += ["--largest", str(self.folder / LARGEST_FILE)]
        command += ["--disable-runtime-dependency-installation"]
        if simulation is not None:
            command += ["--simulation"]
        else:
            command += ["--database", str(self.folder / "superlink.db")]
        if insecure:
            command += ["--insecure"]
        else:
            certificates = self.folder / "certificates"
            command += ["--enable-supernode-auth"]
            command += ["--ssl-ca-certfile", str(certificates / "ca.crt")]
            command += ["--ssl-certfile", str(certificates / "server.pem")]
            command += ["--ssl-keyfile", str(certificates / "server.key")]
        self.superlink = Child(
            "SuperLink", command, self.env, self.folder / "logs" / "superlink.log"
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the SuperLink, wait until it listens, and stop it when the block ends.

        Raises:
            BarterError: It ended, or does not listen within 60 s.
        """
        self.superlink.start()
        try:
            deadline = time.monotonic() + 60
            while not _listens(self.control):
                self.check()
                if time.monotonic() > deadline:
                    raise BarterError(
                        f"the SuperLink did not start within 60 s: see {self.superlink.log}"
                    )
                time.sleep(0.2)
            yield
        finally:
            self.superlink.stop()

    def check(self) -> None:
        """Raise BarterError if the SuperLink has ended."""
        if self.superlink.poll() is not None:
            reason = write_obstacle(self.folder) or f"see {self.superlink.log}"
            raise BarterError(f"the SuperLink ended: {reason}")

    def register(self) -> None:
        """Register the public keys of the folder's sites with the SuperLink.

        The SuperLink must be running. Keys that are registered already stay so. Without keys
        (`insecure`) nothing happens.

        Raises:
            BarterError: Flower refuses a key.
        """
        if self.insecure:
            return
        for site_folder in sorted((self.folder / "sites").iterdir()):
            done = self._flwr(
                "supernode",
                "register",
                str(site_folder / "key.pub"),
                "barter",
                "--name",
                site_folder.name,
            )
            if done.returncode and "already" not in (done.stdout + done.stderr):
                raise BarterError(f"site {site_folder.name} cannot be registered: {_reason(done)}")

    def submit(self, out: Path) -> str:
        """Submit the run to the SuperLink, and return the run's id at Flower.

        The journal of an earlier start is deleted.

        Args:
            out: The run's folder.

        Raises:
            BarterError: Flower does not accept the run.
        """
        (self.folder / "journal.jsonl").unlink(missing_ok=True)
        # The folder may have been moved since it was created: Flower's app gets its path now.
        settings = f'folder="{self.folder}" out="{out.absolute()}"'
        command = ["run", str(self.folder), "barter", "--format", "json", "-c", settings]
        if self.simulation is not None:
            options = " ".join(f"{key}={value}" for key, value in self.simulation.items())
            command += ["--federation-config", options]
        done = self._flwr(*command)
        try:
            return str(json.loads(done.stdout[done.stdout.index("{") :])["run-id"])
        except (ValueError, KeyError):
            raise BarterError(f"Flower did not accept the run: {_reason(done)}") from None

    def stop(self, run: str) -> None:
        """Stop a run, given the id that `submit` returned.

        One that Flower does not stop within two minutes is left alone.
        """
        with suppress(subprocess.TimeoutExpired):
            self._flwr("stop", run, "barter")

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Flower's command line with the connection of this folder.

        A failed command is returned, not raised.

        Raises:
            subprocess.TimeoutExpired: It takes longer than 120 s.
        """
        return subprocess.run(
            ["flwr", *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )


def _port(folder: Path) -> int:
    """Return the port at which a deployment's sites reach the coordinator.

    It is that of the first site.

    Raises:
        ConfigError: The folder has no sites.
    """
    site = next(iter(sorted(folder.glob("sites/*/site.toml"))), None)
    if site is None:
        raise ConfigError(f"{folder} is not a deployment folder: it has no sites/*/site.toml")
    return Address.read(str(read_toml(site)["superlink"])).port


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return a failed command's stderr, or its stdout if that is empty, in one line."""
    return " ".join((done.stderr or done.stdout).split())


def _listens(port: int) -> bool:
    """Return whether a process listens at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
