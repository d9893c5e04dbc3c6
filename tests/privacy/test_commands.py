"""Privacy as a user meets it on the command line and in a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from barter.cli.app import main
from barter.privacy import Privacy
from barter.privacy.show import conclusion
from tests.conftest import small_federation, tiny
from tests.test_cli import QUICK

pytestmark = pytest.mark.usefixtures("few_images")

PARTS = 'privacy.parts={"learn.embeddings" = "gaussian clip=4", "learn.labels" = "withhold"}'


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main([*arguments]) == status
    found = capsys.readouterr()
    return " ".join((found.err if status else found.out).split())


def test_a_run_ends_with_its_statement_and_stops_when_the_budget_is_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    text = said(capsys, "run", "--out", run, *QUICK, "--set", "privacy.epsilon=8", "--set", PARTS)
    for words in (
        "mean and deviation of pixels training images nothing 1 ∞",
        "learn.weights training images nothing 2 ∞",
        "learn.embeddings training images gaussian clip=4 noise=1.6978 2 8 given the client's network",
        "learn.labels training images withhold 2 0",
        "results of evaluation training images nothing 2 ∞",
        "results of evaluation test images nothing 2 ∞",
        "The run as a whole: ε = ∞, there is no guarantee.",
        "Why: mean and deviation of pixels, learn.weights, teach.logits, results of evaluation left "
        "without protection.",
        "Why: learn.embeddings: the client's network depends on private images and is not protected.",
        "Test images: ε = ∞, there is no guarantee; accuracies depend on them.",
        "Protected parts cost ε = 8 with δ = 1e-05 together, within the budget of 8.",
    ):
        assert words in text
    assert said(capsys, "privacy", run) in text
    stopped = said(capsys, "resume", run, "--rounds", "4", status=1)
    assert "the privacy budget is spent after round 2" in stopped
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert main(["report", run, "--no-images"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Privacy</h2>" in page
    assert "given the client&#x27;s network" in page


def test_other_runs_say_that_nothing_is_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ["--algorithm", "local", "--set", "rounds=1", "--set", "algorithm.max_epochs=1"]
    text = said(capsys, "run", "--out", str(tmp_path / "run"), *local)
    assert (
        f"nothing is protected: `barter privacy {tmp_path / 'run'}` shows what clients released"
        in text
    )
    text = said(capsys, "privacy", str(tmp_path / "run"))
    assert (
        "Why: mean and deviation of pixels, results of evaluation left without protection." in text
    )
    assert "Sites with `epsilon` in their site.toml withhold this" in text
    (tmp_path / "run" / "privacy.json").unlink()
    assert "has no privacy statement" in said(capsys, "privacy", str(tmp_path / "run"), status=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            'privacy.parts={"learn.weight" = "withhold"}',
            "DFFKE sends no 'learn.weight': did you mean 'learn.weights'?",
        ),
        ('privacy.parts={"learn.labels" = "gaussian"}', "gaussian needs clip=..."),
        (
            'privacy.parts={"learn.labels" = "gaussian clip=1 noise=1"}',
            "learn.labels holds labels; `response` or `withhold` protects them",
        ),
        (
            'privacy.parts={"learn.embeddings" = "response epsilon=1"}',
            "learn.embeddings holds decimal numbers; it is for labels",
        ),
        ("privacy.epsilon=0", "privacy.epsilon=0: must be float > 0 or none"),
        ("privacy.budget=3", "unknown key 'privacy.budget'"),
    ],
)
def test_mistakes(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, "run", "--set", setting, status=2)


def test_a_method_that_cannot_train_in_private_is_told_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ["--set", "privacy.training=clip=1 noise=1", "--set", "clients=2"]
    text = said(
        capsys,
        "run",
        "--out",
        str(tmp_path / "run"),
        "--algorithm",
        "fedproto",
        *training,
        status=1,
    )
    assert "privacy.training: this method as configured reads private images" in text
    assert "Traceback" not in text


def test_sites_are_not_said_to_take_part_where_they_would_not() -> None:
    """Rows of a network have no promise, whatever else is withheld."""
    parts = {"learn.weights": "withhold", "learn.labels": "withhold", "teach.logits": "withhold"}
    for embeddings, finite in (("gaussian clip=1 each=answer", True), ("gaussian clip=1", False)):
        privacy = Privacy(epsilon=8, parts={**parts, "learn.embeddings": embeddings})
        experiment = small_federation(tiny("dffke"), models="small-mlp", rounds=1, privacy=privacy)
        experiment.step()
        text = " ".join(conclusion(experiment.privacy()))
        assert ("there is no guarantee." in text) != finite
        assert "Sites with `epsilon`" not in text
        assert (
            "learn.examples is the part 'examples' of clients' answers to the call 'learn'" in text
        )
