"""A site's setup and hello, and the server's federation built from hellos."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from barter.compute.fused import fuse
from barter.compute.precision import Precision
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec
from barter.core.nodes import Client, Server
from barter.core.params import Count, DeviceName, Positive, Range, Whole, check_fields
from barter.core.payload import Payload
from barter.data.dataset import Dataset
from barter.data.task import (
    SITES,
    Data,
    Task,
    make_task,
    overlap,
    overlap_note,
    own_data,
    public_data,
    split_validation,
    validation_size,
)
from barter.engines.local import LocalEngine
from barter.flower.address import Address, require_name
from barter.flower.consent import Consent
from barter.flower.site import Site
from barter.privacy.guard import Guard, TotalBudget
from barter.privacy.settings import Plan
from barter.privacy.side_information import facts_in_hello
from barter.setup.config import Config, parse_toml, resolve
from barter.setup.hardware import limit_memory, resolve_device, resolve_precision
from barter.setup.participants import (
    architecture_names,
    cut_networks,
    initial_network,
    make_client,
    make_server,
    require_apart,
)

__all__ = [
    "Hello",
    "Setup",
    "agree",
    "build_client",
    "build_server",
    "foreign_networks",
    "introduce",
    "make_site",
    "new_attempt",
]

log = logging.getLogger("barter")

# Mean and standard deviation of pixels that a site with a privacy requirement sends: its own
# would reveal something about its images.
USUAL_MEAN = 0.5
USUAL_STD = 0.25


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The configuration of a site: the file site.toml."""

    name: str  # the site's name in the federation
    superlink: str = "127.0.0.1:8443"  # the coordinator's address, HOST:PORT
    # the CA certificate that authenticates the coordinator; a path relative to site.toml
    certificate: str = "ca.crt"
    key: str = "key"  # the private key that authenticates this site; a path relative to site.toml
    # the site's own data: npz:PATH, folder:PATH or a named source; empty: a share of the run's data
    data: str = ""
    root: str = ""  # the folder that holds named data sets; empty: as in the run's configuration
    # the site's own choice of public images, for methods that need them: the source that the run
    # names, after checking that none of the site's own images are in it; empty: no such methods.
    # A site with a share of the run's data uses the run's
    public: str = ""
    share: Whole | None = None  # index of this site's share of the run's data, if `data` is empty
    # an architecture of the zoo or package.module:factory; empty: as in the run's configuration
    model: str = ""
    device: DeviceName = "auto"  # the device on which this site computes
    threads: Count | None = None  # number of CPU threads; none: all cores
    # ε: take part only in runs that guarantee at most this privacy loss; none: in all runs
    epsilon: Positive | None = None
    # δ: largest probability with which that guarantee may fail
    delta: Annotated[float, Range(gt=0, le=0.01)] = 1e-5
    # ε of all runs together, by the ledger; no answer leaves that would exceed it; none: no limit.
    # Without `epsilon`, a single run may spend all of it
    budget: Positive | None = None
    # the file of all releases, a path relative to site.toml; sites that hold the same images share
    # one; empty: memory/ledger.jsonl
    ledger: str = ""
    # limits on the algorithms, methods, sizes and times of calls
    consent: Consent = field(default_factory=Consent)
    # use Flower's own SuperNode, which starts a process for every call, instead of barter's node
    supernode: bool = False
    insecure: bool = False  # no encryption and no keys: for tests on one machine only

    def __post_init__(self) -> None:
        check_fields(self)
        require_name(self.name)
        Address.read(self.superlink)
        if self.epsilon is None and self.budget is not None:
            object.__setattr__(self, "epsilon", self.budget)
        if bool(self.data) == (self.share is not None):
            raise ConfigError(
                f"site {self.name}: set either data (its own) or share (the index of its share of "
                "the run's data)"
            )


