"""Runs that are not the published method say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from barter import ALGORITHMS
from barter.cli.app import main
from barter.core.variant import describe_variant, differences_from_paper
from tests.conftest import NEEDED


def test_defaults_that_are_not_the_papers_are_named_with_both_values() -> None:
    note = describe_variant(ALGORITHMS["fedfree"]())
    assert note == (
        "FedFree with barter's defaults differs from its paper in 6 fields, server_lr=0.5 (paper: 0.01), "
        "match=place (paper: depth), outputs=trained (paper: all), transfer=analytic (paper: sampled) and 2 more; "
        "preset=paper is the published method"
    )


def test_the_published_method_says_nothing_and_a_changed_field_is_named() -> None:
    for name, kind in ALGORITHMS.items():
        if "paper" in kind.presets:
            assert describe_variant(kind.preset("paper", NEEDED.get(name))) == "", name
        else:
            assert describe_variant(kind(**NEEDED.get(name, {}))) == "", name
    (one,) = differences_from_paper(ALGORITHMS["fedfree"].preset("paper", {"epochs": 3}))
    assert (one.field, one.value) == ("epochs", 3)
    assert "FedFree differs" in describe_variant(
        ALGORITHMS["fedfree"].preset("paper", {"epochs": 3})
    )


@pytest.mark.parametrize("name", ["dffke", "fedaf", "fedzge", "dfrd", "fedfree"])
def test_the_five_systems_do_not_pass_for_their_papers(name: str) -> None:
    assert "is the published method" in describe_variant(ALGORITHMS[name]())


def test_runs_and_comparisons_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compared"
    settings = ["--set", "clients=2", "--set", "models=small-mlp", "--set", "rounds=1"]
    epochs = ["--algorithms", "fedfree:epochs=1", "--seeds", "0"]
    assert main(["compare", *epochs, *settings, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "not as published, other values of epochs, server_lr, match" in " ".join(printed.split())
    assert "not as published" in (out / "table.md").read_text()
    (log,) = out.glob("*/seed-0.log")
    assert "FedFree differs from its paper in 7 fields" in log.read_text()
