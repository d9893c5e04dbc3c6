"""The guard of a client: protects answers, and enforces the privacy budget."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError, PrivacyError
from barter.core.images import PrivateTraining, Sealed
from barter.core.nodes import Client
from barter.core.payload import Payload, isolate
from barter.privacy.answer_shapes import blanks
from barter.privacy.mechanisms import Mechanism, ReleaseContext
from barter.privacy.noise import Seeded, Source, System
from barter.privacy.parts import nonempty_parts, put_part, take_part
from barter.privacy.prices import (
    ROUNDING,
    Account,
    describe_part,
    describe_step,
    merge_accounts,
    protected_epsilon,
    step_noise,
    total_epsilon,
)
from barter.privacy.settings import Plan, Privacy
from barter.privacy.side_information import EPSILON

__all__ = ["Guard", "TotalBudget"]


@dataclass(frozen=True)
class TotalBudget:
    """A site's budget over all runs, and what its other runs have released."""

    epsilon: float
    delta: float
    elsewhere: Account = field(default_factory=dict)


class Guard:
    """Apply a run's privacy settings to everything that leaves a client.

    Args:
        privacy: The settings.
        algorithm: The algorithm whose answers are protected.
        secret: Whether noise comes from this machine's entropy, and not from the run's seed, which
            the server knows.
    """

    def __init__(
        self, privacy: Privacy, algorithm: Algorithm[Any, Any], *, secret: bool = False
    ) -> None:
        self.plan = Plan(privacy, algorithm)
        self.algorithm = algorithm
        self.secret = secret
        self.total: TotalBudget | None = None  # set by a site that has one
        # Unprotected parts of answers, which a site moves to its ledger after each call.
        self.open_releases: dict[str, int] = {}
        # Method of `Algorithm.once` -> what a site has released of it in this run.
        self.sent_once: dict[str, Payload] = {}
        self.promised = self.plan.training is not None or bool(self.plan.mechanisms)

    def seed(self, known: int) -> int:
        """Return the seed of a client method's randomness other than privacy noise.

        If noise is secret and the run protects any answer or its training, the choice and order of
        images must be secret too: each call returns a new random seed. Otherwise it is `known`.

        Args:
            known: The seed that follows from the run's seed.
        """
        return secrets.randbits(62) if self.secret and self.promised else known

    def copy_arguments(self, method: str, arguments: Payload) -> Payload:
        """Return a copy of a method's arguments if a mechanism clips the change to them.

        A copy is needed because the method may modify its arguments. Without such a mechanism, the
        result is an empty tuple.

        Raises:
            PrivacyError: If the run protects any answer or its training, and the method is neither
                declared by the algorithm nor `evaluate`.
        """
        if self.promised and method not in {*self.plan.methods, Algorithm.evaluate.__name__}:
            raise PrivacyError(
                f"{method!r} is not answered: it is not among the methods that the algorithm declares"
            )
        changes = any(
            getattr(mechanism, "of", "") == "change" for mechanism in self.plan.of(method).values()
        )
        return isolate(arguments) if changes else ()

    @contextmanager
    def seal_images(self, client: Client, method: str, stream: int) -> Iterator[None]:
        """Restrict a client's images to private training, if training is private.

        Inside the context `client.data` is `Sealed`. Each training charges the budget, or raises
        PrivacyError if it would exceed it. Afterwards the client's report has the ε spent so far.
        If training is not private, nothing changes.

        Args:
            client: The client whose images are sealed inside the context.
            method: The method that it runs, for messages.
            stream: The seed of the noise, if it is not secret.
        """
        training = self.plan.training
        if training is None:
            yield
            return

        def charge(rate: float, steps: int) -> float:
            """Charge the budget for a training; return the noise multiplier.

            All trainings of a client use the noise of its first one.
            """
            noise = step_noise(client.released)
            if noise is None:
                noise = training.noise_for(rate, steps, self.plan.privacy.delta)
            self._spend(client, {describe_step(training.clip, noise, rate): steps}, method)
            return noise

        source = self._source(stream)
        images = client.data
        how = PrivateTraining(training.clip, source.normal, source.uniform, charge)
        client.data = Sealed(images, how)
        try:
            yield
        finally:
            client.data = images
            # Set after the method, which may have changed its report.
            client.report[EPSILON] = self.cost(client.released)

    def cost(self, released: Account) -> float:
        """Return ε of a client's releases, each priced by what it was.

        At a site whose run promises a guarantee for all answers, it is infinite if a release has
        none. Otherwise it is the ε of the protected parts; the statement names the others.

        Args:
            released: The number of releases by description, see `prices`.
        """
        epsilon = total_epsilon if self.secret and self.plan.promised else protected_epsilon
        return epsilon(self._described(released), self.plan.privacy.delta)

    def _described(self, released: Account) -> dict[str, int]:
        """Return an account that counts releases by description, not by name.

        Checkpoints of older versions count by name. The settings of a run in one process cannot
        change, so its own mechanism is the one that was used. A site cannot know that: there, such
        a release stays as it is and has no bound.
        """
        described: dict[str, int] = {}
        for name, count in released.items():
            known = name in self.plan.mechanisms and not self.secret
            text = self.plan.describe(name) if known else name
            described[text] = described.get(text, 0) + count
        return described

    def _source(self, stream: int) -> Source:
        """Return the source of noise: the system if it is secret, otherwise seeded."""
        return System() if self.secret else Seeded(stream)

    def _spend(self, client: Client, more: Account, method: str) -> None:
        """Add releases to a client's account, unless they exceed a budget.

        If the run protects any answer or its training, the client's report gets the new ε. Refused
        releases leave everything as it is.

        Raises:
            PrivacyError: If they exceed the run's budget, or the site's over all runs.
        """
        released = merge_accounts(self._described(client.released), more)
        cost = self.cost(released)
        budget = self.plan.privacy.epsilon
        if budget is not None and cost > budget * ROUNDING:
            raise PrivacyError(
                f"client {client.id} does not answer {method!r}: it would have spent epsilon = "
                f"{cost:.4g} then, of {budget:g}"
            )
        if self.total is not None:
            all_runs = merge_accounts(self.total.elsewhere, released)
            overall = total_epsilon(all_runs, self.total.delta)
            if overall > self.total.epsilon * ROUNDING:
                raise PrivacyError(
                    f"client {client.id} does not answer {method!r}: over all runs it would have "
                    f"spent epsilon = {overall:.4g} then, of its total budget of "
                    f"{self.total.epsilon:g}"
                )
        client.released = released
        if self.promised:
            client.report[EPSILON] = cost

    def protect(
        self, client: Client, method: str, answer: Payload, arguments: Payload, stream: int
    ) -> Payload:
        """Return the protected answer that leaves the client; charge the budget.

        Each mechanism of the method is charged once and applied in the order of the settings.
        Without one the answer is returned as it is, at no charge.

        A site answers a method of `Algorithm.once` once in a run. If it is asked again, because the
        server has lost the answer, it releases the same answer again, which reveals nothing more.

        Args:
            client: The client that answers.
            method: The method that was called.
            answer: Its result.
            arguments: Its arguments, as `copy_arguments` returned them.
            stream: The seed of the noise, if it is not secret.

        Raises:
            PrivacyError: If the budget does not allow another answer, or a site would release an
                unprotected part although the run promises a guarantee or the site has a budget.
            ConfigError: If the answer lacks a mechanism's part, or the rows, labels or floats that
                it works on.
        """
        if self.secret and method in self.algorithm.once:
            if method not in self.sent_once:
                protected = self._protect_anew(client, method, answer, arguments, stream)
                self.sent_once[method] = isolate(protected)
            elif self.promised:
                client.report[EPSILON] = self.cost(client.released)
            return isolate(self.sent_once[method])
        return self._protect_anew(client, method, answer, arguments, stream)

    def _protect_anew(
        self, client: Client, method: str, answer: Payload, arguments: Payload, stream: int
    ) -> Payload:
        """Return the protected answer, see `protect`."""
        mechanisms = self.plan.of(method)
        if self.secret and method != Algorithm.evaluate.__name__:
            self._note_unprotected(method, answer)
        if not mechanisms:
            return answer
        self._spend(client, {self.plan.describe(name): 1 for name in mechanisms}, method)
        source = self._source(stream)
        for name, mechanism in mechanisms.items():
            context = ReleaseContext(client, self.plan.each(name), source, arguments)
            answer = self._apply(name, mechanism, answer, context)
        return answer

    def _note_unprotected(self, method: str, answer: Payload) -> None:
        """Add the unprotected parts of a site's answer to `open_releases`.

        In one process the engine counts them.

        Raises:
            PrivacyError: If there are any although the run promises to protect all answers.
        """
        parts = self.plan.unprotected_parts(nonempty_parts(self.algorithm, method, answer))
        if parts and (self.plan.promised or self.total is not None):
            raise PrivacyError(
                f"{method!r} is not answered: {', '.join(parts)} would leave without protection"
            )
        more = {describe_part(part, None): 1 for part in parts}
        self.open_releases = merge_accounts(self.open_releases, more)

    def _apply(
        self, name: str, mechanism: Mechanism, answer: Payload, context: ReleaseContext
    ) -> Payload:
        """Apply a mechanism to one part of an answer, or to all of it.

        Parts of the answer that do not depend on any image stay as they are: the server needs
        them to make sense of the others.

        Raises:
            ConfigError: If the answer lacks the part, or an image has rows in several entries.
        """
        method, _, key = name.partition(".")
        keys = [key] if mechanism.second_key is None else [key, mechanism.second_key]
        found = [take_part(answer, key) for key in keys]
        if not all(found):
            missing = next(key for key, values in zip(keys, found, strict=True) if not values)
            raise ConfigError(
                f"privacy.parts: {name}: this method's answer as configured has no {missing!r}"
            )
        if context.each == "image" and max(map(len, found)) > 1:
            raise ConfigError(
                f"privacy.parts: {name}: an image has rows in several entries of the answer"
            )
        released = mechanism.apply([value for values in found for value in values], context)
        # Key -> values that the mechanism does not determine.
        fixed: dict[str, list[Payload]] = {}
        if not key:
            fixed |= {part: take_part(answer, part) for part in self.plan.harmless(method)}
        if mechanism.blanks:
            for part, blank in blanks(self.plan.algorithm, method).items():
                if part in keys or not key:
                    fixed[part] = [blank(value) for value in take_part(answer, part)]
        for part in keys:
            answer = put_part(answer, part, released)
        for part, values in fixed.items():
            answer = put_part(answer, part, values)
        return answer
