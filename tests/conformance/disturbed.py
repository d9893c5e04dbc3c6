"""One run in place of six: what must not matter, all at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from barter.experiment import Experiment
from barter.testing import conformance
from barter.testing.conformance import Outcome, Trial, Violation, outcome

# Checks that compare one disturbed run each with the undisturbed one. A run with all disturbances
# that ends with the same bits leaves none of them anything to find.
COMPARED: tuple[Callable[[Trial], None], ...] = (
    conformance.follows_the_seed,
    conformance.survives_the_wire,
    conformance.isolates_parties,
    conformance.resumes,
    conformance.ignores_the_order,
    conformance.runs_side_by_side,
)


class RoughWire(conformance.Vandalised, conformance.Coded):
    """A wire that sends bytes, and whose second receiver overwrites its copy."""


def disturbed_run(trial: Trial) -> Outcome:
    """Run a method with every disturbance, and return the outcome.

    All payloads are bytes. Clients are in processes, which answer in any order, in rounds 1 and 2.
    In round 3 they are in this one, the last client first. The run is resumed after round 1.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        first = _disturb(trial, trial.federation(cores=2, out=out))
        _, records = outcome(first, 1)
        assert first.folder is not None
        first.folder.release()
        second = _disturb(trial, trial.federation(cores=2, out=out, resume=True))
        _, later_records = outcome(second, 2)
        second.engine.cores = 1  # type: ignore[attr-defined]
        state, last_records = outcome(second, 3)
        assert second.folder is not None
        second.folder.release()
    return state, records + later_records + last_records


def _disturb(trial: Trial, experiment: Experiment) -> Experiment:
    experiment.engine.wire = RoughWire(trial.algorithm.may_be_infinite)
    experiment.engine.order = lambda ids: sorted(ids, reverse=True)  # type: ignore[attr-defined]
    return experiment


def require_undisturbed(trial: Trial) -> None:
    """Raise if a disturbance changes the results; the message names the rule that is broken."""
    try:
        conformance._require_same(disturbed_run(trial), trial.straight, "disturbed")
    except Violation:
        for check in COMPARED:
            check(trial)
        raise
