from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter import DFFKE, Local
from barter.algorithms.dffke import augment_and_resize
from barter.compute import lanes
from barter.compute.graphs import contents, identity, modules_of, objection
from barter.compute.trainer import Anchor, Trainer
from barter.core.images import Augment, Spec
from barter.ops.fit import Subject, adam, classification, join_subjects, sgd
from barter.ops.inversion import Terms, Viewer, decoded_inversion_loss
from tests.conftest import federation, small_federation, tiny

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.5,))


def test_the_same_recipe_twice_is_one_value() -> None:
    assert adam(1e-3, 1e-5) == adam(1e-3, 1e-5)
    assert adam(1e-3) != adam(1e-4)
    assert len({adam(1e-3), adam(1e-3), sgd(1e-3)}) == 2


def made(model: nn.Module, weight: float, other: nn.Module | None = None) -> object:
    def loss(x: Tensor) -> Tensor:
        value: Tensor = model(x).sum() * weight
        return value if other is None else value + other(x).sum()

    return loss


def test_a_loss_is_known_by_its_code_and_by_what_it_holds() -> None:
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    assert identity(made(one, 2.0)) == identity(made(one, 2.0))
    assert hash(identity(made(one, 2.0))) == hash(identity(made(one, 2.0)))
    for other in (made(two, 2.0), made(one, 3.0), made(one, 2.0, two)):
        assert identity(other) != identity(made(one, 2.0))
    assert identity(lambda x: one(x)) != identity(lambda x: one(x) + 1)


def test_partials_and_methods_are_known_by_value() -> None:
    model: Any = nn.Linear(2, 1)

    def taught(algorithm: DFFKE, augment: Augment) -> Subject:
        return Subject(
            [torch.rand(3, 2)],
            partial(augment_and_resize, SPEC, augment),
            partial(algorithm.exchange_loss, model),
        )

    for make in (
        lambda: partial(classification, model, Spec(1, 8, 8, 10, (0.5,), (0.5,)), Augment(2, True)),
        lambda: join_subjects(
            model, [taught(DFFKE(share=0.5), Augment(2, True)), taught(DFFKE(), Augment())], 4
        )[0],
        lambda: partial(
            decoded_inversion_loss,
            model,
            SPEC,
            (Viewer(model, model),),
            (model,),
            Terms(differ="kl"),
        ),
    ):
        assert identity(make()) == identity(make())
        assert not objection(make())
    one, *others = (
        identity(join_subjects(model, subjects, 4)[0])
        for subjects in (
            [taught(DFFKE(), Augment())],
            [taught(DFFKE(tau=0.5), Augment())],
            [taught(DFFKE(), Augment(1))],
            2 * [taught(DFFKE(), Augment())],
        )
    )
    assert one not in others


def test_defaults_and_functions_that_a_loss_holds_count_too() -> None:
    def with_default(weight: float) -> object:
        def loss(x: Tensor, *, scale: float = weight) -> Tensor:
            return x.sum() * scale

        return loss

    assert identity(with_default(1.0)) == identity(with_default(1.0))
    assert identity(with_default(1.0)) != identity(with_default(5.0))

    def through(table: list[int] | float) -> object:
        def helper(x: Tensor) -> Tensor:
            return x * (table if isinstance(table, float) else table[0])

        return partial(lambda f, x: f(x).sum(), helper)

    assert identity(through(2.0)) == identity(through(2.0))
    assert identity(through(2.0)) != identity(through(3.0))
    assert "holds a list" in objection(through([1]))
    assert not objection(through(2.0))


def test_a_tuple_of_modules_may_be_held_and_a_list_may_not() -> None:
    one, two, three = (nn.Linear(2, 1) for _ in range(3))

    def over(modules: tuple[object, ...] | list[object]) -> partial[Tensor]:
        return partial(lambda modules, x: sum(module(x).sum() for module in modules), modules)

    assert objection(over((one, two))) == ""
    assert objection(over(((one, two), (three, SPEC, 1.0, None)))) == ""
    assert objection(over(())) == ""
    assert "holds a list" in objection(over([one, two]))
    assert "holds a list" in objection(over((one, [two])))
    assert "holds a dict" in objection(over((one, (two, {}))))
    # Their modes are part of what is captured, and their places in memory are watched.
    assert modules_of(contents(over(((one, two), (three,))))) == [one, two, three]
    assert identity(over((one, two))) == identity(over((one, two)))
    assert identity(over((one, two))) != identity(over((two, one)))


def test_what_could_change_behind_a_graph_is_an_objection() -> None:
    client = federation(Local()).engine.clients[0]
    table = {"weight": torch.ones(1)}

    def holds_a_party(x: Tensor) -> Tensor:
        return client.model(x).sum()

    def holds_a_table(x: Tensor) -> Tensor:
        return (x * table["weight"]).sum()

    assert "holds a Client" in objection(holds_a_party)
    assert "holds a dict" in objection(holds_a_table)
    assert not objection(made(client.model, 1.0))


