"""Class shares at home: learnt beside the network, and added where images are of the client's own kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter import Classifier
from barter.core.evaluation import accuracy, evaluate_client
from barter.core.images import Augment, Images, Spec
from barter.core.nodes import Client
from barter.ops.fit import classification, fit, sgd
from barter.ops.shares import log_class_prior
from tests.conftest import small_federation, tiny

SPEC = Spec(1, 8, 8, 3, (0.5,), (0.5,))


def images(*counts: int) -> Images:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Images(torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8), labels, SPEC)


class Constant(Classifier):
    """Says the same of every image."""

    feature_dim = 64

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(logits))

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return self.bias.expand(len(features), -1)


def test_shares_by_hand() -> None:
    assert log_class_prior(images(3, 0, 1)).exp().tolist() == pytest.approx([4 / 7, 1 / 7, 2 / 7])


@given(st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any))
def test_shares_are_shares_and_follow_the_counts(counts: list[int]) -> None:
    shares = log_class_prior(images(*counts)).exp()
    assert float(shares.sum()) == pytest.approx(1)
    assert (
        shares.argsort(stable=True).tolist() == torch.tensor(counts).argsort(stable=True).tolist()
    )


def test_a_network_that_sees_nothing_learns_no_shares() -> None:
    """All that there is to learn of black images is how frequent classes are: 30, 10 and 20 of 60."""
    data = images(30, 10, 20)
    learnt = []
    for by_class in (None, log_class_prior(data)):
        client = Client(0, Constant(0.0, 0.0, 0.0), torch.device("cpu"), data, {})
        fit(client, epochs=400, batch_size=60, recipe=sgd(0.5, 0.0, 0.0), by_class=by_class)
        learnt.append(client.model(torch.zeros(1, 1, 8, 8))[0].detach())
    assert learnt[0].softmax(0).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=1e-3)
    # with 31, 11 and 21 of 63 given, 30/31, 10/11 and 20/21 are left, nearly alike
    assert learnt[1].softmax(0).tolist() == pytest.approx([0.3420, 0.3213, 0.3366], abs=1e-3)


def test_a_loss_of_adjusted_logits_by_hand() -> None:
    model, batch = (
        Constant(1.0, 2.0, 0.0),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])),
    )
    numbers = torch.tensor([2.0, 0.0, 0.0])
    for adjust, logits, right in ((torch.add, [3.0, 2.0, 0.0], 1), (torch.mul, [2.0, 0.0, 0.0], 1)):
        loss, hits = classification(model, SPEC, Augment(), *batch, numbers, adjust=adjust)
        assert loss.item() == pytest.approx(
            float(F.cross_entropy(torch.tensor([logits] * 2), batch[1]))
        )
        assert int(hits) == right, "the first, where the network alone names the second"
    assert int(classification(model, SPEC, Augment(), *batch)[1]) == 1


def test_only_the_clients_own_test_knows_what_is_frequent_at_home() -> None:
    tests = {"global": images(1, 1, 2), "local": images(3, 1, 0)}
    tests |= {"val": tests["global"], "val_local": tests["local"]}
    client = Client(0, Constant(0.0, 1.0, 0.5), torch.device("cpu"), images(3, 1, 0), tests)
    assert evaluate_client(client) == dict.fromkeys(tests, 0.25)
    assert evaluate_client(client, torch.tensor([2.0, 0.0, 0.0])) == {
        **{"global": 0.25, "local": 0.75},
        **{"val": 0.25, "val_local": 0.75},
    }
    assert accuracy(client.model, tests["global"], torch.tensor([0.0, 0.0, 9.0])) == 0.5


def test_a_client_of_dffke_adds_what_is_frequent_at_home_on_its_own_test_and_not_where_it_teaches() -> (
    None
):
    method = tiny("dffke")
    client = small_federation(method).engine.clients[0]
    model, shown = client.model, torch.rand(4, *client.data.spec.shape)
    assert torch.equal(method.predict_targets(client, shown)["logits"], model.eval()(shown))
    assert type(method)(balanced=False).local_offset(client) is None
    assert method.evaluate(client)["local"] == accuracy(
        model, client.tests["local"], log_class_prior(client.data)
    )
