"""Run an experiment round by round; record and checkpoint each round, and resume."""

from __future__ import annotations

import logging
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from barter.compute.precision import use_precision
from barter.compute.threads import limit_threads
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.client_states import ClientStates, LazyClient
from barter.core.clients import Clients
from barter.core.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    PrivacyError,
    StateError,
    summarise_error,
)
from barter.core.nodes import Monitor, Silence, as_numbers
from barter.core.params import BY_PYTHON
from barter.core.payload import Payload, infinite_leaves
from barter.core.record import Round
from barter.core.robust import Defence
from barter.core.robust import using as defend
from barter.data.partition import Partition
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.models import zoo
from barter.models.zoo import Own
from barter.privacy import Privacy
from barter.privacy.settings import Plan
from barter.privacy.side_information import EPSILON
from barter.privacy.statement import Statement, make_statement
from barter.runs.collapse import AccuracyWatch
from barter.runs.folder import (
    RunFolder,
    Which,
    checkpoint_of,
    checkpoint_rounds,
    early_stop,
    has_checkpoint,
    last_checkpoint,
    read_finished_round,
)
from barter.runs.progress import make_onlooker
from barter.runs.selection import Selection, Stop
from barter.runs.state_files import StateFiles, StoredStates
from barter.setup.assembly import Federation, assemble, resolve_partition, start_from
from barter.setup.config import (
    RESULT_FREE,
    Config,
    RunSettings,
    as_algorithm,
    configure,
    first_difference,
    read_toml,
    to_plain,
    to_toml,
    with_defaults,
)
from barter.setup.hardware import resolve_precision, with_threads
from barter.setup.trust import code_names, note_consent, read_run, trusting

__all__ = ["Experiment"]

log = logging.getLogger("barter")

# Bytes that clients may take in host memory during a round, if the others are stored in files.
STATES_LIMIT = 2 * 2**30
EVALUATION = Algorithm.evaluate.__name__


