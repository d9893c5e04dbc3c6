from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import pytest

from barter.core.errors import ConfigError
from barter.core.params import (
    Count,
    Fraction,
    Whole,
    build_dataclass,
    check_fields,
    describe_fields,
    did_you_mean,
)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """For the tests."""

    share: Fraction = 0.5  # ρ: how much
    rounds: Count = 3  # T: how often
    # at most, if there is one,
    # so many
    limit: Whole | None = None
    # -- How it runs

    mode: Literal["fast", "slow"] = "fast"  # which way
    flag: bool = False  # whether
    label: str = ""  # what it is called

    def __post_init__(self) -> None:
        check_fields(self, "knobs.")


def test_good_values_pass_and_whole_numbers_become_floats() -> None:
    knobs = build_dataclass(Knobs, {"share": 1, "limit": 0, "mode": "slow"}, "knobs.")
    assert (knobs.share, type(knobs.share), knobs.limit, knobs.mode) == (1.0, float, 0, "slow")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0}, r"knobs\.share=0: must be float > 0 and <= 1 \(ρ: how much\)"),
        ({"share": 1.1}, "> 0 and <= 1"),
        ({"share": float("nan")}, "finite"),
        ({"share": "0.5"}, "must be float"),
        ({"share": True}, "must be float"),
        ({"rounds": 0}, "int >= 1"),
        ({"rounds": 2.5}, "must be int"),
        ({"rounds": True}, "must be int"),
        ({"limit": -1}, "int >= 0 or none"),
        ({"mode": "fsat"}, "one of fast, slow"),
        ({"mode": 1}, "one of fast, slow"),
        ({"flag": 1}, "must be bool"),
        ({"label": 3}, "must be str"),
        ({"rouns": 3}, r"unknown key 'knobs\.rouns': did you mean 'rounds'\?"),
        ({"zzz": 3}, "there are: flag, label, limit"),
    ],
)
def test_bad_values_say_what_is_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_dataclass(Knobs, values, "knobs.")


def test_fields_describe_themselves() -> None:
    share, rounds, limit, mode, *_ = describe_fields(Knobs)
    assert (share.name, share.kind, share.default, share.meaning) == (
        "share",
        "float > 0 and <= 1",
        0.5,
        "ρ: how much",
    )
    assert rounds.meaning == "T: how often"
    assert limit.meaning == "at most, if there is one, so many"
    assert mode.meaning == "which way"


def test_headings_group_fields_and_are_no_part_of_their_meanings() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Derived(Knobs):
        # -- Its own
        # how far
        # it goes
        reach: Count = 1
        share: Fraction = 0.1  # another default

    fields = {field.name: field for field in describe_fields(Derived)}
    groups = {
        heading: list(group) for heading, group in groupby(fields, lambda f: fields[f].heading)
    }
    assert groups == {
        "": ["share", "rounds", "limit"],
        "How it runs": ["mode", "flag", "label"],
        "Its own": ["reach"],
    }
    assert fields["reach"].meaning == "how far it goes"
    assert fields["share"].meaning == "another default"


def test_the_neighbour_may_live_in_a_table() -> None:
    assert did_you_mean("share", ["algorithm.share", "rounds"]) == "did you mean 'algorithm.share'?"
    assert (
        did_you_mean("algorithm.shar", ["algorithm.share", "rounds"])
        == "did you mean 'algorithm.share'?"
    )
