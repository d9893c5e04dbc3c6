"""The table [privacy]: which parts of answers are protected, and how."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.params import Count, Positive, Range, build_dataclass, check_fields, did_you_mean
from barter.privacy.account import (
    GaussianRelease,
    Release,
    Unbounded,
    calibrate_noise,
    calibrate_step_noise,
    composed_epsilon,
    require_accountant,
)
from barter.privacy.answer_shapes import (
    allows_floats,
    parts_shaped_by_images,
    receives_floats,
    unsent_parts,
    words,
)
from barter.privacy.mechanisms import (
    Additive,
    ClassMeans,
    Gaussian,
    Influence,
    Laplace,
    Mechanism,
)
from barter.privacy.parts import answer_parts, expand_part
from barter.privacy.prices import TRAINING, describe_part
from barter.privacy.registry import mechanism_of

__all__ = ["Plan", "Privacy", "Training"]


# Largest ε for which noise is found. Composing steps with as little noise as a larger one allows
# takes minutes, and the result protects nothing.
LARGEST_EPSILON = 100.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of DP-SGD, whose results are private whatever is released of them."""

    clip: Positive  # C: clipping norm of one image's gradient
    # noise multiplier, in units of C; none: each client finds its own from epsilon and rounds
    noise: Positive | None = None
    epsilon: Positive | None = None  # ε: what a client spends in all its trainings
    rounds: Count | None = None  # number of trainings, each as long as the client's first

    def __post_init__(self) -> None:
        check_fields(self)

    def options(self) -> str:
        """Return the options as they are written in a configuration."""
        options = {
            "clip": self.clip,
            "noise": self.noise,
            "epsilon": self.epsilon,
            "rounds": self.rounds,
        }
        return " ".join(
            f"{name}={value:.12g}" for name, value in options.items() if value is not None
        )

    def __str__(self) -> str:
        return f"{TRAINING} {self.options()}"

    def settle(self, epsilon: float | None, rounds: int) -> Training:
        """Return the options with everything that determines the noise.

        That is `noise`, or `epsilon` and `rounds`, from which each client finds its noise.

        Args:
            epsilon: ε of the run, used if the options have none.
            rounds: The run's number of rounds, used if the options have none.

        Raises:
            ConfigError: If the noise is given twice or not at all, or ε exceeds `LARGEST_EPSILON`.
        """
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
        target = self.epsilon or epsilon
        assert target is not None
        _require_protection(target)
        return replace(self, epsilon=target, rounds=self.rounds or rounds)

    def noise_for(self, rate: float, steps: int, delta: float) -> float:
        """Return a client's noise multiplier: as given, or the least that stays within ε.

        The options must be settled. All `rounds` trainings are assumed to be as long as the first.

        Args:
            rate: The probability that an image takes part in a step.
            steps: The number of steps of the client's first training.
            delta: δ, the probability that ε does not hold.
        """
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None
        assert self.rounds is not None
        return _tidy(calibrate_step_noise(self.epsilon, delta, rate, steps * self.rounds))


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Settings that protect answers before they leave a client.

    >>> from barter.privacy import Privacy
    >>> from barter import DFFKE
    >>> privacy = Privacy(epsilon=8, parts={"learn.embeddings": "gaussian clip=4"})
    >>> privacy.settle(DFFKE(), rounds=5).parts
    {'learn.embeddings': 'gaussian clip=4 noise=2.6844'}
    """

    epsilon: Positive | None = None  # ε: privacy budget of each client in the run; none: no limit
    # δ: probability that ε does not hold; should be far below 1 / number of images
    delta: Annotated[float, Range(ge=1e-12, le=0.01)] = 1e-5
    # options of DP-SGD, such as "clip=1" or "clip=1 noise=1.1"; then only `fit` has access to
    # images. Empty: training is not private
    training: str = ""
    # METHOD.KEY of an answer, or METHOD -> mechanism, such as "gaussian clip=4"
    parts: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, "privacy.")

    def settle(self, algorithm: Algorithm[Any, Any], rounds: int) -> Privacy:
        """Return the settings with all noise multipliers of parts filled in.

        Parts without a multiplier get the same one, the least that stays within ε if each mechanism
        releases once per round, or once in all for methods of `Algorithm.once`. Private training
        gets the ε and the number of rounds from which each client finds its noise.

        Args:
            algorithm: The algorithm whose answers are protected.
            rounds: The number of rounds that the budget is meant for.

        Raises:
            ConfigError: If the settings do not fit the algorithm or leave the noise open, if noise
                is to be found for an ε above `LARGEST_EPSILON`, or if dp-accounting is needed and
                not installed.
        """
        plan = Plan(self, algorithm)
        if plan.training is not None:
            require_accountant()
            return replace(self, training=plan.training.settle(self.epsilon, rounds).options())
        plan.require_usable()
        free = {part: m for part, m in plan.mechanisms.items() if getattr(m, "noise", 0) is None}
        for part, mechanism in free.items():
            if self.epsilon is None or isinstance(mechanism, Laplace):
                needs = "noise=..."
                if not isinstance(mechanism, Laplace):
                    needs += ", or privacy.epsilon for the run"
                raise ConfigError(f"privacy.parts: {part}={self.parts[part]!r}: it needs {needs}")
        others: Counter[Release] = Counter()
        for part, mechanism in plan.mechanisms.items():
            if part not in free and (release := mechanism.release()) is not None:
                others[release] += plan.most_releases(part, rounds)
        if self.epsilon is None or not free:
            if any(not isinstance(release, GaussianRelease) for release in others):
                require_accountant()
            return self
        _require_protection(self.epsilon)
        releases = sum(plan.most_releases(part, rounds) for part in free)
        noise = _tidy(calibrate_noise(self.epsilon, self.delta, releases, others))
        parts = {}
        for part, text in self.parts.items():
            parts[part] = f"{text} noise={noise:g}" if part in free else text
        return replace(self, parts=parts)


def _training(text: str) -> Training:
    """Build the options of DP-SGD from their text, such as "clip=1 noise=1.1".

    Raises:
        ConfigError: If it is not of this form, lacks clip, or an option is unknown or out of range.
    """
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
        return build_dataclass(Training, values)
    except ConfigError as error:
        raise ConfigError(f"privacy.training={text!r}: {error}") from None


def _require_protection(epsilon: float) -> None:
    """Raise ConfigError if ε exceeds LARGEST_EPSILON and so protects nothing."""
    if epsilon > LARGEST_EPSILON:
        raise ConfigError(
            f"privacy.epsilon={epsilon:g}: such an epsilon protects nothing, so no noise is found "
            f"for it; use at most {LARGEST_EPSILON:g} (8 is common), or give noise=... yourself"
        )


def _tidy(noise: float) -> float:
    """Round a positive number up to five significant digits: 1.23451 becomes 1.2346.

    Never down, so that the noise suffices for the budget.
    """
    unit = 10.0 ** (math.floor(math.log10(noise)) - 4)
    return float(f"{math.ceil(noise / unit) * unit:.5g}")


class Plan:
    """Privacy settings applied to an algorithm: the mechanism of each part.

    Raises:
        ConfigError: If the algorithm does not send a mechanism's part, or the part holds labels, no
            floats or no rows of single images where the mechanism needs these; or if a part is
            protected twice, or by parts and by private training.
    """

    def __init__(self, privacy: Privacy, algorithm: Algorithm[Any, Any]) -> None:
        self.privacy = privacy
        self.algorithm = algorithm
        self.tells = type(algorithm).tells
        self.methods = set(getattr(type(algorithm), "crosses", {}))
        self.parts = answer_parts(algorithm)
        self.shaped = parts_shaped_by_images(algorithm, self.parts)
        self.unsent = unsent_parts(algorithm, self.parts)
        self.training = _training(privacy.training) if privacy.training else None
        if self.training is not None and privacy.parts:
            raise ConfigError(
                "privacy.training: private training already protects all answers; leave out "
                "privacy.parts"
            )
        self.mechanisms = {part: mechanism_of(text, part) for part, text in privacy.parts.items()}
        self.covers: dict[str, str] = {}  # part -> the name under which it is protected
        for name, mechanism in self.mechanisms.items():
            for part in self._require_parts(name, mechanism, algorithm):
                if part in self.covers:
                    raise ConfigError(
                        f"privacy.parts: {part} is protected twice, by {self.covers[part]} and {name}"
                    )
                self.covers[part] = name
            self.covers[name] = name  # also covers values outside of the answer's known parts

    def _require_parts(
        self, name: str, mechanism: Mechanism, algorithm: Algorithm[Any, Any]
    ) -> list[str]:
        """Return the parts that a mechanism covers, after checking that it fits them.

        Args:
            name: The part or method that the configuration names.
            mechanism: Its mechanism.
            algorithm: The algorithm.

        Raises:
            ConfigError: If the algorithm does not send a part, the part holds labels, no floats or
                no rows of single images where the mechanism needs these, or the part is a sum and
                the mechanism is not for sums.
        """
        title = type(algorithm).__name__
        sent = {part for parts in self.parts.values() for part in parts} | self.parts.keys()
        if name not in sent:
            raise ConfigError(
                f"privacy.parts: {title} sends no {name!r}: {did_you_mean(name, sent)}"
            )
        wanted = [name]
        if mechanism.second_key is not None:
            wanted.append(f"{name.partition('.')[0]}.{mechanism.second_key}")
        needs_rows = mechanism.needs_rows or getattr(mechanism, "each", None) == "image"
        for part in wanted:
            if part not in sent:
                raise ConfigError(
                    f"privacy.parts: {title} sends no {part!r} for the labels of {name}: set labels=..."
                )
            if part in self.unsent:
                raise ConfigError(
                    f"privacy.parts: {title} as configured sends no {part!r}: leave it out"
                )
            if needs_rows and self.each(part) != "image":
                raise ConfigError(
                    f"privacy.parts: {name}={str(mechanism)!r}: rows of {part} belong to no single "
                    "image, one can change all of them; `gaussian clip=... each=answer` bounds the "
                    "answer as a whole"
                )
        for part in wanted:
            kind = self.tells.get(part)
            if kind is None or kind == "nothing":
                continue
            if not mechanism.protects(kind == "label", part == name):
                reason = "decimal numbers; it is for labels"
                if kind == "label":
                    reason = "labels; `response` or `withhold` protects them"
                raise ConfigError(
                    f"privacy.parts: {name}={str(mechanism)!r}: {part} holds {reason}"
                )
        if isinstance(mechanism, Additive):
            problem = ""
            if not allows_floats(algorithm, name):
                problem = "there are no decimal numbers in it; `withhold` protects it"
            if mechanism.of == "change" and not receives_floats(algorithm, name):
                problem = (
                    "the server sends no decimal numbers that could change; leave out of=change"
                )
            if self.each(name) == "sum" and mechanism.each is None:
                exact = isinstance(mechanism, Gaussian) and mechanism.clip == 1
                if not exact or mechanism.of == "change":
                    problem = (
                        "it is a sum whose terms are bounded already, by Euclidean norms; write "
                        "`gaussian clip=1`"
                    )
            if problem:
                raise ConfigError(f"privacy.parts: {name}={str(mechanism)!r}: {problem}")
        return [part for name in wanted for part in expand_part(name, self.parts)]

    def require_usable(self) -> None:
        """Refuse to blank strings, without which the server cannot use an answer.

        Raises:
            ConfigError: If a mechanism would blank a part that holds strings.
        """
        for name, mechanism in self.mechanisms.items():
            method, _, key = name.partition(".")
            for word in words(self.algorithm, method) if mechanism.blanks else ():
                if not key or key == word:
                    raise ConfigError(
                        f"privacy.parts: {name}={str(mechanism)!r}: {method}.{word} holds a word, "
                        "which cannot be withheld; protect other parts by name, or train privately "
                        "(privacy.training)"
                    )

    def most_releases(self, part: str, rounds: int) -> int:
        """Return how often a client releases a part in this many rounds: once in each.

        It is once in all if the algorithm asks each client only once (`Algorithm.once`).
        """
        return 1 if self.is_released_once(part) else rounds

    def is_released_once(self, part: str) -> bool:
        """Return whether a client releases a part or a method's answer at most once in a run."""
        return part.partition(".")[0] in type(self.algorithm).once

    def each(self, part: str) -> Influence:
        """Return what one image can change in a part.

        It is "image" for its own row, "sum" for its own term of a sum, and "answer" for a part that
        the algorithm's `tells` does not declare. For a method it is "sum" if all its parts that
        depend on images are sums.
        """
        kinds = {self.tells.get(name) for name in expand_part(part, self.parts)}
        if kinds - {"nothing"} == {"sum"}:
            return "sum"
        by_row = self.tells.get(part) in ("label", "row", "row of the network")
        return "image" if by_row else "answer"

    def public_assumption(self, part: str) -> str:
        """Return what the ε of a part assumes to be public; empty if it assumes nothing.

        It is the answer's shape where no contract fixes it, and the client's network where noise is
        added by row to what the network computed.

        Raises:
            KeyError: If no mechanism covers the part and its shape is fixed.
        """
        if part in self.shaped:
            return "the shape of the answer"
        mechanism = self.mechanisms[self.covers[part]]
        rows = mechanism.needs_rows or (
            isinstance(mechanism, Additive) and (mechanism.each or self.each(part)) == "image"
        )
        uses_network = self.tells.get(part) == "row of the network" or isinstance(
            mechanism, ClassMeans
        )
        return "the client's network" if rows and uses_network else ""

    @property
    def promised(self) -> bool:
        """Return whether a site that requires a guarantee can take part.

        That is so with a budget (`privacy.epsilon`) and without `open` parts. Such a site releases
        nothing besides its answers.
        """
        return self.privacy.epsilon is not None and not self.open()

    def open(self) -> list[str]:
        """Return parts that can leave without a guarantee; none with private training.

        They are those that depend on images, are sent as configured, and are not covered by a
        mechanism that promises a guarantee without a `public_assumption`.
        """
        if self.training is not None:
            return []
        private = [
            part
            for part, name in self.covers.items()
            if self.mechanisms[name].promises and not self.public_assumption(part)
        ]
        open_parts = []
        for parts in self.parts.values():
            for part in parts:
                harmless = self.tells.get(part) == "nothing" or part in self.unsent
                if not harmless and part not in private:
                    open_parts.append(part)
        return open_parts

    def describe(self, name: str) -> str:
        """Describe one release of a name in `privacy.parts`, see `prices`."""
        assumptions = [
            self.public_assumption(part) for part, cover in self.covers.items() if cover == name
        ]
        return describe_part(name, self.mechanisms[name], next(filter(None, assumptions), ""))

    def unprotected_parts(self, parts: Iterable[str]) -> list[str]:
        """Return those parts that may depend on images and that no mechanism covers.

        With private training there are none.
        """
        if self.training is not None:
            return []
        return [
            part for part in parts if part not in self.covers and self.tells.get(part) != "nothing"
        ]

    def harmless(self, method: str) -> list[str]:
        """Return the keys of a method's answer that do not depend on any image."""
        harmless = (part for part in self.parts[method] if self.tells.get(part) == "nothing")
        return [key for part in harmless if (key := part.partition(".")[2])]

    def of(self, method: str) -> dict[str, Mechanism]:
        """Return the mechanisms that protect a method's answers: part -> mechanism."""
        return {part: m for part, m in self.mechanisms.items() if part.partition(".")[0] == method}

    def cost(self, released: Mapping[str, int]) -> float:
        """Return ε of all releases together, at the settings' δ.

        It is infinite if a name is not in `privacy.parts`. Mechanisms without a guarantee, and
        `withhold`, add nothing.

        Args:
            released: The number of releases by name in `privacy.parts`. Steps of private training
                cannot be among them.
        """
        releases: Counter[Release] = Counter()
        for name, count in released.items():
            known = name in self.mechanisms
            release = self.mechanisms[name].release() if known else Unbounded()
            if release is not None:
                releases[release] += count
        return composed_epsilon(releases, self.privacy.delta)

    def allows(self, released: Mapping[str, int]) -> bool:
        """Return whether these releases are within the budget, up to rounding.

        Without a budget (`privacy.epsilon` of None) all are.

        Args:
            released: The number of releases by name, as for `cost`.
        """
        budget = self.privacy.epsilon
        return budget is None or self.cost(released) <= budget * (1 + 1e-9)

    def count_releases(self, seen: Mapping[str, int]) -> dict[str, int]:
        """Return the number of releases by name in `privacy.parts`.

        Of several parts that a name covers, which leave together, the largest number counts. Parts
        that no mechanism covers are left out.

        Args:
            seen: The number of times that each part left the client.
        """
        counts: dict[str, int] = {}
        for part, count in seen.items():
            if part in self.covers:
                name = self.covers[part]
                counts[name] = max(counts.get(name, 0), count)
        return counts

    def exhausted_clients(
        self, released: Mapping[int, Mapping[str, int]], rounds: int
    ) -> list[int]:
        """Return the clients whose budget does not allow another round.

        The next round is assumed to release each name as often as the previous ones did on average,
        rounded up and at least once, except for names that are released once in a run. A client is
        exhausted if `allows` refuses the sum of both. Names without a mechanism cost nothing.

        Args:
            released: The number of releases by client and name; other clients are not considered.
            rounds: The number of rounds so far; 0 counts as 1.

        Returns:
            Their ids in ascending order; empty without a budget (`privacy.epsilon`).
        """
        found = []
        for k, counts in sorted(released.items()):
            after = {}
            for name, count in counts.items():
                if name in self.mechanisms:
                    per_round = max(1, math.ceil(count / max(1, rounds)))
                    after[name] = count if self.is_released_once(name) else count + per_round
            if not self.allows(after):
                found.append(k)
        return found
