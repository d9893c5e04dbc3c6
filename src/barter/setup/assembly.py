"""Assemble clients, server, engine and data from a configuration.

`experiment.py` runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from barter.compute.fused import fuse
from barter.core.errors import ConfigError
from barter.core.images import Images
from barter.core.nodes import Client, Monitor, Node, Server
from barter.core.params import BY_PYTHON
from barter.core.payload import Payload
from barter.core.wire_codec import WireCodec
from barter.data.partition import Dirichlet, Domains, Listed, Partition
from barter.data.splits import clients_in
from barter.data.task import Data, Task, make_task, overlap_note, place_clients
from barter.engines.adversaries import choose, flip_labels
from barter.engines.base import BaseEngine
from barter.engines.local import LocalEngine, device_slot
from barter.engines.network import Clock
from barter.models.zoo import Own
from barter.privacy.guard import Guard
from barter.runs.folder import read_finished_round
from barter.setup.config import Config, find_partition
from barter.setup.hardware import limit_memory, resolve_devices
from barter.setup.participants import (
    describe_networks,
    make_all_networks,
    make_client,
    make_server,
    require_apart,
)

__all__ = ["Federation", "assemble", "make_codec", "resolve_partition", "start_from"]

log = logging.getLogger("barter")


@dataclass(frozen=True)
class Federation:
    """Clients, server, engine and data of a run before its first round."""

    config: Config
    server: Server
    engine: BaseEngine  # runs the clients, in this process or at Flower sites
    test: Images | None  # images to evaluate the server's model on
    networks: Payload  # description of the networks, for checkpoints
    task: Task | None = None  # all clients' data; None if clients are at Flower sites
    architectures: tuple[str, ...] = ()  # one per client; empty if clients are at Flower sites
    # all clients' validation images, by which rounds of the server's model are compared
    validation: Images | None = None
    overlap: int = 0  # number of public images that are training images too, as far as is known
    # whether the choice of clients' local test or validation images depends on training labels
    tests_by_labels: bool = False

    def fingerprint(self) -> str:
        """Return hashes of training images, by client, and of test and validation images.

        They are separated by spaces, clients first. Images at Flower sites are not included, nor
        are clients' local test images and public images.
        """
        clients = self.engine.clients.values() if isinstance(self.engine, LocalEngine) else ()
        sets = [*(client.data for client in clients), self.test, self.validation]
        return " ".join(images.fingerprint() for images in sets if images is not None)


def resolve_partition(
    data: Data, partition: str | Partition | Sequence[Sequence[int]] | None, clients: int | None
) -> tuple[Partition, int]:
    """Return partition and number of clients, from the arguments and the data.

    Without a partition, data of several domains, or split among clients already
    (clients:PATH), are divided by domain, with as many clients as domains; all other data by
    `Dirichlet`. Lists of indices have as many clients as lists. Everywhere else the default is 5
    clients. A given number of clients always counts.

    Args:
        data: The run's data.
        partition: A partition, its name, the image indices of each client, or None for the default.
        clients: The number of clients, or None for the default.

    Raises:
        ConfigError: There is no partition of this name, or the folder of split data holds none.
    """
    kind, _, path = data.source.partition(":")
    if kind == "clients":
        domains = clients_in(Path(path))
    elif data.given is None:
        domains = 1
    else:
        domains = len(data.given.domains)
    if partition is None:
        divided = kind == "clients" or domains > 1
        partition = Domains() if divided else Dirichlet()
        clients = domains if clients is None and divided else clients
    elif isinstance(partition, str):
        partition = find_partition(partition)()
    elif not isinstance(partition, Partition):
        clients = len(partition) if clients is None else clients
        partition = Listed.of(partition)
    return partition, 5 if clients is None else clients


def make_codec(config: Config) -> WireCodec | None:
    """Return the codec of a run's payloads; None if they are sent as they are."""
    if config.wire.is_exact:
        return None
    return WireCodec(config.algorithm, config.wire, config.seed)