class Experiment:
    """A federation that is ready to run; the caller loops over its rounds.

    All fields of `barter.setup.config.Config` are parameters, such as `seed` and `rounds`.

    Args:
        algorithm: A method as an instance or, with its defaults, as a class or a name ("fedavg").
        data: A source's name, a `Data` object, or arrays, tensors or a data set of your own.
        partition: A name, a `Partition`, or a list of image indices for each client.
        clients: The number of clients; None for the default, or for as many as the data have.
        models: A family, a model's name, or a list of names, modules or factories.
        out: The run's folder; with None, nothing is written.
        resume: Continue the run in the folder `out`.
        monitor: Notified of the run's progress.
        **settings: Further fields of the configuration, see `barter.setup.config.RunSettings`.

    >>> from barter import Experiment, Local
    >>> from barter.data.task import Data
    >>> digits = Data(source="digits", validation=0.1)
    >>> for r in Experiment(Local(max_epochs=1), data=digits, clients=5).rounds(10):
    ...     if r.mean("val") > 0.2:
    ...         break
    """

    stopped: Stop | None = None  # the early stop that ended `rounds`, if any

    def __init__(
        self,
        algorithm: Algorithm[Any, Any] | type[Algorithm[Any, Any]] | str,
        *,
        data: str | Data | Any = "digits",
        partition: str | Partition | Sequence[Sequence[int]] | None = None,
        clients: int | None = None,
        models: str | Own | Sequence[str | Own] = "auto",
        out: str | Path | None = None,
        resume: bool = False,
        monitor: Monitor | None = None,
        **settings: Unpack[RunSettings],
    ) -> None:
        listed = [(models, None)] if isinstance(models, str) else zoo.name_models(models)
        by_name = all(own is None for _, own in listed)
        data = data if isinstance(data, Data) else Data(source=data)
        partition, clients = resolve_partition(data, partition, clients)
        config = configure(
            settings,
            algorithm=as_algorithm(algorithm),
            data=data,
            partition=partition,
            clients=clients,
            models=",".join(name for name, _ in listed) if by_name else BY_PYTHON,
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
        after_round: Which = "last",
        ignore_stop: bool = False,
    ) -> Experiment:
        """Return the experiment of a configuration, with all clients in this process.

        The configured engine does not count.

        Args:
            config: The configuration.
            out: The run's folder, which must be new or empty unless `resume`; with None, nothing is
                written.
            resume: Continue the run in the folder.
            monitor: Notified of the run's progress.
            after_round: The round after which a resumed run continues, a number, "last" or "best"
                on validation; later rounds are dropped.
            ignore_stop: Continue a resumed run although it stopped early.

        Raises:
            ConfigError: The configuration asks for something this machine or its data do not have.
            CheckpointError: The folder is not empty, or its run cannot be resumed.
        """
        config = with_threads(replace(config, engine="local"), out, resume=resume)
        federation = assemble(config, monitor=monitor)
        return cls.of(
            federation, out, resume=resume, after_round=after_round, ignore_stop=ignore_stop
        )

    @classmethod
    def restore(cls, run: Path, *, unlimited: bool = False, trust: bool = False) -> Experiment:
        """Restore a run after its last finished round, on the CPU, for inspection only.

        Nothing is written or downloaded; the run's data must be on this machine.

        Args:
            run: The run's folder.
            unlimited: Lift the clients' privacy budget; their answers stay protected.
            trust: Consent to run the code that the folder names.

        Raises:
            ConfigError: The run was on Flower, so its clients' images are not here; or the folder
                names code without consent.
            CheckpointError: The checkpoint does not belong to this configuration.
        """
        with trusting(trust):
            config = read_run(run)
        if config.engine == "flower":
            raise ConfigError(
                f"{run} ran on Flower: its clients' images are at their sites, not here"
            )
        last, state = read_finished_round(run)
        data = replace(config.data, download=False)
        privacy = replace(config.privacy, epsilon=None) if unlimited else config.privacy
        config = replace(
            config, data=data, privacy=privacy, device="cpu", precision="auto", start=""
        )
        experiment = cls.from_config(config)
        experiment.round = last
        try:
            experiment.server.recall(state["server"])
            experiment._restore_clients(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{run} holds the checkpoint of another experiment: {summarise_error(error)}"
            ) from error
        return experiment

    @classmethod
    def of(
        cls,
        federation: Federation,
        out: Path | None,
        *,
        resume: bool,
        after_round: Which = "last",
        ignore_stop: bool = False,
    ) -> Experiment:
        """Return the experiment of an assembled federation.

        Its clients may be in this process or at Flower sites. See `from_config` for the arguments.
        """
        experiment = cls.__new__(cls)
        experiment._begin(federation, out, resume, after_round, ignore_stop)
        return experiment

    def _begin(
        self,
        federation: Federation,
        out: Path | None,
        resume: bool,
        after_round: Which = "last",
        ignore_stop: bool = False,
    ) -> None:
        """Set up the experiment; open its folder and restore its checkpoint, if any.

        See `from_config` for the arguments.
        """
        self.config = federation.config
        self.server = federation.server
        self.engine = federation.engine
        self.algorithm = self.config.algorithm
        self.test = federation.test
        self.validation = federation.validation
        self.overlap = federation.overlap
        self.tests_by_labels = federation.tests_by_labels
        self.networks = federation.networks
        self.selection = Selection(self.config.patience)
        self.accuracy_watch = AccuracyWatch(self._chance(federation))
        if federation.task is not None:
            self.task = federation.task
            self.architectures = list(federation.architectures)
        self.device = self.server.device
        self.devices = [self.device]
        if isinstance(self.engine, LocalEngine):
            self.devices = list(self.engine.devices)
        self.precision = resolve_precision(self.config.precision, *self.devices)
        self.server.monitor = self.engine
        self.engine.evaluation = self.config.evaluate
        self.engine.last_round = self.config.rounds
        local_clients = self.engine.clients.values() if isinstance(self.engine, LocalEngine) else ()
        for node in (self.server, *local_clients):
            node.evaluation = self.config.evaluate
        self.engine.set_server(self.server)
        self.round = 0
        self._unfinished = False
        self.states = self._store_states(out)
        starts = self.config.start and not (resume and out is not None and has_checkpoint(out))
        if starts and self.states is None:
            start_from(Path(self.config.start), federation)
        self._data = "" if out is None else federation.fingerprint()
        self.folder = None if out is None else self._open(out, resume, after_round)
        if starts and self.states is not None:
            # Only now: states that do not fit into memory are written to the folder.
            self._start_from(federation)
        if self.folder is not None and resume:
            self._recall_stop(self.folder, ignore_stop)
        if self.folder is not None and self.round:
            # The run may have been killed after its checkpoint and before its privacy statement.
            self.folder.state(self.privacy().to_json())

    def _start_from(self, federation: Federation) -> None:
        """Start clients from another run; leave no folder on errors.

        The clients' states are in files.
        """
        assert self.states is not None
        try:
            start_from(Path(self.config.start), federation)
        except BaseException:
            self.states.discard()
            if self.folder is not None:
                self.folder.discard()
            raise

    def _store_states(self, out: Path | None) -> StateFiles | None:
        """Have clients that do not take part stored in files, if configured.

        Args:
            out: The run's folder; without one, the files are temporary.
        """
        if not self.config.stores_states or not isinstance(self.engine, LocalEngine):
            return None
        if out is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="barter-")
            folder = Path(self._temporary.name)
        else:
            folder = out / "clients"
        states = StateFiles(folder)
        self.engine.store_states(ClientStates(self.engine.clients, states, STATES_LIMIT))
        log.info(
            "%d clients: the states of those that do not take part are in %s; "
            "state_store=memory keeps them in memory",
            self.config.clients,
            folder,
        )
        return states

    def _chance(self, federation: Federation) -> float:
        """Return the test accuracy of always predicting the most frequent class.

        Without a test set, it is 1 / number of classes.
        """
        classes = federation.server.spec.classes
        if federation.test is None or not len(federation.test):
            return 1 / classes
        counts = torch.bincount(federation.test.labels.cpu(), minlength=classes)
        return float(counts.max()) / len(federation.test)

    def rounds(self, n: int, *, progress: bool = True) -> Iterator[Round]:
        """Run until round n is done, and yield the record of each round.

        Each round runs when the iterator is advanced. Round n is always evaluated. With `patience`,
        the run ends earlier if validation accuracy stops improving; `stopped` then holds the
        reason.

        Args:
            n: The number of the last round; a resumed experiment continues after the rounds that
                are done, and yields nothing if there are n already.
            progress: Show progress on a terminal or in a notebook, unless another monitor does, and
                log the algorithm's remarks at the end.

        Raises:
            BarterError: As `step` does.
        """
        shows_progress = progress and self.round < n and isinstance(self.engine.watched, Silence)
        watcher = make_onlooker(n, self.round) if shows_progress else None
        records = [] if self.folder is None else self.folder.records()
        self.engine.last_round = n
        while self.round < n and self.stopped is None:
            record = self.step() if watcher is None else watcher.over(self.engine, self.step)
            records.append(record)
            yield record
        if shows_progress:
            for remark in self.algorithm.remarks(records):
                log.warning("%s", remark)
            if self.stopped is not None and self.round < n:
                log.warning("%s", self.stopped)

    def step(self) -> Round:
        """Run the next round and return its record; with a folder, also save it there.

        After an error in a round this object cannot continue; the run can be resumed from its
        folder. If no round is done and no client had uploaded anything, the folder is deleted
        instead, unless the user interrupted the run.

        Raises:
            CheckpointError: An error interrupted an earlier round of this experiment, or the folder
                cannot be written.
            ClientError: Fewer clients answered a call than `min_clients` requires.
            PrivacyError: The clients' privacy budget does not allow another round.
            StateError: The round left NaN or infinity in the server's state. It is not saved.
        """
        if self._unfinished:
            raise CheckpointError(
                "an error left this experiment in the middle of a round: resume it from its folder"
            )
        self._require_budget()
        self._unfinished = True
        try:
            with (
                limit_threads(self.config.threads),
                use_precision(self.precision),
                self.engine.on_server_stream(),
                self.server.use_lane_module(),
            ):
                record = self._run(self.round + 1)
        except BaseException as error:
            if self.folder is not None:
                with suppress(CheckpointError):
                    # What clients have released stays released, although the round failed.
                    self.folder.state(self.privacy().to_json())
                self.folder.release()
                # An interrupted run can be resumed. One that failed before any exchange cannot.
                if isinstance(error, Exception) and not (self.round or self.engine.crossed):
                    self.folder.discard()
            errors = [failure.error for failure in self.engine.failures]
            refusals = [text for text in errors if PrivacyError.__name__ in text]
            if isinstance(error, ClientError) and refusals:
                reason = refusals[0].partition(f"{PrivacyError.__name__}: ")[2]
                raise PrivacyError(self._budget_message(reason)) from None
            if isinstance(error, ClientError):
                _extend(error, self._way_back(errors, error.answered))
            raise
        self._unfinished = False
        return record

    def privacy(self) -> Statement:
        """Return what clients have released so far, and the resulting guarantee."""
        selection = self.config.keep == "best" or self.config.patience is not None
        return make_statement(
            self.config.privacy,
            self.algorithm,
            self.engine.crossed,
            self.engine.reported_epsilon,
            secret=not isinstance(self.engine, LocalEngine),
            start=self.config.start,
            validation=self.config.data.validation > 0,
            selection=selection,
            public=self.config.data.public,
            overlap=self.overlap,
            tests_by_labels=self.tests_by_labels,
        )

    def _require_budget(self) -> None:
        """Raise PrivacyError if too few clients have budget for another round.

        `min_clients` must have it, by default all clients of the run (see `exhausted_clients`).
        """
        plan = Plan(self.config.privacy, self.algorithm)
        client_ids = self.engine.client_ids
        released = {k: plan.count_releases(seen) for k, seen in self.engine.crossed.items()}
        exhausted = plan.exhausted_clients(released, self.round)
        if len(client_ids) - len(exhausted) < (self.config.min_clients or len(client_ids)):
            names = ", ".join(map(str, exhausted[:5]))
            if len(exhausted) > 5:
                names += f" and {len(exhausted) - 5} more"
            reason = f"another would cost client {names} more than {plan.privacy.epsilon:g}"
            raise PrivacyError(self._budget_message(reason))

    def _budget_message(self, reason: str) -> str:
        return (
            f"the privacy budget is spent after round {self.round}: {reason}. Finished rounds are "
            "kept; more rounds "
            "need a larger privacy.epsilon, or more noise, in a new run"
        )

    def _run(self, t: int) -> Round:
        """Run round t, record it, and write its checkpoint.

        Round 1 is preceded by the algorithm's `setup`. Without a folder nothing is written.

        Raises:
            StateError: The round left NaN or infinity in the server's state. It is not recorded.
        """
        start = time.perf_counter()
        all_clients = Clients(self.engine, self.engine.client_ids)
        self.engine.participants.clear()
        if self.states is not None:
            self.states.round = t
        with self.engine.count_server_work():
            if t == 1:
                with seeds.scope(self.config.seed, 0, "server", device=self.device):
                    self.algorithm.setup(self.server, all_clients)
            self.engine.round = t
            defence = Defence(self.config.robust, self.config.robust_share)
            with seeds.scope(self.config.seed, t, "server", device=self.device), defend(defence):
                self.algorithm.round(self.server, all_clients, t)
        self._require_finite(t)
        record = self._record(t, all_clients, start)
        self.round = t
        record = self._with_warnings(record)
        best = self.selection.best
        self.selection.add(record)
        self.stopped = self.selection.stop()
        self._rest_clients()
        if self.folder is not None:
            self.folder.append(record)
            self._save(self.folder, best)
            self.folder.state(self.privacy().to_json())
            if self.stopped is not None:
                self.folder.note_stop(self.stopped)
        if self.selection.best is None and t == 1:
            self._warn_without_validation()
        return record

    def _rest_clients(self) -> None:
        """Put all clients to rest at a round's end, if their states are stored in files."""
        if self.states is None or not isinstance(self.engine, LocalEngine):
            return
        assert self.engine.states is not None
        self.engine.states.rest_all()
        if self.folder is None:
            self.states.prune([])
            return
        if self.states.has_initial:
            return
        clients = [c for c in self.engine.clients.values() if isinstance(c, LazyClient)]
        kinds = {client.id: client.architecture for client in clients}
        first = {client.architecture: client for client in reversed(clients)}
        initial = {name: client.initial_memory() for name, client in first.items()}
        self.states.write_initial(initial, kinds)

    def _require_finite(self, t: int) -> None:
        """Raise StateError if a round left NaN or infinity in the server's state.

        Such a state must not be saved. The next round would fail: a server does not send such
        numbers, and no later checkpoint could be used either.
        """
        found = infinite_leaves(self.server.memory())
        if not found:
            return
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        message = (
            f"round {t} left NaN or infinity in the server's state ({found[0]}{more}): it is not "
            f"saved{self.engine.suspect()}"
        )
        if self.folder is not None and self.round:
            message += f"; `barter resume {self.folder.path}` repeats round {t}"
            message += self._earlier_round(", ", self.round)
        raise StateError(message)

    def _with_warnings(self, record: Round) -> Round:
        """Return the record, with a warning if the primary model collapsed in this round.

        The warning names the answer that stands out, if any, and the way back to an earlier round.
        """
        warning = self.accuracy_watch.add(record)
        if not warning:
            return record
        warning += self.engine.suspect()
        good = self.accuracy_watch.good
        if self.folder is not None and good is not None:
            warning += self._earlier_round("; ", good + 1)
        return replace(record, warnings=[*record.warnings, warning])

    def _earlier_round(self, before: str, than: int) -> str:
        """Return the command that goes back to an earlier round, for messages.

        Args:
            before: Text to put before the command.
            than: The round must be earlier than this one.

        Returns:
            The text, empty if the run has no folder or no earlier checkpoint is kept. It is empty
            on Flower too: sites keep their own memory, which does not go back.
        """
        return "" if self.folder is None else self._command_back(self.folder.path, before, than)

    def _command_back(self, path: Path, before: str, than: int) -> str:
        """Return a clause for messages that names the command to go back.

        The clause is `before`, then "`barter resume PATH --round N` goes back". N is the newest
        checkpoint before round `than` in the run's folder `path`. Empty if there is none, and on
        Flower. `self.folder` need not be set, unlike in `_earlier_round`.
        """
        if not isinstance(self.engine, LocalEngine):
            return ""
        earlier = [t for t in checkpoint_rounds(path) if t < than]
        return f"{before}`barter resume {path} --round {earlier[-1]}` goes back" if earlier else ""

    def _way_back(self, errors: Sequence[str], answered: int) -> str:
        """Return how to go back if several clients' answers are extreme; or nothing.

        One client's malformed answer is its own. If others' are extreme too, at least two in all,
        an earlier round has probably spoilt what all clients start from. Extreme are errors about
        NaN, infinity or a range of values. Several earlier rounds may be spoilt: with a plain mean,
        one client can enlarge the weights a little in every round. If no client has a good answer
        in the first round, it is more likely that training diverged.

        Args:
            errors: The errors of the round's failures.
            answered: The number of clients whose answers were accepted in the failed call.
        """
        extreme = [text for text in errors if "NaN or infinity" in text or "of its values" in text]
        if len(extreme) < 2:
            return ""
        if not (answered or self.round) and len(extreme) == len(errors):
            return "; training probably diverged at all clients: try a lower learning rate"
        way_back = self._earlier_round("; ", self.round)
        plain_mean = getattr(self.algorithm, "average", "mean") == "mean"
        if self.config.robust == "none" and self.algorithm.aggregates and plain_mean:
            way_back += "; a new run with robust=auto limits what one client's answers can spoil"
        return way_back

    def _save(self, folder: RunFolder, former_best: int | None) -> None:
        """Write the finished round's checkpoint; delete those not to be kept.

        Kept are the last `keep_rounds` rounds, the last evaluated round whose accuracy had not
        collapsed, and with `keep` "best" the best one on validation.

        Args:
            folder: The run's folder.
            former_best: The best round before this one; it stays until the new file is on disk.
        """
        keep = set(range(self.round - self.config.keep_rounds + 1, self.round))
        # However many rounds follow a collapse, or are not evaluated: there is a way back.
        if self.accuracy_watch.good is not None:
            keep.add(self.accuracy_watch.good)
        until_saved = set[int]()
        if self.config.keep == "best" and self.selection.best is not None:
            keep.add(self.selection.best)
            # If this round is the new best, the former best stays until the new one is on disk.
            if former_best is not None:
                until_saved.add(former_best)
        state = self._state(clients=self.states is None)
        folder.save(self.round, state, self._origin(), keep, until_saved, self.states)

    def _warn_without_validation(self) -> None:
        """Log that there is no best round and no early stop, if the run asks for either.

        Called after round 1 if no client reports a validation accuracy. Does nothing unless
        `keep` is "best" or `patience` is set.
        """
        if self.config.keep == "best" or self.config.patience is not None:
            log.warning(
                "no client reports a validation accuracy: no round is the best, and the run does "
                "not stop early"
            )

    def _record(self, t: int, all_clients: Clients, start: float) -> Round:
        """Evaluate clients and server if due, and return the record of round t.

        Reports, times, failures and byte counts of the round are collected and reset.

        Args:
            t: The round.
            all_clients: All clients.
            start: When the round began, by `time.perf_counter`.
        """
        participants = sorted(self.engine.participants)
        tested = self.engine.clients_due()
        adversarial = self.engine.adversarial
        # Adversarial clients are not evaluated: means are those of honest clients.
        evaluated = {*tested, *participants} - set(adversarial)
        metrics = all_clients.only(evaluated).run(self.algorithm.evaluate)
        server = as_numbers(self.server.report)
        self.server.report = {}
        evaluate = self.config.evaluate
        due = evaluate.is_due(t, self.engine.last_round)
        if due and self.test is not None and evaluate.runs("global"):
            server |= self.algorithm.evaluate_server(self.server, self.test)
        if due and self.validation is not None:
            validated = self.algorithm.evaluate_server(self.server, self.validation)
            if "global" in validated:
                server["val"] = validated["global"]
        seconds = {**self.engine.seconds, "round": time.perf_counter() - start}
        if self.device.type == "cuda":
            devices = set(self.devices)
            server["device_memory"] = float(max(map(torch.cuda.max_memory_reserved, devices)))
            for device in devices:
                torch.cuda.reset_peak_memory_stats(device)
        failures = [str(failure) for failure in self.engine.failures]
        self.engine.seconds.clear()
        self.engine.failures.clear()
        by_method: dict[str, dict[str, int]] = {}
        by_client = {k: {"bytes_up": 0, "bytes_down": 0} for k in all_clients}
        for (method, client, direction), count in sorted(self.engine.wire.take_bytes().items()):
            if (
                method != EVALUATION
            ):  # Evaluation serves the experimenter; it is not the method's traffic.
                by_method.setdefault(method, {"up": 0, "down": 0})[direction] += count
                by_client[client][f"bytes_{direction}"] += count
        clients = {k: {**metrics.get(k, {}), **by_client[k]} for k in all_clients}
        for k in adversarial:
            clients[k]["adversarial"] = 1.0
        simulated: dict[str, float] = {}
        if self.engine.clock is not None:
            reading = self.engine.clock.take_reading()
            simulated = reading.seconds
            server["flops"] = float(reading.server_flops)
            for k in clients:
                clients[k]["flops"] = float(reading.flops.get(k, 0))
                clients[k]["simulated_call_seconds"] = reading.by_client.get(k, 0.0)
        return Round(
            t,
            clients,
            server,
            seconds,
            by_method,
            failures,
            participants=participants,
            primary=self.algorithm.primary,
            simulated=simulated,
            wire=str(self.config.wire),
        )

    def _origin(self) -> dict[str, str]:
        """Return the configuration and the data's fingerprint, for checkpoints."""
        return {"config": to_toml(self.config), "data": self._data}

    def _state(self, *, clients: bool = True) -> dict[str, Any]:
        """Return all that a checkpoint holds, not copied.

        Without `clients`, their states are left out, since they are in files; calls that wait for
        them are included.
        """
        state = {
            "server": self.server.memory(),
            "clients": self.engine.memory() if clients else {},
            "networks": self.networks,
            "crossed": self.engine.crossed,
            "told": self.engine.reported_epsilon,
        }
        # With `clients`, the engine has just delivered everything.
        if not clients and isinstance(self.engine, LocalEngine) and self.engine.deliveries.last:
            state["deliveries"] = self.engine.deliveries.memory()
        return state

    def _require_same(self, path: Path, origin: Mapping[str, str]) -> None:
        """Check that a checkpoint was made with this configuration and these data.

        Raises:
            CheckpointError: They differ, or the checkpoint does not say.
        """
        if not {"config", "data"} <= origin.keys():
            raise CheckpointError(
                f"{path} was written by an older version, which did not record its configuration "
                "and data"
            )
        try:
            begun = self._begun_with(tomllib.loads(origin["config"]))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} holds a damaged checkpoint: its configuration is not TOML: "
                f"{summarise_error(error)}"
            ) from error
        key = first_difference(to_plain(self.config), begun, but=RESULT_FREE)
        if key is not None:
            raise CheckpointError(
                f"{path / 'config.toml'} was changed after round {self.round}: {key} differs; "
                "change it back, or start a new run"
            )
        if origin["data"] != self._data:
            raise CheckpointError(
                f"{self.config.data.source} does not hold the data that {path} was begun with: "
                "restore them, "
                "or start a new run"
            )

    def _begun_with(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values a run was begun with, with defaults for newer keys.

        Args:
            tree: The values of the run's configuration file.
        """
        privacy = to_plain(replace(self.config, privacy=Privacy()))["privacy"]
        return with_defaults({"privacy": privacy, **tree})

    def _recall_stop(self, folder: RunFolder, ignore_stop: bool) -> None:
        """Restore the early stop of a resumed run, or ignore it and continue.

        A stop after the round that the run goes on from, or that `patience` no longer asks for, is
        deleted. One that `patience` asks for is recorded and sets `stopped`, unless `ignore_stop`
        overrules a recorded one; patience then counts again from that round on.
        """
        for record in folder.records():
            self.selection.add(record)
            self.accuracy_watch.add(record)
        recorded = early_stop(folder.path)
        if recorded is not None and recorded.round > self.round:
            # The run was resumed from an earlier round: the stop belongs to dropped rounds.
            folder.forget_stop()
            recorded = None
        if recorded is not None and recorded.overruled:
            self.selection.ignore_stop(recorded)
        due = self.selection.stop()
        if due is not None and recorded is not None and ignore_stop:
            folder.note_stop(self.selection.ignore_stop(due))
        elif due is not None:
            folder.note_stop(due)
            self.stopped = due
        elif recorded is not None and not recorded.overruled:
            folder.forget_stop()

    def _read_checkpoint(
        self, path: Path, after_round: Which
    ) -> tuple[int, Payload, dict[str, str]] | None:
        """Read the checkpoint to continue from; None if no round is finished.

        Returns:
            The round, the state and the notes of the checkpoint.

        Raises:
            CheckpointError: If it is damaged, or the wanted round is not kept. Where an earlier
                round is kept, the message says how to go back to it.
        """
        if after_round != "last":
            return checkpoint_of(path, after_round)
        try:
            return last_checkpoint(path)
        except CheckpointError as error:
            earlier = checkpoint_rounds(path)[:-1]
            if not earlier or not isinstance(self.engine, LocalEngine):
                raise
            back = f"`barter resume {path} --round {earlier[-1]}` goes back to an earlier round"
            raise CheckpointError(f"{error}; {back}") from error

    def _open(self, path: Path, resume: bool, after_round: Which) -> RunFolder:
        """Create the run's folder, or with `resume` open it and restore its checkpoint.

        Consent to the code that the configuration names is recorded in either case.

        Raises:
            CheckpointError: If a new folder is not empty, or a run cannot be resumed.
        """
        code = code_names(to_plain(self.config))
        if not resume:
            return RunFolder.create(path, to_toml(self.config), lambda: note_consent(path, code))
        folder = RunFolder.existing(path)
        try:
            self._continue(folder, after_round, code)
        except BaseException:
            # The traceback keeps the folder alive, and with it the lock.
            folder.release()
            raise
        return folder

    def _continue(self, folder: RunFolder, after_round: Which, code: list[str]) -> None:
        """Restore the checkpoint of an opened folder, and drop later rounds.

        Settings that may change, such as the number of rounds, are written to the folder.

        Raises:
            CheckpointError: The run has another configuration, its checkpoint is damaged or not
                kept, or was made with another configuration, other data or other networks.
        """
        path = folder.path
        begun = self._begun_with(read_toml(folder.config))
        key = first_difference(to_plain(self.config), begun, but=RESULT_FREE)
        if key is not None:
            raise CheckpointError(f"{path} is a run of another configuration: {key} differs")
        checkpoint = self._read_checkpoint(path, after_round)
        if checkpoint is not None:
            self.round, state, origin = checkpoint
            self._require_same(path, origin)
            try:
                self._restore(state, folder.records())
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"{path} holds the checkpoint of another experiment: {summarise_error(error)}"
                ) from error
            found = infinite_leaves(self.server.memory())
            if found:
                raise CheckpointError(
                    f"{path}: the checkpoint of round {self.round} holds NaN or infinity ({found[0]})"
                    f"{self._command_back(path, '; ', self.round)}"
                )
        note_consent(path, code)
        folder.go_on_after(self.round)
        if self.states is not None:
            folder.clean_states(self.states)
        threads = self.config.threads
        threads_before = begun.get("threads")
        if self.round and isinstance(threads_before, int) and threads not in (None, threads_before):
            log.warning(
                "%s continues with threads=%d, begun with %d: last digits will differ",
                path,
                threads,
                threads_before,
            )
        values = to_plain(self.config)
        changes = {key: values[key] for key in ("keep", "keep_rounds", "patience")}
        changes["rounds"] = max(self.config.rounds, begun["rounds"])
        if threads is not None:
            changes["threads"] = threads
        folder.change(changes)

    def _restore(self, state: Payload, records: Sequence[Round]) -> None:
        """Restore all parties and the account of what was released.

        Args:
            state: What `_state` returned. Counts of releases that it lacks, as older ones do, stay.
            records: All recorded rounds; the largest ε that a client reported in any counts.
        """
        self.server.recall(state["server"])
        self._restore_clients(state)
        for k, seen in state.get("crossed", {}).items():
            self.engine.crossed[k] = self.engine.crossed.get(k, {}) | seen
        self.engine.reported_epsilon = state.get("told", {})
        # Records may hold values of epsilon that clients reported after the checkpoint.
        for record in records:
            for k, metrics in record.clients.items():
                self.engine.record_epsilon(k, metrics.get(EPSILON))

    def _restore_clients(self, state: Payload) -> None:
        """Restore the clients; those whose state is in a file are read when used."""
        states = state["clients"]
        if isinstance(self.engine, LocalEngine) and "deliveries" in state:
            self.engine.deliveries.recall(state["deliveries"])
        if self.states is not None and isinstance(states, StoredStates):
            if list(states) != list(self.engine.client_ids):
                raise LookupError(f"it has {len(states)} clients")
            self.states.restore(states)
            return
        if self.states is not None:
            self.states.round = self.round
        self.engine.recall(states)


def _extend(error: Exception, text: str) -> None:
    """Append text to an error's message; its notes and traceback stay."""
    if text:
        error.args = (f"{error}{text}",)
