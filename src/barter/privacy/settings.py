"""The table [privacy] of a configuration: which part of which answer is protected, and how."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.params import Count, Positive, Range, build, check, did_you_mean
from barter.privacy.account import (
    Gaussian,
    Release,
    Sampled,
    calibrated,
    calibrated_steps,
    require_accountant,
    spent,
)
from barter.privacy.answer_shapes import decimals, decimals_come, shaped_by_images, unsent
from barter.privacy.mechanisms import Additive, ClassMeans, Each, Laplace, Mechanism
from barter.privacy.parts import covered, parts_of
from barter.privacy.registry import mechanism_of

__all__ = ["TRAINING", "Plan", "Privacy", "Training"]


# of an account: so many steps, behind it the share of images in each, and its noise
TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of which everything may be told: DP-SGD."""

    clip: Positive  # C: the largest length of one image's gradient
    # of a step's sum, in units of C; none: each client's own, so that it spends
    noise: Positive | None = None
    epsilon: Positive | None = None  # ε
    rounds: Count | None = None  # in so many trainings like its first

    def __post_init__(self) -> None:
        check(self)

    def options(self) -> str:
        """As a configuration says it."""
        named = {
            "clip": self.clip,
            "noise": self.noise,
            "epsilon": self.epsilon,
            "rounds": self.rounds,
        }
        return " ".join(
            f"{name}={value:.12g}" for name, value in named.items() if value is not None
        )

    def __str__(self) -> str:
        return f"{TRAINING} {self.options()}"

    def settled(self, epsilon: float | None, rounds: int) -> Training:
        """The same with all that noise is found from, for a run of so many rounds."""
        if self.noise is not None:
            if self.epsilon is not None or self.rounds is not None:
                raise ConfigError(
                    "privacy.training: noise is given, or found from epsilon and rounds, not both"
                )
            return self
        if self.epsilon is None and epsilon is None:
            raise ConfigError(
                "privacy.training: it needs noise=..., or privacy.epsilon for the run"
            )
        return replace(self, epsilon=self.epsilon or epsilon, rounds=self.rounds or rounds)

    def noise_for(self, rate: float, steps: int, delta: float) -> float:
        """That of a client whose first training has so many steps, each on such a share of its images."""
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None
        assert self.rounds is not None
        return _tidy(calibrated_steps(self.epsilon, delta, rate, steps * self.rounds))


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What is done to answers before they leave a client.

    >>> from barter.privacy import Privacy
    >>> from barter import DFFKE
    >>> Privacy(epsilon=8, parts={"learn.embeddings": "gaussian clip=4"}).settled(DFFKE(), rounds=5).parts
    {'learn.embeddings': 'gaussian clip=4 noise=2.6844'}
    """

    epsilon: Positive | None = None  # ε: what each client may spend in the run; none: no limit
    # δ: the chance that ε does not hold; far below 1 / images
    delta: Annotated[float, Range(ge=1e-12, le=0.01)] = 1e-5
    training: str = ""  # DP-SGD, such as "clip=1" or "clip=1 noise=1.1": nothing but `fit` looks at images; or as ever
    # METHOD.KEY of an answer, or METHOD -> mechanism
    parts: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check(self, "privacy.")

    def settled(self, algorithm: Algorithm[Any, Any], rounds: int) -> Privacy:
        """The same with all noise in it, for so many rounds; an error for what cannot be done to this method."""
        plan = Plan(self, algorithm)
        if plan.training is not None:
            require_accountant()
            return replace(self, training=plan.training.settled(self.epsilon, rounds).options())
        free = {part: m for part, m in plan.mechanisms.items() if getattr(m, "noise", 0) is None}
        for part, mechanism in free.items():
            if self.epsilon is None or isinstance(mechanism, Laplace):
                raise ConfigError(
                    f"privacy.parts: {part}={self.parts[part]!r}: it needs noise=...{_or_epsilon(mechanism)}"
                )
        others: Counter[Release] = Counter()
        for part, mechanism in plan.mechanisms.items():
            if part not in free and (release := mechanism.release()) is not None:
                others[release] += rounds
        if self.epsilon is None or not free:
            if any(not isinstance(release, Gaussian) for release in others):
                require_accountant()
            return self
        noise = _tidy(calibrated(self.epsilon, self.delta, rounds * len(free), others))
        return replace(
            self,
            parts={p: f"{t} noise={noise:g}" if p in free else t for p, t in self.parts.items()},
        )


def _training(text: str) -> Training:
    try:
        pairs = [option.split("=") for option in text.split()]
        values = {key: int(value) if key == "rounds" else float(value) for key, value in pairs}
    except ValueError:
        raise ConfigError(
            f"privacy.training={text!r}: write it as clip=1 or clip=1 noise=1.1"
        ) from None
    if "clip" not in values:
        raise ConfigError(f"privacy.training={text!r}: it needs clip=...")
    try:
        return build(Training, values)
    except ConfigError as error:
        raise ConfigError(f"privacy.training={text!r}: {error}") from None


def _or_epsilon(mechanism: Mechanism) -> str:
    return "" if isinstance(mechanism, Laplace) else ", or privacy.epsilon for the run"


def _tidy(noise: float) -> float:
    """Rounded up to five digits."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 4)
    return float(f"{math.ceil(noise / unit) * unit:.5g}")


