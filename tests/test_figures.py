"""Figures of pages are drawn from stored results, and agree with them."""

from __future__ import annotations

from pathlib import Path

from barter.recipes.stored import StoredRun
from benchmarks.figures import FIGURES, Panel, draw
from benchmarks.tables import stored_rows

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def test_committed_figures_agree_with_the_stored_results() -> None:
    rows = stored_rows()
    for name, panels in FIGURES.items():
        wanted = draw(panels, rows)
        assert (IMAGES / name).read_text() == wanted, f"{name}: run python -m benchmarks.figures"


def test_a_curve_is_the_mean_over_seeds_from_round_0() -> None:
    runs = [
        StoredRun("a", 0, {"round": [1, 2], "global": [0.5, 0.6], "trained": [0.2, None]}),
        StoredRun(
            "a", 1, {"round": [1, 2, 3], "global": [0.7, 0.8, 0.9], "trained": [0.4, None, None]}
        ),
    ]
    drawn = draw([Panel("A", {"DFFKE": "a", "other": "a"}, "no recipe")], {"a": runs})
    dffke, other = [line for line in drawn.splitlines() if line.startswith("<polyline")]
    # 30, 60 and 70 % of an axis that ends at 80, which is 150 pixels high and begins at 34.
    assert 'points="34.0,127.8 129.0,71.5 224.0,52.8"' in dffke
    assert 'points="129.0,71.5 224.0,52.8"' in other, "without what was before the exchange"
    assert 'class="paper" x1' not in drawn.split("round</text>")[0], "there is no paper's figure"
