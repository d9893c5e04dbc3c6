"""The parts of answers, from what methods say that they return."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from hypothesis import given
from hypothesis import strategies as st

from barter import ALGORITHMS, Algorithm, Client, Crossing
from barter.privacy.parts import answer_parts, nonempty_parts, put_part, take_part
from tests.conftest import tiny

values = st.dictionaries(st.sampled_from("abc"), st.integers(-(2**63), 2**63 - 1))


@given(st.one_of(values, st.lists(values)), st.sampled_from(["", "a", "b"]))
def test_what_was_taken_can_be_put_back(answer: Any, key: str) -> None:
    assert put_part(answer, key, take_part(answer, key)) == answer
    other = put_part(answer, key, [None for _ in take_part(answer, key)])
    assert all(value is None for value in take_part(other, key))


class Entry(TypedDict):
    a: int
    b: NotRequired[float]


class Odd(Algorithm):
    """Answers of all kinds."""

    crosses = {
        "many": Crossing(up="a, b"),
        "maybe": Crossing(up="a, b"),
        "whole": Crossing(up="all"),
        "none": Crossing(),
        "unknown": Crossing(up="what?"),
    }

    def many(self, client: Client) -> list[Entry]:
        return []

    def maybe(self, client: Client) -> Entry | None:
        return None

    def whole(self, client: Client) -> dict[str, float]:
        return {}

    def none(self, client: Client) -> None: ...

    def unknown(self, client: Client) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821


def test_parts_are_keys_or_the_whole() -> None:
    both = ["many.a", "many.b"], ["maybe.a", "maybe.b"]
    assert answer_parts(Odd()) == {
        "many": both[0],
        "maybe": both[1],
        "whole": ["whole"],
        "unknown": ["unknown"],
    }
    assert nonempty_parts(Odd(), "many", [{"a": 1}, {"a": 2}]) == ["many.a"]
    assert nonempty_parts(Odd(), "maybe", None) == []
    assert nonempty_parts(Odd(), "whole", {"x": 0.5}) == ["whole"]
    assert nonempty_parts(Odd(), "secret", 3) == ["secret"], "also what nobody spoke of"


def test_what_is_said_of_parts_is_said_of_parts_that_there_are() -> None:
    for name in ALGORITHMS:
        algorithm = tiny(name)
        known = {part for parts in answer_parts(algorithm).values() for part in parts}
        assert set(algorithm.tells) <= known, name
