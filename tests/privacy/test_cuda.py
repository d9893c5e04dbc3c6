"""Protected answers and private training where clients compute on the streams of a GPU."""

from __future__ import annotations

import math

import pytest

from barter.privacy import Privacy
from barter.privacy.side_information import PIXELS, RESULTS
from tests.conftest import federation, same, state, tiny

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.cuda

# With a larger clip, the weights' noise gives networks whose logits are refused as outliers.
PARTS = {
    "learn.weights": "gaussian clip=0.01",
    "learn.embeddings": "means clip=1",
    "teach.logits": "laplace clip=1 noise=50",
}


@pytest.mark.parametrize("streams", [1, 3])
def test_answers_are_protected_on_any_number_of_streams(streams: int) -> None:
    experiment = federation(
        tiny("dffke"),
        device="cuda",
        streams=streams,
        rounds=2,
        privacy=Privacy(epsilon=50, parts=PARTS),
    )
    list(experiment.rounds(2))
    statement = experiment.privacy()
    # Answers are protected; what clients tell beside them is not: the embeddings come from a network that was trained
    # without protection, so no site that wants a promise would take part, and all others tell.
    unprotected = [row.part for row in statement.rows if math.isinf(row.epsilon)]
    assert unprotected == [PIXELS, RESULTS, RESULTS], "results on training and on test images"
    assert max(statement.clients.values()) == pytest.approx(50, rel=0.01)


def test_private_training_is_the_same_on_any_number_of_streams() -> None:
    runs = [
        federation(
            tiny("fedavg"),
            device="cuda",
            streams=streams,
            privacy=Privacy(training="clip=1 noise=1"),
        )
        for streams in (1, 3)
    ]
    for experiment in runs:
        list(experiment.rounds(2))
    assert same(state(runs[0]), state(runs[1]))
    assert runs[0].privacy().epsilon > 0


@pytest.mark.parametrize("name", ["fedprox", "dffke"])
def test_methods_train_privately(name: str) -> None:
    quiet = (
        {"reveal": "nothing", "local_review": False, "balanced": False} if name == "dffke" else {}
    )
    privacy = Privacy(epsilon=1000, training="clip=1 noise=1")  # a promise: nothing is told beside
    experiment = federation(tiny(name, **quiet), device="cuda", privacy=privacy)
    assert not experiment.step().failures
    assert math.isfinite(experiment.privacy().epsilon)
