"""What leaves a client beside its answers: rows of the statement, on Flower and in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from barter import FedAvg
from barter.core.errors import ClientError, ConfigError
from barter.core.nodes import Client
from barter.data.task import Data
from barter.experiment import Experiment
from barter.flower import engine
from barter.flower.deploy import conduct
from barter.flower.handshake import Setup
from barter.flower.site import FAILED, Site
from barter.flower.supervise import reports_progress
from barter.privacy import Privacy
from barter.privacy.side_information import PROGRESS, RESULTS, facts_in_hello
from barter.privacy.statement import Statement, make_statement
from barter.runs.journal import Journal
from barter.setup.config import Config, to_toml
from barter.testing.conformance import few_digits
from tests.conftest import small_federation, tiny
from tests.flower.grid import LoopbackGrid, site

PARTS = {"client_update": "gaussian clip=5 noise=2"}
PROMISE = Privacy(epsilon=20, parts=PARTS)
TRAINING = "training clip=1 noise=1"
TRAINED, TESTS = "training images", "test images"
NOTHING, WITHHELD, HERE = "", "withheld by the site", "seen here; withheld by sites with `epsilon`"
Line = tuple[str, str, str, int, bool]


def lines(statement: Statement) -> list[Line]:
    """Part, whose images, protection, times, and whether ε is infinite."""
    return [
        (r.part, r.about, r.protection, r.releases, math.isinf(r.epsilon)) for r in statement.rows
    ]


def told(update: str, times: int, results: str = NOTHING) -> list[Line]:
    """What the statement has where sites keep nothing back."""
    return [
        ("number of images", TRAINED, NOTHING, 1, False),
        ("names of classes", TRAINED, NOTHING, 1, False),
        ("mean and deviation of pixels", TRAINED, NOTHING, 1, True),
        ("client_update", TRAINED, update, times, not update),
        ("results of evaluation", TRAINED, results, times, not results),
        ("results of evaluation", TESTS, NOTHING, times, True),
    ]


def kept(update: str, times: int, withheld: str = WITHHELD) -> list[Line]:
    """And where all of them do."""
    return [
        ("number of images", TRAINED, NOTHING, 1, False),
        ("names of classes", TRAINED, NOTHING, 1, False),
        ("mean and deviation of pixels", TRAINED, withheld, 0, False),
        ("client_update", TRAINED, update, times, False),
        ("results of evaluation", TRAINED, withheld, 0, False),
        ("results of evaluation", TESTS, withheld, 0, False),
    ]


def own(folder: Path, k: int, epsilon: float | None = None, *, named: bool = True) -> Site:
    """A site with images of its own."""
    pixels = np.random.default_rng(k).integers(256, size=(40, 8, 8, 1), dtype=np.uint8)
    arrays = {
        "x_train": pixels,
        "x_test": pixels,
        "y_train": np.arange(40) % 4,
        "y_test": np.arange(40) % 4,
    }
    np.savez(
        folder / f"{k}.npz", **arrays, **({"classes": np.array(list("abcd"))} if named else {})
    )
    data = f"npz:{folder / f'{k}.npz'}"
    return site(folder / f"memory-{k}", name=f"site-{k}", data=data, device="cpu", epsilon=epsilon)


@pytest.fixture
def across(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Statement]:
    """What a run of these sites says of itself, and its file."""
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)

    def run(sites: list[Site], privacy: Privacy, rounds: int = 1, deliver: Any = None) -> Statement:
        grid = LoopbackGrid(sites, monkeypatch)
        grid.deliver = deliver or grid.deliver
        algorithm: dict[str, Any] = {
            "algorithm": tiny("fedavg"),
            "models": "small-mlp",
            "device": "cpu",
        }
        config = Config(**algorithm, clients=len(sites), rounds=rounds, privacy=privacy)
        config = replace(config, data=replace(config.data, source="sites"))
        out = sites[0].memory.parent / "run"
        if deliver is not None:
            with pytest.raises(ClientError):
                conduct(grid, config, out, Journal(tmp_path / "journal"))
            return Statement.read(out / "privacy.json")
        statement = conduct(grid, config, out, Journal(tmp_path / "journal")).privacy()
        assert Statement.read(out / "privacy.json") == statement
        return statement

    return run


def test_what_sites_tell_has_rows_and_counts(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    statement = across([own(tmp_path, k) for k in range(2)], Privacy(parts=PARTS))
    assert lines(statement) == told("gaussian clip=5 noise=2", 1)
    assert statement.why == (
        "mean and deviation of pixels, results of evaluation left without protection",
    )
    assert math.isinf(statement.epsilon)
    assert math.isinf(statement.of_tests)
    assert 0 < statement.clients[0] < 20


def test_sites_that_want_a_promise_keep_the_rest_to_themselves(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    statement = across([own(tmp_path, k, epsilon=30) for k in range(2)], PROMISE, rounds=2)
    assert lines(statement) == kept("gaussian clip=5 noise=2", 2)
    assert 0 < statement.epsilon == statement.clients[0] < 20
    assert statement.of_tests == 0


def test_one_site_that_tells_is_enough(tmp_path: Path, across: Callable[..., Statement]) -> None:
    statement = across([own(tmp_path, 0, epsilon=30), own(tmp_path, 1)], PROMISE)
    assert lines(statement) == told("gaussian clip=5 noise=2", 1)
    assert math.isinf(statement.epsilon)


def test_a_run_that_goes_on_keeps_its_rows(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    sites = [own(tmp_path, k) for k in range(2)]
    assert lines(across(sites, Privacy())) == told(NOTHING, 1)
    assert lines(across(sites, Privacy(), rounds=2)) == told(NOTHING, 2)


def test_classes_that_nobody_named_are_read_from_labels(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    statement = across([own(tmp_path, 0, named=False)], Privacy())
    assert lines(statement)[1] == ("number of classes, by labels", TRAINED, NOTHING, 1, True)
    careful = own(tmp_path, 1, epsilon=30, named=False)
    config = Config(
        algorithm=tiny("fedavg"), models="small-mlp", device="cpu", clients=1, privacy=PROMISE
    )
    with pytest.raises(
        ConfigError,
        match=r"site site-1 requires a privacy guarantee, and npz:.* does not name its classes",
    ):
        careful.introduce(to_toml(config))


def test_an_evaluation_has_left_whatever_becomes_of_the_answer_it_rode_on(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    def spoilt(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        reply = answer()
        return {**reply, "answer": {}} if "evaluation" in reply else reply

    statement = across([own(tmp_path, 0, epsilon=30)], PROMISE, deliver=spoilt)
    assert lines(statement)[-2:] == kept("", 0)[-2:]
    (tmp_path / "other").mkdir()
    statement = across([own(tmp_path / "other", 1)], PROMISE, deliver=spoilt)
    assert lines(statement)[-2:] == told("", 1)[-2:]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_reason_of_a_failure_stays_at_the_site(
    tmp_path: Path, across: Callable[..., Statement], quiet: bool
) -> None:
    one, replies = own(tmp_path, 0, epsilon=30 if quiet else None), []

    def broken(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if request["ask"] == "call":
            one.settle = lambda session: [][7]  # type: ignore[assignment]
            replies.append(answer())
            return replies[-1]
        return answer()

    found = lines(across([one], PROMISE, deliver=broken))
    said = ("failures of calls", TRAINED, "the same words for every reason; not counted", 1, False)
    assert [line for line in found if line[0] == said[0]] == [said]
    assert replies == [{"error": FAILED, "traceback": "", "quiet": True}]


def test_messages_of_sites_of_older_versions_count(
    tmp_path: Path, across: Callable[..., Statement]
) -> None:
    def raised(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        return {"error": "of label 7", "traceback": ""} if request["ask"] == "call" else answer()

    found = lines(across([own(tmp_path, 0)], PROMISE, deliver=raised))
    said = [("messages of errors", about, NOTHING, 1, True) for about in (TRAINED, TESTS)]
    assert [line for line in found if line[0] == "messages of errors"] == said


@pytest.mark.parametrize(
    ("privacy", "expected"),
    [
        (PROMISE, kept("gaussian clip=5 noise=2", 1, HERE)),
        (Privacy(epsilon=1000, training="clip=1 noise=1"), kept(TRAINING, 1, HERE)),
        (Privacy(), told(NOTHING, 1)),
        (Privacy(parts=PARTS), told("gaussian clip=5 noise=2", 1)),
        (Privacy(training="clip=1 noise=1"), told(TRAINING, 1)),
    ],
    ids=["parts within a budget", "training within a budget", "nothing", "parts", "training"],
)
def test_one_process_says_what_sites_would(
    tmp_path: Path, privacy: Privacy, expected: list[Line]
) -> None:
    """Those that can take part: where there is a promise, the ones that want it."""

    def run(**options: Any) -> Experiment:
        fields: dict[str, Any] = {
            "models": "small-mlp",
            "privacy": privacy,
            "rounds": 2,
            "out": tmp_path / "run",
        }
        return small_federation(tiny("fedavg"), **fields, **options)

    experiment = run()
    experiment.step()
    statement = experiment.privacy()
    assert lines(statement) == expected
    assert math.isfinite(statement.epsilon) == (privacy.epsilon is not None)
    assert ("passing it on voids the guarantee" in statement.left_out) == (
        privacy.epsilon is not None
    )
    assert experiment.folder is not None
    experiment.folder.release()
    assert run(resume=True).privacy() == statement, "all of it is in the checkpoint"


@pytest.mark.parametrize(
    "privacy",
    [PROMISE, Privacy(parts=PARTS), Privacy(training="clip=1 noise=1"), Privacy(epsilon=8)],
    ids=["parts within a budget", "parts", "training", "budget"],
)
def test_private_images_cannot_be_public(privacy: Privacy) -> None:
    """Public images are used without noise, so that no ε would hold of them."""
    data = Data(source=few_digits(), public="digits")
    with pytest.raises(
        ConfigError, match=r"data.public='digits': 360 public images are training images too, and"
    ):
        small_federation(tiny("fedavg"), models="small-mlp", privacy=privacy, data=data)


def test_public_images_have_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y, x_test, y_test = few_digits()
    np.savez(tmp_path / "other.npz", x_train=x_test.permute(0, 2, 3, 1), y_train=y_test)
    rows = {}
    for public in ("digits", f"npz:{tmp_path / 'other.npz'}"):
        data = Data(source=(x, y, x_test, y_test), public=public)
        experiment = small_federation(tiny("fedavg"), models="small-mlp", data=data)
        experiment.step()
        statement = experiment.privacy()
        rows[public] = lines(statement)[-1]
        overlaps = public == "digits"
        assert any("360 public images are among" in why for why in statement.why) == overlaps
        assert ("360 public images are training images too" in caplog.text) == overlaps
        caplog.clear()
    assert [row[0] for row in rows.values()] == ["public images"] * 2
    assert [row[-1] for row in rows.values()] == [True, False]


def test_results_follow_from_private_training_unless_labels_choose_the_tests() -> None:
    """Local tests have the mix of classes of a client's training images."""
    privacy = Privacy(training="clip=1 noise=1")
    seen = {0: {RESULTS: 1, "client_update": 1}}
    for by_labels in (False, True):
        found = make_statement(
            privacy, tiny("fedavg"), seen, {0: 3.0}, secret=True, tests_by_labels=by_labels
        )
        (row,) = (r for r in found.rows if r.part == RESULTS and r.about == TRAINED)
        assert math.isinf(row.epsilon) == by_labels


