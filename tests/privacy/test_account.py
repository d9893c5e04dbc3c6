"""What releases cost together, beside another accountant and numbers derived by hand."""

from __future__ import annotations

import math
import sys

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from barter.core.errors import ConfigError
from barter.privacy.account import (
    LOSS_GRID,
    GaussianRelease,
    PureRelease,
    SampledRelease,
    calibrate_noise,
    calibrate_step_noise,
    composed_epsilon,
)

REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
DELTA = 1e-5
noises = st.floats(0.3, 200.0)
counts = st.integers(1, 300)


@pytest.mark.parametrize(
    ("count", "epsilon"), [(1, 0.687), (10, 2.594), (50, 6.882), (100, 10.718), (300, 22.527)]
)
def test_the_noise_that_is_called_epsilon_1_costs_more(count: int, epsilon: float) -> None:
    """σ = √(2 ln(1.25 / δ)) Δ for ε = 1 and δ = 1 / 5000; the distance Δ is 2 C."""
    noise = 2 * math.sqrt(2 * math.log(1.25 * 5000))
    assert composed_epsilon({GaussianRelease(noise): count}, 1 / 5000) == pytest.approx(
        epsilon, abs=2e-3
    )


@pytest.mark.parametrize(
    ("delta", "count", "epsilon", "sigma"),
    [
        (2e-4, 1, 1, 3.010),
        (2e-4, 50, 1, 21.28),
        (2e-4, 50, 8, 3.711),
        (1e-5, 1, 1, 3.731),
        (1e-5, 50, 8, 4.244),
    ],
)
def test_the_least_noise(delta: float, count: int, epsilon: float, sigma: float) -> None:
    assert calibrate_noise(epsilon, delta, count) / 2 == pytest.approx(sigma, rel=3e-4)


@given(noises, counts)
def test_gaussians_cost_what_another_accountant_says(noise: float, count: int) -> None:
    expected = dp_accounting.get_epsilon_gaussian(noise / 2 / math.sqrt(count), DELTA)
    assert composed_epsilon({GaussianRelease(noise): count}, DELTA) == pytest.approx(
        expected, rel=1e-6, abs=1e-9
    )


@given(st.floats(0.05, 50.0), counts)
def test_calibration_is_the_inverse(epsilon: float, count: int) -> None:
    noise = calibrate_noise(epsilon, DELTA, count)
    assert composed_epsilon({GaussianRelease(noise): count}, DELTA) == pytest.approx(
        epsilon, rel=1e-6
    )


@given(noises, counts, st.floats(1.01, 3.0))
def test_more_noise_costs_less_and_more_releases_cost_more(
    noise: float, count: int, factor: float
) -> None:
    now = composed_epsilon({GaussianRelease(noise): count}, DELTA)
    assert (
        composed_epsilon({GaussianRelease(factor * noise): count}, DELTA)
        <= now
        <= composed_epsilon({GaussianRelease(noise): count + 1}, DELTA)
    )
    assert composed_epsilon({GaussianRelease(noise): count}, DELTA / 10) >= now
    assert composed_epsilon(
        {GaussianRelease(noise): count, GaussianRelease(2 * noise): 4}, DELTA
    ) == pytest.approx(composed_epsilon({GaussianRelease(noise): count + 1}, DELTA), rel=1e-9), (
        "four with twice the noise are one"
    )


@settings(max_examples=8)
@given(st.floats(4.0, 40.0), st.integers(1, 10), st.floats(0.05, 1.0))
def test_mixtures_cost_more_than_their_parts_and_less_than_their_sum(
    noise: float, count: int, each: float
) -> None:
    gaussian, pure = {GaussianRelease(noise): count}, {PureRelease(each): count}
    one, other, both = (
        composed_epsilon(gaussian, DELTA),
        composed_epsilon(pure, DELTA),
        composed_epsilon({**gaussian, **pure}, DELTA),
    )
    assert max(one, other) <= both + 2e-3
    assert both <= one + count * each + 1e-9


def test_a_step_on_a_sample_costs_what_another_accountant_says() -> None:
    found = composed_epsilon({SampledRelease(1.5, 0.02): 50}, DELTA)
    for step, tolerance in (
        (LOSS_GRID, 1e-6),
        (LOSS_GRID / 10, 1e-3),
    ):  # on the same grid, and on a finer one
        accountant = dp_accounting.pld.PLDAccountant(REPLACE, value_discretization_interval=step)
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5)), 50
        )
        assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=tolerance)


PRV_ERROR = 0.01  # of ε, that Opacus asks of its accountant by numerical composition


def by_opacus(kind: str, noise: float, rate: float, steps: int) -> float:
    """ε where one image is added or removed, which moves a sum by C: half as far as one that is replaced."""
    accountant = getattr(pytest.importorskip("opacus.accountants"), kind)()
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("noise", "steps"), [(8.0, 10), (20.0, 100)])
def test_steps_on_all_images_cost_what_opacus_says(noise: float, steps: int) -> None:
    found = composed_epsilon({SampledRelease(noise, 1.0): steps}, DELTA)
    assert found == pytest.approx(
        by_opacus("PRVAccountant", noise / 2, 1.0, steps), abs=PRV_ERROR + 1e-3
    )
    assert found <= by_opacus("RDPAccountant", noise / 2, 1.0, steps)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("noise", "rate", "steps"), [(2.0, 0.145, 140), (1.5, 0.02, 500)])
