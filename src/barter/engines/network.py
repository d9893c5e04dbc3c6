"""A simulated network: how long calls would take, and which clients drop out.

The time of a call follows from the bytes that cross and from the operations that a client computes.
Neither depends on the machine that runs the simulation. Nothing waits: a simulated hour takes as
long as its computation.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from barter.core import seeds
from barter.core.errors import ConfigError
from barter.core.params import (
    NonNegative,
    Positive,
    Range,
    Spelling,
    build_dataclass,
    check_fields,
    did_you_mean,
)

__all__ = ["CallWork", "Clock", "ClockReading", "Link", "Network", "SlowPolicy"]

NUMBER = r"[0-9]+(?:\.[0-9]+)?"
DRAW = re.compile(rf"(uniform|lognormal)\( *({NUMBER}) *, *({NUMBER}) *\)")
Distribution = Annotated[
    str, Spelling(DRAW.pattern, "uniform(LOW, HIGH) or lognormal(MEDIAN, SIGMA)")
]
# A value of all clients, one value for each client, or a distribution to draw them from.
ByClient: TypeAlias = Positive | tuple[Positive, ...] | Distribution
Latency: TypeAlias = NonNegative | tuple[NonNegative, ...] | Distribution
SlowPolicy: TypeAlias = Literal["wait", "deadline", "over-select"]
Probability = Annotated[float, Range(ge=0, le=0.9)]
MEGABIT = 1e6 / 8  # Bytes.
GIGA = 1e9
BY_CLIENT = ("up_mbps", "down_mbps", "latency_ms", "gflops")  # Fields with a value for each client.


@dataclass(frozen=True, kw_only=True)
class Network:
    """The table [network] of a configuration: links and speeds of simulated clients.

    Bandwidths, latency and speed are a number for all clients, a list with a number for each, or
    a distribution from which the run's seed draws one for each client: "uniform(LOW, HIGH)" or
    "lognormal(MEDIAN, SIGMA)".

    >>> from barter.engines.network import Network
    >>> Network.preset("mobile", {"dropout": 0.3}).dropout
    0.3
    """

    up_mbps: ByClient | None = None  # clients' upload bandwidth in Mbit/s; none: no simulation
    down_mbps: ByClient | None = None  # clients' download bandwidth in Mbit/s; none: as upload
    latency_ms: Latency = 20.0  # time of a message from one end of the link to the other
    # clients' sustained computing speed in billions of floating-point operations per second
    gflops: ByClient = 1000.0
    server_gflops: Positive = 10000.0  # the server's sustained computing speed
    # probability that a client drops out during a round; it is back in the next one
    dropout: Probability = 0.0
    # slow clients: wait for all answers, fail those that take longer than the deadline, or take the
    # first answers only
    policy: SlowPolicy = "wait"
    deadline: Positive | None = None  # simulated seconds that a client has for one call
    # clients that are asked, as a multiple of the answers that are taken
    over_select: Annotated[float, Range(gt=1)] = 1.3

    # Preset name -> fields; docs/time.md has the sources.
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "hospital": {
            "up_mbps": 100.0,
            "down_mbps": 100.0,
            "latency_ms": 20.0,
            "gflops": 5000.0,
        },
        "broadband": {
            "up_mbps": "lognormal(50, 0.7)",
            "down_mbps": "lognormal(100, 0.7)",
            "latency_ms": 10.0,
            "gflops": "lognormal(100, 0.5)",
            "dropout": 0.05,
        },
        "mobile": {
            "up_mbps": "lognormal(12, 0.8)",
            "down_mbps": "lognormal(60, 0.8)",
            "latency_ms": "lognormal(27, 0.4)",
            "gflops": "lognormal(20, 0.6)",
            "dropout": 0.1,
        },
    }

    def __post_init__(self) -> None:
        check_fields(self, "network.")
        others = [field for field in fields(self) if getattr(self, field.name) != field.default]
        if not self.enabled and others:
            raise ConfigError(
                f"network.{others[0].name}: network.up_mbps is missing, the clients' upload "
                f"bandwidth in Mbit/s; give it, or network.preset={'|'.join(self.presets)}"
            )
        for name in BY_CLIENT:
            self._require_drawable(name)
        if self.policy == "deadline" and self.deadline is None:
            raise ConfigError("network.policy='deadline': set network.deadline, in seconds")
        if self.policy != "deadline" and self.deadline is not None:
            raise ConfigError(
                f"network.deadline={self.deadline:g}: it belongs to network.policy=deadline, and "
                f"network.policy is {self.policy}"
            )

    def _require_drawable(self, name: str) -> None:
        """Raise ConfigError if a field is a distribution with forbidden values."""
        value = getattr(self, name)
        if not isinstance(value, str):
            return
        kind, low, high = _parse(value)
        if kind == "uniform" and low > high:
            raise ConfigError(f"network.{name}={value!r}: LOW is above HIGH")
        if not low and name != "latency_ms":
            raise ConfigError(f"network.{name}={value!r}: its values must be above 0")

    @property
    def enabled(self) -> bool:
        """Return whether a network is simulated."""
        return self.up_mbps is not None

    @classmethod
    def preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Network:
        """Return the network of a preset.

        Args:
            name: A key of `presets`.
            overrides: Fields that replace those of the preset.

        Raises:
            ConfigError: If there is no such preset or a field is invalid.
        """
        if name not in cls.presets:
            raise ConfigError(
                f"network.preset={name!r}: there is no such preset; {did_you_mean(name, cls.presets)}"
            )
        return build_dataclass(cls, {**cls.presets[name], **(overrides or {})}, "network.")

    def require(self, clients: int, min_clients: int | None) -> None:
        """Raise if the network does not suit a run.

        Args:
            clients: The run's number of clients.
            min_clients: The number of clients that must answer a call; None for all.

        Raises:
            ConfigError: A list does not have one value for each client, or dropout or
                over-selection can lose clients although all must answer.
        """
        for name in BY_CLIENT:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != clients:
                raise ConfigError(
                    f"network.{name} lists {len(value)} values, and there are {clients} clients"
                )
        if min_clients is None and (self.dropout or self.policy == "over-select"):
            loss = f"dropout={self.dropout:g}" if self.dropout else f"policy={self.policy!r}"
            raise ConfigError(
                f"network.{loss}: some clients will not answer; set min_clients to the number that "
                f"must, of {clients}"
            )

    def links(self, clients: int, seed: int) -> list[Link]:
        """Return each client's link and speed, from 0 on, as the run's seed draws them."""
        down = self.up_mbps if self.down_mbps is None else self.down_mbps
        up_rates = _values(self.up_mbps, "up_mbps", clients, seed)
        down_rates = _values(down, "down_mbps", clients, seed)
        latencies = _values(self.latency_ms, "latency_ms", clients, seed)
        speeds = _values(self.gflops, "gflops", clients, seed)
        return [
            Link(
                up=up_rates[k] * MEGABIT,
                down=down_rates[k] * MEGABIT,
                latency=latencies[k] / 1000,
                speed=speeds[k] * GIGA,
            )
            for k in range(clients)
        ]


def _parse(distribution: str) -> tuple[str, float, float]:
    """Return a distribution's kind, "uniform" or "lognormal", and its two numbers."""
    found = DRAW.fullmatch(distribution)
    assert found is not None
    return found[1], float(found[2]), float(found[3])


