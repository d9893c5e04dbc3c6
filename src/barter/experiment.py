"""A run: its rounds one by one, what is kept of each, and how it goes on where it stopped."""

from __future__ import annotations

import logging
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from barter.compute.precision import using
from barter.compute.threads import threaded
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    PrivacyError,
    in_short,
)
from barter.core.metrics import Evaluation
from barter.core.nodes import Monitor, Silence, as_numbers
from barter.core.params import BY_PYTHON
from barter.core.payload import Payload
from barter.core.record import Round
from barter.data.partition import Partition
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.models import zoo
from barter.models.zoo import Own
from barter.privacy import Privacy
from barter.privacy.settings import Plan
from barter.privacy.side_information import EPSILON
from barter.privacy.statement import Statement, statement
from barter.runs.folder import (
    RunFolder,
    Which,
    checkpoint_of,
    early_stop,
    finished,
    has_checkpoint,
    kept_rounds,
    last_checkpoint,
)
from barter.runs.progress import onlooker
from barter.runs.selection import Selection, Stop
from barter.setup.assembly import Federation, assemble, shared, start_from
from barter.setup.config import (
    RESULT_FREE,
    Config,
    as_algorithm,
    first_difference,
    plain,
    read,
    resolve,
    to_toml,
    with_defaults,
)
from barter.setup.hardware import precision_named, with_threads

__all__ = ["Experiment"]

log = logging.getLogger("barter")

EVALUATION = Algorithm.evaluate.__name__


