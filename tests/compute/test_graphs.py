"""What may be asked by a graph, and what is asked step by step."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.graphs import Captured, Forward
from barter.compute.lanes import Lane
from barter.core.evaluation import PREDICT_CHUNK, predict


def scaled(model: nn.Module, factor: float, x: Tensor) -> Tensor:
    return factor * model(x)  # type: ignore[no-any-return]


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane that keeps a network, without a device."""
    made: dict[Any, Any] = {}
    kept = nn.Linear(2, 1).eval()
    lane = SimpleNamespace(
        modules={"kept": kept}, forward=lambda key, make: made.setdefault(key, make()), made=made
    )
    monkeypatch.setattr(lanes, "current_lane", lambda: lane)
    return lane


def test_a_network_that_has_its_place_is_asked_by_a_graph(lane: Any) -> None:
    kept = lane.modules["kept"]
    for work in (kept, kept.forward, partial(scaled, kept, 2.0), lambda x: kept(x)):
        assert Forward.of(work) is next(iter(lane.made.values())), "one for the same network"
    assert len(lane.made) == 1


def test_anything_else_is_asked_step_by_step(lane: Any) -> None:
    kept, moved, factor = lane.modules["kept"], nn.Linear(2, 1).eval(), torch.ones(1)
    assert Forward.of(moved) is None, "its weights are elsewhere next time"
    assert Forward.of(partial(scaled, moved, 2.0)) is None
    assert Forward.of(lambda x: kept(x) + moved(x)) is None
    assert Forward.of(lambda x: factor * kept(x)) is None, "the tensor may be another next time"
    assert Forward.of(lambda x: x + 1) is None, "nothing to know it by"
    watch = kept.register_forward_hook(lambda *_: None)
    assert Forward.of(kept) is None, "a graph calls nobody"
    watch.remove()
    kept.train()
    assert Forward.of(kept) is None, "what fills up a batch would be learnt from"
    lane.modules["by batch"] = by_batch = nn.Sequential(
        nn.BatchNorm1d(2, track_running_stats=False)
    ).eval()
    assert Forward.of(by_batch) is None, "or looked at"
    assert not lane.made


def test_a_closure_that_is_not_filled_yet_is_no_obstacle(
    lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def early(x: Tensor) -> Tensor:
        return later(x)  # type: ignore[no-any-return]

    assert Forward.of(early) is None
    monkeypatch.setattr(lanes, "current_lane", lambda: None)
    assert Forward.of(early) is None
    later = lane.modules["kept"]


@pytest.mark.cuda
@pytest.mark.parametrize("images", [1, PREDICT_CHUNK - 1, PREDICT_CHUNK, 2 * PREDICT_CHUNK + 17])
def test_predictions_by_a_graph_are_those_without(images: int) -> None:
    device = torch.device("cuda", 0)
    lane = Lane(device, 2**30)
    x = torch.randn(images, 3, 16, 16, device=device)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5)
    )
    index = torch.arange(images, device=device).flip(0)
    with lane.open():
        kept = lanes.keep("network", network.to(device).eval())
        with torch.no_grad():
            plain = kept(x[index])
        for _ in range(4):
            said = predict(kept, lambda part: x[part], index)
            assert said.shape == plain.shape
            assert torch.allclose(said, plain, atol=1e-4)
        (forward,) = lane.forwards.values()
        (step,) = forward.steps.values()  # chunks have one size
        assert isinstance(step, Captured), "also of few images, when they have come often enough"
        with torch.no_grad():
            kept[0].weight.mul_(2)  # type: ignore[operator, union-attr]
            plain = kept(x[index])
        assert torch.allclose(predict(kept, lambda part: x[part], index), plain, atol=1e-4), (
            "weights of today"
        )
