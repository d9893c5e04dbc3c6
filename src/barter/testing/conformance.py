"""Check a method against the rules for all methods, in a small federation.

A check raises `Violation` if the method breaks its rule. `CHECKS` has the rules as `barter check`
prints them.
"""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor

from barter.compute.threads import limit_threads
from barter.core.algorithm import Algorithm
from barter.core.errors import BarterError
from barter.core.params import describe_fields
from barter.core.payload import isolate, leaves, pack, unpack
from barter.core.schema import compile_method
from barter.core.wire import Direction, Wire
from barter.data.sources import load_dataset
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.engines.network import Network
from barter.experiment import Experiment
from barter.testing.adversarial import AdversarialClient

__all__ = ["CHECKS", "Trial", "Violation", "check_algorithm", "few_digits", "find_problem"]

HERE = Path(__file__).parent
ROUNDS = 3
CLIENTS = 3
IMAGES = 360
MOST_ROUNDS = 20  # maximum number of rounds with an adversarial client
DROPOUT = 0.3  # probability that a client drops out during a round
# With this seed one client drops out during the first round, and two drop out of the second.
DROPOUT_SEED = 87
DROPOUT_ROUNDS = 2
ROUNDS_AFTER = 2  # rounds after those, in which all clients are honest
# Every leaf of the last checkpoint, and the records of all rounds.
Outcome: TypeAlias = tuple[dict[str, Any], list[Any]]


class Violation(BarterError):
    """A method breaks a rule."""


class Listening(Wire):
    """A wire that records which methods are called."""

    def __init__(self, may_be_infinite: frozenset[str]) -> None:
        super().__init__(may_be_infinite)
        self.methods: list[str] = []

    def deliver(self, received: Any, method: str, client: int, direction: Direction) -> Any:
        self.methods.append(method)
        return received


class Trial:
    """A method to check, and its runs in small federations."""

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self.algorithm = algorithm
        self.kind = type(algorithm)

    def federation(
        self,
        *,
        seed: int = 0,
        cores: int = 1,
        out: Path | None = None,
        resume: bool = False,
        min_clients: int | None = None,
        network: Network | None = None,
    ) -> Experiment:
        """Return a new federation of three clients that runs the method on few digits.

        It runs on the CPU.

        Args:
            seed: The run's seed.
            cores: Number of processes for clients.
            out: The run's folder; None writes nothing.
            resume: Continue the run in the folder.
            min_clients: Number of clients that must answer; all if None.
            network: A simulated network, or None.
        """
        # With two architectures, two of the three clients have the same one.
        models = (
            "small-mlp" if self.algorithm.server_model.one_architecture else "small-mlp,small-cnn"
        )
        public = "digits" if self.algorithm.needs_public_data else ""
        experiment = Experiment(
            self.algorithm,
            data=Data(source=few_digits(), public=public),
            partition="dirichlet",
            clients=CLIENTS,
            models=models,
            device="cpu",
            seed=seed,
            out=out,
            resume=resume,
            min_clients=min_clients,
            network=network,
        )
        assert isinstance(experiment.engine, LocalEngine)
        experiment.engine.cores = cores
        return experiment

    def over(self, wire: Wire) -> Outcome:
        """Run the method for three rounds with this wire, and return the outcome."""
        experiment = self.federation()
        experiment.engine.wire = wire
        return outcome(experiment)

    @cached_property
    def straight(self) -> Outcome:
        """Return the outcome of an undisturbed run, which others are compared with."""
        return self.over(self.recorded_calls)

    @cached_property
    def recorded_calls(self) -> Listening:
        """Return the wire of the undisturbed run, which records the calls in `methods`.

        It is empty until `straight` has been computed.
        """
        return Listening(self.algorithm.may_be_infinite)