def _values(value: object, name: str, clients: int, seed: int) -> list[float]:
    """Return the number of each client: the same one, those of a list, or drawn ones.

    A client's draw depends on seed, name and its id alone.
    """
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        assert isinstance(value, float)
        return [value] * clients
    kind, first, second = _parse(value)
    values = []
    for k in range(clients):
        draw = _stream(seed, name, k).random()
        if kind == "uniform":
            values.append(first + (second - first) * draw)
        else:
            # The quantile of 0 is minus infinity.
            deviation = NormalDist().inv_cdf(max(draw, 1e-12))
            values.append(first * math.exp(second * deviation))
    return values


def _stream(seed: int, *path: object) -> random.Random:
    """Return a random stream of the network, which no other part of a run draws from."""
    return random.Random(seeds.stream_seed(seed, "network", *path))


@dataclass(frozen=True)
class Link:
    """A client's link to the server, and its speed."""

    up: float  # Bytes per second.
    down: float  # Bytes per second.
    latency: float  # Seconds.
    speed: float  # Floating-point operations per second.

    def seconds(self, work: CallWork) -> float:
        """Return the seconds from the server's message until the client's answer arrives."""
        transfer = work.down / self.down + work.up / self.up
        return 2 * self.latency + transfer + work.flops / self.speed


@dataclass(frozen=True)
class CallWork:
    """A call's bytes in both directions, and the operations that the client computed."""

    down: int
    flops: int
    up: int


@dataclass
class ClockReading:
    """Simulated times and work since the last reading."""

    seconds: dict[str, float]  # Method, "server" or "round" -> seconds.
    by_client: dict[int, float]  # Client -> seconds of its calls.
    flops: dict[int, int]  # Client -> operations.
    server_flops: int


