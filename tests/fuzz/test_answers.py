"""Answers of one client that were mutated at random: they harm nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from barter.core.answers import Valid
from barter.engines import base
from tests.fuzz.answers import FINDINGS, KNOWN_OPEN, Case, Subject, scratch
from tests.fuzz.limits import Cases
from tests.fuzz.mutations import Mutation

SHORT = ("fedavg", "fedproto")  # all others: python -m tests.fuzz answers


@pytest.mark.parametrize("name", SHORT)
def test_answers(name: str, cases: Cases) -> None:
    """Everybody else goes on, all state is finite, and the run can be resumed."""
    with scratch() as folder:
        subject = Subject(name, folder)
        for i, rng in enumerate(cases(8)):
            case = subject.case(rng.getrandbits(32), i, KNOWN_OPEN)
            outcome = subject.run(case)
            assert outcome.verdict not in FINDINGS, (case, outcome)


def test_the_fuzzer_finds_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the contracts switched off, answers do what they must not."""
    subject = Subject("fedavg", tmp_path)
    assert subject.case(3, 4).mutation.at == subject.case(3, 4).mutation.at
    method, answer, _ = subject.taps[1].calls[0]
    other = dict(answer)
    name = next(iter(other))
    other[name] = torch.zeros(3)
    case = Case(method, 0, Mutation("another shape", name, other), 1, always_run=True)
    assert subject.run(case).verdict == "refused"
    monkeypatch.setattr(base, "validate", lambda *_: Valid(set()))
    assert subject.run(case).verdict == "ended"