def _what(kind: str) -> str:
    return "labels" if kind == "label" else "decimal numbers"


class Plan:
    """The mechanisms of a method's parts, and what answers cost under them."""

    def __init__(self, privacy: Privacy, algorithm: Algorithm[Any, Any]) -> None:
        self.privacy, self.tells = privacy, type(algorithm).tells
        self.methods, self.parts = set(getattr(type(algorithm), "crosses", {})), parts_of(algorithm)
        self.shaped = shaped_by_images(algorithm, self.parts)
        self.unsent = unsent(algorithm, self.parts)
        self.training = _training(privacy.training) if privacy.training else None
        if self.training is not None and privacy.parts:
            raise ConfigError(
                "privacy.training: all that leaves is as private as the training is; leave out privacy.parts"
            )
        self.mechanisms = {part: mechanism_of(text, part) for part, text in privacy.parts.items()}
        self.covers: dict[str, str] = {}  # part -> the name under which it is protected
        for name, mechanism in self.mechanisms.items():
            for part in self._covered(name, mechanism, algorithm):
                if part in self.covers:
                    raise ConfigError(
                        f"privacy.parts: {part} is protected twice, by {self.covers[part]} and {name}"
                    )
                self.covers[part] = name
            self.covers[name] = name  # and what is no part of the answer

    def _covered(
        self, name: str, mechanism: Mechanism, algorithm: Algorithm[Any, Any]
    ) -> list[str]:
        title = type(algorithm).__name__
        every = [part for parts in self.parts.values() for part in parts]
        if name not in every and name not in self.parts:
            raise ConfigError(
                f"privacy.parts: {title} sends no {name!r}: {did_you_mean(name, {*every, *self.parts})}"
            )
        wanted = (
            [name]
            if mechanism.beside is None
            else [name, f"{name.partition('.')[0]}.{mechanism.beside}"]
        )
        for part in wanted:
            if part not in every and part not in self.parts:
                raise ConfigError(
                    f"privacy.parts: {title} sends no {part!r} for the labels of {name}: set labels=..."
                )
            if part in self.unsent:
                raise ConfigError(
                    f"privacy.parts: {title} as configured sends no {part!r}: leave it out"
                )
            if (mechanism.needs_rows or getattr(mechanism, "each", None) == "image") and self.each(
                part
            ) != "image":
                raise ConfigError(
                    f"privacy.parts: {name}={str(mechanism)!r}: rows of {part} belong to no single image, "
                    "one can change all of them; `gaussian clip=... each=answer` bounds the answer as a whole"
                )
        for part in wanted:
            kind = self.tells.get(part)
            if (
                kind is not None
                and kind != "nothing"
                and not mechanism.protects(kind == "label", part == name)
            ):
                other = (
                    "`response` or `withhold` protects them"
                    if kind == "label"
                    else "it is for labels"
                )
                raise ConfigError(
                    f"privacy.parts: {name}={str(mechanism)!r}: {part} holds {_what(kind)}; {other}"
                )
        if isinstance(mechanism, Additive):
            lacks = (
                ""
                if decimals(algorithm, name)
                else "there are no decimal numbers in it; `withhold` protects it"
            )
            if mechanism.of == "change" and not decimals_come(algorithm, name):
                lacks = "nothing comes down from which it could have changed; leave out of=change"
            if lacks:
                raise ConfigError(f"privacy.parts: {name}={str(mechanism)!r}: {lacks}")
        return [part for name in wanted for part in covered(name, self.parts)]

    def each(self, part: str) -> Each:
        """What one image can change of a part: its own row, or the answer."""
        return (
            "image" if self.tells.get(part) in ("label", "row", "row of the network") else "answer"
        )

    def given(self, part: str) -> str:
        """What ε of a part takes for granted."""
        if part in self.shaped:
            return "the shape of the answer"
        mechanism = self.mechanisms[self.covers[part]]
        rows = mechanism.needs_rows or (
            isinstance(mechanism, Additive) and (mechanism.each or self.each(part)) == "image"
        )
        through = self.tells.get(part) == "row of the network" or isinstance(mechanism, ClassMeans)
        return "the client's network" if rows and through else ""

    @property
    def promised(self) -> bool:
        """Whether a site that wants a promise would take part: one that tells nothing beside its answers."""
        return self.privacy.epsilon is not None and not self.open()

    def open(self) -> list[str]:
        """The parts that may leave without a promise."""
        if self.training is not None:
            return []
        every = [
            part
            for parts in self.parts.values()
            for part in parts
            if self.tells.get(part) != "nothing"
        ]
        kept = [
            part
            for part, name in self.covers.items()
            if self.mechanisms[name].promises and not self.given(part)
        ]
        return [part for part in every if part not in kept and part not in self.unsent]

    def of(self, method: str) -> dict[str, Mechanism]:
        """The mechanisms for a method's answers."""
        return {part: m for part, m in self.mechanisms.items() if part.partition(".")[0] == method}

    def cost(self, released: Mapping[str, int]) -> float:
        """ε of so many releases of each name."""
        releases: Counter[Release] = Counter()
        for name, count in released.items():
            release = self._release(name)
            if release is not None:
                releases[release] += count
        return spent(releases, self.privacy.delta)

    def _release(self, name: str) -> Release | None:
        kind, *numbers = name.split(" ")
        if kind == TRAINING and self.training is not None:
            rate, noise = map(float, numbers)
            return Sampled(noise, rate)
        return self.mechanisms[name].release() if name in self.mechanisms else None

    def allows(self, released: Mapping[str, int]) -> bool:
        """Whether so many releases are within the budget."""
        return self.privacy.epsilon is None or self.cost(released) <= self.privacy.epsilon * (
            1 + 1e-9
        )

    def released(self, seen: Mapping[str, int]) -> dict[str, int]:
        """How often each protected name left a client, from how often its parts did."""
        counts: dict[str, int] = {}
        for part, count in seen.items():
            if part in self.covers:
                name = self.covers[part]
                counts[name] = max(counts.get(name, 0), count)
        return counts

    def exhausted(self, released: Mapping[int, Mapping[str, int]], rounds: int) -> list[int]:
        """The clients that cannot answer in another round as they did in these."""
        found = []
        for k, counts in sorted(released.items()):
            again = {
                n: count + max(1, -(-count // max(1, rounds)))
                for n, count in counts.items()
                if n in self.mechanisms
            }
            if not self.allows(again):
                found.append(k)
        return found
