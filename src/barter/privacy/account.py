"""Privacy accounting: the (ε, δ) cost of releases under composition.

Two data sets are neighbours if one image is replaced by any other; the number of images is public.
A release adds noise in proportion to C, the clipping norm of one image's contribution. Replacing an
image therefore changes the sum by at most 2 C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from scipy.special import log_ndtr, ndtri

from barter.core.errors import ConfigError, install_command

__all__ = [
    "GaussianRelease",
    "PureRelease",
    "Release",
    "Releases",
    "SampledRelease",
    "Unbounded",
    "calibrate_noise",
    "calibrate_step_noise",
    "composed_epsilon",
    "require_accountant",
]

LOSS_GRID = 1e-3  # grid of discretised privacy losses, which are rounded up
POINTS = 2e5  # approximate limit on the number of grid points
HUGE = 1e3  # μ above which an upper bound of ε replaces root finding
MAX_LOG_NOISE = 20.0  # largest logarithm of the noise multiplier that is tried
# Below this noise multiplier, subsampling is ignored. That is an upper bound of the cost, and ε is in
# the hundreds anyway.
SLIGHT = 0.1


@dataclass(frozen=True)
class GaussianRelease:
    """A Gaussian mechanism with standard deviation `noise` times C."""

    noise: float


@dataclass(frozen=True)
class PureRelease:
    """An ε-private mechanism with δ = 0: Laplace noise, randomised response."""

    epsilon: float


@dataclass(frozen=True)
class SampledRelease:
    """A step of DP-SGD: Poisson sampling with `rate`, noise on the sum.

    The noise has `noise` times the clipping norm C as its standard deviation.
    """

    noise: float
    rate: float


@dataclass(frozen=True)
class Unbounded:
    """A release without a guarantee: its ε is infinite."""


Release: TypeAlias = GaussianRelease | PureRelease | SampledRelease | Unbounded
Releases: TypeAlias = Mapping[Release, int]


def composed_epsilon(releases: Releases, delta: float) -> float:
    """Return the smallest known ε such that all releases together are (ε, δ)-private.

    It is 0 without releases, and infinite with an `Unbounded` one.

    Args:
        releases: The number of times each release happens.
        delta: δ, the probability that ε does not hold.

    Raises:
        ConfigError: If dp-accounting is not installed, which all but Gaussian releases need.
    """
    counts: dict[Release, int] = {}
    for release, count in releases.items():
        if isinstance(release, Unbounded) and count:
            return math.inf
        if isinstance(release, SampledRelease) and release.noise < SLIGHT:
            release = GaussianRelease(release.noise)
        counts[release] = counts.get(release, 0) + count
    return _composed_epsilon(
        frozenset((release, count) for release, count in counts.items() if count), delta
    )


@lru_cache(maxsize=4096)
def _composed_epsilon(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    """Return ε of all releases together at δ; only Gaussian ones have a closed form.

    Args:
        releases: Kinds of releases and how often each happened.
        delta: δ, the probability that ε does not hold.
    """
    squares = [
        count * (2 / r.noise) ** 2 for r, count in releases if isinstance(r, GaussianRelease)
    ]
    mu = math.sqrt(sum(squares))
    others: dict[Release, int] = {
        release: count for release, count in releases if not isinstance(release, GaussianRelease)
    }
    gaussian_epsilon = _gaussian_epsilon(mu, delta)
    if not others:
        return gaussian_epsilon
    pure_epsilon = sum(
        r.epsilon * count for r, count in others.items() if isinstance(r, PureRelease)
    )
    if mu > HUGE or pure_epsilon > HUGE**2:
        # On a grid that spans such losses, dp-accounting's numbers overflow. ε and δ add up.
        sampled = frozenset((r, n) for r, n in others.items() if isinstance(r, SampledRelease))
        return (
            _gaussian_epsilon(mu, delta / 2) + _composed_epsilon(sampled, delta / 2) + pure_epsilon
        )
    composed = _by_distribution(mu, others, delta)
    if any(isinstance(release, SampledRelease) for release in others):
        return composed
    return min(composed, gaussian_epsilon + pure_epsilon)


def _root(function: Callable[[float], float], least: float, most: float, *, xtol: float) -> float:
    """Return the root of a function between two bounds, by Brent's method.

    Raises:
        ValueError: If the function has the same sign at both bounds.
    """
    from scipy.optimize import brentq  # Loading takes most of a second, and most runs need no root.

    return float(brentq(function, least, most, xtol=xtol))


def calibrate_noise(
    epsilon: float, delta: float, count: int, others: Releases | None = None
) -> float:
    """Return the least noise multiplier with which Gaussian releases stay within ε.

    Args:
        epsilon: ε of all releases together, `others` included.
        delta: δ, the probability that ε does not hold.
        count: The number of Gaussian releases, all with the same noise.
        others: Further releases whose noise is given, and their numbers.

    Returns:
        The standard deviation of one release in units of C; with others, up to 0.2 % too large.

    Raises:
        ConfigError: If the other releases leave no budget, or if pricing them needs dp-accounting,
            which is not installed.
    """
    others = others or {}
    if not any(others.values()):
        most = 10 + math.sqrt(2 * epsilon)
        mu = _root(lambda mu: _log_delta(epsilon, mu) - math.log(delta), 1e-13, most, xtol=1e-16)
        return 2 * math.sqrt(count) / float(mu)
    fixed = composed_epsilon(others, delta)
    if fixed >= epsilon:
        raise ConfigError(
            f"privacy.epsilon={epsilon:g}: parts whose noise is given already cost {fixed:.3g}; "
            "give them more noise"
        )

    def excess(log: float) -> float:
        return composed_epsilon({**others, GaussianRelease(math.exp(log)): count}, delta) - epsilon

    # This would be enough noise without the others.
    low = high = math.log(calibrate_noise(epsilon, delta, count))
    while excess(high) > 0:
        low, high = high, high + 0.5
        if high > MAX_LOG_NOISE:
            raise ConfigError(
                f"privacy.epsilon={epsilon:g}: no noise is enough in addition to the parts whose "
                "noise is given"
            )
    if low < high:
        high = _root(excess, low, high, xtol=1e-3) + 1e-3
    return math.exp(high)


def calibrate_step_noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the smallest noise multiplier with which steps of DP-SGD stay within ε.

    Args:
        epsilon: ε of all steps together.
        delta: δ, the probability that ε does not hold.
        rate: The probability that an image takes part in a step.
        steps: The number of steps, at least 1.

    Returns:
        The standard deviation in units of C, with a relative error of about 1e-5 upwards.

    Raises:
        ConfigError: If dp-accounting is not installed, unless so little noise suffices that
            subsampling is ignored (`SLIGHT`).
    """

    if steps < 1:
        raise ValueError(f"{steps} steps: they release nothing, so any noise stays within ε")

    def excess(log: float) -> float:
        return composed_epsilon({SampledRelease(math.exp(log), rate): steps}, delta) - epsilon

    high = 0.0
    while excess(high) > 0:
        high += 1
    while excess(high - 1) <= 0:
        high -= 1
    found = _root(excess, high - 1, high, xtol=1e-5)
    # Privacy losses are rounded up on a grid, so ε is a step function with small steps.
    while excess(found) > 0:
        found += 1e-5
    return math.exp(found)


