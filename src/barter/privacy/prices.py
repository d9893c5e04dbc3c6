"""Describe releases so that their price does not depend on later settings.

An account maps the description of a release to how often it happened. A description is
`PART: MECHANISM` with all options, such as `client_update: gaussian clip=5.0 noise=3.7`. A step of
private training is `training: dp-sgd clip=1.0 noise=0.7 rate=0.05`, and a part that leaves as it is
`client_update: nothing`. A price that holds only if something else is public says so at its end:
`learn.embeddings: gaussian clip=4.0 noise=2.7 given the client's network`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

from barter.core.errors import ConfigError
from barter.privacy.account import Release, SampledRelease, Unbounded, composed_epsilon
from barter.privacy.mechanisms import Mechanism
from barter.privacy.registry import mechanism_of

__all__ = [
    "NOTHING",
    "ROUNDING",
    "TRAINING",
    "Account",
    "Description",
    "describe_part",
    "describe_step",
    "merge_accounts",
    "protected_epsilon",
    "step_noise",
    "total_epsilon",
]

TRAINING = "training"  # the part under which steps of private training are counted
DP_SGD = "dp-sgd"  # the mechanism of such a step
NOTHING = "nothing"  # the mechanism of a part that leaves without protection
GIVEN_WORD = " given "
ROUNDING = 1 + 1e-9  # a cost may exceed a budget by this factor

Account = Mapping[str, int]  # description of a release -> number of releases


class Description(NamedTuple):
    """The fields of a description."""

    part: str
    mechanism: str  # name and options; empty if unknown
    given: str  # what the price assumes to be public; empty if nothing

    @classmethod
    def read(cls, text: str) -> Description:
        """Split the text of a description.

        Releases that older versions counted by name have no mechanism. Of steps of private
        training they noted the sampling rate and the noise: `training 0.05 0.7`.
        """
        words = text.split(" ")
        if words[0] == TRAINING and len(words) == 3:
            return cls(TRAINING, f"{DP_SGD} noise={words[2]} rate={words[1]}", "")
        part, _, rest = text.partition(": ")
        mechanism, _, given = rest.partition(GIVEN_WORD)
        return cls(part, mechanism, given)

    @property
    def is_open(self) -> bool:
        """Return whether the part left without a guarantee, and on purpose.

        Its mechanism is then "nothing" or "paper", DFFKE's published noise.
        """
        return self.mechanism == NOTHING or self.mechanism.partition(" ")[0] == "paper"

    def price(self) -> Release | None:
        """Return the cost of one release; None if it costs nothing.

        A mechanism without a guarantee, and what is not understood, is `Unbounded`.
        """
        name = self.mechanism.partition(" ")[0]
        try:
            if name == DP_SGD:
                options = self._options()
                return SampledRelease(options["noise"], options["rate"])
            mechanism = mechanism_of(self.mechanism, self.part)
            return mechanism.release() if mechanism.promises else Unbounded()
        except (ConfigError, ValueError, LookupError, AssertionError):
            return Unbounded()

    def _options(self) -> dict[str, float]:
        """Return the options of a step of private training.

        Raises:
            ValueError: If one is no number, or out of range.
        """
        options = {}
        for word in self.mechanism.split(" ")[1:]:
            key, _, value = word.partition("=")
            options[key] = float(value)
        if not (options["noise"] > 0 and 0 < options["rate"] <= 1):
            raise ValueError(f"{self.mechanism}: noise and rate are out of range")
        return options


def describe_part(part: str, mechanism: Mechanism | None, given: str = "") -> str:
    """Return the description of a part's release, with its options at full precision.

    Args:
        part: The part or method that the mechanism protects.
        mechanism: Its mechanism; None if it leaves as it is.
        given: What the price of the release assumes to be public.
    """
    words = [NOTHING]
    if mechanism is not None:
        words = [mechanism.name]
        for field in fields(mechanism):
            value = getattr(mechanism, field.name)
            if value != field.default:
                words.append(f"{field.name}={value}")
    return f"{part}: {' '.join(words)}{GIVEN_WORD + given if given else ''}"


def describe_step(clip: float, noise: float, rate: float) -> str:
    """Return the description of a step of private training."""
    return f"{TRAINING}: {DP_SGD} clip={clip!r} noise={noise!r} rate={rate!r}"


def step_noise(account: Account) -> float | None:
    """Return the noise multiplier of private training; None without steps.

    With several kinds of steps, it is that of the first.
    """
    for text in account:
        description = Description.read(text)
        price = description.price()
        if description.part == TRAINING and isinstance(price, SampledRelease):
            return price.noise
    return None


def merge_accounts(*accounts: Account) -> dict[str, int]:
    """Return the account of all releases in several accounts; counts add up."""
    merged: Counter[str] = Counter()
    for account in accounts:
        merged.update(account)
    return dict(merged)


def total_epsilon(account: Account, delta: float) -> float:
    """Return ε of all releases together.

    It is infinite if a part left without protection, if its price assumes that something else is
    public, or if its description is not understood.

    Args:
        account: The releases.
        delta: δ, the probability that ε does not hold.
    """
    releases: Counter[Release] = Counter()
    for text, count in account.items():
        description = Description.read(text)
        price = description.price()
        if price is not None:
            releases[Unbounded() if description.given else price] += count
    return composed_epsilon(releases, delta)


def protected_epsilon(account: Account, delta: float) -> float:
    """Return ε of the protected parts together, whatever prices assume to be public.

    Parts that left without protection, or with "paper", are left out, so that it is no guarantee if
    there are any. It is infinite if a description is not understood.

    Args:
        account: The releases.
        delta: δ, the probability that ε does not hold.
    """
    protected: Counter[str] = Counter()
    for text, count in account.items():
        description = Description.read(text)
        if not description.is_open:
            protected[f"{description.part}: {description.mechanism}"] += count
    return total_epsilon(protected, delta)
