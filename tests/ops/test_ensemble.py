from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.images import Images, Spec
from barter.core.model import SplitClassifier
from barter.ops.ensemble import (
    class_shares,
    distil,
    logit_loss,
    mean_predictions,
    merge_logits,
    reduce_entropy,
    require_labels,
    sample_index,
    soft_loss,
)
from barter.ops.fit import sgd

SPEC = Spec(1, 1, 2, 3, (0.0,), (1.0,))


def images(*labels: int) -> Images:
    return Images(
        torch.full((len(labels), 1, 1, 2), 255, dtype=torch.uint8), torch.tensor(labels), SPEC
    )


def test_consensus_is_a_mean_in_which_classes_may_count_by_who_has_them() -> None:
    one, other = torch.tensor([[2.0, 0.0, 4.0]]), torch.tensor([[0.0, 6.0, 0.0]])
    assert mean_predictions([one, other]).tolist() == [[1.0, 3.0, 2.0]]
    shares = class_shares(torch.tensor([[30, 0, 0], [10, 5, 0]]))
    assert shares.tolist() == [[0.75, 0.0, 0.5], [0.25, 1.0, 0.5]], "all alike where nobody has any"
    assert mean_predictions([one, other], shares).tolist() == [[1.5, 6.0, 2.0]]


def test_a_mixture_trusts_those_who_know_a_class() -> None:
    said = torch.tensor([[[math.log(9.0), 0.0]], [[0.0, math.log(3.0)]]])  # 0.9, 0.1 and 0.25, 0.75
    shares = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    assert merge_logits(said, shares).exp()[0].tolist() == pytest.approx(
        [0.75 * 0.9 + 0.25 * 0.25, 0.75], abs=1e-5
    )
    loud = torch.stack(
        [said[0] * 100, said[1]]
    )  # a network with large logits is sure, and no more than that
    assert merge_logits(loud, shares).exp()[0].tolist() == pytest.approx(
        [0.75 + 0.25 * 0.25, 0.75], abs=1e-5
    )
    assert merge_logits(torch.stack([said, loud]), shares).shape == (2, 1, 2)


def test_era_by_hand() -> None:
    p = torch.tensor([[0.75, 0.25]])
    assert reduce_entropy(p, 0.1)[0, 0].item() == pytest.approx(1 / (1 + math.exp(-5))), (
        "a softmax of probabilities"
    )
    assert reduce_entropy(p, 1.0)[0, 0].item() == pytest.approx(1 / (1 + math.exp(-0.5))), (
        "at T = 1 less sure than before"
    )


def test_losses_by_hand_and_their_direction() -> None:
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    assert soft_loss(q.log(), p).item() == pytest.approx(math.log(2))
    assert logit_loss(q.log(), p.log()).item() == pytest.approx(
        0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    )


def test_labels_that_cannot_be_the_tasks_are_refused() -> None:
    require_labels(images(0, 2), "FedMD", "take others")
    with pytest.raises(ConfigError, match="go up to 3 and the task has 3 classes: take others"):
        require_labels(images(0, 3), "FedMD", "take others")
    with pytest.raises(ConfigError, match="FedMD learns from labels .* as if there were none"):
        require_labels(images(1, 1), "FedMD", "take others")


def test_places_are_drawn_once_each() -> None:
    some, every = (
        sample_index(images(*range(3)), 2).tolist(),
        sample_index(images(*range(3)), None).tolist(),
    )
    assert len(set(some)) == 2
    assert sorted(every) == [0, 1, 2] == sorted(sample_index(images(*range(3)), 9).tolist())


def test_distilling_is_descent_on_the_chosen_images() -> None:
    data = images(0, 1, 2, 0)
    data.pixels[1:3] = 0  # the bias alone learns from these
    model = SplitClassifier(nn.Flatten(), nn.Linear(2, 3))
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    target = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])

    def square(logits: Tensor, wanted: Tensor) -> Tensor:
        return (logits - wanted).square().sum(1).mean()

    distil(
        model, data, torch.tensor([2, 0]), [target], square, batch_size=8, recipe=sgd(0.5), steps=1
    )
    assert model.head.bias.tolist() == [0.5, 0.0, 0.5]
    assert model.head.weight.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]], (
        "targets are in the order of places"
    )
