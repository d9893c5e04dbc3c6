"""One client sends mutated answers; everybody else must go on, and the run must stay usable.

A case takes a run after its first round (or before it), resumes it from its folder, replaces one
answer of one client in the next round by a mutated one, resumes the run again from what that round
left on disk, and runs one more round. So each case tests the round, the checkpoint and `resume`.

An answer that the engine refuses on arrival has no other effect than the client's failure. Such a
case runs its rounds only every `REFUSED_RUN`th time; the others end with the refusal.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barter import Experiment
from barter.core.errors import summarise_error
from barter.core.payload import Payload, isolate, leaves
from tests.conftest import small_federation, tiny
from tests.fuzz.limits import Hang, within_limits
from tests.fuzz.mutations import Mutation, mutate

__all__ = ["KNOWN_OPEN", "VERDICTS", "Case", "Outcome", "Subject"]

# Kinds of mutations that are known to do harm. The tests leave them out.
KNOWN_OPEN: frozenset[str] = frozenset()
# Verdicts from the best to the worst; the last six are findings.
VERDICTS = (
    "survived",  # accepted, and all went on
    "refused",  # a failure of the client that sent it
    "blamed",  # a failure of another client
    "non-finite",  # NaN or infinity in the state of the server or of another client
    "no resume",  # the run cannot be resumed, or the resumed run fails
    "ended",  # the round ended the run
    "slow",  # more than `limits.SECONDS`
    "odd message",  # the refusal is not one line of moderate length
)
FINDINGS = VERDICTS[2:]
CLIENTS = 3
REFUSED_RUN = 8
MESSAGE = 2000  # characters of a refusal


@dataclass(frozen=True)
class Case:
    """A mutated answer to one call of one client."""

    method: str
    call: int  # index of the call among the client's calls of the round
    mutation: Mutation
    begin: int  # rounds that are done before
    always_run: bool  # run the rounds even if the answer is refused on arrival


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    verdict: str
    reason: str = ""
    ran: bool = True  # False if the answer was refused on arrival and the rounds were not run


@dataclass
class Tap:
    """Records an engine's answers, and replaces one of them."""

    experiment: Experiment
    replace: tuple[int, Payload] | None = None
    calls: list[tuple[str, Payload, tuple[Any, ...]]] = field(default_factory=list)
    others: dict[str, list[Payload]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine = self.experiment.engine
        self.liar = engine.client_ids[-1]
        self.arrive = engine.receive_answer
        engine.receive_answer = self.arrived  # type: ignore[method-assign]

    def arrived(self, answer: Payload, method: str, client: int, sent: tuple[Any, ...]) -> Payload:
        if client != self.liar:
            self.others.setdefault(method, []).append(isolate(answer))
            return self.arrive(answer, method, client, sent)
        at = len(self.calls)
        self.calls.append((method, isolate(answer), sent))
        if self.replace is not None and self.replace[0] == at:
            answer = self.replace[1]
        return self.arrive(answer, method, client, sent)


class Subject:
    """An algorithm with a prepared run, from which all cases start.

    Args:
        name: The algorithm.
        folder: Where run folders are written.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.prepared = folder / f"{name}-1"
        first = self._experiment(folder / name)
        taps = [Tap(first)]
        record = first.step()
        self._release(first)
        shutil.copytree(folder / name, self.prepared)
        second = self._experiment(folder / name, resume=True)
        taps.append(Tap(second))
        after = second.step()
        self._release(second)
        shutil.rmtree(folder / name)
        assert not record.failures, record.failures
        assert not after.failures, after.failures
        self.door = second
        self.arrive = taps[1].arrive
        self.taps = taps
        self.liar = taps[0].liar

    def _experiment(self, out: Path, *, resume: bool = False) -> Experiment:
        return small_federation(
            tiny(self.name),
            clients=CLIENTS,
            min_clients=CLIENTS - 1,
            threads=1,
            out=out,
            resume=resume,
        )

    @staticmethod
    def _release(experiment: Experiment) -> None:
        if experiment.folder is not None:
            experiment.folder.release()

    def case(self, seed: int, index: int, without: Collection[str] = ()) -> Case:
        """Return a case; the same seed and index give the same case.

        Args:
            seed: Seed of all cases.
            index: Number of the case.
            without: Kinds of mutations to leave out.
        """
        rng = random.Random(f"{seed} {self.name} {index}")
        while True:
            begin = 0 if rng.random() < 0.25 else 1
            tap = self.taps[begin]
            call = rng.randrange(len(tap.calls))
            if tap.calls[call][0] == "evaluate" and rng.random() < 0.7:
                continue  # It is the same for all algorithms.
            method, answer, _ = tap.calls[call]
            others = [other for at in self.taps for other in at.others.get(method, [])]
            others += [old for name, old, _ in self.taps[0].calls if name == method]
            mutation = mutate(rng, answer, others)
            if mutation.kind not in without:
                return Case(method, call, mutation, begin, index % REFUSED_RUN == 0)

    def run(self, case: Case) -> Outcome:
        """Run a case."""
        try:
            with within_limits():
                return self._run(case)
        except Hang:
            return Outcome("slow", _where())

    def _run(self, case: Case) -> Outcome:
        method, _, sent = self.taps[case.begin].calls[case.call]
        refusal = self._refusal(case.mutation.answer, method, sent)
        if refusal is not None:
            if len(refusal) > MESSAGE or len(refusal.splitlines()) != 1:
                return Outcome("odd message", refusal[:MESSAGE])
            if not case.always_run:
                return Outcome("refused", refusal, ran=False)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return self._rounds(case, Path(folder) / "run")

    def _refusal(self, answer: Payload, method: str, sent: tuple[Any, ...]) -> str | None:
        """Return why an answer is refused on arrival, None if it is accepted."""
        try:
            self.arrive(answer, method, self.liar, sent)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _rounds(self, case: Case, run: Path) -> Outcome:
        """Run the round with the mutated answer, resume, and run the next round."""
        if case.begin:
            shutil.copytree(self.prepared, run)
        first = self._experiment(run, resume=bool(case.begin))
        Tap(first, (case.call, case.mutation.answer))
        try:
            record = first.step()
        except Exception as error:
            return Outcome("ended", summarise_error(error))
        finally:
            self._release(first)
        outcome = self._judge(first, record.failures)
        if outcome is not None:
            return outcome
        try:
            second = self._experiment(run, resume=True)
        except Exception as error:
            return Outcome("no resume", summarise_error(error))
        try:
            after = second.step()
        except Exception as error:
            return Outcome("no resume", f"round {case.begin + 2}: {summarise_error(error)}")
        finally:
            self._release(second)
        outcome = self._judge(second, after.failures)
        if outcome is not None:
            return outcome
        return Outcome("refused", record.failures[0]) if record.failures else Outcome("survived")

    def _judge(self, experiment: Experiment, failures: list[str]) -> Outcome | None:
        """Return a finding about a finished round; None if nobody else was harmed."""
        for failure in failures:
            if not failure.startswith(f"client {self.liar} failed in "):
                return Outcome("blamed", failure.splitlines()[0][:MESSAGE])
        for at, leaf in leaves(isolate(experiment._state()), "state"):
            own = at.startswith(f"state.clients.{self.liar}.")
            if isinstance(leaf, Tensor) and not own and not bool(leaf.isfinite().all()):
                return Outcome("non-finite", at)
        return None


def _where() -> str:
    """Return the innermost line of this package at which the last exception was raised."""
    lines = [line.strip() for line in traceback.format_exc().splitlines()]
    places = [line for line in lines if line.startswith("File ") and "/barter/" in line]
    return places[-1] if places else ""


@dataclass
class Tally:
    """Outcomes of an algorithm's cases."""

    name: str
    seconds: float = 0.0
    ran: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.seconds += other.seconds
        self.ran += other.ran
        self.verdicts += other.verdicts
        self.kinds += other.kinds
        self.findings += other.findings


def examine(
    name: str, seed: int, indices: range, without: Collection[str] = (), end: float | None = None
) -> Tally:
    """Run an algorithm's cases and count their outcomes.

    Args:
        name: The algorithm.
        seed: Seed of all cases.
        indices: Numbers of the cases.
        without: Kinds of mutations to leave out.
        end: Time (of `time.time`) after which no further case begins.
    """
    torch.set_num_threads(1)
    tally = Tally(name)
    start = time.perf_counter()
    if end is not None and time.time() > end:
        return tally
    with scratch() as folder:
        subject = Subject(name, folder)
        for index in indices:
            if end is not None and time.time() > end:
                break
            case = subject.case(seed, index, without)
            outcome = subject.run(case)
            tally.verdicts[outcome.verdict] += 1
            tally.ran += outcome.ran
            if outcome.verdict in FINDINGS:
                tally.kinds[f"{outcome.verdict}: {case.mutation.kind}"] += 1
                tally.findings.append(
                    {
                        "case": f"{name}:{index}",
                        "verdict": outcome.verdict,
                        "kind": case.mutation.kind,
                        "method": case.method,
                        "at": case.mutation.at,
                        "reason": outcome.reason[:400],
                    }
                )
    tally.seconds = time.perf_counter() - start
    return tally


class scratch:
    """A temporary folder, in memory where there is room."""

    def __enter__(self) -> Path:
        memory = Path("/dev/shm")
        roomy = False
        with suppress(OSError):
            roomy = shutil.disk_usage(memory).free > 2**30
        self.folder = tempfile.TemporaryDirectory(
            prefix="barter-fuzz-", dir=memory if roomy else None, ignore_cleanup_errors=True
        )
        return Path(self.folder.name)

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()


def chunks(names: Collection[str], count: int, size: int) -> Iterator[tuple[str, range]]:
    """Split the cases over algorithms and tasks: each algorithm gets count / algorithms of them."""
    share = -(-count // len(names))
    for begin in range(0, share, size):
        for name in names:
            yield name, range(begin, min(share, begin + size))


def to_json(tallies: Collection[Tally], command: str, seconds: float) -> str:
    """Return the counts and findings of all algorithms as benchmarks/results/fuzz-answers.json."""
    rows = [
        {
            "algorithm": tally.name,
            "answers": tally.verdicts.total(),
            "ran": tally.ran,
            **{verdict: tally.verdicts[verdict] for verdict in VERDICTS},
            "seconds": round(tally.seconds, 1),
            "findings": tally.findings,
        }
        for tally in tallies
    ]
    found = {"command": command, "seconds": round(seconds), "rows": rows}
    return json.dumps(found, indent=1) + "\n"
