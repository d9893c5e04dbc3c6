from __future__ import annotations

from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from barter import Local
from barter.core.images import Augment, Images, Spec
from barter.core.model import SplitClassifier
from barter.ops.fit import (
    Subject,
    Trainer,
    adam,
    classification,
    epoch_length,
    fit,
    fit_by,
    fit_rows,
    index_batches,
    join_subjects,
    sgd,
)
from tests.conftest import federation, small_federation, tiny


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 5))
def test_batches_have_one_shape_and_an_epoch_sees_every_sample(
    n: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    length = epoch_length(n, size)
    stream = index_batches(n, size, torch.device("cpu"))
    for _ in range(2):
        epoch = list(islice(stream, length))
        assert {len(batch) for batch in epoch} == {max(2, min(size, n))}
        seen = torch.cat(epoch)
        assert set(seen.tolist()) == set(range(n))
        assert len(seen) - n < max(2, size)


def test_batches_are_shuffled() -> None:
    torch.manual_seed(0)
    first, second = islice(index_batches(50, 50, torch.device("cpu")), 2)
    assert first.tolist() != sorted(first.tolist())
    assert first.tolist() != second.tolist()


def test_one_adam_step_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    trainer = Trainer.of(nn.ParameterList([weight]), adam(lr=0.1, weight_decay=0.01))
    loss = trainer.step(lambda x: (weight * x).sum(), torch.tensor([3.0, 0.5]))
    assert loss.item() == pytest.approx(2.0)
    gradient = np.array([3.0, 0.5]) + 0.01 * np.array([1.0, -2.0])
    # In the first step both moments are corrected to the gradient itself.
    expected = np.array([1.0, -2.0]) - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    assert weight.detach().numpy() == pytest.approx(expected, abs=1e-6)


def test_two_adam_steps_with_little_first_momentum_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    trainer = Trainer.of(nn.ParameterList([weight]), adam(lr=0.1, beta1=0.5))
    for slope in (2.0, -1.0):
        trainer.step(lambda x: (weight * x).sum(), torch.tensor([slope]))
    # First moments 1 and 0.5 - 0.5 = 0: the second step goes nowhere, with 0.9 it would.
    assert weight.item() == pytest.approx(1.0 - 0.1, abs=1e-6)


def test_a_loss_of_ones_own_is_trained_on() -> None:
    def reversed_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, 9 - labels)

    fitted = []
    for loss in (
        nn.functional.cross_entropy,
        reversed_labels,
        nn.CrossEntropyLoss(label_smoothing=0.5),
    ):
        client = federation(Local(), clients=1, models="small-mlp").engine.clients[0]  # type: ignore[attr-defined]
        fitted.append(fit(client, epochs=3, batch_size=50, recipe=adam(1e-2), loss=loss))
    assert fitted[0].accuracy > 0.8
    assert fitted[1].accuracy < 0.2, "accuracy is of the labels, whatever the loss makes of them"
    assert fitted[2].loss > fitted[0].loss + 0.5


def test_others_are_trained_along_with_the_clients_network_and_every_step_is_given_its_own() -> (
    None
):
    client = federation(Local(), models="small-mlp").engine.clients[0]
    along, given = nn.Linear(1, 1, bias=False), []
    before = along.weight.item()

    def loss(x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert x.is_floating_point(), "images, not bytes"
        assert x.shape[1:] == client.data.spec.shape
        given.append(int(number))
        return along.weight.sum()

    numbers = ((torch.tensor(i),) for i in count())
    fit_by(client, loss, epochs=2, batch_size=500, recipe=sgd(0.5), extras=numbers, also=[along])
    steps = 2 * epoch_length(len(client.data), 500)
    assert given == list(range(steps))
    assert along.weight.item() == pytest.approx(before - 0.5 * steps)


def squared(
    model: SplitClassifier, features: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor
) -> torch.Tensor:
    return sum(weight, torch.ones(())) * (model.logits(features) - target).square().sum()


def test_subjects_of_one_course_share_a_pass_and_its_statistics() -> None:
    """By hand: 1, 3 and, doubled, 5, 7 have mean 7 and variance (36 + 16 + 9 + 49) / 4 = 27.5."""
    norm, head = nn.BatchNorm1d(1, affine=False, momentum=1.0), nn.Linear(1, 1, bias=False)
    nn.init.constant_(head.weight, 2.0)
    model = SplitClassifier(norm, head)
    one = Subject(
        [torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)], torch.clone, partial(squared, model)
    )
    rows = [torch.tensor([[5.0], [7.0]]), torch.ones(2, 1)]
    two = Subject(
        rows, partial(torch.mul, torch.tensor(2.0)), partial(squared, model), (torch.tensor(2.0),)
    )
    loss, batches = join_subjects(model.train(), [one, two], 4)
    value = loss(*next(batches))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.item() == pytest.approx((1 + 3 + 10 + 14) / 4)
    z = [(x - 7) / 27.5**0.5 for x in (1, 3, 10, 14)]
    assert norm.running_var.item() == pytest.approx(27.5 * 4 / 3), "unbiased"
    by_hand = sum((2 * x) ** 2 for x in z[:2]) + 3 * sum((2 * x - 1) ** 2 for x in z[2:])
    assert value.item() == pytest.approx(by_hand, rel=1e-4)
    for subject, mean in ((one, 2.0), (two, 12.0)):
        loss, batches = join_subjects(model, [subject], 4)
        loss(*next(batches))
        assert norm.running_mean.item() == pytest.approx(mean)