def test_without_a_lane_nothing_is_kept() -> None:
    assert lanes.current_lane() is None
    module = nn.Linear(2, 1)
    assert lanes.keep("name", module) is module
    assert lanes.lane_module("name", lambda: module) is module
    lanes.throttle()
    lanes.wait_for_device()


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("peers", [1, 2])
def test_a_client_learns_from_so_many_peers_in_an_iteration(
    peers: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    original = DFFKE.exchange_loss

    def counted(self: DFFKE, model: nn.Module, *batch: object) -> Tensor:
        steps.append(id(model))
        return original(self, model, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(DFFKE, "exchange_loss", counted)
    options = {
        "mixed": mixed,
        "peers": peers,
        "exchange_epochs": 3,
        "exchange_steps": 0,
        "max_epochs": 1,
    }
    options["batch_size"] = 250  # so that an epoch is one step
    list(small_federation(tiny("dffke", **options), clients=4).rounds(2))
    fresh, both = (
        (2, 3 * 2) if mixed else (peers, 2 * peers)
    )  # mixed, steps are on as much of each kind of image
    assert len(steps) == 4 * 3 * (fresh + both), (
        "private and fresh in round 1; remembered as well in round 2"
    )


class Point(nn.Module):
    """Two numbers, and one that no loss knows of."""

    def __init__(self, x: float, y: float) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.tensor([x, y])), nn.Parameter(torch.ones(1))

    def bowl(self, scale: Tensor) -> Tensor:
        """Least at (1, 0)."""
        value: Tensor = scale * (self.w - torch.tensor([1.0, 0.0])).square().sum() / 2
        return value


@pytest.mark.parametrize("clip", [None, 1.0, 100.0])
def test_an_anchor_adds_its_pull_to_the_gradient(clip: float | None) -> None:
    point = Point(3.0, 0.0)
    anchor = Anchor([torch.tensor([2.0, 4.0]), torch.zeros(1)], 0.5)
    Trainer.of(point, sgd(0.1, clip=clip), anchor).step(point.bowl, torch.tensor(1.0))
    # The bowl pulls by (2, 0), the anchor by half of (1, -4); clipped, by their direction.
    slope = torch.tensor([2.5, -2.0])
    slope = slope if clip is None else slope / max(1.0, slope.norm() / clip)
    assert torch.allclose(point.w.detach(), torch.tensor([3.0, 0.0]) - 0.1 * slope, atol=1e-5)
    assert float(point.unused.detach()) == 1, "what has no gradient is left alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_keeps_the_direction_and_bounds_the_length(
    dtype: torch.dtype, momentum: float
) -> None:
    weight = nn.Linear(2, 1, bias=False).to(dtype)
    nn.init.zeros_(weight.weight)
    trainer = Trainer([weight], sgd(1.0, momentum, clip=0.5))
    slopes = torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([[0.0, -0.3]], dtype=dtype)

    def slide(slope: Tensor) -> Tensor:
        value: Tensor = (weight.weight * slope).sum()
        return value

    for slope in slopes:
        trainer.step(slide, slope)
    # The first has length 5 and becomes (0.3, 0.4), the second is short enough; momentum goes on with the first.
    wanted = torch.tensor([[-0.3 * (1 + momentum), -0.4 * (1 + momentum) + 0.3]], dtype=dtype)
    assert torch.allclose(weight.weight.detach(), wanted, atol=1e-6)


def test_adam_clips_too() -> None:
    weight = nn.Linear(1, 1, bias=False)
    moments = []
    for clip in (None, 0.5):
        trainer = Trainer([weight], adam(0.1, clip=clip))
        trainer.step(lambda x: (weight.weight * x).sum(), torch.tensor([[4.0]]))
        moments.append(float(trainer.moments()[0]["exp_avg"]))
    assert moments == pytest.approx([0.4, 0.05]), (
        "a tenth of the slope, and of what clipping leaves of it"
    )


def test_an_anchor_holds_where_it_was_dropped() -> None:
    point = Point(3.0, 0.0)
    trainer = Trainer.of(point, sgd(0.2), Anchor(point.parameters(), 3.0))
    for _ in range(200):
        trainer.step(point.bowl, torch.tensor(1.0))
    assert torch.allclose(point.w.detach(), torch.tensor([(1 + 3 * 3) / 4, 0.0])), (
        "between the bowl's least and it"
    )


def test_an_optimizer_that_is_remembered_goes_on() -> None:
    def loss(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x).square().mean()

    batches = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(0))
    ends = []
    for remembered in (None, True, False):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        trainer = Trainer([layer], adam(0.1))
        for i, x in enumerate(batches):
            if i == 2 and remembered is not None:
                moments = trainer.moments()
                trainer = Trainer([layer], adam(0.1))
                trainer.recall(moments if remembered else [])
            trainer.step(partial(loss, layer), x)
        ends.append(layer.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
