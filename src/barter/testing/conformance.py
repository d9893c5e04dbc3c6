"""What every method keeps to, whoever wrote it: checks that run it in a small federation and say what is wrong."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor

from barter.compute.threads import threaded
from barter.core.algorithm import Algorithm
from barter.core.errors import BarterError
from barter.core.params import describe
from barter.core.payload import isolate, leaves, pack, unpack
from barter.core.wire import Direction, Wire
from barter.data.sources import load
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.testing.adversarial import Liar

__all__ = ["CHECKS", "Trial", "Violation", "examined", "few_digits", "problem"]

HERE = Path(__file__).parent
ROUNDS, CLIENTS, IMAGES = 3, 3, 360
MOST_ROUNDS = 6  # that a client lies in
Outcome: TypeAlias = tuple[
    dict[str, Any], list[Any]
]  # every leaf of the last checkpoint, and the rounds' records


class Violation(BarterError):
    """A method that does not keep to what all of them must."""


class Listening(Wire):
    """A wire that somebody listens to."""

    def __init__(self, may_be_infinite: frozenset[str]) -> None:
        super().__init__(may_be_infinite)
        self.methods: list[str] = []

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
    ) -> Any:
        self.methods.append(method)
        return super().carry(tree, method, client, direction, device)


class Trial:
    """A method in a small federation, as often as a check wants it."""

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self.algorithm, self.kind = algorithm, type(algorithm)

    def federation(
        self,
        *,
        seed: int = 0,
        cores: int = 1,
        out: Path | None = None,
        resume: bool = False,
        min_clients: int | None = None,
    ) -> Experiment:
        models = (
            "small-mlp" if self.algorithm.one_architecture else "small-mlp,small-cnn"
        )  # two of three are alike
        data = Data(
            source=few_digits(), public="digits" if self.algorithm.needs_public_data else ""
        )
        options: dict[str, Any] = {
            "seed": seed,
            "out": out,
            "resume": resume,
            "min_clients": min_clients,
        }
        experiment = Experiment(
            self.algorithm,
            data=data,
            partition="dirichlet",
            clients=CLIENTS,
            models=models,
            device="cpu",
            **options,
        )
        assert isinstance(experiment.engine, LocalEngine)
        experiment.engine.cores = cores
        return experiment

    def over(self, wire: Wire) -> Outcome:
        """How it ends where everything crosses this wire."""
        experiment = self.federation()
        experiment.engine.wire = wire
        return outcome(experiment)

    @cached_property
    def straight(self) -> Outcome:
        """How it ends where nothing is done to it."""
        return self.over(self.heard)

    @cached_property
    def heard(self) -> Listening:
        """What crossed then."""
        return Listening(self.algorithm.may_be_infinite)


def few_digits(images: int = IMAGES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train with, and a quarter as many to test with: so few that a round takes a moment."""
    digits, test = load("digits"), images // 4
    return (
        digits.x_train[:images],
        digits.y_train[:images],
        digits.x_test[:test],
        digits.y_test[:test],
    )


def outcome(experiment: Experiment, rounds: int = ROUNDS) -> Outcome:
    """Run until so many rounds are done; all there is to know then."""
    records = [
        (r.round, r.clients, r.server, r.bytes) for r in experiment.rounds(rounds, progress=False)
    ]
    return dict(leaves(isolate(experiment._state()), "state")), records


def _require_same(one: Outcome, other: Outcome, reason: str) -> None:
    """Refuse two runs that ended differently, and name the first difference."""
    for at in one[0].keys() | other[0].keys():
        if at not in one[0] or at not in other[0]:
            raise Violation(
                f"{reason}: {at.removeprefix('state.')} is there in one of two runs only"
            )
    for at, mine in one[0].items():
        theirs = other[0][at]
        if not isinstance(mine, Tensor):
            differs, how = mine != theirs, f"{mine} and {theirs}"
        elif mine.shape != theirs.shape:
            differs, how = True, f"shapes {tuple(mine.shape)} and {tuple(theirs.shape)}"
        else:
            differs, how = (
                not torch.equal(mine, theirs),
                f"by up to {float((mine - theirs.to(mine)).abs().max()):.2g}",
            )
        if differs:
            raise Violation(f"{reason}: {at.removeprefix('state.')} differs, {how}")
    for mine, theirs in zip(one[1], other[1], strict=True):
        if mine != theirs:
            raise Violation(f"{reason}: the record of round {mine[0]} differs")


