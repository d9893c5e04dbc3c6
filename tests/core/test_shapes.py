"""What strangers answer is looked at before it is used."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

import pytest
import torch
from torch import Tensor

from barter.core.errors import PayloadError
from barter.core.shapes import require_kind, require_weights


class Offer(TypedDict):
    examples: int
    weights: NotRequired[dict[str, Tensor]]


def offer() -> Offer: ...
def pair() -> tuple[Tensor, float]: ...
def many() -> tuple[int, ...]: ...
def maybe() -> list[int] | None: ...
def nothing() -> None: ...
def word() -> Literal["a", "b"]: ...
def anything() -> Any: ...


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        (offer, {"examples": 3}),
        (offer, {"examples": 3, "weights": {"a": X}}),
        (pair, (X, 1.5)),
        (pair, (X, 1)),
        (many, ()),
        (many, (1, 2, 3)),
        (maybe, None),
        (maybe, [1]),
        (nothing, None),
        (word, "b"),
        (anything, {"x": [None]}),
    ],
)
def test_what_was_asked_for_passes(method: Any, tree: Any) -> None:
    require_kind(tree, method)


@pytest.mark.parametrize(
    ("method", "tree", "said"),
    [
        (offer, {}, "offer lacks examples"),
        (offer, {"examples": 3, "more": 1}, "offer has the unknown more"),
        (offer, {"examples": "3"}, "offer.examples is a str, asked for was int"),
        (offer, {"examples": True}, "offer.examples is a bool, asked for was int"),
        (offer, {"examples": 3, "weights": {"a": 1}}, "offer.weights.a is a int, asked for was Tensor"),
        (offer, {"examples": 3, "weights": {1: X}}, "key is a int, asked for was str"),
        (offer, {"examples": 3, "weights": {}}, "offer.weights is empty, asked for were weights"),
        (pair, [X, 1.5], "pair is a list"),
        (pair, (X,), "pair is a tuple"),
        (many, (1, "2"), r"many\[1\] is a str"),
        (maybe, 3, "maybe is a int"),
        (nothing, 0, "nothing is a int, asked for was None"),
        (word, "c", "word is a str"),
    ],
)
def test_what_was_not_asked_for_is_refused(method: Any, tree: Any, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        require_kind(tree, method)


OWN = {"w": (torch.Size([2, 3]), torch.float32), "n": (torch.Size([]), torch.int64)}


def test_weights_have_the_shapes_of_their_network() -> None:
    whole = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}
    require_weights({"weights": whole, "labels": torch.zeros(7)}, OWN, "learn")
    for change, said in (
        ({"w": torch.zeros(3, 2)}, r"learn\[0\].w is \(3, 2\) of torch.float32, the network's is \(2, 3\)"),
        ({"w": torch.zeros(2, 3).double()}, "of torch.float64"),
        ({"w": "much"}, "is str"),
        ({"zz": torch.zeros(1)}, "not the network's weights: zz too much or missing"),
    ):
        with pytest.raises(PayloadError, match=said):
            require_weights([{**whole, **change}], OWN, "learn")
    with pytest.raises(PayloadError, match="n too much or missing"):
        require_weights({"w": torch.zeros(2, 3)}, OWN, "learn")