@dataclass(frozen=True)
class Hello:
    """A site's description of itself, sent before the first round."""

    name: str
    share: int | None
    spec: Spec
    classes: tuple[str, ...]
    examples: int
    architecture: str
    # whether the pixel statistics are the default ones, and the classes have names
    careful: bool = False
    public: str = ""  # fingerprint of the public images that the site uses; empty: none

    def revealed_facts(self) -> dict[str, int]:
        """Return which facts about the site's data this reveals: name of the fact -> 1."""
        numbered = self.share is None and self.classes == tuple(map(str, range(self.spec.classes)))
        return facts_in_hello(numbered=numbered and not self.careful, pixels=not self.careful)

    def payload(self) -> Payload:
        """Return this as a payload tree, which `read` converts back."""
        tree = dataclasses.asdict(self)
        return {**tree, "classes": list(self.classes), "spec": self.spec.plain()}

    @classmethod
    def read(cls, tree: Payload) -> Hello:
        """Parse and validate a hello that came over the network.

        Raises:
            ConfigError: If it is malformed, or has impossible values.
        """
        try:
            classes = tuple(tree["classes"])
            hello = cls(**{**tree, "classes": classes, "spec": Spec.of(tree["spec"])})
        except ValueError as error:
            raise ConfigError(f"a site's hello has impossible values: {error}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"a site's hello is malformed: {error}") from error
        if not hello._is_valid():
            raise ConfigError(f"a site's hello has impossible values: {tree}")
        require_name(hello.name)
        return hello

    def _is_valid(self) -> bool:
        """Return whether every field has its declared type and a possible value.

        Counts are from 1 to 2**40 - 1, `share` is None or at least 0, and mean and standard
        deviation have one finite float per channel.
        """
        spec = self.spec
        counts = [spec.channels, spec.height, spec.width, spec.classes, self.examples]
        if type(self.share) is int:
            counts.append(self.share + 1)
        texts = (self.name, self.architecture, self.public, *self.classes)
        return (
            all(type(n) is int and 0 < n < 2**40 for n in counts)
            and all(type(text) is str for text in texts)
            and type(self.careful) is bool
            and (self.share is None or type(self.share) is int)
            and len(spec.mean) == len(spec.std) == spec.channels
            and all(type(x) is float and math.isfinite(x) for x in (*spec.mean, *spec.std))
        )


@cache
def _config(toml: str) -> Config:
    return resolve(parse_toml(toml))


def _require_consent(setup: Setup, toml: str) -> Config:
    """Parse a run's configuration; check it against the site's consent.

    Raises:
        ConfigError: If the run asks for more than the site allows.
    """
    setup.consent.require_code(setup.name, toml, own=(setup.model, setup.data))
    config = _config(toml)
    setup.consent.require(setup.name, config, own_data=setup.share is None)
    setup.consent.require_model(setup.name, "", config.algorithm.server_model.network or "")
    _require_guarantee(setup, config)
    return config


def foreign_networks(config: Config) -> list[str]:
    """Return a run's networks given as package.module:factory, also the server's.

    A site imports them only with its consent, which the user who starts the site has to give.
    """
    names = architecture_names(config.algorithm, config.models, config.clients)
    names.append(config.algorithm.server_model.network or "")
    return sorted({name for name in names if ":" in name})


def introduce(setup: Setup, toml: str) -> Payload:
    """Return a site's hello to a run, as a payload tree.

    Args:
        setup: The site.
        toml: The run's configuration.

    Raises:
        ConfigError: If the site cannot or does not want to take part.
    """
    config = _require_consent(setup, toml)
    cpu = torch.device("cpu")
    if setup.share is not None:
        _require_share(setup, config)
    architecture = _architecture(setup, config)
    setup.consent.require_model(setup.name, setup.model, architecture)
    if setup.share is not None:
        task = _task(setup, config, cpu)
        return Hello(
            name=setup.name,
            share=setup.share,
            spec=task.spec,
            classes=tuple(task.classes),
            examples=len(task.train[setup.share]),
            architecture=architecture,
            public="" if task.public is None else task.public.fingerprint(),
        ).payload()
    dataset, spec, _ = _own_data(setup, config)
    public = _public(setup, config, dataset, spec, cpu)
    careful = setup.epsilon is not None
    if careful:
        spec = dataclasses.replace(
            spec, mean=(USUAL_MEAN,) * spec.channels, std=(USUAL_STD,) * spec.channels
        )
    n_images = len(dataset.y_train)
    n_validation = validation_size(n_images, config.data.validation, f"site {setup.name}")
    classes = tuple(dataset.classes)
    examples = n_images - n_validation
    return Hello(
        name=setup.name,
        share=None,
        spec=spec,
        classes=classes,
        examples=examples,
        architecture=architecture,
        careful=careful,
        public="" if public is None else public.fingerprint(),
    ).payload()


def _architecture(setup: Setup, config: Config) -> str:
    """Return the site's network: its own, or the run's for its share.

    Without a share, it is that of client 0.
    """
    share = setup.share or 0
    return setup.model or architecture_names(config.algorithm, config.models, config.clients)[share]


def _data(setup: Setup, config: Config) -> Data:
    """Return the run's data configuration, with the site's `root` if it has one."""
    return dataclasses.replace(config.data, root=setup.root or config.data.root)


def _task(setup: Setup, config: Config, device: torch.device) -> Task:
    """Return the run's data, of which this site has a share.

    Raises:
        ConfigError: If public images are training images, in a run that protects these.
    """
    data = _data(setup, config)
    if setup.public:
        data = dataclasses.replace(data, public=setup.public)
    task = make_task(data, config.partition, config.clients, config.seed, device)
    require_apart(config, task.overlap)
    return task


@contextmanager
def _own_words(setup: Setup, problem: str) -> Iterator[None]:
    """Replace errors that may quote the site's data by one message; log them.

    Args:
        setup: The site.
        problem: What failed, in words that do not depend on the data.

    Raises:
        ConfigError: If anything fails inside the context.
    """
    try:
        yield
    except Exception as error:
        log.warning("site %s: %s", setup.name, error)
        raise ConfigError(f"site {setup.name}: {problem}; its log says why") from None


def _own_data(setup: Setup, config: Config) -> tuple[Dataset, Spec, Augment]:
    """Load the site's own data.

    A test part that is missing is held out by position, whatever the run asks for: by class, the
    number of training images would depend on labels.

    Raises:
        ConfigError: If the data cannot be used, or do not name their classes although the site
            requires a privacy guarantee.
    """
    with _own_words(setup, "its data cannot be used in this run"):
        data = dataclasses.replace(_data(setup, config), source=setup.data, hold_out="position")
        found = own_data(data, setup.data)
    if setup.epsilon is not None and found[0].numbered:
        raise ConfigError(
            f"site {setup.name} requires a privacy guarantee, and {setup.data} does not name "
            "its classes: their number would be read from its labels; add an array `classes` "
            "of their names"
        )
    return found


def _public(
    setup: Setup, config: Config, dataset: Dataset, spec: Spec, device: torch.device
) -> Images | None:
    """Load the public images that a site has chosen; None if none are needed.

    The server's choice does not count: it could name the site's own file.

    Raises:
        ConfigError: If the algorithm needs public images and the site names none, or if they are
            among its own images.
    """
    if not config.algorithm.needs_public_data:
        return None
    title = type(config.algorithm).__name__
    if not setup.public:
        raise ConfigError(
            f"site {setup.name}: {title} as configured needs public images, which a site chooses "
            f"itself; set public in its site.toml, such as public = {config.data.public!r} if "
            "none of its own images are among these"
        )
    with _own_words(setup, "its public images cannot be used in this run"):
        public = public_data(
            dataclasses.replace(_data(setup, config), public=setup.public), spec, device
        )
        assert public is not None
        count = overlap(torch.cat([dataset.x_train, dataset.x_test]), public)
        if count:
            raise ConfigError(f"public={setup.public!r}: {overlap_note(count)}")
    return public


def _require_share(setup: Setup, config: Config) -> None:
    """Raise ConfigError if the run has no data for this site's share."""
    if config.data.source == SITES:
        raise ConfigError(
            f"site {setup.name} has no data of its own, and the run has none to share: "
            "set data in its site.toml"
        )
    if setup.share is not None and setup.share >= config.clients:
        raise ConfigError(
            f"site {setup.name} wants share {setup.share}, and the run has the shares "
            f"0 to {config.clients - 1}"
        )


def _require_guarantee(setup: Setup, config: Config) -> None:
    """Raise ConfigError if a run guarantees less privacy than the site requires.

    A site with `epsilon` requires that no part leaves unprotected, and that the run's ε and δ are
    at most the site's. Without it, nothing is required.
    """
    if setup.epsilon is None:
        return
    privacy = config.privacy
    unprotected = Plan(privacy, config.algorithm).open()
    if unprotected:
        why = f"{', '.join(unprotected)} would be released without protection"
    elif privacy.epsilon is None or privacy.epsilon > setup.epsilon:
        why = f"its privacy.epsilon is {privacy.epsilon}"
    elif privacy.delta > setup.delta:
        why = f"its privacy.delta is {privacy.delta:g}, and may be {setup.delta:g} at most"
    else:
        return
    raise ConfigError(
        f"site {setup.name} requires a privacy guarantee of epsilon = {setup.epsilon:g}, and the "
        f"run gives none: {why}"
    )


def build_client(setup: Setup, session: Payload) -> tuple[LocalEngine, Precision]:
    """Build a site's client for a session of a run.

    Args:
        setup: The site.
        session: The session as the server sends it with every call: the run's configuration, the
            spec of the images, the client's id and its architecture.

    Returns:
        A local engine with this one client, and the precision of its computations.

    Raises:
        ConfigError: If the run asks for more than the site allows, or client, architecture, classes
            or image shape are not those of the site.
    """
    config = _require_consent(setup, session["config"])
    spec = Spec.of(session["spec"])
    k = int(session["client"])
    device = resolve_device(setup.device)
    names = {k: _architecture(setup, config)}
    if session["architecture"] != names[k]:
        raise ConfigError(
            f"site {setup.name} has the network {names[k]}, and is asked for "
            f"{str(session['architecture'])[:200]}"
        )
    setup.consent.require_model(setup.name, setup.model, names[k])
    if not 0 <= k < config.clients or setup.share not in (None, k):
        raise ConfigError(f"site {setup.name} is not client {k} of this run")
    if setup.share is None:
        dataset, own_spec, augment = _own_data(setup, config)
    else:
        _require_share(setup, config)
        task = _task(setup, config, device)
        own_spec = task.spec
    _require_spec(setup, spec, own_spec)
    parts = cut_networks(config, names, {k: initial_network(names[k], spec, config.seed)}, spec)
    network = parts.own[k]
    name = parts.names[k]
    if setup.share is not None:
        client = make_client(config, setup.share, network, name, task, device)
    else:
        x = dataset.x_train
        y = dataset.y_train
        tests = {"local": Images(dataset.x_test.to(device), dataset.y_test.to(device), spec)}
        if config.data.validation:
            trained, held = split_validation(
                dataset,
                np.arange(len(y)),
                config.data.validation,
                config.seed,
                k,
                by_class=False,
            )
            tests["val_local"] = Images(x[held].to(device), y[held].to(device), spec)
            x = x[trained]
            y = y[trained]
        train = Images(x.to(device), y.to(device), spec, augment)
        kind: type[Client] = config.algorithm.parties()[1]
        public = _public(setup, config, dataset, spec, device)
        client = kind(k, network, device, train, tests, public, name)
    client.evaluation = config.evaluate
    memory = limit_memory(device, config.device_memory)
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
    # No other client computes in this process, so its kernels use all of torch's threads.
    engine.cores = 1
    return engine, resolve_precision("auto" if device.type == "cpu" else config.precision, device)


def _require_spec(setup: Setup, spec: Spec, own: Spec) -> None:
    """Refuse a session whose classes or images are not those of the site.

    This is checked before any image is used. Otherwise a call would succeed or fail depending on a
    label, which would reveal the label to the server.

    Raises:
        ConfigError: If classes or shape differ, or the normalisation is impossible.
    """
    if spec.classes != own.classes or spec.shape != own.shape:
        raise ConfigError(
            f"site {setup.name} has {own.classes} classes and images of {own.shape}, and the run "
            f"wants {spec.classes} and {spec.shape}"
        )
    statistics = (spec.mean, spec.std)
    possible = all(
        len(values) == spec.channels and all(math.isfinite(value) for value in values)
        for values in statistics
    )
    if not possible or min(spec.std) <= 0:
        raise ConfigError(f"site {setup.name}: pixels cannot be normalised by {statistics}")


def make_site(setup: Setup, memory: Path) -> Site:
    """Build the site of a setup, which saves its memory in the folder `memory`."""
    quiet = setup.epsilon is not None
    budget = None
    if setup.budget is not None:
        budget = TotalBudget(setup.budget, setup.delta)
    return Site(
        setup.name,
        memory,
        partial(introduce, setup),
        partial(build_client, setup),
        setup.consent,
        ledger=Path(setup.ledger) if setup.ledger else None,
        budget=budget,
        quiet=quiet,
    )


def agree(config: Config, hellos: Sequence[Hello]) -> tuple[Spec, dict[int, Hello]]:
    """Check that sites fit together, and number them.

    Sites with a share of the run's data have its index as client id, sites with their own data are
    numbered in the order of their names.

    Returns:
        The spec of the images, with the pixel statistics of all sites pooled, and client id ->
        hello in ascending order.

    Raises:
        ConfigError: If the sites disagree, or are not as many as the run has clients.
    """
    by_name: dict[str, Hello] = {}
    for hello in sorted(hellos, key=lambda hello: hello.name):
        if hello.name in by_name:
            raise ConfigError(f"two sites are called {hello.name!r}: names must be unique")
        by_name[hello.name] = hello
    first, *others = by_name.values()
    for other in others:
        if other.spec.classes != first.spec.classes or other.classes != first.classes:
            raise ConfigError(
                "sites disagree on the classes: "
                f"{first.name} has {first.spec.classes} ({_some(first.classes)}), "
                f"{other.name} has {other.spec.classes} ({_some(other.classes)})"
            )
        if other.spec.shape != first.spec.shape:
            raise ConfigError(
                "sites disagree on the shape of images: "
                f"{first.name} has {first.spec.shape}, {other.name} {other.spec.shape}; "
                "set data.size for all of them"
            )
    shares = [hello.share for hello in by_name.values()]
    if None not in shares and len(set(shares)) == len(shares):
        ids = {hello.share: hello for hello in by_name.values() if hello.share is not None}
    elif set(shares) == {None}:
        ids = dict(enumerate(by_name.values()))
    else:
        described = [
            f"{hello.name} {'own' if hello.share is None else hello.share}"
            for hello in by_name.values()
        ]
        raise ConfigError(
            "either every site has its own data, or each has another share of the run's data: "
            + ", ".join(described)
        )
    if sorted(ids) != list(range(config.clients)):
        raise ConfigError(
            f"the run is for {config.clients} clients, the sites are {', '.join(by_name)}"
        )
    return _pool_statistics(list(by_name.values())), dict(sorted(ids.items()))


def _some(classes: Sequence[str]) -> str:
    """Return the first four names, for messages."""
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")


def _pool_statistics(hellos: Sequence[Hello]) -> Spec:
    """Return the spec with the pixel statistics of all sites' images together.

    Sites are weighted by their numbers of images. Equal specs are returned as they are.
    """
    specs = {hello.spec for hello in hellos}
    if len(specs) == 1:
        return specs.pop()
    total = sum(hello.examples for hello in hellos)
    mean = []
    std = []
    for c in range(hellos[0].spec.channels):
        m = math.fsum(h.examples / total * h.spec.mean[c] for h in hellos)
        square = math.fsum(
            h.examples / total * (h.spec.std[c] ** 2 + h.spec.mean[c] ** 2) for h in hellos
        )
        mean.append(m)
        std.append(max(square - m**2, 1e-6) ** 0.5)
    return dataclasses.replace(hellos[0].spec, mean=tuple(mean), std=tuple(std))


def build_server(
    config: Config, spec: Spec, members: Mapping[int, Hello]
) -> tuple[Server, Task | None]:
    """Build the server of these sites, and load the run's data.

    Args:
        config: The run's configuration.
        spec: The spec of the images, as `agree` returns it.
        members: The hello of each client.

    Returns:
        The server, and the run's data; None if the data belong to the sites.

    Raises:
        ConfigError: If the algorithm needs a site's network at the server, which cannot build it,
            or a site has other public images than the server.
    """
    device = resolve_device(config.device)
    algorithm = config.algorithm
    networks = {}
    errors = {}
    run_models = [model.strip() for model in config.models.split(",")]
    for name in dict.fromkeys(hello.architecture for hello in members.values()):
        try:
            if ":" in name and name not in run_models:
                raise ConfigError(
                    "code that a site names is not run here unless `models` of the run names "
                    f"{name} too"
                )
            networks[name] = initial_network(name, spec, config.seed)
        except ConfigError as error:
            errors[name] = error
    builds_networks = algorithm.server_model.kind != "none"
    public = public_data(config.data, spec, device)
    for hello in members.values():
        if hello.public and (public is None or hello.public != public.fingerprint()):
            raise ConfigError(
                f"site {hello.name} has other public images than data.public="
                f"{config.data.public!r}: calls name public images by their position, so that all "
                "parties need the same"
            )
    for hello in members.values():
        if builds_networks and hello.architecture in errors:
            raise ConfigError(
                f"{type(algorithm).__name__}'s server must build the network of site {hello.name} "
                f"and cannot: {errors[hello.architecture]}"
            )
    names = {k: hello.architecture for k, hello in members.items()}
    known = {k: networks[name] for k, name in names.items() if name in networks}
    parts = cut_networks(config, names, known, spec)
    task = None
    if config.data.source != SITES:
        task = make_task(config.data, config.partition, config.clients, config.seed, device)
    server = make_server(config, names, parts, spec, public, device)
    return server, task


def new_attempt() -> str:
    """Return a unique name for one start of a server.

    Sites identify repeated calls by it.
    """
    return f"{time.time_ns():x}"