def _log_delta(epsilon: float, mu: float) -> float:
    """Return log δ of a Gaussian mechanism (Balle and Wang 2018).

    Args:
        epsilon: ε.
        mu: The distance of the two means in standard deviations, above 0.

    Returns:
        log δ; -infinity where δ underflows.
    """
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if second >= first:
        return -math.inf
    return first + math.log(-math.expm1(second - first))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε of a Gaussian mechanism whose means are μ standard deviations apart.

    It is 0 for μ = 0, or if δ alone covers the mechanism. Above `HUGE` it is an upper bound.
    """
    if mu == 0 or _log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    largest = mu * (mu / 2 - float(ndtri(delta)))  # An upper bound: here the first term equals δ.
    if mu > HUGE:
        return largest
    return _root(lambda e: _log_delta(e, mu) - math.log(delta), 0.0, largest, xtol=1e-12)


def _by_distribution(mu: float, others: Releases, delta: float) -> float:
    """Return ε by composing privacy loss distributions, rounded up.

    Google's accountant composes them.

    Args:
        mu: μ of all Gaussian releases together.
        others: The other releases and their numbers.
        delta: δ, the probability that ε does not hold.
    """
    pld = require_accountant()
    most = mu * (mu / 2 + 6) + sum(
        r.epsilon * n for r, n in others.items() if isinstance(r, PureRelease)
    )
    step = max(LOSS_GRID, most / POINTS)
    distribution = pld.identity(value_discretization_interval=step)
    if mu:
        distribution = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=step)
    for release, count in others.items():
        distribution = distribution.compose(_distribution(release, count, step))
    return float(distribution.get_epsilon_for_delta(delta))


# A site that composes the releases of all its runs finds those of earlier runs here.
@lru_cache(maxsize=64)
def _distribution(release: Release, count: int, step: float) -> Any:
    """Return the privacy loss distribution of several releases of one kind.

    Args:
        release: The release, which is not Gaussian.
        count: The number of times it happens.
        step: The grid of privacy losses.
    """
    pld = require_accountant()
    if isinstance(release, SampledRelease):
        one = pld.from_gaussian_mechanism(
            release.noise,
            value_discretization_interval=step,
            sampling_prob=release.rate,
            neighboring_relation=pld.NeighborRel.REPLACE_ONE,
        )
    else:
        assert isinstance(release, PureRelease)
        parameters = pld.common.DifferentialPrivacyParameters(release.epsilon, 0.0)
        one = pld.from_privacy_parameters(parameters, value_discretization_interval=step)
    return one.self_compose(count)


def require_accountant() -> Any:
    """Return Google's accountant, `dp_accounting.pld.privacy_loss_distribution`.

    Raises:
        ConfigError: If dp-accounting is not installed.
    """
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ModuleNotFoundError:
        raise ConfigError(
            "dp-accounting is not installed; it computes the joint cost of different mechanisms: "
            f"{install_command('privacy')}"
        ) from None
    return privacy_loss_distribution
