"""What releases cost together: (ε, δ) differential privacy.

Two data sets are neighbours if one image of one is replaced by any other: how many there are is public. A release adds
noise in proportion to C, the largest norm of what one image contributes; to replace it moves the sum by 2 C at most.
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
    "Gaussian",
    "Pure",
    "Release",
    "Releases",
    "Sampled",
    "calibrated",
    "calibrated_steps",
    "require_accountant",
    "spent",
]

STEP = 1e-3  # of discretised privacy losses; they are rounded up
POINTS = 2e5  # at most about so many of them
HUGE = 1e3  # μ beyond which nobody asks for the last digits of ε
LARGEST = 20.0  # logarithm of noise that is looked at
SLIGHT = 0.1  # noise below which steps on samples count as steps on all images, which is no less: ε is in the hundreds


@dataclass(frozen=True)
class Gaussian:
    """Noise of standard deviation `noise` times C."""

    noise: float


@dataclass(frozen=True)
class Pure:
    """Whatever keeps ε with δ = 0: Laplace noise, randomised response."""

    epsilon: float


@dataclass(frozen=True)
class Sampled:
    """A step of DP-SGD: each image takes part with probability `rate`, noise of `noise` times C on the sum."""

    noise: float
    rate: float


Release: TypeAlias = Gaussian | Pure | Sampled
Releases: TypeAlias = Mapping[Release, int]


def spent(releases: Releases, delta: float) -> float:
    """The smallest known ε such that all these releases together are (ε, δ)-private."""
    counts: dict[Release, int] = {}
    for release, count in releases.items():
        if isinstance(release, Sampled) and release.noise < SLIGHT:
            release = Gaussian(release.noise)
        counts[release] = counts.get(release, 0) + count
    return _spent(frozenset((release, count) for release, count in counts.items() if count), delta)


@lru_cache(maxsize=4096)
def _spent(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    mu = math.sqrt(
        sum(count * (2 / r.noise) ** 2 for r, count in releases if isinstance(r, Gaussian))
    )
    others: dict[Release, int] = {
        release: count for release, count in releases if not isinstance(release, Gaussian)
    }
    alone = _gaussian_epsilon(mu, delta)
    if not others:
        return alone
    found = _by_distribution(mu, others, delta)
    if any(isinstance(release, Sampled) for release in others):
        return found
    return min(
        found, alone + sum(r.epsilon * count for r, count in others.items() if isinstance(r, Pure))
    )


def _root(function: Callable[[float], float], least: float, most: float, *, xtol: float) -> float:
    """Return where a function changes its sign, by Brent's method."""
    from scipy.optimize import brentq  # takes most of a second to load, and most runs need no root

    return float(brentq(function, least, most, xtol=xtol))


def calibrated(epsilon: float, delta: float, count: int, others: Releases | None = None) -> float:
    """The smallest noise with which so many Gaussian releases, and others beside them, stay within ε."""
    others = others or {}
    if not any(others.values()):
        most = 10 + math.sqrt(2 * epsilon)
        mu = _root(lambda mu: _log_delta(epsilon, mu) - math.log(delta), 1e-13, most, xtol=1e-16)
        return 2 * math.sqrt(count) / float(mu)
    already = spent(others, delta)
    if already >= epsilon:
        raise ConfigError(
            f"privacy.epsilon={epsilon:g}: parts whose noise is given cost {already:.3g} already; give them more of it"
        )

    def excess(log: float) -> float:
        return spent({**others, Gaussian(math.exp(log)): count}, delta) - epsilon

    # which would be enough without the others
    low = high = math.log(calibrated(epsilon, delta, count))
    while excess(high) > 0:
        low, high = high, high + 0.5
        if high > LARGEST:
            raise ConfigError(
                f"privacy.epsilon={epsilon:g}: no noise is enough beside the parts whose noise is given"
            )
    if low < high:
        high = _root(excess, low, high, xtol=1e-3) + 1e-3
    return math.exp(high)


def calibrated_steps(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The smallest noise, but for some 1e-5 of it, with which so many steps of DP-SGD stay within ε."""

    def excess(log: float) -> float:
        return spent({Sampled(math.exp(log), rate): steps}, delta) - epsilon

    high = 0.0
    while excess(high) > 0:
        high += 1
    while excess(high - 1) <= 0:
        high -= 1
    found = _root(excess, high - 1, high, xtol=1e-5)
    while excess(found) > 0:  # losses are rounded up on a grid, so that ε has small steps
        found += 1e-5
    return math.exp(found)


def _log_delta(epsilon: float, mu: float) -> float:
    """log δ of the Gaussian mechanism whose means are μ standard deviations apart (Balle and Wang 2018)."""
    one = float(log_ndtr(mu / 2 - epsilon / mu))
    other = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return one + math.log(-math.expm1(other - one)) if other < one else -math.inf


def _gaussian_epsilon(mu: float, delta: float) -> float:
    if mu == 0 or _log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    largest = mu * (mu / 2 - float(ndtri(delta)))  # where the first term alone is δ
    if mu > HUGE:
        return largest
    return float(
        _root(lambda epsilon: _log_delta(epsilon, mu) - math.log(delta), 0.0, largest, xtol=1e-12)
    )


def _by_distribution(mu: float, others: Releases, delta: float) -> float:
    """By the distribution of privacy losses, rounded up, that Google's accountant composes."""
    pld = require_accountant()
    relation = pld.NeighborRel.REPLACE_ONE
    most = mu * (mu / 2 + 6) + sum(r.epsilon * n for r, n in others.items() if isinstance(r, Pure))
    step = max(STEP, most / POINTS)
    distribution = pld.identity(value_discretization_interval=step)
    if mu:
        distribution = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=step)
    for release, count in others.items():
        if isinstance(release, Sampled):
            one = pld.from_gaussian_mechanism(
                release.noise,
                value_discretization_interval=step,
                sampling_prob=release.rate,
                neighboring_relation=relation,
            )
        else:
            assert isinstance(release, Pure)
            kept = pld.common.DifferentialPrivacyParameters(release.epsilon, 0.0)
            one = pld.from_privacy_parameters(kept, value_discretization_interval=step)
        distribution = distribution.compose(one.self_compose(count))
    return float(distribution.get_epsilon_for_delta(delta))


def require_accountant() -> Any:
    """Google's accountant; an error where it is not installed."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ModuleNotFoundError:
        raise ConfigError(
            "dp-accounting is not installed here, which counts what noises of different kinds cost together: "
            f"{install_command('privacy')}"
        ) from None
    return privacy_loss_distribution
