"""Clients that live elsewhere: what a site brings, and how a server makes a federation of several."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from barter.compute.fused import fuse
from barter.compute.precision import Precision
from barter.core.errors import ConfigError
from barter.core.images import Images, Spec
from barter.core.nodes import Client, Server
from barter.core.params import Count, DeviceName, Positive, Range, Whole, check
from barter.core.payload import Payload
from barter.data.task import (
    SITES,
    Data,
    held_out,
    make_task,
    own_data,
    public_data,
    validation_size,
)
from barter.engines.local import LocalEngine
from barter.flower.address import Address, require_name
from barter.flower.consent import Consent
from barter.flower.site import Site
from barter.privacy.guard import Guard
from barter.privacy.settings import Plan
from barter.privacy.side_information import said_of_itself
from barter.setup.config import Config, parsed, resolve
from barter.setup.hardware import device_named, memory_within, precision_named
from barter.setup.participants import cut, initial, make_client, make_server, names_of

__all__ = [
    "Hello",
    "Setup",
    "agree",
    "federation",
    "introduce",
    "make_site",
    "new_attempt",
    "settle",
]

USUAL = (
    0.5,
    0.25,
)  # mean and deviation of pixels, as a site says that wants a promise: its own tell of its images


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a site brings; the file site.toml."""

    name: str  # how the others know this site
    superlink: str = "127.0.0.1:8443"  # the coordinator's address
    certificate: str = "ca.crt"  # who vouches for the coordinator; a path from here
    key: str = "key"  # the private key this site is known by; a path from here
    data: str = ""  # npz:PATH, folder:PATH or a named source, all of it this site's own; empty: a share of the run's
    root: str = ""  # the folder that holds named data sets; empty: as the run says
    share: Whole | None = None  # which share of the run's data is this site's, where data is empty
    model: str = ""  # a name of the zoo or package.module:factory; empty: as the run says
    device: DeviceName = "auto"  # where this site computes
    threads: Count | None = None  # on how many cores; none means all
    # take part only in runs that promise at most this; none: in all
    epsilon: Positive | None = None
    # with at most this chance that it does not hold
    delta: Annotated[float, Range(gt=0, le=0.01)] = 1e-5
    # in what it takes part, and how much it does for it
    consent: Consent = field(default_factory=Consent)
    supernode: bool = False  # be Flower's own SuperNode, which starts a process for every call, and not barter's node
    insecure: bool = False  # without encryption and without a key: for tests on one machine only

    def __post_init__(self) -> None:
        check(self)
        require_name(self.name)
        Address.read(self.superlink)
        if bool(self.data) == (self.share is not None):
            raise ConfigError(
                f"site {self.name}: give it data of its own, or the number of its share of the run's data"
            )