class Clock:
    """Simulated time of a run, and the clients that the simulated network loses.

    Args:
        network: The settings.
        clients: The number of clients.
        seed: The run's seed.
        methods: The remote methods of the algorithm; the last one is a round's last call.
        min_clients: The number of clients that must answer a call; None for all that are asked.
    """

    def __init__(
        self,
        network: Network,
        clients: int,
        *,
        seed: int,
        methods: Sequence[str],
        min_clients: int | None,
    ) -> None:
        self.network = network
        self.links = network.links(clients, seed)
        self.seed = seed
        self.methods = list(methods)
        self.min_clients = min_clients
        self.round = 0
        # Of the current round: calls by client, why a client is out of it, clients whose answers
        # were among the first, and clients that stay although they were to drop out.
        self._calls: Counter[int] = Counter()
        self._out: dict[int, str] = {}
        self._admitted: set[int] = set()
        self._spared: set[int] = set()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._by_client: defaultdict[int, float] = defaultdict(float)
        self._flops: Counter[int] = Counter()
        self._server_flops = 0

    def begin_call(self, method: str, clients: Collection[int], round: int) -> dict[int, Exception]:
        """Begin a call; return the clients that it cannot reach, and why.

        They have dropped out in this call, or earlier in the round, by dropout or by
        over-selection. They stay out until the next round.

        Args:
            method: The remote method.
            clients: The clients that are asked.
            round: The current round; with a new one, all clients are back.
        """
        if round != self.round:
            self.round = round
            self._calls.clear()
            self._out.clear()
            self._admitted.clear()
            self._spared.clear()
        self._drop_out(method, clients)
        return {k: ConnectionError(self._out[k]) for k in sorted(clients) if k in self._out}

    def _drop_out(self, method: str, clients: Collection[int]) -> None:
        """Take the clients out of the round that drop out in this call.

        At least `min_clients` always remain, as a server waits for enough clients.
        Otherwise a run could not go on, since a resumed round draws the same numbers.
        """
        reachable = [k for k in clients if k not in self._out]
        self._calls.update(reachable)
        if not self.network.dropout:
            return
        leaving: list[tuple[float, int]] = []
        for k in reachable:
            stream = _stream(self.seed, "dropout", self.round, k)
            draw = stream.random()
            # Any call of the round is equally likely to be the last.
            last_call = stream.randrange(max(1, len(self.methods)))
            now = self._calls[k] > last_call or self.methods[-1:] == [method]
            if draw < self.network.dropout and now and k not in self._spared:
                leaving.append((draw, k))
        leaving.sort()
        spare = len(reachable) - self._needed(len(clients))
        for _, k in leaving[: max(0, spare)]:
            self._out[k] = f"it dropped out of the simulated network in round {self.round}"
        self._spared |= {k for _, k in leaving[max(0, spare) :]}

    def _needed(self, asked: int) -> int:
        return asked if self.min_clients is None else min(self.min_clients, asked)

    def end_call(
        self, method: str, asked: int, work: Mapping[int, CallWork], answered: Iterable[int]
    ) -> dict[int, Exception]:
        """Add the time of a call; return clients whose answers came too late, and why.

        The call lasts until the last answer that is waited for: with policy "deadline" no longer
        than the deadline, with "over-select" until the last answer that is taken. Late clients of
        "over-select" are out of the round; those of "deadline" can be called again.

        Args:
            method: The remote method.
            asked: The number of clients that were asked, with those that could not be reached.
            work: The work of every client that was reached.
            answered: The clients that answered, all of them in `work`.
        """
        seconds = {k: self.links[k].seconds(work[k]) for k in sorted(work)}
        answers = sorted(answered, key=lambda k: (seconds[k], k))
        late: dict[int, Exception] = {}
        deadline = self.network.deadline
        lasted = max(seconds.values(), default=0.0)
        if self.network.policy == "deadline" and deadline is not None:
            for k in answers:
                if seconds[k] > deadline:
                    late[k] = TimeoutError(
                        f"its answer took {seconds[k]:.1f} s of simulated time, and "
                        f"network.deadline is {deadline:g} s"
                    )
            lasted = min(lasted, deadline)
        elif self.network.policy == "over-select":
            newcomers = [k for k in answers if k not in self._admitted]
            waiting = asked - sum(k in self._admitted for k in work)
            wanted = max(round(waiting / self.network.over_select), 1)
            wanted = max(wanted, self._needed(asked) - (len(answers) - len(newcomers)))
            for k in newcomers[wanted:]:
                self._out[k] = f"its answer was not among the first {wanted} of {waiting}"
                late[k] = TimeoutError(self._out[k])
            taken = [k for k in answers if k not in late]
            self._admitted |= set(taken)
            if late:
                lasted = max(seconds[k] for k in taken)
        for k in sorted(work):
            self._by_client[k] += min(seconds[k], lasted)
            self._flops[k] += work[k].flops
        self._seconds[method] += lasted
        return late

    def add_server_work(self, flops: int) -> None:
        """Add floating-point operations of the server, during which clients wait."""
        self._server_flops += flops

    def take_reading(self) -> ClockReading:
        """Return times and work since the last reading, and start again from zero.

        "round" is the sum of all methods' seconds and the server's: calls do not overlap.
        """
        seconds = dict(self._seconds)
        seconds["server"] = self._server_flops / (self.network.server_gflops * GIGA)
        seconds["round"] = sum(seconds.values())
        reading = ClockReading(
            seconds, dict(self._by_client), dict(self._flops), self._server_flops
        )
        self._seconds.clear()
        self._by_client.clear()
        self._flops.clear()
        self._server_flops = 0
        return reading