def is_documented(trial: Trial) -> None:
    """it says what it is: a docstring, a comment behind every field, what crosses, what its methods return"""
    kind = trial.kind
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):
        raise Violation(f"{kind.__name__} has no docstring")
    for field in describe(kind):
        if len(field.meaning) <= 5:
            raise Violation(
                f"{field.name} has no comment behind it: what it is, and the paper's symbol"
            )
    if not hasattr(kind, "crosses"):
        raise Violation(f'{kind.__name__} has no crosses = {{"method": "down: ...; up: ..."}}')
    for method in kind.crosses:
        if not callable(getattr(kind, method, None)):
            raise Violation(f"crosses names {method!r}, and there is no such method")
        if "return" not in get_type_hints(getattr(kind, method)):
            raise Violation(
                f"{method} does not say what it returns: answers from elsewhere are checked against it"
            )


def runs(trial: Trial) -> None:
    """it runs, its methods return what they say, and every client and its primary model is evaluated"""
    for t, clients, server, _ in trial.straight[1]:
        if trial.kind.primary == "server" and not 0 <= server.get("global", -1) <= 1:
            raise Violation(f"round {t}: primary is 'server', and the server has no accuracy")
        for k, metrics in clients.items():
            if not 0 <= metrics.get("global", -1) <= 1:
                raise Violation(f"round {t}: client {k} has no accuracy")


def crosses_what_it_says(trial: Trial) -> None:
    """what crosses is what it says"""
    (_, records) = trial.straight
    totals: dict[str, dict[str, int]] = {}
    for _, _, _, by_method in records:
        for method, count in by_method.items():
            total = totals.setdefault(method, {"up": 0, "down": 0})
            total.update({way: total[way] + count[way] for way in count})
    for method, count in totals.items():
        if method not in trial.kind.crosses:
            raise Violation(f"{method!r} is called at clients, and crosses does not name it")
        for way, bytes_ in count.items():
            if (bytes_ > 0) != (f"{way}:" in trial.kind.crosses[method]):
                raise Violation(
                    f"{method}: {bytes_} bytes go {way}, crosses says {trial.kind.crosses[method]!r}"
                )
    last = [method for method in trial.heard.methods if method != "evaluate"][-1:]
    if last and last != list(trial.kind.crosses)[-1:]:
        raise Violation(
            f"a round's last call is {last[0]!r}: crosses must name it last, evaluation rides on it"
        )


class Coded(Wire):
    """A wire with an ocean in it: payloads become bytes and back."""

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device)
        tensors, header = pack(arrived)
        return unpack({name: tensor.clone() for name, tensor in tensors.items()}, header)


def survives_the_wire(trial: Trial) -> None:
    """payloads survive being sent to another machine"""
    _require_same(
        trial.over(Coded(trial.algorithm.may_be_infinite)), trial.straight, "sent as bytes"
    )


class Vandalised(Wire):
    """A wire with a vandal at its end, who overwrites all that arrives for somebody else."""

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device)
        for _, leaf in leaves(isolate(tree, device, path=method)):
            if isinstance(leaf, Tensor):
                leaf.zero_()
        return arrived


def isolates_parties(trial: Trial) -> None:
    """who changes what it received changes nobody else's"""
    _require_same(
        trial.over(Vandalised(trial.algorithm.may_be_infinite)), trial.straight, "beside a vandal"
    )


