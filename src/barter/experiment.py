"""From a configuration to objects, and from objects to an iterator of rounds."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from barter.config import RESULT_FREE, Config, first_difference, partition_named, plain, read, to_toml
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import CheckpointError, ConfigError
from barter.core.evaluation import accuracy
from barter.core.images import Images, Spec
from barter.core.model import Classifier, split, verify_split
from barter.core.nodes import Client, Monitor, Server, as_numbers
from barter.core.precision import resolved, using
from barter.data.partition import Partition
from barter.data.task import Data, Task, make_task
from barter.engines.base import BaseEngine
from barter.engines.local import LocalEngine
from barter.engines.parking import budget
from barter.models import families, zoo
from barter.models.fused import fuse
from barter.runs.folder import RunFolder
from barter.runs.record import Round

__all__ = [
    "BY_PYTHON",
    "Experiment",
    "Parts",
    "cut",
    "device_named",
    "initial",
    "make_client",
    "make_server",
    "names_of",
    "narrowed",
]

ELSEWHERE = ("engine", "timeout")  # of a configuration: only for clients that live elsewhere
BY_PYTHON = "(given in Python)"
EVALUATION = Algorithm.evaluate.__name__


class Experiment:
    """A federation ready to run; the loop over its rounds is the caller's.

    for r in Experiment(DFFKE(), data="digits", clients=5).rounds(10):
        print(r.round, r.mean("global"))
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        *,
        data: str | Data = "digits",
        partition: str | Partition = "dirichlet",
        clients: int = 5,
        models: str | nn.Module | Sequence[nn.Module] = "auto",
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        streams: int = 10,
        device_memory: float | None = None,
        min_clients: int | None = None,
        rounds: int = 5,
        out: str | Path | None = None,
        resume: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        config = Config(
            algorithm=algorithm,
            data=Data(source=data) if isinstance(data, str) else data,
            partition=partition_named(partition)() if isinstance(partition, str) else partition,
            clients=clients,
            models=models if isinstance(models, str) else BY_PYTHON,
            rounds=rounds,
            seed=seed,
            device=device,  # type: ignore[arg-type]  # checked by Config
            precision=precision,  # type: ignore[arg-type]
            streams=streams,
            device_memory=device_memory,
            min_clients=min_clients,
        )
        if models == BY_PYTHON:
            raise ConfigError("this run's models were given in Python: resume it there, with out=... and resume=True")
        where = device_named(device)
        memory = budget(where, device_memory)
        self.task = make_task(config.data, config.partition, clients, seed, where)
        given = [models] if isinstance(models, nn.Module) else models
        names, networks = _networks(algorithm, given, self.task.spec, clients, seed)
        parts = cut(config, names, networks, self.task.spec)
        self.architectures = [parts.names[k] for k in range(clients)]
        members = {k: make_client(config, k, parts.own[k], parts.names[k], self.task, where) for k in parts.own}
        server = make_server(config, names, parts, self.task.spec, self.task.public, where)
        engine = LocalEngine(
            algorithm,
            members,
            seed=seed,
            min_clients=min_clients,
            monitor=monitor,
            streams=streams,
            device_memory=memory,
            tune=fuse,
        )
        self._begin(config, server, engine, self.task.global_test, out, resume)

    @classmethod
    def across(
        cls, config: Config, server: Server, engine: BaseEngine, test: Images | None, out: Path, *, resume: bool
    ) -> Experiment:
        """The experiment of a server whose clients live elsewhere; `test` is what a model of its own is judged by."""
        experiment = cls.__new__(cls)
        experiment._begin(config, server, engine, test, out, resume)
        return experiment

    def _begin(
        self,
        config: Config,
        server: Server,
        engine: BaseEngine,
        test: Images | None,
        out: str | Path | None,
        resume: bool,
    ) -> None:
        self.config, self.algorithm, self.server, self.engine, self.test = (
            config,
            config.algorithm,
            server,
            engine,
            test,
        )
        self.device, self.precision = server.device, resolved(config.precision, server.device)
        server.monitor = engine
        self.round, self._unfinished = 0, False
        self.folder = None if out is None else self._open(Path(out), resume)

    @classmethod
    def from_config(
        cls, config: Config, out: Path | None = None, *, resume: bool = False, monitor: Monitor | None = None
    ) -> Experiment:
        """The experiment that a configuration describes."""
        fields = {name: getattr(config, name) for name in Config.__dataclass_fields__ if name not in ELSEWHERE}
        return cls(**fields, out=out, resume=resume, monitor=monitor)

    def rounds(self, n: int) -> Iterator[Round]:
        """Run until round n is done, and hand out each round's record on the way."""
        while self.round < n:
            yield self.step()

    def step(self) -> Round:
        """One round."""
        if self._unfinished:
            raise CheckpointError("an error left this experiment in the middle of a round: resume it from its folder")
        self._unfinished = True
        try:
            with using(self.precision), self.engine.at_home(), self.server.seated():
                record = self._run(self.round + 1)
        except BaseException:
            if self.folder is not None:
                self.folder.release()
            raise
        self._unfinished = False
        return record

    def _run(self, t: int) -> Round:
        start = time.perf_counter()
        everybody = Clients(self.engine, self.engine.client_ids)
        if t == 1:
            with seeds.scope(self.config.seed, 0, "server", device=self.device):
                self.algorithm.setup(self.server, everybody)
        self.engine.round = t
        with seeds.scope(self.config.seed, t, "server", device=self.device):
            self.algorithm.round(self.server, everybody, t)
        record = self._record(t, everybody, start)
        self.round = t
        if self.folder is not None:
            self.folder.append(record)
            self.folder.save(t, self._state())
        return record

    def _record(self, t: int, everybody: Clients, start: float) -> Round:
        metrics = everybody.run(self.algorithm.evaluate)
        server, self.server.report = as_numbers(self.server.report), {}
        if self.server.model_or_none is not None and self.test is not None:
            server["global"] = accuracy(self.server.model, self.test)
        seconds = {**self.engine.seconds, "round": time.perf_counter() - start}
        if self.device.type == "cuda":
            server["device_memory"] = float(torch.cuda.max_memory_reserved(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        failures = [str(failure) for failure in self.engine.failures]
        self.engine.seconds.clear()
        self.engine.failures.clear()
        by_method: dict[str, dict[str, int]] = {}
        by_client = {k: {"bytes_up": 0, "bytes_down": 0} for k in everybody}
        for (method, client, direction), count in sorted(self.engine.wire.take_bytes().items()):
            if method != EVALUATION:  # the experimenter's own question, not the method's traffic
                by_method.setdefault(method, {"up": 0, "down": 0})[direction] += count
                by_client[client][f"bytes_{direction}"] += count
        clients = {k: {**metrics.get(k, {}), **by_client[k]} for k in everybody}
        return Round(t, clients, server, seconds, by_method, failures)

    def _state(self) -> dict[str, Any]:
        return {"server": self.server.memory(), "clients": self.engine.memory()}

    def _open(self, path: Path, resume: bool) -> RunFolder:
        if not resume:
            return RunFolder.create(path, to_toml(self.config))
        folder = RunFolder.existing(path)
        key = first_difference(plain(self.config), read(folder.config), but=RESULT_FREE)
        if key is not None:
            raise CheckpointError(f"{path} is a run of another configuration: {key} differs")
        found = folder.load(torch.device("cpu"))
        if found is not None:
            self.round, state = found
            try:
                self.server.recall(state["server"])
                self.engine.recall(state["clients"])
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(f"{path} holds the checkpoint of another experiment: {error}") from error
        folder.lengthen(self.config.rounds)
        return folder


@dataclass(frozen=True)
class Parts:
    """Each client's network, as wide as it can afford, with a name that says so; and the server's, at full width."""

    names: dict[int, str]
    own: dict[int, Classifier]
    full: Classifier | None


def cut(config: Config, names: Mapping[int, str], networks: Mapping[int, Classifier], spec: Spec) -> Parts:
    """The parties' networks from those of their architectures; equal ones are one."""
    algorithm, made = config.algorithm, dict[tuple[Classifier, float], Classifier]()

    def part(network: Classifier, share: float) -> Classifier:
        if (network, share) not in made:
            narrower = algorithm.network(copy.deepcopy(network), share, spec)
            made[network, share] = narrower.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made[network, share]

    shares = {k: algorithm.budget(k, config.clients) for k in names}
    own = {k: part(network, shares[k]) for k, network in networks.items()}
    called = {k: narrowed(name, shares[k]) for k, name in names.items()}
    return Parts(called, own, part(networks[0], 1.0) if 0 in networks else None)


def make_client(
    config: Config, k: int, network: Classifier, architecture: str, task: Task, device: torch.device
) -> Client:
    """Client k with its share of a task."""
    tests = {"global": task.global_test, "local": task.local_tests[k]}
    kind = config.algorithm.parties()[1]
    return kind(k, copy.deepcopy(network), device, task.train[k], tests, task.public, architecture)


def make_server(
    config: Config, names: Mapping[int, str], parts: Parts, spec: Spec, public: Images | None, device: torch.device
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
    wanted = algorithm.one_architecture or algorithm.global_model
    model = copy.deepcopy(parts.full).to(device) if wanted and parts.full is not None else None
    return algorithm.parties()[0](spec, build, model, device, public)


def device_named(name: str) -> torch.device:
    """The device that a configuration asks for."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': this machine has no CUDA device; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def initial(name: str, spec: Spec, seed: int) -> Classifier:
    """The network of an architecture as it is before the first round: clients of one architecture start from the same
    weights, and so does a model of the server's."""
    with seeds.scope(seed, "weights", name):
        return zoo.build(name, spec)


def narrowed(name: str, share: float) -> str:
    """What a network is called that has this share of its architecture's width."""
    return name if share == 1 else f"{name}@{share:g}"


def names_of(algorithm: Algorithm[Any, Any], models: str, clients: int) -> list[str]:
    """The architecture of each client."""
    if models == "auto":
        models = "small-cnn" if algorithm.one_architecture else "small-5"
    return families.members(models, clients)


def _networks(
    algorithm: Algorithm[Any, Any], models: str | Sequence[nn.Module], spec: Spec, clients: int, seed: int
) -> tuple[dict[int, str], dict[int, Classifier]]:
    """The architecture of each client and a network of it in its initial state; equal names are one network."""
    if isinstance(models, str):
        names = names_of(algorithm, models, clients)
        built = {name: initial(name, spec, seed) for name in dict.fromkeys(names)}
        return dict(enumerate(names)), {k: built[name] for k, name in enumerate(names)}
    if not models:
        raise ConfigError("models: give at least one module; client i gets module i mod n")
    ready = []
    for module in models:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"models: {module!r} is no module; names go into one string, with commas between them")
        classifier = split(module)
        verify_split(module, classifier, spec.shape, spec.classes)
        ready.append(classifier)
    chosen = {k: k % len(ready) for k in range(clients)}
    return {k: f"{type(models[i]).__name__}-{i}" for k, i in chosen.items()}, {k: ready[i] for k, i in chosen.items()}
