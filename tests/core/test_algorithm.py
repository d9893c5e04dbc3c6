"""What an algorithm declares of itself, and declarations of older versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from barter import ALGORITHMS, Algorithm, Crossing
from barter.core.algorithm import FORMER, ServerModel


def test_payloads_are_shown_in_words() -> None:
    assert str(Crossing(up="labels")) == "up: labels"
    assert str(Crossing(down="images", up="logits")) == "down: images; up: logits"
    assert str(Crossing()) == "nothing"


def test_what_model_the_server_holds_decides_the_clients_networks() -> None:
    kinds: Any = ("none", "shared", "personal", "copies", "own")
    assert [kind for kind in kinds if ServerModel(kind).exists] == ["shared", "own"]
    one = [kind for kind in kinds if ServerModel(kind).one_architecture]
    assert one == ["shared", "personal"]
    by_kind: dict[str, set[str]] = {}
    for name, algorithm in ALGORITHMS.items():
        by_kind.setdefault(algorithm().server_model.kind, set()).add(name)
    assert by_kind["personal"] == {"fedbn", "pfedla"}
    assert by_kind["copies"] == {"dffke", "feddf"}
    assert by_kind["own"] == {
        *("dense", "dsfl", "fediod", "fedkd", "fedzge", "fedzkt", "fml", "mhat"),
    }
    assert by_kind["shared"] == {
        *("dfrd", "fedaf", "fedavg", "feddm", "feddropout", "feddyn", "fedftg", "fedprox"),
        *("fedrolex", "heterofl", "moon", "perfedavg"),
    }
    named: Any = ALGORITHMS["fml"](shared="small-mlp")  # type: ignore[call-arg]
    assert named.server_model == ServerModel("own", "small-mlp")


@pytest.mark.parametrize("name", FORMER)
def test_a_former_attribute_is_refused_with_its_new_spelling(name: str) -> None:
    with pytest.raises(TypeError, match=f"Older.{name}: .*server_model"):
        type("Older", (Algorithm,), {name: True})


def test_a_field_may_have_a_former_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Newer(Algorithm):
        personal: bool = False  # whether clients differ

    assert Newer(personal=True).personal


def test_payloads_as_text_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Older.crosses\['learn'\] is a str: write Crossing\("):
        type("Older", (Algorithm,), {"crosses": {"learn": "down: nothing; up: weights"}})
