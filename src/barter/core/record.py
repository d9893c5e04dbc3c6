"""What a round leaves behind: plain data, one line of metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["Primary", "Round"]

# Whose accuracy is a method's headline: the server's model, or the mean over the clients' own.
Primary: TypeAlias = Literal["server", "clients"]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round in numbers.

    >>> from barter import Experiment, Local, Round
    >>> r: Round = Experiment(Local(max_epochs=1), clients=2).step()
    >>> r.clients[0]["global"] < r.clients[0]["local"], r.mean("epochs"), r.traffic("down")
    (True, 1.0, 0)
    """

    round: int
    clients: dict[int, dict[str, float]]  # client -> metric -> value
    server: dict[str, float]
    seconds: dict[str, float]  # phase -> seconds
    bytes: dict[str, dict[str, int]]  # method -> "up" and "down"
    failures: list[str]
    participants: list[int] = dataclasses.field(
        default_factory=list
    )  # clients that answered a call
    primary: Primary = "clients"  # whose accuracy is the method's headline

    def values(self, metric: str, clients: Collection[int] | None = None) -> dict[int, float]:
        """Return this metric of every client that reports it, or of these clients only."""
        return {
            k: metrics[metric]
            for k, metrics in self.clients.items()
            if metric in metrics and (clients is None or k in clients)
        }

    def mean(self, metric: str, clients: Collection[int] | None = None) -> float:
        """Return the mean over all clients that report this metric, or over these clients only.

        Every client counts alike, whatever number of images it has.
        """
        values = self.values(metric, clients)
        if not values:
            known = sorted({name for metrics in self.clients.values() for name in metrics})
            raise KeyError(f"no client reports {metric!r}; there are: {', '.join(known)}")
        return sum(values.values()) / len(values)

    def headline(self, test: str = "global") -> float | None:
        """Return the accuracy of the method's primary model on a test set; None if not evaluated.

        It is the server's model for methods that train one model for all, and the mean over the
        clients' models otherwise (`primary`).
        """
        if self.primary == "server":
            return self.server.get(test)
        values = self.values(test)
        return sum(values.values()) / len(values) if values else None

    def traffic(self, direction: str) -> int:
        """All bytes that went this way, "up" or "down"."""
        return sum(count[direction] for count in self.bytes.values())

    def scalars(self) -> dict[str, float]:
        """All numbers by name, as trackers of experiments take them: `global/mean`, `global/client-0`, `bytes/up`."""
        flat: dict[str, float] = {}
        for metric in sorted({name for metrics in self.clients.values() for name in metrics}):
            flat[f"{metric}/mean"] = self.mean(metric)
            flat |= {
                f"{metric}/client-{k}": m[metric] for k, m in self.clients.items() if metric in m
            }
        flat |= {f"{metric}/server": value for metric, value in self.server.items()}
        flat |= {f"bytes/{direction}": self.traffic(direction) for direction in ("up", "down")}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        return {**flat, "failures": len(self.failures)}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Round:
        """From a line of `to_json`; ValueError if it is none."""
        try:
            fields: Mapping[str, Any] = json.loads(line)
            clients = {int(k): v for k, v in fields["clients"].items()}
            everyone = {
                "participants": list(clients)
            }  # of a version that did not say who took part
            record = cls(**{**everyone, **fields, "clients": clients})
            tables: list[Mapping[str, float]] = [
                record.server,
                record.seconds,
                *record.clients.values(),
            ]
            numbers = [
                record.round,
                record.seconds["round"],
                *record.participants,
                *(n for table in tables for n in table.values()),
            ]
            numbers += [n for table in record.bytes.values() for n in (table["up"], table["down"])]
            whole = (
                all(isinstance(n, int | float) for n in numbers)
                and isinstance(record.failures, list)
                and record.primary in ("server", "clients")
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no record of a round: {error}") from error
        if not whole:
            raise ValueError("no record of a round")
        return record