class Experiment:
    """A federation ready to run; the loop over its rounds is the caller's.

    >>> from barter import Experiment, Local
    >>> from barter.data.task import Data
    >>> digits = Data(source="digits", validation=0.1)
    >>> for r in Experiment(Local(max_epochs=1), data=digits, clients=5).rounds(10):
    ...     if r.mean("val") > 0.2:
    ...         break

    An algorithm is an object or, with its defaults, a class or a name: `Experiment("fedavg")`.
    """

    stopped: Stop | None = None  # why `rounds` does not go on

    def __init__(
        self,
        algorithm: Algorithm[Any, Any] | type[Algorithm[Any, Any]] | str,
        *,
        data: str | Data | Any = "digits",
        partition: str | Partition | Sequence[Sequence[int]] | None = None,
        clients: int | None = None,
        models: str | Own | Sequence[str | Own] = "auto",
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        streams: int = 10,
        device_memory: float | None = None,
        threads: int | None = None,
        min_clients: int | None = None,
        timeout: float | None = None,
        privacy: Privacy | None = None,
        evaluate: Evaluation | None = None,
        start: str | Path = "",
        rounds: int = 5,
        keep: str = "last",
        keep_rounds: int = 2,
        patience: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        listed = [(models, None)] if isinstance(models, str) else zoo.listed(models)
        by_name = all(own is None for _, own in listed)
        data = data if isinstance(data, Data) else Data(source=data)
        partition, clients = shared(data, partition, clients)
        config = Config(
            algorithm=as_algorithm(algorithm),
            data=data,
            partition=partition,
            clients=clients,
            models=",".join(name for name, _ in listed) if by_name else BY_PYTHON,
            rounds=rounds,
            seed=seed,
            device=device,
            precision=precision,  # type: ignore[arg-type]  # checked by Config
            streams=streams,
            device_memory=device_memory,
            threads=threads,
            min_clients=min_clients,
            timeout=timeout,
            privacy=privacy or Privacy(),
            evaluate=evaluate or Evaluation(),
            start=str(start),
            keep=keep,  # type: ignore[arg-type]
            keep_rounds=keep_rounds,
            patience=patience,
        )
        place = None if out is None else Path(out)
        config = with_threads(config, place, resume=resume)
        self._begin(assemble(config, listed, monitor), place, resume)

    @classmethod
    def from_config(
        cls,
        config: Config,
        out: Path | None = None,
        *,
        resume: bool = False,
        monitor: Monitor | None = None,
        behind: Which = "last",
        overrule: bool = False,
    ) -> Experiment:
        """The experiment that a configuration describes, with all clients in this process.

        Args:
            config: The configuration.
            out: The run's folder; None keeps nothing.
            resume: Continue the run in the folder.
            monitor: Is told how far the run has come.
            behind: The round behind which a resumed run continues; later ones are dropped.
            overrule: Let a resumed run go on that stopped early.
        """
        config = with_threads(replace(config, engine="local"), out, resume=resume)
        federation = assemble(config, monitor=monitor)
        return cls.of(federation, out, resume=resume, behind=behind, overrule=overrule)

    @classmethod
    def revisited(cls, run: Path, *, unlimited: bool = False) -> Experiment:
        """A run as its last round left it, on the CPU and for eyes alone: nothing is written or fetched.

        Its clients keep to no budget, if that is wanted; what protects their answers stays.
        """
        config = resolve(read(run / "config.toml"))
        if config.engine == "flower":
            raise ConfigError(
                f"{run} ran on Flower: its clients' images are at their sites, not here"
            )
        last, state = finished(run)
        data = replace(config.data, download=False)
        privacy = replace(config.privacy, epsilon=None) if unlimited else config.privacy
        config = replace(
            config, data=data, privacy=privacy, device="cpu", precision="auto", start=""
        )
        experiment = cls.from_config(config)
        experiment.round = last
        try:
            experiment.server.recall(state["server"])
            experiment.engine.recall(state["clients"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{run} holds the checkpoint of another experiment: {in_short(error)}"
            ) from error
        return experiment

    @classmethod
    def of(
        cls,
        federation: Federation,
        out: Path | None,
        *,
        resume: bool,
        behind: Which = "last",
        overrule: bool = False,
    ) -> Experiment:
        """The experiment of parties that are there already, here or elsewhere; see `from_config`."""
        experiment = cls.__new__(cls)
        experiment._begin(federation, out, resume, behind, overrule)
        return experiment

    def _begin(
        self,
        federation: Federation,
        out: Path | None,
        resume: bool,
        behind: Which = "last",
        overrule: bool = False,
    ) -> None:
        self.config, self.server, self.engine = (
            federation.config,
            federation.server,
            federation.engine,
        )
        self.algorithm, self.test, self.networks = (
            self.config.algorithm,
            federation.test,
            federation.networks,
        )
        self.validation = federation.validation
        self.selection = Selection(self.config.patience)
        if federation.task is not None:
            self.task, self.architectures = federation.task, list(federation.architectures)
        self.device, self.precision = (
            self.server.device,
            precision_named(self.config.precision, self.server.device),
        )
        self.server.monitor = self.engine
        self.engine.evaluation = self.config.evaluate
        self.engine.last_round = self.config.rounds
        here = self.engine.clients.values() if isinstance(self.engine, LocalEngine) else ()
        for node in (self.server, *here):
            node.evaluation = self.config.evaluate
        self.engine.meet(self.server)
        self.round, self._unfinished = 0, False
        if self.config.start and not (resume and out is not None and has_checkpoint(out)):
            start_from(Path(self.config.start), federation)
        self._data = "" if out is None else federation.fingerprint()
        self.folder = None if out is None else self._open(out, resume, behind)
        if self.folder is not None and resume:
            self._recall_stop(self.folder, overrule)
        if self.folder is not None and self.round:
            self.folder.state(self.privacy().to_json())  # a kill may have come before

    def rounds(self, n: int, *, progress: bool = True) -> Iterator[Round]:
        """Run until round n is done, and hand out each round's record on the way.

        With `patience`, the run ends earlier if validation accuracy stops improving; `stopped` says why.
        A terminal or a notebook shows how far it has come, if that is wanted and nobody watches already.
        """
        wanted = progress and self.round < n and isinstance(self.engine.watched, Silence)
        watcher = onlooker(n, self.round) if wanted else None
        done = [] if self.folder is None else self.folder.records()
        self.engine.last_round = n
        while self.round < n and self.stopped is None:
            done.append(self.step() if watcher is None else watcher.over(self.engine, self.step))
            yield done[-1]
        if wanted:
            for remark in self.algorithm.remarks(done):
                log.warning("%s", remark)
            if self.stopped is not None and self.round < n:
                log.warning("%s", self.stopped)

    def step(self) -> Round:
        """One round."""
        if self._unfinished:
            raise CheckpointError(
                "an error left this experiment in the middle of a round: resume it from its folder"
            )
        self._require_budget()
        self._unfinished = True
        try:
            with (
                threaded(self.config.threads),
                using(self.precision),
                self.engine.at_home(),
                self.server.seated(),
            ):
                record = self._run(self.round + 1)
        except BaseException as error:
            if self.folder is not None:
                with suppress(CheckpointError):
                    self.folder.state(self.privacy().to_json())  # what has left has left
                self.folder.release()
                # An interrupted run may go on; one that failed before anything was exchanged has nothing to go on from.
                if isinstance(error, Exception) and not (self.round or self.engine.crossed):
                    self.folder.discard()
            refused = [
                failure.error
                for failure in self.engine.failures
                if PrivacyError.__name__ in failure.error
            ]
            if isinstance(error, ClientError) and refused:
                raise PrivacyError(
                    self._spent(refused[0].partition(f"{PrivacyError.__name__}: ")[2])
                ) from None
            raise
        self._unfinished = False
        return record

    def privacy(self) -> Statement:
        """What has left the clients so far, and what that promises to whoever is in an image."""
        secret = not isinstance(self.engine, LocalEngine)
        engine, start = self.engine, self.config.start
        selection = self.config.keep == "best" or self.config.patience is not None
        return statement(
            self.config.privacy,
            self.algorithm,
            engine.crossed,
            engine.told,
            secret=secret,
            start=start,
            validation=self.config.data.validation > 0,
            selection=selection,
        )

    def _require_budget(self) -> None:
        """An error, before anything is done, if too few clients could answer in another round like the last ones."""
        plan, ids = Plan(self.config.privacy, self.algorithm), self.engine.client_ids
        spent = plan.exhausted(
            {k: plan.released(seen) for k, seen in self.engine.crossed.items()}, self.round
        )
        if len(ids) - len(spent) < (self.config.min_clients or len(ids)):
            names = ", ".join(map(str, spent[:5])) + (
                f" and {len(spent) - 5} more" if len(spent) > 5 else ""
            )
            raise PrivacyError(
                self._spent(f"another would cost client {names} more than {plan.privacy.epsilon:g}")
            )

    def _spent(self, why: str) -> str:
        return (
            f"the privacy budget is spent after round {self.round}: {why}. What was done is kept; more rounds need a "
            "larger privacy.epsilon, or more noise, in a new run"
        )

    def _run(self, t: int) -> Round:
        start = time.perf_counter()
        everybody = Clients(self.engine, self.engine.client_ids)
        self.engine.participants.clear()
        if t == 1:
            with seeds.scope(self.config.seed, 0, "server", device=self.device):
                self.algorithm.setup(self.server, everybody)
        self.engine.round = t
        with seeds.scope(self.config.seed, t, "server", device=self.device):
            self.algorithm.round(self.server, everybody, t)
        record = self._record(t, everybody, start)
        self.round = t
        best = self.selection.best
        self.selection.add(record)
        self.stopped = self.selection.stop()
        if self.folder is not None:
            self.folder.append(record)
            self._save(self.folder, best)
            self.folder.state(self.privacy().to_json())
            if self.stopped is not None:
                self.folder.note_stop(self.stopped)
        if self.selection.best is None and t == 1:
            self._warn_without_validation()
        return record

    def _save(self, folder: RunFolder, former_best: int | None) -> None:
        """Write the checkpoint of the round that is done; keep the last ones and, if wanted, the best."""
        keep = set(range(self.round - self.config.keep_rounds + 1, self.round))
        until_saved = set[int]()
        if self.config.keep == "best" and self.selection.best is not None:
            keep.add(self.selection.best)
            # If this round is the new best, the former one is needed until it is on disk.
            until_saved |= set() if former_best is None else {former_best}
        folder.save(self.round, self._state(), self._origin(), keep, until_saved)

    def _warn_without_validation(self) -> None:
        """Say so if no validation accuracy came that `keep` or `patience` could go by."""
        if self.config.keep == "best" or self.config.patience is not None:
            log.warning(
                "no client tells its validation accuracy: no round is the best, and the run does not stop early"
            )

    def _record(self, t: int, everybody: Clients, start: float) -> Round:
        participants = sorted(self.engine.participants)
        tested = [k for k in everybody if self.engine.tests_due(k, EVALUATION)]
        metrics = everybody.only({*tested, *participants}).run(self.algorithm.evaluate)
        server, self.server.report = as_numbers(self.server.report), {}
        evaluate = self.config.evaluate
        due = evaluate.is_due(t, self.engine.last_round)
        if due and self.test is not None and evaluate.runs("global"):
            server |= self.algorithm.evaluate_server(self.server, self.test)
        if due and self.validation is not None:
            validated = self.algorithm.evaluate_server(self.server, self.validation)
            server |= {"val": validated["global"]} if "global" in validated else {}
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
        return Round(
            t,
            clients,
            server,
            seconds,
            by_method,
            failures,
            participants=participants,
            primary=self.algorithm.primary,
        )

    def _origin(self) -> dict[str, str]:
        """What the run's results come from."""
        return {"config": to_toml(self.config), "data": self._data}

    def _state(self) -> dict[str, Any]:
        memory = {"server": self.server.memory(), "clients": self.engine.memory()}
        return {
            **memory,
            "networks": self.networks,
            "crossed": self.engine.crossed,
            "told": self.engine.told,
        }

    def _require_same(self, path: Path, origin: Mapping[str, str]) -> None:
        """Refuse to go on with a configuration or data that the checkpoint is not made of."""
        if not {"config", "data"} <= origin.keys():
            raise CheckpointError(
                f"{path} was kept by an older version, which did not say what it is made of"
            )
        try:
            begun = self._begun(tomllib.loads(origin["config"]))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} holds a damaged checkpoint: its configuration is not TOML: {in_short(error)}"
            ) from error
        key = first_difference(plain(self.config), begun, but=RESULT_FREE)
        if key is not None:
            raise CheckpointError(
                f"{path / 'config.toml'} was changed after round {self.round}: {key} is not what it was; "
                "change it back, or start a new run"
            )
        if origin["data"] != self._data:
            raise CheckpointError(
                f"{self.config.data.source} does not hold the data that {path} was begun with: bring them back, "
                "or start a new run"
            )

    def _begun(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """What a run was begun with; an older version did not write some keys, which had no effect."""
        privacy = plain(replace(self.config, privacy=Privacy()))["privacy"]
        return with_defaults({"privacy": privacy, **tree})

    def _recall_stop(self, folder: RunFolder, overrule: bool) -> None:
        """Find out whether a resumed run has stopped early, and whether it goes on nevertheless."""
        for record in folder.records():
            self.selection.add(record)
        noted = early_stop(folder.path)
        if noted is not None and noted.round > self.round:  # of rounds that were dropped
            folder.forget_stop()
            noted = None
        if noted is not None and noted.overruled:
            self.selection.overrule(noted)
        due = self.selection.stop()
        if due is not None and noted is not None and overrule:
            folder.note_stop(self.selection.overrule(due))
        elif due is not None:
            folder.note_stop(due)
            self.stopped = due
        elif noted is not None and not noted.overruled:
            folder.forget_stop()

    def _found(self, path: Path, behind: Which) -> tuple[int, Payload, dict[str, str]] | None:
        """Read the checkpoint to continue from; None if no round is finished."""
        if behind != "last":
            return checkpoint_of(path, behind)
        try:
            return last_checkpoint(path)
        except CheckpointError as error:
            earlier = kept_rounds(path)[:-1]
            if not earlier or not isinstance(self.engine, LocalEngine):
                raise
            back = f"`barter resume {path} --round {earlier[-1]}` goes back to an earlier round"
            raise CheckpointError(f"{error}; {back}") from error

    def _open(self, path: Path, resume: bool, behind: Which) -> RunFolder:
        if not resume:
            return RunFolder.create(path, to_toml(self.config))
        folder = RunFolder.existing(path)
        begun = self._begun(read(folder.config))
        key = first_difference(plain(self.config), begun, but=RESULT_FREE)
        if key is not None:
            raise CheckpointError(f"{path} is a run of another configuration: {key} differs")
        found = self._found(path, behind)
        if found is not None:
            self.round, state, origin = found
            self._require_same(path, origin)
            try:
                self.server.recall(state["server"])
                self.engine.recall(state["clients"])
                for k, seen in state.get("crossed", {}).items():
                    self.engine.crossed[k] = self.engine.crossed.get(k, {}) | seen
                self.engine.told = state.get("told", {})
                for (
                    record
                ) in folder.records():  # of which some may have been told after the checkpoint
                    for k, said in record.clients.items():
                        self.engine.hear(k, said.get(EPSILON))
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"{path} holds the checkpoint of another experiment: {in_short(error)}"
                ) from error
        folder.go_on_after(self.round)
        threads, before = self.config.threads, begun.get("threads")
        if self.round and isinstance(before, int) and threads not in (None, before):
            log.warning(
                "%s goes on with threads=%d, begun with %d: last digits will differ",
                path,
                threads,
                before,
            )
        now = plain(self.config)
        changes = {key: now[key] for key in ("keep", "keep_rounds", "patience")}
        changes["rounds"] = max(self.config.rounds, begun["rounds"])
        folder.change(changes if threads is None else {**changes, "threads": threads})
        return folder