def test_progress_has_a_row_where_sites_report_it() -> None:
    """When training ends early depends on images, unless it is private."""
    seen = {0: {PROGRESS: 3, "client_update": 1}}
    for privacy, protection in ((PROMISE, NOTHING), (Privacy(training="clip=1 noise=1"), TRAINING)):
        found = lines(make_statement(privacy, tiny("fedavg"), seen, {0: 3.0}, secret=True))
        assert (PROGRESS, TRAINED, protection, 3, protection == NOTHING) in found
    assert [reports_progress(Setup(name="a", share=0, epsilon=e)) for e in (None, 8.0)] == [
        True,
        False,
    ]


@dataclass(frozen=True, kw_only=True)
class Peeking(FedAvg):
    """Measures training images too."""

    def evaluate(self, client: Client) -> dict[str, float]:
        return {"first": float(client.data.labels[0])}


def test_an_evaluation_sees_no_more_of_sealed_images_than_an_answer() -> None:
    training = Privacy(training="clip=1 noise=1")
    experiment = small_federation(Peeking(epochs=1), models="small-mlp", privacy=training)
    with pytest.raises(ClientError, match=r"reads private images \(labels\) other than by `fit`"):
        experiment.step()


def test_a_site_that_only_said_hello_has_spent_nothing() -> None:
    hello = facts_in_hello(numbered=False, pixels=False)
    crossed, training = (
        {0: {**hello, "client_update": 1}, 1: hello},
        Privacy(epsilon=9, training="clip=1 noise=1"),
    )
    assert make_statement(training, tiny("fedavg"), crossed, {0: 3.0}, secret=True).clients == {
        0: 3.0,
        1: 0.0,
    }
    crossed[1] = {**hello, RESULTS: 1}
    assert math.isinf(
        make_statement(training, tiny("fedavg"), crossed, {0: 3.0}, secret=True).epsilon
    )


def test_a_client_that_only_measures_needs_no_epsilon_of_its_own() -> None:
    privacy = Privacy(epsilon=1000, training="clip=1 noise=1")
    experiment = small_federation(
        tiny("fedavg", fraction=0.34), models="small-mlp", privacy=privacy
    )
    experiment.step()
    statement = experiment.privacy()
    assert sorted(epsilon > 0 for epsilon in statement.clients.values()) == [False, False, True]
    assert math.isfinite(statement.epsilon)
