"""Batches with names for their parts, on the CPU and in a graph that is captured by a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.batches import flatten, refill, shape_key
from barter.compute.graphs import WARM_UP, Captured
from barter.compute.trainer import Trainer, sgd


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Both(NamedTuple):
    pairs: tuple[Pair, ...]
    weight: Tensor | None


def both(value: float = 1.0, weight: float | None = 2.0) -> Both:
    pairs = tuple(Pair(torch.full((n, 1), value), torch.zeros(n, 1)) for n in (2, 3))
    return Both(pairs, None if weight is None else torch.tensor(weight))


def test_a_batch_is_flattened_and_refilled() -> None:
    batch = [both(), None, torch.ones(4)]
    tensors = flatten(batch)
    assert [tensor.numel() for tensor in tensors] == [2, 2, 3, 3, 1, 4]
    again = refill(batch, [tensor + 1 for tensor in tensors])
    assert isinstance(again[0], Both)
    assert again[0].pairs[1].y.tolist() == [[1.0]] * 3
    assert again[0].weight == 3
    assert again[1] is None
    assert shape_key(again) == shape_key(batch)
    assert hash(shape_key(batch))


def test_batches_of_other_structure_are_other_batches() -> None:
    x = torch.zeros(2)
    others = [[x], [x, x], [(x, x)], [Pair(x, x)], [x, None], [x.long()], [torch.zeros(3)]]
    assert len({shape_key(batch) for batch in others}) == len(others)


def distance(model: nn.Module, batch: Both) -> Tensor:
    gaps = torch.stack([(model(pair.x) - pair.y).square().sum() for pair in batch.pairs])
    return gaps.sum() if batch.weight is None else gaps.sum() * batch.weight


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    return model


def test_a_step_on_a_batch_with_names() -> None:
    model = line()
    trainer = Trainer.of(model, sgd(0.01))
    value = trainer.step(lambda batch: distance(model, batch), both())
    assert value.item() == pytest.approx(2 * 5 * 9), "five rows of 1, which become 3"
    assert model.weight.item() == pytest.approx(3 - 0.01 * 2 * 5 * 2 * 3)
    with pytest.raises(TypeError, match="holds a list.*NamedTuples"):
        trainer.step(lambda batch: distance(model, batch), [torch.ones(1)])  # type: ignore[list-item]


def test_a_graph_has_a_place_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake captures: the loss gets the structure with the graph's inputs in it."""
    graph = SimpleNamespace(
        capture_begin=lambda **_: None, capture_end=lambda: None, replay=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    generator = SimpleNamespace(initial_seed=lambda: 0, get_offset=lambda: 0)
    lane: Any = SimpleNamespace(throttle=lambda: None, generator=generator, pool=None)
    monkeypatch.setattr(lanes, "current_lane", lambda: lane)
    model = line()
    trainer = Trainer([model], sgd(0.0))
    seen: list[Both] = []

    def loss(batch: Both) -> Tensor:
        seen.append(batch)
        return distance(model, batch)

    monkeypatch.setattr("barter.compute.graphs.objection", lambda work: "")
    monkeypatch.setattr("barter.compute.graphs.identity", lambda work: "loss")
    batches = [both(value) for value in (1.0, 2.0, 3.0, 4.0)]
    for batch in batches:
        trainer.step(loss, batch)
    assert len(seen) == WARM_UP + 1, "the third is captured, the fourth replayed"
    assert all(given is batch for given, batch in zip(seen, batches[:WARM_UP], strict=False))
    (step,) = trainer.steps.values()
    assert isinstance(step, Captured)
    inputs = seen[-1]
    assert isinstance(inputs, Both)
    assert all(map(lambda one, other: one is other, flatten([inputs]), step.inputs))
    assert inputs.pairs[0].x.tolist() == [[4.0]] * 2, "the last batch was copied in"
    trainer.step(loss, both(weight=None))
    assert len(trainer.steps) == 2, "without a weight it is another graph"