def assemble(
    config: Config, models: Sequence[tuple[str, Own | None]] = (), monitor: Monitor | None = None
) -> Federation:
    """Assemble a federation with all clients in this process.

    Loads the data, builds all networks, and limits the devices' memory for this process.

    Args:
        config: The configuration.
        models: Pairs of a model's name and the module or factory that was given in Python, or None
            for a name alone. Clients take them in turn. `config.models` counts if they are empty or
            all names.
        monitor: Notified of the run's progress.

    Raises:
        ConfigError: The configuration asks for something this machine or its data do not have.
    """
    if config.models == BY_PYTHON and all(own is None for _, own in models):
        raise ConfigError(
            "this run's models were given in Python: resume it there, with out=... and resume=True"
        )
    devices = resolve_devices(config.device)
    memory = min(limit_memory(device, config.device_memory) for device in devices)
    task = make_task(
        config.data,
        config.partition,
        config.clients,
        config.seed,
        devices[0],
        shared=config.stores_states,
    )
    # Only after the data have ruled out a number of clients that would take all memory.
    device_of = [devices[device_slot(k, len(devices))] for k in range(config.clients)]
    task = place_clients(task, device_of)
    require_apart(config, task.overlap)
    if task.overlap:
        log.warning("data.public=%r: %s", config.data.public, overlap_note(task.overlap))
    for note in task.notes:
        log.warning("%s: %s", config.data.source, note)
    names, parts = make_all_networks(config, models or [(config.models, None)], task.spec)
    clients = {
        k: make_client(config, k, parts.own[k], parts.names[k], task, device_of[k])
        for k in parts.own
    }
    adversarial = choose(config.adversaries, config.clients, config.seed)
    if adversarial:
        listed = ", ".join(map(str, adversarial))
        log.info("adversarial clients (%s): %s", config.adversaries.attack, listed)
    if config.adversaries.attack == "flipped-labels":
        for k in adversarial:
            clients[k].data = flip_labels(clients[k].data)
    elif config.adversaries.attack == "absent":
        for k in adversarial:
            del clients[k]
        adversarial = ()
    clock = None
    if config.network.enabled:
        clock = Clock(
            config.network,
            config.clients,
            seed=config.seed,
            methods=list(config.algorithm.crosses),
            min_clients=config.min_clients,
        )
    server = make_server(config, names, parts, task.spec, task.public, devices[0])
    engine = LocalEngine(
        config.algorithm,
        clients,
        seed=config.seed,
        min_clients=config.min_clients,
        monitor=monitor,
        streams=config.streams,
        device_memory=memory,
        tune=None if config.privacy.training else fuse,
        threads=config.threads,
        guard=Guard(config.privacy, config.algorithm),
        timeout=config.timeout,
        adversaries=(config.adversaries, adversarial),
        clock=clock,
        codec=make_codec(config),
        devices=devices,
    )
    if config.timeout is not None and (why := engine.timeout_gap()):
        log.warning(
            "timeout=%g is not enforced here: %s; a client that takes longer is named, and its "
            "answer counts",
            config.timeout,
            why,
        )
    networks = describe_networks(task.spec, task.classes, names)
    architectures = tuple(parts.names[k] for k in range(config.clients))
    return Federation(
        config,
        server,
        engine,
        task.global_test,
        networks,
        task,
        architectures,
        task.global_validation,
        task.overlap,
        task.tests_by_labels,
    )


def start_from(run: Path, federation: Federation) -> None:
    """Initialise every client and the server with the weights of another run.

    They are those after its last finished round; no other memory is taken over. Client k gets those
    of client k there. `server.fresh` becomes False. The clients must be in this process.

    Raises:
        ConfigError: A client or the server has no network in that run, or another architecture.
        CheckpointError: `run` is not the folder of a run with a finished round.
    """
    assert isinstance(federation.engine, LocalEngine)
    _, state = read_finished_round(run)
    there = state["networks"]["architectures"]
    here = federation.networks["architectures"]
    parties: list[tuple[str, int, Node]] = [
        (f"client {k}", k, client) for k, client in federation.engine.clients.items()
    ]
    federation.server.fresh = False
    if federation.server.model_or_none is not None:
        parties.append(("the server", 0, federation.server))
    for name, k, party in parties:
        # Read one by one: there may be many clients.
        is_client = isinstance(party, Client)
        memory: Payload = state["clients"].get(k, {}) if is_client else state["server"]
        if "model" not in memory:
            raise ConfigError(f"start={str(run)!r}: {name} has no network there to start from")
        try:
            party.model.load_state_dict(memory["model"])
        except RuntimeError:
            task = " for images or classes of another number" if there[k] == here[k] else ""
            raise ConfigError(
                f"start={str(run)!r}: the network of {name} is {there[k]}{task} there and "
                f"{here[k]} here"
            ) from None
        if federation.engine.states is not None and isinstance(party, Client):
            federation.engine.states.make_room(party)