@dataclass(frozen=True)
class Hello:
    """What a site says of itself before the first round."""

    name: str
    share: int | None
    spec: Spec
    classes: tuple[str, ...]
    examples: int
    architecture: str
    # whether the numbers of its pixels are the usual ones, and its classes have names
    careful: bool = False

    def tells(self) -> dict[str, int]:
        """What this has told of the site's data, part by part."""
        numbered = self.share is None and self.classes == tuple(map(str, range(self.spec.classes)))
        return said_of_itself(numbered=numbered and not self.careful, pixels=not self.careful)

    def payload(self) -> Payload:
        tree = dataclasses.asdict(self)
        return {**tree, "classes": list(self.classes), "spec": self.spec.plain()}

    @classmethod
    def read(cls, tree: Payload) -> Hello:
        """From what came over the wire."""
        try:
            said = cls(**{**tree, "classes": tuple(tree["classes"]), "spec": Spec.of(tree["spec"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"a site said hello in a way that is not understood: {error}"
            ) from error
        spec = said.spec
        share = [] if said.share is None else [said.share + 1]
        whole = [spec.channels, spec.height, spec.width, spec.classes, said.examples, *share]
        sound = all(type(n) is int and 0 < n < 2**40 for n in whole)
        sound = sound and all(
            type(word) is str for word in (said.name, said.architecture, *said.classes)
        )
        sound = sound and type(said.careful) is bool
        sound = sound and len(spec.mean) == len(spec.std) == spec.channels
        if not sound or not all(
            type(x) is float and math.isfinite(x) for x in (*spec.mean, *spec.std)
        ):
            raise ConfigError(f"a site said hello with values that cannot be: {tree}")
        require_name(said.name)
        return said


@cache
def _config(toml: str) -> Config:
    return resolve(parsed(toml))


def _consented(setup: Setup, toml: str) -> Config:
    """The configuration of a run that asks for no more than a site agrees to."""
    setup.consent.require_code(setup.name, toml)
    config = _config(toml)
    setup.consent.require(setup.name, config, own_data=setup.share is None)
    _require_promise(setup, config)
    return config


def introduce(setup: Setup, toml: str) -> Payload:
    """A site's hello to a run."""
    config = _consented(setup, toml)
    if setup.share is not None:
        _require_share(setup, config)
    architecture = (
        setup.model or names_of(config.algorithm, config.models, config.clients)[setup.share or 0]
    )
    if setup.share is None:
        dataset, spec, _ = own_data(_data(setup, config), setup.data)
        careful = setup.epsilon is not None
        if careful and dataset.numbered:
            raise ConfigError(
                f"site {setup.name} wants a promise, and {setup.data} does not name its classes: how many there are "
                "would be read from its labels; add an array `classes` of their names"
            )
        if careful:
            spec = dataclasses.replace(
                spec, mean=(USUAL[0],) * spec.channels, std=(USUAL[1],) * spec.channels
            )
        classes, images = tuple(dataset.classes), len(dataset.y_train)
        examples = images - validation_size(images, config.data.validation, f"site {setup.name}")
        return Hello(setup.name, None, spec, classes, examples, architecture, careful).payload()
    task = make_task(
        _data(setup, config), config.partition, config.clients, config.seed, torch.device("cpu")
    )
    examples = len(task.train[setup.share])
    return Hello(
        setup.name, setup.share, task.spec, tuple(task.classes), examples, architecture
    ).payload()


def _data(setup: Setup, config: Config) -> Data:
    """The run's data as this site finds them."""
    return dataclasses.replace(config.data, root=setup.root or config.data.root)


def _require_share(setup: Setup, config: Config) -> None:
    if config.data.source == SITES:
        raise ConfigError(
            f"site {setup.name} brings no data, and the run has none to share: set data in its site.toml"
        )
    if setup.share is not None and setup.share >= config.clients:
        raise ConfigError(
            f"site {setup.name} wants share {setup.share}, the run has {config.clients}, from 0 on"
        )


def _require_promise(setup: Setup, config: Config) -> None:
    if setup.epsilon is None:
        return
    privacy, bare = config.privacy, Plan(config.privacy, config.algorithm).open()
    why = f"{', '.join(bare)} would leave without one" if bare else ""
    if privacy.epsilon is None or privacy.epsilon > setup.epsilon:
        why = why or f"its privacy.epsilon is {privacy.epsilon}"
    if privacy.delta > setup.delta:
        why = why or f"its privacy.delta is {privacy.delta:g}, and may be {setup.delta:g}"
    if why:
        raise ConfigError(
            f"site {setup.name} wants a promise of epsilon = {setup.epsilon:g}, and the run makes none: {why}"
        )


def settle(setup: Setup, session: Payload) -> tuple[LocalEngine, Precision]:
    """The client that a site is in a run."""
    config, spec, k = (
        _consented(setup, session["config"]),
        Spec.of(session["spec"]),
        int(session["client"]),
    )
    device = device_named(setup.device)
    named = {k: str(session["architecture"])}
    parts = cut(config, named, {k: initial(named[k], spec, config.seed)}, spec)
    network, name = parts.own[k], parts.names[k]
    data = _data(setup, config)
    if setup.share is not None:
        task = make_task(data, config.partition, config.clients, config.seed, device)
        client = make_client(config, setup.share, network, name, task, device)
    else:
        dataset, _, augment = own_data(data, setup.data)
        x, y = dataset.x_train, dataset.y_train
        tests = {"local": Images(dataset.x_test.to(device), dataset.y_test.to(device), spec)}
        if data.validation:
            trained, held = held_out(dataset, np.arange(len(y)), data.validation, config.seed, k)
            tests["val_local"] = Images(x[held].to(device), y[held].to(device), spec)
            x, y = x[trained], y[trained]
        train = Images(x.to(device), y.to(device), spec, augment)
        kind: type[Client] = config.algorithm.parties()[1]
        client = kind(k, network, device, train, tests, public_data(data, spec, device), name)
    client.evaluation = config.evaluate
    memory = memory_within(device, config.device_memory)
    tune = None if config.privacy.training else fuse
    guard = Guard(config.privacy, config.algorithm, secret=True)
    engine = LocalEngine(
        config.algorithm,
        {k: client},
        seed=config.seed,
        device_memory=memory,
        tune=tune,
        guard=guard,
    )
    # nobody computes beside this client: all threads that torch has are for its kernels
    engine.cores = 1
    return engine, precision_named("auto" if device.type == "cpu" else config.precision, device)


def make_site(setup: Setup, memory: Path) -> Site:
    """The site of a setup, which remembers here."""
    quiet = setup.epsilon is not None
    return Site(
        setup.name,
        memory,
        partial(introduce, setup),
        partial(settle, setup),
        setup.consent,
        quiet=quiet,
    )


def agree(config: Config, hellos: Sequence[Hello]) -> tuple[Spec, dict[int, Hello]]:
    """What all parties agree on, and which client each site is; an error where they cannot."""
    by_name: dict[str, Hello] = {}
    for hello in sorted(hellos, key=lambda hello: hello.name):
        if hello.name in by_name:
            raise ConfigError(f"two sites are called {hello.name!r}: each needs a name of its own")
        by_name[hello.name] = hello
    first, *others = by_name.values()
    for other in others:
        if other.spec.classes != first.spec.classes or other.classes != first.classes:
            raise ConfigError(
                f"sites disagree on the classes: {first.name} has {first.spec.classes} ({_some(first.classes)}), "
                f"{other.name} has {other.spec.classes} ({_some(other.classes)})"
            )
        if other.spec.shape != first.spec.shape:
            raise ConfigError(
                f"sites disagree on the images: {first.name} has {first.spec.shape}, {other.name} {other.spec.shape}; "
                "set data.size for all of them"
            )
    shares = [hello.share for hello in by_name.values()]
    if None not in shares and len(set(shares)) == len(shares):
        ids = {hello.share: hello for hello in by_name.values() if hello.share is not None}
    elif set(shares) == {None}:
        ids = dict(enumerate(by_name.values()))
    else:
        raise ConfigError(
            "every site has data of its own, or each a share of the run's that no other has: "
            + ", ".join(
                f"{hello.name} {'own' if hello.share is None else hello.share}"
                for hello in by_name.values()
            )
        )
    if sorted(ids) != list(range(config.clients)):
        raise ConfigError(
            f"the run is for {config.clients} clients, the sites are {', '.join(by_name)}"
        )
    return _pooled(list(by_name.values())), dict(sorted(ids.items()))


def _some(classes: Sequence[str]) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")


def _pooled(hellos: Sequence[Hello]) -> Spec:
    """The pixel statistics of all images together, from each site's own."""
    specs = {hello.spec for hello in hellos}
    if len(specs) == 1:
        return specs.pop()
    total = sum(hello.examples for hello in hellos)
    mean, std = [], []
    for c in range(hellos[0].spec.channels):
        m = math.fsum(h.examples / total * h.spec.mean[c] for h in hellos)
        square = math.fsum(
            h.examples / total * (h.spec.std[c] ** 2 + h.spec.mean[c] ** 2) for h in hellos
        )
        mean.append(m)
        std.append(max(square - m**2, 1e-6) ** 0.5)
    return dataclasses.replace(hellos[0].spec, mean=tuple(mean), std=tuple(std))


def federation(
    config: Config, spec: Spec, members: Mapping[int, Hello]
) -> tuple[Server, Images | None, Images | None]:
    """The server of these sites, its test set and its validation set, where it can have them."""
    device, algorithm = device_named(config.device), config.algorithm
    built, unknown = {}, {}
    for name in dict.fromkeys(hello.architecture for hello in members.values()):
        try:
            if ":" in name and name not in map(str.strip, config.models.split(",")):
                raise ConfigError(
                    f"code that a site names is not run here unless `models` of the run names {name} too"
                )
            built[name] = initial(name, spec, config.seed)
        except ConfigError as error:
            unknown[name] = error
    needed = algorithm.one_architecture or algorithm.global_model or algorithm.replicas
    for hello in members.values():
        if needed and hello.architecture in unknown:
            raise ConfigError(
                f"{type(algorithm).__name__}'s server must build the network of site {hello.name} and cannot: "
                f"{unknown[hello.architecture]}"
            )
    names = {k: hello.architecture for k, hello in members.items()}
    parts = cut(config, names, {k: built[name] for k, name in names.items() if name in built}, spec)
    test = validation = None
    if config.data.source != SITES:
        task = make_task(config.data, config.partition, config.clients, config.seed, device)
        test, validation = task.global_test, task.global_validation
    server = make_server(config, names, parts, spec, public_data(config.data, spec, device), device)
    return server, test, validation


def new_attempt() -> str:
    """A name for one start of a server: what it asks twice it wants once."""
    return f"{time.time_ns():x}"
