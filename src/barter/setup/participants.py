"""Who takes part in a run: the network of each party, the clients and the server, from a configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.payload import Payload
from barter.data.task import Task
from barter.models import zoo
from barter.models.grouped import grouped
from barter.models.pooled import pooled
from barter.models.zoo import Own
from barter.setup.config import Config

__all__ = [
    "Parts",
    "cut",
    "described",
    "everybodys_networks",
    "initial",
    "make_client",
    "make_server",
    "names_of",
    "narrowed",
]


def initial(name: str, spec: Spec, seed: int, own: Own | None = None) -> Classifier:
    """The network of an architecture as it is before the first round: clients of one architecture start from the same
    weights, and so does a model of the server's."""
    with seeds.scope(seed, "weights", name):
        return zoo.build(name, spec, own)


def narrowed(name: str, share: float) -> str:
    """What a network is called that has this share of its architecture's width."""
    return name if share == 1 else f"{name}@{share:g}"


def names_of(algorithm: Algorithm[Any, Any], models: str, clients: int) -> list[str]:
    """The architecture of each client."""
    if models == "auto":
        models = "small-cnn" if algorithm.one_architecture else "small-5"
    return zoo.members(models, clients)


def described(spec: Spec, classes: Sequence[str], names: Mapping[int, str]) -> Payload:
    """What a checkpoint says of the networks in it, so that they can be used without the data."""
    return {"spec": spec.plain(), "classes": list(classes), "architectures": dict(names)}


@dataclass(frozen=True)
class Parts:
    """Each client's network, as wide as it can afford, with a name that says so; and the server's, at full width."""

    names: dict[int, str]
    own: dict[int, Classifier]
    full: Classifier | None


def cut(
    config: Config, names: Mapping[int, str], networks: Mapping[int, Classifier], spec: Spec
) -> Parts:
    """The parties' networks from those of their architectures; equal ones are one."""
    algorithm, made = config.algorithm, dict[tuple[str, float], Classifier]()

    def part(k: int, share: float) -> Classifier:
        key = names[k], share
        if key not in made:
            with seeds.scope(config.seed, "network", *key):
                network = algorithm.network(copy.deepcopy(networks[k]), share, spec)
                if algorithm.feature_width is not None:
                    network = pooled(network, algorithm.feature_width)
                if config.privacy.training:
                    grouped(network)
            made[key] = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made[key]

    shares = {k: algorithm.budget(k, config.clients) for k in names}
    own = {k: part(k, shares[k]) for k in networks}
    called = {k: narrowed(name, shares[k]) for k, name in names.items()}
    if algorithm.server_network is None:
        return Parts(called, own, part(0, 1.0) if 0 in networks else None)
    full = initial(algorithm.server_network, spec, config.seed)
    return Parts(called, own, full.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def everybodys_networks(
    config: Config, listed: Sequence[tuple[str, Own | None]], spec: Spec
) -> tuple[dict[int, str], Parts]:
    """The architecture of each client and all parties' networks, of models by name or with what is behind the name."""
    own = dict(listed)
    by_name = all(network is None for network in own.values())
    called = (
        names_of(config.algorithm, config.models, config.clients)
        if by_name
        else [name for name, _ in listed]
    )
    names = {k: called[k % len(called)] for k in range(config.clients)}
    built = {
        name: initial(name, spec, config.seed, own.get(name)) for name in dict.fromkeys(called)
    }
    return names, cut(config, names, {k: built[name] for k, name in names.items()}, spec)


def make_client(
    config: Config, k: int, network: Classifier, architecture: str, task: Task, device: torch.device
) -> Client:
    """Client k with its share of a task."""
    tests = {"global": task.global_test, "local": task.local_tests[k]}
    if task.global_validation is not None:
        tests |= {"val": task.global_validation, "val_local": task.validation[k]}
    kind = config.algorithm.parties()[1]
    return kind(k, copy.deepcopy(network), device, task.train[k], tests, task.public, architecture)


def make_server(
    config: Config,
    names: Mapping[int, str],
    parts: Parts,
    spec: Spec,
    public: Images | None,
    device: torch.device,
) -> Server:
    """The server of clients with these architectures."""
    algorithm, title = config.algorithm, type(config.algorithm).__name__
    if algorithm.needs_public_data and public is None:
        raise ConfigError(f"{title} as asked for needs public data: set data.public to a source")
    if algorithm.one_architecture and len(set(names.values())) > 1:
        raise ConfigError(
            f"{title} has one model for all and needs one architecture, these clients have "
            f"{', '.join(sorted(set(names.values())))}: set models to one of them"
        )
    build = {k: partial(copy.deepcopy, network) for k, network in parts.own.items()}
    wanted = (algorithm.one_architecture and not algorithm.personal) or algorithm.global_model
    model = copy.deepcopy(parts.full).to(device) if wanted and parts.full is not None else None
    return algorithm.parties()[0](spec, build, model, device, public, parts.names)