def test_a_loss_by_inputs_is_called_with_what_the_network_was_shown() -> None:
    body = nn.Linear(1, 1, bias=False)
    nn.init.constant_(body.weight, 10.0)
    model = SplitClassifier(body, nn.Linear(1, 1))

    def difference(
        x: torch.Tensor, features: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return weight * (features - x - target).sum()

    double = partial(torch.mul, torch.tensor(2.0))
    rows = [torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [5.0]])]
    plain = Subject(rows, torch.clone, lambda features, target: features.sum())
    shown = Subject(rows, double, difference, (torch.tensor(0.5),), by_inputs=True)
    loss, batches = join_subjects(model, [plain, shown], 4)
    # Features of 1 and 3 are 10 and 30; of 2 and 6, 20 and 60: (20 - 2 - 1) + (60 - 6 - 5) = 66.
    assert float(loss(*next(batches)).detach()) == pytest.approx(40 + 0.5 * 66)


def test_a_batch_holds_as_much_of_each_subject() -> None:
    model = SplitClassifier(nn.Identity(), nn.Linear(1, 1))
    subjects = [
        Subject([torch.rand(n, 1), torch.rand(n, 1)], torch.clone, partial(squared, model))
        for n in (50, 7, 3)
    ]
    _, batches = join_subjects(model, subjects, 30)
    (parts,) = next(batches)
    assert [(len(part.data), *map(len, part.targets)) for part in parts] == [
        (10, 10),
        (7, 7),
        (3, 3),
    ], "a small one is there as a whole"


def test_the_server_trains_on_rows() -> None:
    server, module = federation(Local()).server, nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    rows = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([10.0, 20.0, 30.0])

    def loss(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        assert torch.equal(10 * x.flatten(), y), "rows stay together"
        return factor * module.weight.sum()

    extras = iter([(torch.tensor(1.0),), (torch.tensor(3.0),)])
    fit_rows(
        server, "rows", module, loss, rows, epochs=2, batch_size=5, recipe=sgd(1.0), extras=extras
    )
    assert module.weight.item() == -4.0, "two epochs of one step"


def test_masked_cross_entropy_by_hand() -> None:
    class Says(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1.0, 5.0, 2.0]])

    spec = Spec(1, 1, 1, 3, (0.5,), (0.5,))
    batch = (torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.tensor([0]))
    given: Any = (Says(), spec, Augment(), *batch)
    value, right = classification(*given, torch.tensor([1.0, 0.0, 1.0]), adjust=torch.mul)
    # The logit of the absent class is zero, neither 5 nor minus infinity.
    assert value.item() == pytest.approx(np.log(np.exp(1) + np.exp(0) + np.exp(2)) - 1)
    assert right.item() == 0
    assert classification(*given)[0].item() == pytest.approx(np.log(np.exp([1, 5, 2]).sum()) - 1)


def test_an_epoch_of_so_many_steps_counts_what_it_saw() -> None:
    client = federation(Local(), models="small-mlp").engine.clients[0]
    seen = torch.zeros(10, dtype=torch.long)
    fit(client, epochs=2, batch_size=5, recipe=sgd(0.1), steps=3, seen=seen)
    assert seen.sum().item() == 2 * 3 * 5
    whole = torch.zeros(10, dtype=torch.long)
    fit(client, epochs=1, batch_size=len(client.data), recipe=sgd(0.1), seen=whole)
    assert whole.tolist() == client.data.class_counts().tolist()


def test_two_sgd_steps_with_momentum_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    trainer = Trainer.of(nn.ParameterList([weight]), sgd(lr=0.1, momentum=0.5))
    for _ in range(2):
        trainer.step(lambda: (weight**2).sum())
    # w0 = 1, g0 = 2, v0 = 2, w1 = 0.8; g1 = 1.6, v1 = 0.5 * 2 + 1.6 = 2.6, w2 = 0.54
    assert weight.item() == pytest.approx(0.54)


def test_frozen_parameters_stay() -> None:
    frozen, free = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    Trainer.of(nn.ParameterList([frozen, free]), sgd(lr=1.0)).step(lambda: (frozen * free).sum())
    assert (frozen.item(), free.item()) == (1.0, 0.0)


def test_training_stops_at_the_goal_or_at_the_cap() -> None:
    client = federation(Local()).engine.clients[2]
    short = fit(client, epochs=2, batch_size=50, recipe=adam(1e-3), goal=1.0)
    assert short.epochs == 2
    reached = fit(client, epochs=60, batch_size=50, recipe=adam(1e-3), goal=0.9)
    assert reached.epochs < 60
    assert reached.accuracy >= 0.9
    assert reached.loss < short.loss


def test_the_learning_rate_falls_as_a_cosine_and_begins_anew() -> None:
    trainer = Trainer.of(nn.Linear(1, 1), adam(0.1, cosine=True))
    rates = []
    for done in (0.0, 0.5, 1.0):
        trainer.anneal(done)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.05, 0.0])
    trainer.renew()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    steady = Trainer.of(nn.Linear(1, 1), adam(0.1))
    steady.anneal(0.7)
    assert steady.optimizer.param_groups[0]["lr"] == 0.1


def test_private_images_do_not_stand_in_for_an_empty_set() -> None:
    client = small_federation(tiny("local")).engine.clients[0]
    own = client.data
    empty = Images(own.pixels[:0], own.labels[:0], own.spec)
    with pytest.raises(ValueError, match="no images to train on"):
        fit(client, epochs=1, batch_size=10, recipe=adam(0.01), data=empty)
