"""The record of a round: plain data, stored as one line of metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["Primary", "Round"]

# The model whose accuracy is a method's headline: the server's, or the mean over the clients'.
Primary: TypeAlias = Literal["server", "clients"]


@dataclasses.dataclass(frozen=True)
class Round:
    """Metrics, traffic, timing and failures of one round.

    >>> from barter import Experiment, Local, Round
    >>> r: Round = Experiment(Local(max_epochs=1), clients=2).step()
    >>> r.clients[0]["global"] < r.clients[0]["local"], r.mean("epochs"), r.traffic("down")
    (True, 1.0, 0)
    """

    round: int
    clients: dict[int, dict[str, float]]  # Client -> metric -> value.
    server: dict[str, float]  # Metric -> value.
    seconds: dict[str, float]  # Phase -> seconds.
    bytes: dict[str, dict[str, int]]  # Method -> "up" and "down" -> bytes.
    failures: list[str]
    # Clients that answered a call.
    participants: list[int] = dataclasses.field(default_factory=list)
    primary: Primary = "clients"  # The model whose accuracy is the method's headline.
    # What a reader should know of the round, such as that the accuracy fell to chance.
    warnings: list[str] = dataclasses.field(default_factory=list)
    # Method, "server" or "round" -> seconds in the simulated network; empty if there is none.
    simulated: dict[str, float] = dataclasses.field(default_factory=dict)
    wire: str = "exact"  # The profile by which payloads were encoded, and its exceptions.

    def values(self, metric: str, clients: Collection[int] | None = None) -> dict[int, float]:
        """Return the value of a metric for each client that reports it.

        Args:
            metric: The metric's name.
            clients: Restricts the result to these clients; None for all.
        """
        return {
            k: metrics[metric]
            for k, metrics in self.clients.items()
            if metric in metrics and (clients is None or k in clients)
        }

    def mean(self, metric: str, clients: Collection[int] | None = None) -> float:
        """Return the mean of a metric over the clients that report it.

        All clients have the same weight, whatever their number of images.

        Args:
            metric: The metric's name.
            clients: Restricts the mean to these clients; None for all.

        Raises:
            KeyError: If no client reports the metric.
        """
        values = self.values(metric, clients)
        if not values:
            known = sorted({name for metrics in self.clients.values() for name in metrics})
            raise KeyError(f"no client reports {metric!r}; there are: {', '.join(known)}")
        return sum(values.values()) / len(values)

    def describe_clients(self, test: str) -> str:
        """Return how many clients a test set was used on, such as "3 sampled clients".

        The text is empty if it was all clients that are not adversarial; those are never evaluated.
        The clients are "sampled" if they are exactly those that took part in the round.
        """
        honest = {k for k, metrics in self.clients.items() if "adversarial" not in metrics}
        tested = self.values(test).keys()
        if tested == honest:
            return ""
        sampled = "sampled " * (tested == honest & set(self.participants))
        return f"{len(tested)} {sampled}client{'s' * (len(tested) != 1)}"

    def headline(self, test: str = "global") -> float | None:
        """Return the primary model's accuracy on a test set; None if not evaluated.

        If `primary` is "server", as for methods that train one model for all, it is the server's
        accuracy; otherwise the mean over the clients that report one, with equal weights.
        """
        if self.primary == "server":
            return self.server.get(test)
        values = self.values(test)
        return sum(values.values()) / len(values) if values else None

    def traffic(self, direction: str) -> int:
        """Return the sum of bytes of all clients and methods, without evaluation.

        Args:
            direction: "up" to the server or "down" to the clients.
        """
        return sum(count[direction] for count in self.bytes.values())

    @property
    def simulated_seconds(self) -> float | None:
        """Return how long the round takes in the simulated network; None without one."""
        return self.simulated.get("round")

    def scalars(self) -> dict[str, float]:
        """Return all numbers under flat names for experiment trackers.

        For each metric of clients METRIC/mean and METRIC/client-K, for those of the server
        METRIC/server; then bytes/up, bytes/down, seconds/PHASE, simulated_seconds/PHASE, and the
        number of failures as failures. Means are over the clients that report the metric.
        """
        flat: dict[str, float] = {}
        for metric in sorted({name for metrics in self.clients.values() for name in metrics}):
            flat[f"{metric}/mean"] = self.mean(metric)
            for k, value in self.values(metric).items():
                flat[f"{metric}/client-{k}"] = value
        for metric, value in self.server.items():
            flat[f"{metric}/server"] = value
        for direction in ("up", "down"):
            flat[f"bytes/{direction}"] = self.traffic(direction)
        for phase, seconds in self.seconds.items():
            flat[f"seconds/{phase}"] = seconds
        for phase, seconds in self.simulated.items():
            flat[f"simulated_seconds/{phase}"] = seconds
        flat["failures"] = len(self.failures)
        return flat

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        # The fields are plain data. `asdict` would copy the metrics of thousands of clients.
        names = [field.name for field in dataclasses.fields(self)]
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def from_json(cls, line: str) -> Round:
        """Parse a line that `to_json` returned.

        In records of old versions, which have no participants, all clients took part.

        Raises:
            ValueError: If the line is not a valid record.
        """
        try:
            fields: Mapping[str, Any] = json.loads(line)
            clients = {int(k): metrics for k, metrics in fields["clients"].items()}
            # Records of old versions have no participants: all clients took part.
            with_participants = {"participants": list(clients), **fields}
            record = cls(**{**with_participants, "clients": clients})
            is_valid = record._is_valid()
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a record of a round: {error}") from error
        if not is_valid:
            raise ValueError("not a record of a round")
        return record

    def _is_valid(self) -> bool:
        """Return whether the fields of a parsed record have usable types.

        Checked are that all values, times and bytes are int or float, that `failures` and
        `warnings` are lists and `wire` is a string, and that `primary` has one of its values.

        Raises:
            KeyError: If the seconds lack "round", or the bytes of a method "up" or "down".
        """
        numbers: list[object] = [self.round, self.seconds["round"], *self.participants]
        for metrics in (self.server, self.seconds, self.simulated, *self.clients.values()):
            numbers += metrics.values()
        for traffic in self.bytes.values():
            numbers += [traffic["up"], traffic["down"]]
        return (
            all(isinstance(number, int | float) for number in numbers)
            and isinstance(self.failures, list)
            and isinstance(self.warnings, list)
            and isinstance(self.wire, str)
            and self.primary in ("server", "clients")
        )
