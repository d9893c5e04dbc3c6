"""From a configuration to objects, and from objects to an iterator of rounds."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
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
from barter.core.model import Classifier, split, verify_split
from barter.core.nodes import Client, Monitor, Server, as_numbers
from barter.core.precision import resolved, using
from barter.data.partition import Partition
from barter.data.task import Data, Task, make_task
from barter.engines.local import LocalEngine
from barter.engines.parking import budget
from barter.models import families, zoo
from barter.runs.folder import RunFolder
from barter.runs.record import Round

__all__ = ["Experiment"]

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
        self.config = Config(
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
        self.algorithm, self.device = algorithm, _device(device)
        self.precision = resolved(precision, self.device)
        memory = budget(self.device, device_memory)
        self.task = make_task(self.config.data, self.config.partition, clients, seed, self.device)
        if algorithm.needs_public_data and self.task.public is None:
            raise ConfigError(f"{type(algorithm).__name__} as asked for needs public data: set data.public to a source")
        given = [models] if isinstance(models, nn.Module) else models
        if given == "auto":
            given = "small-cnn" if algorithm.one_architecture else "small-5"
        self.architectures, networks = _networks(given, self.task, clients, seed)
        self.server, members = self._parties(networks)
        self.engine = LocalEngine(
            algorithm,
            members,
            seed=seed,
            min_clients=min_clients,
            monitor=monitor,
            streams=streams,
            device_memory=memory,
        )
        self.server.monitor = self.engine
        self.round, self._unfinished = 0, False
        self.folder = None if out is None else self._open(Path(out), resume)

    @classmethod
    def from_config(
        cls, config: Config, out: Path | None = None, *, resume: bool = False, monitor: Monitor | None = None
    ) -> Experiment:
        """The experiment that a configuration describes."""
        fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
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
        if self.server.model_or_none is not None:
            server["global"] = accuracy(self.server.model, self.task.global_test)
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

    def _parties(self, networks: Mapping[int, Classifier]) -> tuple[Server, dict[int, Client]]:
        server_kind, client_kind = self.algorithm.parties()
        if self.algorithm.one_architecture and len(set(self.architectures)) > 1:
            raise ConfigError(
                f"{type(self.algorithm).__name__} has one model for all and needs one architecture, these clients have "
                f"{', '.join(sorted(set(self.architectures)))}: set models to one of them"
            )
        # Clients of one architecture start from the same weights, and so does a model of the server's.
        shares = {k: self.algorithm.budget(k, len(networks)) for k in networks}
        wanted = dict.fromkeys([(networks[0], 1.0), *((networks[k], share) for k, share in shares.items())])
        adapted = {
            (network, share): self.algorithm.network(copy.deepcopy(network), share, self.task.spec)
            for network, share in wanted
        }
        for network in adapted.values():
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.architectures = [
            name if shares[k] == 1 else f"{name}@{shares[k]:g}" for k, name in enumerate(self.architectures)
        ]
        build = {k: partial(copy.deepcopy, adapted[networks[k], share]) for k, share in shares.items()}
        public, device = self.task.public, self.device
        clients: dict[int, Client] = {}
        for k, (train, local) in enumerate(zip(self.task.train, self.task.local_tests, strict=True)):
            tests = {"global": self.task.global_test, "local": local}
            clients[k] = client_kind(k, build[k](), device, train, tests, public, self.architectures[k])
        has_model = self.algorithm.one_architecture or self.algorithm.global_model
        model = copy.deepcopy(adapted[networks[0], 1.0]).to(device) if has_model else None
        return server_kind(self.task.spec, build, model, device, public), clients

    def _state(self) -> dict[str, Any]:
        members = {k: client.memory() for k, client in self.engine.clients.items()}
        return {"server": self.server.memory(), "clients": members}

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
                for k, client in self.engine.clients.items():
                    client.recall(state["clients"][k])
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(f"{path} holds the checkpoint of another experiment: {error}") from error
        return folder


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': this machine has no CUDA device; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _networks(
    models: str | Sequence[nn.Module], task: Task, clients: int, seed: int
) -> tuple[list[str], dict[int, Classifier]]:
    """The architecture of each client and a network of it in its initial state; equal names are one network."""
    if isinstance(models, str):
        names = families.members(models, clients)
        built: dict[str, Classifier] = {}
        for name in dict.fromkeys(names):
            with seeds.scope(seed, "weights", name):
                built[name] = zoo.build(name, task.spec)
        return names, {k: built[name] for k, name in enumerate(names)}
    if not models:
        raise ConfigError("models: give at least one module; client i gets module i mod n")
    ready = []
    for module in models:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"models: {module!r} is no module; names go into one string, with commas between them")
        classifier = split(module)
        verify_split(module, classifier, task.spec.shape, task.spec.classes)
        ready.append(classifier)
    chosen = {k: k % len(ready) for k in range(clients)}
    return [f"{type(models[i]).__name__}-{i}" for i in chosen.values()], {k: ready[i] for k, i in chosen.items()}