def few_digits(images: int = IMAGES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first digits: images and labels for training, then those for tests.

    Args:
        images: Number of training images; there are a quarter as many for tests.
    """
    digits = load_dataset("digits")
    test = images // 4
    return (
        digits.x_train[:images],
        digits.y_train[:images],
        digits.x_test[:test],
        digits.y_test[:test],
    )


def outcome(experiment: Experiment, rounds: int = ROUNDS) -> Outcome:
    """Run an experiment until this round; return its state and its records.

    Returns:
        The leaves of the state by path, and of each round that was run now its number, the clients'
        and the server's metrics, and bytes by method.
    """
    records = [
        (r.round, r.clients, r.server, r.bytes) for r in experiment.rounds(rounds, progress=False)
    ]
    return dict(leaves(isolate(experiment._state()), "state")), records


def _require_same(one: Outcome, other: Outcome, reason: str) -> None:
    """Raise Violation, naming one difference, if two runs ended differently."""
    state, records = one
    other_state, other_records = other
    for at in state.keys() | other_state.keys():
        if at not in state or at not in other_state:
            raise Violation(f"{reason}: {at.removeprefix('state.')} exists in one of two runs only")
    for at, value in state.items():
        difference = _difference(value, other_state[at])
        if difference:
            raise Violation(f"{reason}: {at.removeprefix('state.')} differs, {difference}")
    for record, other_record in zip(records, other_records, strict=True):
        if record != other_record:
            raise Violation(f"{reason}: the record of round {record[0]} differs")


def _difference(value: Any, other: Any) -> str:
    """Describe how two leaves of a state differ; return "" if they are equal.

    Leaves are tensors or plain values, not containers. Types, dtypes and shapes must be the same;
    values are compared exactly, and NaN equals NaN.
    """
    if type(value) is not type(other):
        return f"{type(value).__name__} and {type(other).__name__}"
    if not isinstance(value, Tensor):
        both_nan = value != value and other != other
        return "" if value == other or both_nan else f"{value} and {other}"
    if value.shape != other.shape or value.dtype != other.dtype:
        one, two = (f"{tuple(x.shape)} {x.dtype}" for x in (value, other))
        return f"shapes and dtypes {one} and {two}"
    differs = (value != other) & ~(value.isnan() & other.isnan())
    if not differs.any():
        return ""
    difference = (value.double() - other.double())[differs].abs().nan_to_num(math.inf)
    return f"by up to {float(difference.max()):.2g}"


def is_documented(trial: Trial) -> None:
    """Check that the method is documented and its return types can be compiled."""
    kind = trial.kind
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):
        raise Violation(f"{kind.__name__} has no docstring")
    for field in describe_fields(kind):
        if len(field.meaning) <= 5:
            raise Violation(
                f"{field.name} has no comment next to it: its meaning, and the paper's symbol"
            )
    if not hasattr(kind, "crosses"):
        raise Violation(f'{kind.__name__} has no crosses = {{"method": Crossing(...)}}')
    for method in kind.crosses:
        if not callable(getattr(kind, method, None)):
            raise Violation(f"crosses names {method!r}, and there is no such method")
        if "return" not in get_type_hints(getattr(kind, method)):
            raise Violation(
                f"{method} has no return annotation: answers of remote clients are checked against "
                "it"
            )
        try:
            compile_method(trial.algorithm, method)
        except TypeError as error:  # an annotation out of place, or a size with two meanings
            raise Violation(str(error)) from None


def runs(trial: Trial) -> None:
    """Check that clients and the primary model have an accuracy in each round."""
    for t, clients, server, _ in trial.straight[1]:
        if trial.kind.primary == "server" and not 0 <= server.get("global", -1) <= 1:
            raise Violation(f"round {t}: primary is 'server', and the server has no accuracy")
        for k, metrics in clients.items():
            if not 0 <= metrics.get("global", -1) <= 1:
                raise Violation(f"round {t}: client {k} has no accuracy")


def crosses_what_it_says(trial: Trial) -> None:
    """Check that calls and their directions are those that `crosses` declares.

    The last call of a round must be the one that `crosses` names last.
    """
    _, records = trial.straight
    totals: dict[str, dict[str, int]] = {}
    for _, _, _, by_method in records:
        for method, count in by_method.items():
            total = totals.setdefault(method, {"up": 0, "down": 0})
            total.update({way: total[way] + count[way] for way in count})
    for method, count in totals.items():
        if method not in trial.kind.crosses:
            raise Violation(f"{method!r} is called at clients, and crosses does not name it")
        for way, bytes_ in count.items():
            crossing = trial.kind.crosses[method]
            if (bytes_ > 0) != bool(crossing.down if way == "down" else crossing.up):
                raise Violation(f"{method}: {bytes_} bytes go {way}, crosses says '{crossing}'")
    last = [method for method in trial.recorded_calls.methods if method != "evaluate"][-1:]
    if last and last != list(trial.kind.crosses)[-1:]:
        raise Violation(
            f"a round's last call is {last[0]!r}: crosses must name it last, evaluation rides on it"
        )


class Coded(Wire):
    """A wire that serialises and deserialises every payload."""

    def deliver(self, received: Any, method: str, client: int, direction: Direction) -> Any:
        tensors, header = pack(received)
        return unpack({name: tensor.clone() for name, tensor in tensors.items()}, header)


def survives_the_wire(trial: Trial) -> None:
    """Check that results are the same if payloads are sent as bytes."""
    _require_same(
        trial.over(Coded(trial.algorithm.may_be_infinite)), trial.straight, "sent as bytes"
    )


class Vandalised(Wire):
    """A wire with a second receiver, which overwrites its own copy of every payload."""

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
        size: int | None = None,
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device, size)
        for _, leaf in leaves(isolate(tree, device, path=method)):
            if isinstance(leaf, Tensor):
                leaf.zero_()
        return arrived


def isolates_parties(trial: Trial) -> None:
    """Check that results are the same if receivers overwrite their payloads."""
    _require_same(
        trial.over(Vandalised(trial.algorithm.may_be_infinite)),
        trial.straight,
        "with a receiver that overwrites its copy",
    )


def resumes(trial: Trial) -> None:
    """Check that a run interrupted after round 1 ends with the same results."""
    with tempfile.TemporaryDirectory() as folder:
        first = trial.federation(out=Path(folder) / "run")
        begun = outcome(first, 1)
        assert first.folder is not None
        first.folder.release()
        second = trial.federation(out=Path(folder) / "run", resume=True)
        state, records = outcome(second)
        assert second.folder is not None
        second.folder.release()
    reason = (
        "resumed after round 1 (what a party remembers must be annotated on its class, with a "
        "default)"
    )
    _require_same((state, begun[1] + records), trial.straight, reason)


def ignores_the_order(trial: Trial) -> None:
    """Check that results are the same if the last client is called first."""
    experiment = trial.federation()
    experiment.engine.order = lambda ids: sorted(ids, reverse=True)  # type: ignore[attr-defined]
    reason = "last client first (do clients share state outside of messages?)"
    _require_same(outcome(experiment), trial.straight, reason)


def runs_side_by_side(trial: Trial) -> None:
    """Check that results are the same with clients in separate processes."""
    reason = "clients in processes (does a method change state that is not its client's?)"
    _require_same(outcome(trial.federation(cores=2)), trial.straight, reason)


def follows_the_seed(trial: Trial) -> None:
    """Check that a second run with the same seed has the same results."""
    reason = "again with the same seed (use torch's random numbers only)"
    _require_same(outcome(trial.federation()), trial.straight, reason)


def tolerates_malformed_answers(trial: Trial) -> None:
    """Check that malformed or extreme answers of one client do no harm to others.

    The run must go on and resume, no other client may fail, answers that must be refused must be
    recorded as failures, and nothing but that client's own state may hold NaN or infinity.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        first = trial.federation(min_clients=CLIENTS - 1, out=out)
        assert first.folder is not None
        adversary = AdversarialClient(first.engine)
        for _ in range(MOST_ROUNDS):
            _step_with_adversary(adversary, first)
            if adversary.next_round():
                break
        first.folder.release()
        second = trial.federation(min_clients=CLIENTS - 1, out=out, resume=True)
        assert second.folder is not None
        for _ in range(ROUNDS_AFTER):
            adversary.description = "answers were extreme in earlier rounds"
            _step_with_adversary(adversary, second)
        second.folder.release()


def _step_with_adversary(adversary: AdversarialClient, experiment: Experiment) -> None:
    """Run a round with an adversarial client.

    Raises:
        Violation: It harms others, or goes unnoticed.
    """
    try:
        record = experiment.step()
    except Exception as error:
        raise Violation(f"{adversary.situation}: {_where(error)}") from error
    for failure in record.failures:
        if not failure.startswith(f"client {adversary.client} failed in "):
            raise Violation(f"{adversary.situation}: {failure}")
    for method in adversary.caught:
        if not any(f"failed in {method!r}" in failure for failure in record.failures):
            raise Violation(f"{adversary.situation}: no failure of {method!r} is recorded")
    for at, leaf in leaves(isolate(experiment._state()), "state"):
        finite = not isinstance(leaf, Tensor) or bool(leaf.isfinite().all())
        if not finite and f".clients.{adversary.client}." not in at:
            raise Violation(f"{adversary.situation}: {at} holds NaN or infinity")


def tolerates_dropouts(trial: Trial) -> None:
    """Run with 30 % dropouts: others must not fail, and no state may be non-finite."""
    network = Network.preset("mobile", {"dropout": DROPOUT})
    experiment = trial.federation(seed=DROPOUT_SEED, min_clients=1, network=network)
    dropped = 0
    for record in experiment.rounds(DROPOUT_ROUNDS, progress=False):
        for failure in record.failures:
            if "dropped out" not in failure:
                raise Violation(f"beside clients that drop out: {failure}")
        dropped += len(record.failures)
    if trial.kind.crosses and not dropped:
        raise Violation("no client dropped out: is any of `crosses` called?")
    for at, leaf in leaves(isolate(experiment._state()), "state"):
        if isinstance(leaf, Tensor) and not bool(leaf.isfinite().all()):
            raise Violation(f"beside clients that drop out: {at} holds NaN or infinity")


# Check -> the rule, as `barter check` prints it.
CHECKS: dict[Callable[[Trial], None], str] = {
    is_documented: (
        "it is documented: a docstring, a comment on every field, `crosses`, and return types"
    ),
    runs: (
        "it runs, its methods return what they declare, all clients and its primary model are "
        "tested"
    ),
    crosses_what_it_says: "it exchanges what `crosses` declares",
    survives_the_wire: "its payloads survive serialisation, as for another machine",
    isolates_parties: "copies of its payloads share no memory with the sender's data",
    resumes: "an interrupted and resumed run ends with bitwise equal results",
    ignores_the_order: "the order in which clients are called does not matter",
    runs_side_by_side: "clients in separate processes end with bitwise equal results",
    follows_the_seed: "the same seed gives the same run",
    tolerates_malformed_answers: (
        "one client with malformed or extreme answers harms no other client, and the run resumes"
    ),
    tolerates_dropouts: (
        "clients that drop out of a simulated network before or during a round harm no other"
    ),
}


def check_algorithm(algorithm: Algorithm[Any, Any]) -> Iterator[tuple[str, str]]:
    """Check a method; yield each rule and its problem, an empty string if none.

    If the method does not run at all, the remaining checks are skipped.
    """
    trial = Trial(algorithm)
    for check, rule in CHECKS.items():
        found = find_problem(check, trial)
        yield rule, found
        if found and check is runs:
            return


def find_problem(check: Callable[[Trial], None], trial: Trial) -> str:
    """Run a check on one thread; return the problem in one line, or an empty string.

    Any exception of the check is a problem, not only a `Violation`.
    """
    try:
        with limit_threads(1):
            check(trial)
    except Violation as error:
        return str(error)
    except Exception as error:
        return _where(error)
    return ""


def _where(error: Exception) -> str:
    """Describe an error in one line, with the line of the method's code.

    If it occurred at several clients, the first one is described.
    """
    notes = "\n".join(getattr(error, "__notes__", []))  # a client's traceback
    lines = (notes or "".join(traceback.format_exception(error))).splitlines()
    places = [
        line.strip() for line in lines if line.strip().startswith("File ") and str(HERE) not in line
    ]
    text = str(error) if isinstance(error, BarterError) else f"{type(error).__name__}: {error}"
    message = next(iter(text.splitlines()), "").partition("; client ")[0]
    return f"{message} ({places[-1]})" if places else message