def resumes(trial: Trial) -> None:
    """a run that was interrupted ends with the same bits"""
    with tempfile.TemporaryDirectory() as folder:
        first = trial.federation(out=Path(folder) / "run")
        begun = outcome(first, 1)
        assert first.folder is not None
        first.folder.release()
        second = trial.federation(out=Path(folder) / "run", resume=True)
        state, records = outcome(second)
        assert second.folder is not None
        second.folder.release()
    reason = "resumed behind round 1 (what a party remembers must be annotated on its class, with a default)"
    _require_same((state, begun[1] + records), trial.straight, reason)


def ignores_the_order(trial: Trial) -> None:
    """the order in which clients take their turns does not matter"""
    experiment = trial.federation()
    experiment.engine.order = lambda ids: sorted(ids, reverse=True)  # type: ignore[attr-defined]
    reason = "last client first (do clients share something that does not cross?)"
    _require_same(outcome(experiment), trial.straight, reason)


def runs_side_by_side(trial: Trial) -> None:
    """clients in processes of their own end with the same bits"""
    reason = "clients in processes (does a method change something that is not its client's?)"
    _require_same(outcome(trial.federation(cores=2)), trial.straight, reason)


def follows_the_seed(trial: Trial) -> None:
    """one seed is one run"""
    _require_same(
        outcome(trial.federation()),
        trial.straight,
        "again with the same seed (draw with torch only)",
    )


def bears_a_liar(trial: Trial) -> None:
    """one client that answers nonsense costs nobody but itself"""
    experiment = trial.federation(min_clients=CLIENTS - 1)
    liar = Liar(experiment.engine)
    for _ in range(MOST_ROUNDS):
        try:
            record = experiment.step()
        except Exception as error:
            raise Violation(f"{liar.beside}: {_where(error)}") from error
        for failure in record.failures:
            if not failure.startswith(f"client {liar.client} failed in "):
                raise Violation(f"{liar.beside}: {failure}")
        for method in liar.caught:
            if not any(
                f"failed in {method!r}" in failure and f": {method}" in failure
                for failure in record.failures
            ):
                raise Violation(f"{liar.beside}: no failure of {method!r} says so")
        for at, leaf in leaves(isolate(experiment._state()), "state"):
            if (
                isinstance(leaf, Tensor)
                and not leaf.isfinite().all()
                and f".clients.{liar.client}." not in at
            ):
                raise Violation(f"{liar.beside}: {at} holds NaN or infinity")
        if liar.done():
            return


CHECKS: tuple[Callable[[Trial], None], ...] = (
    is_documented,
    runs,
    crosses_what_it_says,
    survives_the_wire,
    isolates_parties,
    resumes,
    ignores_the_order,
    runs_side_by_side,
    follows_the_seed,
    bears_a_liar,
)


def examined(algorithm: Algorithm[Any, Any]) -> Iterator[tuple[str, str]]:
    """What each check is about, and what is wrong; where a method does not run at all, that is the last one."""
    trial = Trial(algorithm)
    for check in CHECKS:
        wrong = problem(check, trial)
        yield check.__doc__ or "", wrong
        if wrong and check is runs:
            return


def problem(check: Callable[[Trial], None], trial: Trial) -> str:
    """What a check finds wrong, in a line; empty if nothing is."""
    try:
        with threaded(1):
            check(trial)
    except Violation as error:
        return str(error)
    except Exception as error:
        return _where(error)
    return ""


def _where(error: Exception) -> str:
    """What went wrong, with one client if it did with several, and on which line of the method's own."""
    notes = "\n".join(getattr(error, "__notes__", []))  # a client's traceback
    lines = (notes or "".join(traceback.format_exception(error))).splitlines()
    places = [
        line.strip() for line in lines if line.strip().startswith("File ") and str(HERE) not in line
    ]
    said = str(error) if isinstance(error, BarterError) else f"{type(error).__name__}: {error}"
    said = next(iter(said.splitlines()), "").partition("; client ")[0]
    return f"{said} ({places[-1]})" if places else said
