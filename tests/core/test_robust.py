"""Rules of robust aggregation, against results computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from barter.core import robust
from barter.core.robust import AggregationRule, Defence

RULES: list[AggregationRule] = [
    "median",
    "trimmed-mean",
    "clip",
    "krum",
    "multi-krum",
    "geometric-median",
]


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)[:, None]


def combined(
    rule: AggregationRule, x: torch.Tensor, share: float = 0.3, **options: object
) -> list[float]:
    (result,) = Defence(rule, share).combine([x], "states", **options)  # type: ignore[arg-type]
    return result.tolist()


def test_median_is_the_middle_value_or_the_mean_of_two() -> None:
    assert combined("median", rows(5, 1, 900)) == [5]
    assert combined("median", rows(5, 1, 900, 7)) == [6]


def test_median_counts_weights_and_ignores_entries_without() -> None:
    x = rows(1, 2, 3)
    assert robust.median(x, rows(1, 1, 3)).tolist() == [3]
    assert robust.median(x, rows(1, 1, 2)).tolist() == [2.5]
    assert robust.median(x, rows(0, 1, 0)).tolist() == [2]
    assert robust.median(x, rows(0, 0, 0)).tolist() == [0]


def test_trimmed_mean_leaves_out_a_share_at_each_end() -> None:
    x = rows(*range(9), 1e6)  # of ten values, three at each end: the mean of 3, 4, 5, 6
    assert combined("trimmed-mean", x) == pytest.approx([4.5])
    # A share of 0.25 of two values halves the weight of both; of three, the outer ones keep 1/12.
    assert combined("trimmed-mean", rows(0, 10), 0.25) == pytest.approx([5])
    assert combined("trimmed-mean", rows(0, 6, 12), 0.25) == pytest.approx([6])
    expected = (1 / 12 * 0 + 1 / 3 * 3 + 1 / 12 * 12) / 0.5
    assert combined("trimmed-mean", rows(0, 3, 12), 0.25) == pytest.approx([expected])


def test_clipping_shortens_differences_to_the_median_norm() -> None:
    # From 0 the norms are 1, 2 and 9, so 9 becomes 2.
    start = [torch.zeros(1, dtype=torch.double)]
    assert combined("clip", rows(1, -2, 9), since=start) == pytest.approx([(1 - 2 + 2) / 3])
    # Without a start, differences are from the median 1: 0, 3 and 8; the median norm is 3.
    assert combined("clip", rows(1, -2, 9)) == pytest.approx([(1 - 2 + 4) / 3])


def test_krum_takes_the_client_nearest_to_its_neighbours() -> None:
    # n = 5, f = 1: the two nearest neighbours count. Scores: 0: 1 + 9, 1: 1 + 4, 3: 4 + 4, 5: 4 + 16
    x = rows(0, 1, 3, 5, 100)
    squared = robust.pairwise([x], [torch.ones_like(x)])
    assert robust.krum_scores(squared, 1).tolist() == [10, 5, 8, 20, 95**2 + 97**2]
    assert combined("krum", x, 0.2) == [1]
    assert combined("multi-krum", x, 0.2) == pytest.approx([(0 + 1 + 3 + 5) / 4])


def test_geometric_median_minimises_the_sum_of_distances() -> None:
    # In one dimension it is the median; of a triangle with an angle of 120 degrees, that corner.
    assert combined("geometric-median", rows(0, 1, 100)) == pytest.approx([1], abs=1e-3)
    corner = torch.tensor(
        [[0.0, 0.0], [1.0, 0.0], [math.cos(2.2), math.sin(2.2)]], dtype=torch.double
    )
    assert combined("geometric-median", corner) == pytest.approx([0, 0], abs=0.02)


def test_similarities_are_medians_of_cosines_over_common_entries() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [-5.0, 0.0]], dtype=torch.double)
    ones = torch.ones_like(x)
    half = 0.5**0.5
    start = [torch.zeros(2, dtype=torch.double)]
    found = robust.similarities([x], [ones], start)
    assert found.tolist() == pytest.approx([half, half, half, -1])
    without = ones.clone()
    without[2, 1] = 0  # Client 2 has the first entry only, where it points as the others do.
    assert robust.similarities([x], [without], start)[2] == pytest.approx(1)


def test_cosine_leaves_out_opposite_and_long_updates() -> None:
    start = [torch.zeros(2, dtype=torch.double)]
    honest = [[1.0, 0.2], [1.0, -0.2], [1.0, 0.0], [0.8, 0.1], [0.9, 0.0], [1.1, 0.1], [1.0, 0.1]]
    mean = torch.tensor(honest).double().mean(0).tolist()
    for bad in ([[-1.0, 0.0]] * 3, [[10.0, 0.0]] * 3, [[-9.0, 1.0], [5.0, 5.0], [-0.5, 0.0]]):
        x = torch.tensor([*honest, *bad], dtype=torch.double)
        assert combined("cosine", x, since=start) == pytest.approx(mean)
    assert combined("cosine", torch.tensor(honest).double(), since=start) == pytest.approx(mean)


def test_class_agreement_compares_classes_within_a_feature_space() -> None:
    units = torch.eye(64, dtype=torch.double)
    right = units[:3]
    elsewhere = units[10:13]  # another architecture: its features are unrelated
    vectors = torch.stack([right, 5 * right + 2, right, right.flip(0), elsewhere])
    held = torch.ones(5, 3, dtype=torch.bool)
    # Less their mean, unit vectors have cosines 1 with themselves and -1/2 with one another, so the
    # reversed classes have a mean of (-1/2 + 1 - 1/2) / 3 = 0 where the best is 1.
    found = robust.class_agreement(vectors, held).tolist()
    assert found[:4] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])
    assert math.isnan(found[4])
    held[3, 1] = False  # Of two common classes, nothing follows.
    found = robust.class_agreement(vectors, held).tolist()
    assert found[:3] == pytest.approx([1, 1, 1])
    assert math.isnan(found[3])


def test_clients_of_a_rare_architecture_are_judged_by_each_other() -> None:
    units = torch.eye(64, dtype=torch.double)
    vectors = torch.stack([units[:4]] * 5 + [units[:4].flip(0)] + [units[10:14]] * 2)
    kept = Defence("cosine", 0.3).keep([vectors]).tolist()
    assert kept == [True] * 5 + [False] + [True] * 2


def test_predictions_are_compared_without_what_a_client_predicts_for_all_images() -> None:
    truth = 5 * torch.eye(5).repeat(4, 1)
    priors = 40 * torch.eye(5)  # Each client prefers another class.
    x = torch.stack([truth + priors[k] for k in range(5)])
    x[3] = truth.flip(1) + priors[3]
    defence = Defence("cosine", 0.3)
    assert defence.agreeing_predictions([x]).tolist() == [True, True, True, False, True]
    x[3] = truth + 1000 * priors[3]  # A prior can be extreme, too.
    assert defence.agreeing_predictions([x]).tolist() == [True, True, True, False, True]
    x[3] = truth + priors[3]
    assert all(defence.agreeing_predictions([x]).tolist())


@pytest.mark.parametrize(("angle", "kept"), [(40, True), (55, False)])
def test_predictions_must_be_more_alike_the_more_alike_the_others_are(
    angle: float, kept: bool
) -> None:
    # U = 1, so the least similarity is 2/3, the cosine of 48 degrees.
    one = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    two = torch.tensor([[1.0, 1.0, -2.0], [-1.0, -1.0, 2.0], [0.0, 0.0, 0.0]]) / 3**0.5
    turned = math.cos(math.radians(angle)) * one + math.sin(math.radians(angle)) * two
    x = torch.stack([one, one, one, one, turned])
    assert Defence("cosine", 0.3).agreeing_predictions([x]).tolist() == [True] * 4 + [kept]


def test_cosine_leaves_out_no_more_than_the_assumed_share() -> None:
    start = [torch.zeros(1, dtype=torch.double)]
    x = rows(1, 1, 1, 1, 1, 1, -1, -1, -1, -1)
    assert combined("cosine", x, 0.2, since=start) == pytest.approx([(6 - 2) / 8])
    assert combined("cosine", rows(1, -1), since=start) == [0]  # Nobody knows who of two is honest.


@pytest.mark.parametrize("rule", [*RULES, "cosine"])
def test_a_minority_cannot_move_the_result_far(rule: AggregationRule) -> None:
    torch.manual_seed(0)
    honest = torch.randn(7, 20).double()
    since = [torch.zeros(20).double() - 3]  # All honest clients have moved by about 3.
    for bad in (1e6, -1e6):
        x = torch.cat([honest, torch.full((3, 20), bad).double()])
        (result,) = Defence(rule, 0.3).combine([x], "states", since=since)
        assert result.abs().max() < 3.5, rule
    (without,) = Defence("none").combine([x], "states")
    assert without.abs().min() > 1e5


@pytest.mark.parametrize("rule", [*RULES, "cosine"])
def test_entries_that_some_clients_lack_are_aggregated_over_the_others(
    rule: AggregationRule,
) -> None:
    x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).double()
    held = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).double()
    start = [torch.zeros(2).double()]
    (result,) = Defence(rule).combine([x], "states", [held], since=start)
    assert result.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("rule", [*RULES, "cosine"])
def test_sets_far_from_the_others_are_left_out(rule: AggregationRule) -> None:
    torch.manual_seed(0)
    centre = torch.randn(1, 4, 8).double() * 3
    summaries = centre + 0.1 * torch.randn(10, 4, 8).double()
    summaries[3] = -10 * summaries[3]
    summaries[7] = summaries[7].flip(0)  # the classes in reverse order
    mask = Defence(rule, 0.2).keep([summaries]).tolist()
    assert [k for k, kept in enumerate(mask) if not kept] == [3, 7]


def test_auto_is_the_recommended_rule_of_each_kind() -> None:
    for kind, rule in robust.RECOMMENDED.items():
        assert Defence("auto").rule_for(kind) == rule
        assert Defence("krum").rule_for(kind) == "krum"
    assert not Defence().defends("states")


def test_a_defence_holds_inside_of_using_only() -> None:
    with robust.using(Defence("median")):
        assert robust.aggregate(torch.tensor([[1.0], [2.0], [60.0]]), "logits").tolist() == [2]
        with pytest.raises(ZeroDivisionError), robust.using(Defence("krum")):
            raise ZeroDivisionError
        assert robust.active().rule == "median"
    assert robust.active() == Defence()


def test_gradients_flow_through_every_rule() -> None:
    for rule in (*RULES, "cosine"):
        x = torch.randn(5, 3, 4, requires_grad=True)
        with robust.using(Defence(rule)):
            robust.aggregate(x, "logits").sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        assert bool(x.grad.any())
