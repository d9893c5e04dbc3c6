"""Metrics against scikit-learn and numbers derived by hand; which clients are evaluated, and when."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, roc_auc_score

from barter import FedAvg, Local
from barter.core.metrics import Evaluation, auc, calibration_error, macro_f1, measure
from barter.setup.config import resolve, to_plain
from tests.conftest import perceptrons, tiny


@pytest.mark.parametrize("seed", range(5))
def test_metrics_agree_with_scikit_learn(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, 4, generator=generator).mul(4).round().div(2)  # with ties
    labels = torch.cat([torch.arange(4), torch.randint(4, (56,), generator=generator)])
    truth, scores = labels.numpy(), logits.double().softmax(1).numpy()
    expected = {
        "global": float(np.mean(scores.argmax(1) == truth)),
        "global_loss": log_loss(truth, scores),
        "global_macro_f1": f1_score(truth, logits.argmax(1).numpy(), average="macro"),
        "global_auc": roc_auc_score(truth, scores, multi_class="ovr", average="macro"),
    }
    assert measure("global", logits, labels, ["loss", "macro_f1", "auc"]) == pytest.approx(expected)


def test_classes_that_do_not_occur_count_nothing() -> None:
    logits, labels = torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1])
    # Class 0: two claimed, one right, one there: 2/3. Class 1: one claimed, right, of two: 2/3.
    assert macro_f1(logits, labels) == pytest.approx(2 / 3)
    # Only class 0 (one positive above one of two negatives, equal to the other) and class 1 are asked.
    assert auc(logits, labels) == pytest.approx((0.75 + 0.75) / 2)
    assert auc(torch.eye(2)[[0, 0]], torch.tensor([0, 0])) == 0.5


def test_calibration_error_by_hand() -> None:
    # Confidence 0.75 in four images of which two are right: the gap is 0.25 in the one bin that has any.
    logits = torch.tensor([[3.0, 1.0]]).log().expand(4, 2)
    assert calibration_error(logits, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.25)
    # Confidence 1 and right, 0.5 and wrong: gaps 0 and 0.5, half of the images each.
    logits = torch.tensor([[100.0, 0.0], [0.0, 0.0]])
    assert calibration_error(logits, torch.tensor([0, 1])) == pytest.approx(0.25)


def test_rounds_and_clients_that_are_evaluated() -> None:
    experiment = perceptrons(
        tiny("fedavg", fraction=0.34), clients=3, evaluate=Evaluation(every=3, clients="sampled")
    )
    records = list(experiment.rounds(5, progress=False))
    assert [r.round for r in records if r.values("global")] == [1, 3, 5], "first, third and last"
    assert [r.round for r in records if "global" in r.server] == [1, 3, 5]
    for record in records:
        assert len(record.participants) == 1
        evaluated = set(record.values("local"))
        assert evaluated == (set(record.participants) if record.round in (1, 3, 5) else set())
    assert all(r.headline() == r.server.get("global") for r in records)


def test_a_fixed_number_of_clients_is_evaluated() -> None:
    few = perceptrons(Local(max_epochs=1), clients=4, evaluate=Evaluation(clients=2))
    first, second = few.rounds(2, progress=False)
    assert len(first.values("global")) == 2
    assert first.values("global").keys() == second.values("global").keys()
    assert len(first.participants) == 4


def test_what_is_not_evaluated_changes_no_result() -> None:
    def state(evaluate: Evaluation) -> dict[str, torch.Tensor]:
        experiment = perceptrons(FedAvg(epochs=1, batch_size=50), evaluate=evaluate)
        list(experiment.rounds(3, progress=False))
        return experiment.server.model.state_dict()

    usual, seldom = state(Evaluation()), state(Evaluation(tests=("local",), every=9))
    assert all(torch.equal(usual[name], seldom[name]) for name in usual)


def test_tests_can_be_left_out_and_metrics_added() -> None:
    wanted = Evaluation(tests=("global",), metrics=("loss", "per_class"))
    record = perceptrons(FedAvg(epochs=1, batch_size=50), evaluate=wanted).step()
    assert "local" not in record.clients[0]
    assert "before_local" not in record.clients[0]
    assert {"global", "global_loss", "global_class_3"} <= record.clients[0].keys()
    assert {"global", "global_loss", "global_class_3"} <= record.server.keys()


def test_the_table_of_a_configuration() -> None:
    config = resolve({"evaluate": {"every": 2, "clients": 5, "metrics": ["auc"]}})
    assert config.evaluate == Evaluation(every=2, clients=5, metrics=("auc",))
    assert to_plain(config)["evaluate"]["tests"] == ["global", "local"]