def test_steps_on_samples_cost_what_opacus_says(noise: float, rate: float, steps: int) -> None:
    one = pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=LOSS_GRID
    )
    added = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert added == pytest.approx(
        by_opacus("PRVAccountant", noise, rate, steps), abs=PRV_ERROR + 1e-3
    )
    found = composed_epsilon(
        {SampledRelease(noise, rate): steps}, DELTA
    )  # to replace is more than to add, less than to move twice as far
    assert added < found < by_opacus("PRVAccountant", noise / 2, rate, steps)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"), [(8.0, 0.145, 140), (1.0, 0.145, 140), (3.0, 1.0, 20)]
)
def test_noise_of_steps_is_the_least_that_keeps_within(
    epsilon: float, rate: float, steps: int
) -> None:
    noise = calibrate_step_noise(epsilon, DELTA, rate, steps)
    assert epsilon - 1e-3 < composed_epsilon({SampledRelease(noise, rate): steps}, DELTA) <= epsilon


@pytest.mark.slow
def test_more_steps_larger_samples_and_less_epsilon_need_more_noise() -> None:
    noise = calibrate_step_noise(4.0, DELTA, 0.1, 20)
    assert noise < calibrate_step_noise(4.0, DELTA, 0.1, 40)
    assert noise < calibrate_step_noise(4.0, DELTA, 0.2, 20)
    assert noise < calibrate_step_noise(2.0, DELTA, 0.1, 20)
    assert noise < calibrate_step_noise(4.0, DELTA / 100, 0.1, 20)


@pytest.mark.parametrize("classes", [2, 10])
def test_pure_is_no_less_than_randomised_response(classes: int) -> None:
    epsilon, count = 0.7, 8
    keep = 1 / (1 + (classes - 1) * math.exp(-epsilon))
    exact = pld.from_randomized_response(
        (1 - keep) * classes / (classes - 1), classes
    ).self_compose(count)
    found = composed_epsilon({PureRelease(epsilon): count}, DELTA)
    assert exact.get_epsilon_for_delta(DELTA) <= found + 1e-3
    assert found <= count * epsilon


def test_calibration_beside_others() -> None:
    others = {PureRelease(0.3): 3}
    noise = calibrate_noise(4.0, DELTA, 3, others)
    assert 3.95 < composed_epsilon({**others, GaussianRelease(noise): 3}, DELTA) <= 4.0
    with pytest.raises(
        ConfigError, match=r"privacy.epsilon=0.5: parts whose noise is given already cost 0.9"
    ):
        calibrate_noise(0.5, DELTA, 3, others)


def test_nothing_costs_nothing_and_much_is_finite() -> None:
    assert composed_epsilon({}, DELTA) == 0
    assert composed_epsilon({GaussianRelease(1e6): 1}, DELTA) == 0, "δ alone covers it"
    for noise in (2e-3, 1.99e-3, 1e-9, 1e-150):
        assert composed_epsilon({GaussianRelease(noise): 1}, DELTA) == pytest.approx(
            2 / noise**2, rel=0.01
        )


@pytest.mark.slow
def test_the_least_and_the_largest_that_can_be_asked_for_are_found() -> None:
    for epsilon, delta in ((1e-9, 1e-12), (1e-6, 1e-5), (1e9, 1e-5)):
        noise = calibrate_noise(epsilon, delta, 5)
        assert composed_epsilon({GaussianRelease(noise): 5}, delta) == pytest.approx(
            epsilon, rel=1e-5
        )
    noise = calibrate_step_noise(1e6, DELTA, 0.1, 20)
    assert composed_epsilon({SampledRelease(noise, 0.1): 20}, DELTA) == pytest.approx(1e6, rel=1e-5)


def test_steps_with_hardly_any_noise_are_counted_at_once_and_cost_no_less() -> None:
    assert (
        composed_epsilon({SampledRelease(1e-6, 0.5): 2}, DELTA)
        == composed_epsilon({GaussianRelease(1e-6): 2}, DELTA)
        < math.inf
    )
    costs = [
        composed_epsilon({SampledRelease(noise, 0.5): 2}, DELTA)
        for noise in (0.01, 0.099, 0.101, 0.2)
    ]
    assert costs == sorted(costs, reverse=True)


def test_mixtures_without_noise_are_counted_all_the_same() -> None:
    tiny = {GaussianRelease(1e-9): 1, PureRelease(0.5): 2}
    alone = composed_epsilon({GaussianRelease(1e-9): 1}, DELTA)
    assert alone < composed_epsilon(tiny, DELTA) < 1.01 * alone
    assert math.isfinite(composed_epsilon({GaussianRelease(1.0): 1, PureRelease(1e9): 1}, DELTA))


def test_without_the_accountant_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert composed_epsilon({GaussianRelease(5.5): 1}, DELTA) > 0, "Gaussians need none"
    with pytest.raises(ConfigError, match=r"pip install '\.\[privacy\]' in a checkout"):
        composed_epsilon({GaussianRelease(5.5): 1, PureRelease(0.123): 1}, DELTA)
