"""One suite of checks that every algorithm of the registry passes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import partial

import pytest

from barter import ALGORITHMS
from barter.core.params import describe_fields
from barter.engines import local
from barter.testing import conformance
from barter.testing.conformance import CHECKS, Trial, few_digits
from tests.conformance.disturbed import COMPARED, require_undisturbed
from tests.conftest import NEEDED, TINY, federation, least


def test_the_suite_covers_the_registry() -> None:
    assert TINY.keys() == ALGORITHMS.keys()


LONG = {
    "moments",
    "dffke",
    "dense",
    "fediod",
    "dfrd",
    "fedzkt",
    "fedmd",
    "feddf",
    "fedftg",
}  # ten seconds and more by default
ONE_EPOCH = {"fedbn"}  # by default, which takes more images to learn anything


@pytest.mark.usefixtures("all_crops")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in TINY]
)
def test_runs_with_its_defaults(name: str) -> None:
    algorithm = ALGORITHMS[name](**NEEDED.get(name, {}))
    images = 720 if name in ONE_EPOCH else 480
    (record,) = federation(algorithm, few_digits(images), clients=2).rounds(1)
    assert sorted(record.clients) == [0, 1]
    for metrics in record.clients.values():
        assert 0 <= metrics["global"] <= 1
        trained = metrics.get("before_local", metrics["local"])
        assert trained > 0.3, "every method at least trains on the client's own data"
    assert record.seconds["round"] > 0
    assert not record.failures


NEVER_ALONE = {
    "central",
    "fedaf",
    "feddm",
}  # others' data come first, or clients train no network of their own
# What is known before each exchange, not before the first alone.
EACH_ROUND = {
    "dffke",
    "fedbn",
    "fedfree",
    "fedzge",
    "fedzkt",
    "perfedavg",
    "fedmd",
    "dsfl",
    "mhat",
    "feddf",
}
# What is known before the first exchange, which is in the round of the first training.
FIRST_ROUND = {"moments"}


def require_what_clients_knew_alone(name: str, trial: Trial) -> None:
    (_, first, _, _), (_, second, _, _), _ = trial.straight[1]
    own_word = name in EACH_ROUND
    for k in range(3):
        said = {key for key in first[k] if key.startswith("before_")}
        assert said == (set() if name in NEVER_ALONE else {"before_global", "before_local"})
        assert ("before_global" in second[k]) == own_word
        if (
            said and not own_word and name not in FIRST_ROUND
        ):  # until the next round begins, the client's network is the one it trained alone
            told = first[k]
            for key in ("global", "local"):
                assert told[f"before_{key}"] == told.get(f"head_{key}", told[key]), (
                    "by the head, if that is told apart"
                )


def test_keeps_to_what_all_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rules in one test: they compare with the same run, and six of them share another."""
    # Also a short turn is taken in a process of its own.
    monkeypatch.setattr(local, "FORK_SECONDS", 0)
    # Half of the images that `barter check` takes: what is compared are bits, not accuracies.
    monkeypatch.setattr(conformance, "few_digits", partial(few_digits, conformance.IMAGES // 2))
    trial = Trial(least(name))
    for check in CHECKS:
        if check not in COMPARED:
            check(trial)
    require_undisturbed(trial)
    require_what_clients_knew_alone(name, trial)


def test_fields_have_defaults_and_the_file_opens_with_a_citation(name: str) -> None:
    kind = ALGORITHMS[name]
    assert all(field.default is not inspect.Parameter.empty for field in describe_fields(kind))
    assert kind.citation().endswith((".", ")."))
    for preset in kind.presets:
        assert isinstance(kind.preset(preset), kind)


def test_the_round_fits_one_screen_and_holds_no_batch_loop(name: str) -> None:
    source = inspect.getsource(ALGORITHMS[name].round)
    assert len(source.splitlines()) <= 40
    loops = [n for n in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(n, ast.For)]
    assert not any("batch" in ast.unparse(loop.target) for loop in loops)
