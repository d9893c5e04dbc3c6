"""Whoever stands at a client's door: changes what leaves, counts it, and lets nothing out beyond the budget."""

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
from barter.privacy.mechanisms import Mechanism, Turn
from barter.privacy.noise import Seeded, Source, System
from barter.privacy.parts import put, take
from barter.privacy.settings import TRAINING, Plan, Privacy
from barter.privacy.side_information import EPSILON

__all__ = ["Guard"]


class Guard:
    """`secret`: noise comes from this machine's entropy, not from the run's seed, which the server knows."""

    def __init__(
        self, privacy: Privacy, algorithm: Algorithm[Any, Any], *, secret: bool = False
    ) -> None:
        self.plan, self.secret = Plan(privacy, algorithm), secret
        self.promised = self.plan.training is not None or bool(self.plan.mechanisms)

    def seed(self, known: int) -> int:
        """Of all other chance in a method: where noise is secret, so is which images it chose, and in which order."""
        return secrets.randbits(62) if self.secret and self.promised else known

    def kept(self, method: str, came: Payload) -> Payload:
        """What came for a method, where the change since then is told: it may write to what it was given."""
        if self.promised and method not in {*self.plan.methods, Algorithm.evaluate.__name__}:
            raise PrivacyError(
                f"{method!r} is not answered: it is none of the methods that are said to cross"
            )
        changes = any(
            getattr(mechanism, "of", "") == "change" for mechanism in self.plan.of(method).values()
        )
        return isolate(came) if changes else ()

    @contextmanager
    def sealing(self, client: Client, method: str, stream: int) -> Iterator[None]:
        """Inside, nothing but private training looks at the client's images, if training is to be private."""
        training = self.plan.training
        if training is None:
            yield
            return

        def count(rate: float, steps: int) -> float:
            before = (
                float(name.split(" ")[2]) for name in client.released if name.startswith(TRAINING)
            )
            noise = next(before, None) or training.noise_for(rate, steps, self.plan.privacy.delta)
            name = f"{TRAINING} {rate!r} {noise!r}"
            self._spend(
                client, {**client.released, name: client.released.get(name, 0) + steps}, method
            )
            return noise

        source, own = self._source(stream), client.data
        how = PrivateTraining(training.clip, source.normal, source.uniform, count)
        client.data = Sealed(own, how)
        try:
            yield
        finally:
            client.data = own
            client.report[EPSILON] = self.plan.cost(
                client.released
            )  # whatever the method has made of its report

    def _source(self, stream: int) -> Source:
        return System() if self.secret else Seeded(stream)

    def _spend(self, client: Client, released: dict[str, int], method: str) -> None:
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
        """What leaves instead of a client's answer to what came; `stream` is the seed of noise that comes again."""
        mechanisms = self.plan.of(method)
        if not mechanisms:
            return answer
        more = {name: client.released.get(name, 0) + 1 for name in mechanisms}
        self._spend(client, {**client.released, **more}, method)
        source = self._source(stream)
        for name, mechanism in mechanisms.items():
            answer = self._changed(
                name, mechanism, answer, Turn(client, self.plan.each(name), source, came)
            )
        return answer

    def _changed(self, name: str, mechanism: Mechanism, answer: Payload, turn: Turn) -> Payload:
        key = name.partition(".")[2]
        keys = [key] if mechanism.beside is None else [key, mechanism.beside]
        found = [take(answer, key) for key in keys]
        if not all(found):
            missing = next(key for key, values in zip(keys, found, strict=True) if not values)
            raise ConfigError(
                f"privacy.parts: {name}: the answer of this method as configured has no {missing!r}"
            )
        if turn.each == "image" and max(map(len, found)) > 1:
            raise ConfigError(
                f"privacy.parts: {name}: an image has rows in several entries of the answer"
            )
        told = mechanism.apply([value for values in found for value in values], turn)
        for key in keys:
            answer = put(answer, key, told)
        return answer
