"""Build the clients, the server and their networks from a configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.client_states import lazy_class
from barter.core.errors import ConfigError
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.payload import Payload
from barter.data.task import Task, overlap_note
from barter.models import zoo
from barter.models.grouped import use_group_norm
from barter.models.pooled import pool_features
from barter.models.zoo import Own
from barter.setup.config import Config

__all__ = [
    "Parts",
    "architecture_names",
    "cut_networks",
    "describe_networks",
    "initial_network",
    "make_all_networks",
    "make_client",
    "make_server",
    "narrowed_name",
    "require_apart",
]


def initial_network(name: str, spec: Spec, seed: int, own: Own | None = None) -> Classifier:
    """Build the initial network of an architecture, on the CPU.

    All clients of one architecture start from the same weights, and so does the server's model:
    they depend on seed and name alone, except that a module in `own` keeps its weights. The global
    random state is restored.

    Args:
        name: The architecture.
        spec: Shape and number of classes of the images.
        seed: The run's seed.
        own: The module or factory of this name, if it was given in Python.
    """
    with seeds.scope(seed, "weights", name):
        return zoo.build_network(name, spec, own)


def narrowed_name(name: str, share: float) -> str:
    """Return the name of a network with this share of its architecture's width.

    It is the architecture's name, followed by @SHARE if the share is not 1.
    """
    return name if share == 1 else f"{name}@{share:g}"


def architecture_names(algorithm: Algorithm[Any, Any], models: str, clients: int) -> list[str]:
    """Return the architecture of each client, in the order of their ids.

    The models of a list or family are repeated in turn. "auto" is small-cnn for algorithms that
    need one architecture, and small-5, five different ones, for all others.

    Raises:
        ConfigError: `models` has a name that is neither known nor module:name.
    """
    if models == "auto":
        models = "small-cnn" if algorithm.server_model.one_architecture else "small-5"
    return zoo.client_architectures(models, clients)


def describe_networks(spec: Spec, classes: Sequence[str], names: Mapping[int, str]) -> Payload:
    """Return what a checkpoint needs so that its networks load without the data.

    These are the spec, the classes' names, and each client's architecture.
    """
    return {"spec": spec.plain(), "classes": list(classes), "architectures": dict(names)}


@dataclass(frozen=True)
class Parts:
    """The networks of all parties."""

    names: dict[int, str]  # client -> architecture and width, such as small-cnn@0.5
    own: dict[int, Classifier]  # client -> its network, as wide as its budget allows
    full: Classifier | None  # the server's network, at full width


def cut_networks(
    config: Config, names: Mapping[int, str], networks: Mapping[int, Classifier], spec: Spec
) -> Parts:
    """Make all parties' networks from full-width networks of their architectures.

    Clients with the same architecture and width share one network object. Features are pooled to
    the algorithm's width, and private training replaces batch by group normalisation. The server's
    network is that of client 0 at full width, unless the algorithm names another, which is built
    and not changed; None if client 0 has no network here. The given networks are copied.

    Args:
        config: The configuration.
        names: Client -> architecture, of all clients.
        networks: Client -> network of that architecture; at a site, of that client only.
        spec: Shape and number of classes of the images.
    """
    algorithm = config.algorithm
    cache: dict[tuple[str, float], Classifier] = {}

    def network_of(k: int, share: float) -> Classifier:
        key = (names[k], share)
        if key not in cache:
            with seeds.scope(config.seed, "network", *key):
                network = algorithm.network(copy.deepcopy(networks[k]), share, spec)
                if algorithm.feature_width is not None:
                    network = pool_features(network, algorithm.feature_width)
                if config.privacy.training:
                    use_group_norm(network)
            cache[key] = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return cache[key]

    shares = {k: algorithm.budget(k, config.clients) for k in names}
    own = {k: network_of(k, shares[k]) for k in networks}
    full_names = {k: narrowed_name(name, shares[k]) for k, name in names.items()}
    server_network = algorithm.server_model.network
    if server_network is None:
        return Parts(full_names, own, network_of(0, 1.0) if 0 in networks else None)
    full = initial_network(server_network, spec, config.seed)
    return Parts(full_names, own, full.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def make_all_networks(
    config: Config, listed: Sequence[tuple[str, Own | None]], spec: Spec
) -> tuple[dict[int, str], Parts]:
    """Build the initial networks of all clients and of the server.

    Objects are shared by clients with the same architecture and width, and by the server's network
    with clients of its architecture at full width. Copy a network before changing it.

    Args:
        config: The configuration.
        listed: Pairs of a model's name and its module or factory, or None for a name alone. Clients
            take them in turn. If all are names alone, `config.models` is used instead.
        spec: Shape and number of classes of the images.

    Returns:
        Client -> architecture without its width, and the networks of `cut_networks`.
    """
    own = dict(listed)
    if all(factory is None for factory in own.values()):
        architectures = architecture_names(config.algorithm, config.models, config.clients)
    else:
        architectures = [name for name, _ in listed]
    names = {k: architectures[k % len(architectures)] for k in range(config.clients)}
    # One initial network for each architecture, which its clients share.
    initial_networks = {
        name: initial_network(name, spec, config.seed, own.get(name))
        for name in dict.fromkeys(architectures)
    }
    networks = {k: initial_networks[name] for k, name in names.items()}
    return names, cut_networks(config, names, networks, spec)


def require_apart(config: Config, overlap: int) -> None:
    """Refuse public images that are private ones, if the run protects private images.

    Methods train on public images and their labels without noise, so that no ε would hold.

    Args:
        config: The configuration.
        overlap: The number of public images that are training images too.

    Raises:
        ConfigError: There are such images, and the configuration has privacy settings.
    """
    privacy = config.privacy
    if overlap and (privacy.epsilon is not None or privacy.training or privacy.parts):
        raise ConfigError(
            f"data.public={config.data.public!r}: {overlap_note(overlap)}, and public images are "
            "used without protection: choose another public source, or leave out [privacy]"
        )


def make_client(
    config: Config, k: int, network: Classifier, architecture: str, task: Task, device: torch.device
) -> Client:
    """Build client k, of the algorithm's client class, with training data and tests.

    Tests are "global" and "local", and with validation images "val" and "val_local". Its network is
    copied from the given one when it is first used.

    Args:
        config: The configuration.
        k: The client's id.
        network: The initial network, which is copied.
        architecture: The network's name.
        task: The data of all clients, those of client k on its device.
        device: Where the client computes.
    """
    tests = {"global": task.global_test.to(device), "local": task.local_tests[k]}
    if task.global_validation is not None:
        tests |= {"val": task.global_validation.to(device), "val_local": task.validation[k]}
    public = None if task.public is None else task.public.to(device)
    kind = lazy_class(config.algorithm.parties()[1])
    return kind(k, network, device, task.train[k], tests, public, architecture)


def make_server(
    config: Config,
    names: Mapping[int, str],
    parts: Parts,
    spec: Spec,
    public: Images | None,
    device: torch.device,
) -> Server:
    """Build the server, with a model if the algorithm's `server_model` asks for one.

    Args:
        config: The configuration.
        names: Client -> architecture.
        parts: The networks of all parties; the server's model is a copy of `parts.full`.
        spec: Shape and number of classes of the images.
        public: The public images; None if the run has none.
        device: Where the server computes.

    Raises:
        ConfigError: The algorithm needs public data or one architecture, and the run does not have
            it.
    """
    algorithm = config.algorithm
    title = type(algorithm).__name__
    if algorithm.needs_public_data and public is None:
        raise ConfigError(f"{title} as configured needs public data: set data.public to a source")
    if algorithm.server_model.one_architecture and len(set(names.values())) > 1:
        raise ConfigError(
            f"{title} has one model for all and needs one architecture, these clients have "
            f"{', '.join(sorted(set(names.values())))}: set models to one of them"
        )
    # One function for each network, by which the engine recognises equal networks.
    copies = {id(network): partial(copy.deepcopy, network) for network in parts.own.values()}
    build = {k: copies[id(network)] for k, network in parts.own.items()}
    model = None
    if algorithm.server_model.exists and parts.full is not None:
        model = copy.deepcopy(parts.full).to(device)
    return algorithm.parties()[0](spec, build, model, device, public, parts.names)
