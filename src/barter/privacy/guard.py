"""The guard of a client: protects answers, accounts for them, and enforces the budget."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError, PrivacyError
from barter.core.images import PrivateTraining, Sealed
from barter.core.nodes import Client
from barter.core.payload import Payload, isolate
from barter.privacy.answer_shapes import blanks
from barter.privacy.mechanisms import Mechanism, Turn
from barter.privacy.noise import Seeded, Source, System
from barter.privacy.parts import put, take
from barter.privacy.settings import TRAINING, Plan, Privacy
from barter.privacy.side_information import EPSILON

__all__ = ["Guard"]


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
        self.secret = secret
        self.promised = self.plan.training is not None or bool(self.plan.mechanisms)

    def seed(self, known: int) -> int:
        """Return the seed of all other randomness in a method.

        If noise is secret, the choice and order of images must be secret too.

        Args:
            known: The seed that follows from the run's seed.
        """
        return secrets.randbits(62) if self.secret and self.promised else known

    def kept(self, method: str, came: Payload) -> Payload:
        """Return a copy of a method's arguments if a mechanism clips the change since then.

        A copy is needed because the method may modify its arguments.

        Raises:
            PrivacyError: If the algorithm does not declare this method.
        """
        if self.promised and method not in {*self.plan.methods, Algorithm.evaluate.__name__}:
            raise PrivacyError(
                f"{method!r} is not answered: it is not among the methods that the algorithm declares"
            )
        changes = any(
            getattr(mechanism, "of", "") == "change" for mechanism in self.plan.of(method).values()
        )
        return isolate(came) if changes else ()

    @contextmanager
    def sealing(self, client: Client, method: str, stream: int) -> Iterator[None]:
        """Restrict a client's images to private training, if training is private.

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
            earlier = [name for name in client.released if name.startswith(TRAINING)]
            if earlier:
                noise = float(earlier[0].split(" ")[2])
            else:
                noise = training.noise_for(rate, steps, self.plan.privacy.delta)
            name = f"{TRAINING} {rate!r} {noise!r}"
            total = client.released.get(name, 0) + steps
            self._spend(client, {**client.released, name: total}, method)
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
            client.report[EPSILON] = self.plan.cost(client.released)

    def _source(self, stream: int) -> Source:
        """Return the source of noise."""
        return System() if self.secret else Seeded(stream)

    def _spend(self, client: Client, released: dict[str, int], method: str) -> None:
        """Replace a client's count of releases, unless it exceeds the budget."""
        if not self.plan.allows(released):
            raise PrivacyError(
                f"client {client.id} does not answer {method!r}: it would have spent epsilon = "
                f"{self.plan.cost(released):.4g} then, of {self.plan.privacy.epsilon:g}"
            )
        client.released = released
        client.report[EPSILON] = self.plan.cost(released)

    def protect(
        self, client: Client, method: str, answer: Payload, came: Payload, stream: int
    ) -> Payload:
        """Return the protected answer that leaves the client, and charge the budget for it.

        Args:
            client: The client that answers.
            method: The method that was called.
            answer: Its result.
            came: Its arguments, as `kept` returned them.
            stream: The seed of the noise, if it is not secret.

        Raises:
            PrivacyError: If the budget does not allow another answer.
            ConfigError: If a mechanism does not fit the answer.
        """
        mechanisms = self.plan.of(method)
        if not mechanisms:
            return answer
        more = {name: client.released.get(name, 0) + 1 for name in mechanisms}
        self._spend(client, {**client.released, **more}, method)
        source = self._source(stream)
        for name, mechanism in mechanisms.items():
            turn = Turn(client, self.plan.each(name), source, came)
            answer = self._apply(name, mechanism, answer, turn)
        return answer

    def _apply(self, name: str, mechanism: Mechanism, answer: Payload, turn: Turn) -> Payload:
        """Apply a mechanism to one part of an answer, or to all of it.

        Parts of the answer that do not depend on any image stay as they are: the server needs
        them to make sense of the others.
        """
        method, _, key = name.partition(".")
        keys = [key] if mechanism.beside is None else [key, mechanism.beside]
        found = [take(answer, key) for key in keys]
        if not all(found):
            missing = next(key for key, values in zip(keys, found, strict=True) if not values)
            raise ConfigError(
                f"privacy.parts: {name}: this method's answer as configured has no {missing!r}"
            )
        if turn.each == "image" and max(map(len, found)) > 1:
            raise ConfigError(
                f"privacy.parts: {name}: an image has rows in several entries of the answer"
            )
        released = mechanism.apply([value for values in found for value in values], turn)
        # Key -> values that the mechanism does not determine.
        fixed: dict[str, list[Payload]] = {}
        if not key:
            fixed |= {part: take(answer, part) for part in self.plan.harmless(method)}
        if mechanism.blanks:
            for part, blank in blanks(self.plan.algorithm, method).items():
                if part in keys or not key:
                    fixed[part] = [blank(value) for value in take(answer, part)]
        for part in keys:
            answer = put(answer, part, released)
        for part, values in fixed.items():
            answer = put(answer, part, values)
        return answer
