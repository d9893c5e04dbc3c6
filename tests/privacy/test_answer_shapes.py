"""Shapes that private images can change: noise does not hide them, and no finite ε covers them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import pytest
from torch import Tensor

from barter import Crossing
from barter.algorithms import ALGORITHMS
from barter.algorithms.fedfree import Layer
from barter.core.algorithm import Algorithm
from barter.core.contracts import Floats, Places, When
from barter.core.nodes import Client
from barter.data.partition import Classes
from barter.privacy import Privacy
from barter.privacy.answer_shapes import parts_shaped_by_images, unsent_parts
from barter.privacy.parts import answer_parts
from barter.privacy.settings import Plan
from tests.conftest import small_federation, tiny

BY_CLASS = {"learn", "learn.classes", "learn.vectors"}
LOT = {"condense", "condense.classes", "condense.sizes", "condense.images"}
SHAPED = {
    **dict.fromkeys(["fedproto", "fedtgp", "fedgh", "feddistill", "fedktl"], BY_CLASS),
    "feddm": LOT,
    "fedaf": {*LOT, "condense.soft", "summarise", "summarise.classes", "summarise.logits"},
    "fedfree": {
        "learn",
        *(f"learn.{key}" for key in Layer.__annotations__),
    },  # the layers that training changed most
    "fedkd": {"learn"},  # as many factors as the change needs
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_which_shapes_tell(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    shaped = parts_shaped_by_images(algorithm, answer_parts(algorithm))
    assert shaped == SHAPED.get(name, set())
    parts = ({part for part in shaped if "." in part} or shaped) - unsent_parts(
        algorithm, answer_parts(algorithm)
    )
    plan = Plan(Privacy(epsilon=1, parts=dict.fromkeys(parts, "withhold")), algorithm)
    assert parts <= set(plan.open()), "nothing that is done to numbers closes them"
    assert not plan.promised or not shaped


@pytest.mark.parametrize(
    "name", ["fedproto", "fedtgp", "fedgh", "feddistill", "fedktl", "fedaf", "feddm"]
)
def test_which_classes_a_client_has_is_stated(name: str) -> None:
    experiment = small_federation(tiny(name))
    experiment.step()
    found = {
        row.part: row.epsilon for row in experiment.privacy().rows if row.part.endswith(".classes")
    }
    assert found
    assert all(map(math.isinf, found.values()))


def test_noise_on_class_means_promises_nothing_alone() -> None:
    """Each client has one class: that name can be withheld, and how many rows there are stays."""
    privacy = Privacy(
        epsilon=9, parts={"learn.vectors": "gaussian clip=1", "learn.classes": "withhold"}
    )
    one = {"models": "small-mlp", "partition": Classes(per_client=1), "rounds": 1}
    experiment = small_federation(tiny("fedproto"), **one, privacy=privacy)
    experiment.step()
    statement = experiment.privacy()
    given = {row.part: row.given for row in statement.rows if row.part.startswith("learn")}
    assert given == dict.fromkeys(["learn.classes", "learn.vectors"], "the shape of the answer")
    assert (
        statement.why[-1]
        == "learn.vectors: the shape of the answer depends on private images and is not protected"
    )
    assert math.isinf(statement.epsilon)


class Told(TypedDict):
    """Of each kind one."""

    fixed: Annotated[Tensor, Floats("classes", "width", 3)]
    sent: Annotated[Tensor, Floats("places")]
    field: Annotated[Tensor, Floats("depth")]
    free: Annotated[Tensor, Floats("n")]
    open: Annotated[Tensor, Floats("classes", ...)]
    bare: Tensor
    maybe: NotRequired[Annotated[Tensor, Floats("classes")]]
    off: NotRequired[Annotated[Tensor, Floats("classes"), When("wide")]]
    number: float
    weights: dict[str, Tensor]
    words: dict[str, float]


class Row(TypedDict):
    """One of several."""

    value: Annotated[Tensor, Floats("classes")]


@dataclass(frozen=True, kw_only=True)
class Shapes(Algorithm):
    """Answers of all kinds."""

    crosses = {
        "tell": Crossing(up="this and that"),
        "several": Crossing(up="rows"),
        "either": Crossing(up="a row, or anything"),
    }
    sizes = ("depth",)
    depth: int = 3
    wide: bool = False

    def tell(self, client: Client, places: Annotated[Tensor, Places("places")]) -> Told:
        raise NotImplementedError

    def several(self, client: Client) -> list[Row]:
        raise NotImplementedError

    def either(self, client: Client) -> Row | Tensor:
        raise NotImplementedError


def test_what_a_contract_fixes() -> None:
    algorithm: Any = Shapes()
    free = {"tell.free", "tell.open", "tell.bare", "tell.maybe", "tell.words"}
    assert parts_shaped_by_images(algorithm, answer_parts(algorithm)) == {
        *free,
        "tell",
        "several",
        "several.value",
        "either",
    }
    assert unsent_parts(algorithm, ["tell"]) == {"tell.off"}
    assert not unsent_parts(Shapes(wide=True), ["tell"])


def test_a_site_that_wants_a_promise_stays_away(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from barter.setup.config import Config, to_toml
    from tests.flower.grid import site

    privacy = Privacy(epsilon=4, parts={"learn": "gaussian clip=1"})
    run = to_toml(
        Config(
            algorithm=tiny("fedproto"), models="small-mlp", device="cpu", clients=1, privacy=privacy
        )
    )
    said = site(tmp_path, name="a", share=0, device="cpu", epsilon=8).answer(
        {"ask": "hello", "config": run}
    )
    assert (
        "the run gives none: learn.classes, learn.vectors would be released without protection"
        in said["error"]
    )
