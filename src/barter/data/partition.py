"""How samples are split over clients: from labels to lists of indices. The registry is a dict one can read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from barter.core.errors import ConfigError
from barter.core.params import Count, Positive, check

__all__ = [
    "PARTITIONS",
    "Classes",
    "Dirichlet",
    "Domains",
    "Dominant",
    "Iid",
    "Listed",
    "Partition",
    "Quantity",
]

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A rule that gives every sample to at most one client."""

    summary: ClassVar[str]
    min_samples: Count = 2  # the least a client may get

    def __post_init__(self) -> None:
        check(self, "partition.")

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        """The indices of each client."""
        raise NotImplementedError

    def __call__(self, labels: Indices, domains: Indices, clients: int, seed: int) -> list[Indices]:
        """The indices of each client, sorted; the same for the same seed."""
        if clients * self.min_samples > len(labels):
            raise ConfigError(
                f"{clients} clients with at least {self.min_samples} samples each need {clients * self.min_samples} "
                f"samples, there are {len(labels)}: ask for fewer clients or a smaller partition.min_samples"
            )
        parts = self.split(labels, domains, clients, np.random.default_rng(seed))
        self._require_sound(parts, clients, len(labels))
        smallest = min(len(part) for part in parts)
        if smallest < self.min_samples:
            raise ConfigError(
                f"{self}: the smallest of {clients} clients would get {smallest} samples, {self.min_samples} are "
                "asked for: lower partition.min_samples or take fewer clients"
            )
        return [np.sort(part) for part in parts]

    def _require_sound(self, parts: Sequence[Indices], clients: int, samples: int) -> None:
        if len(parts) != clients:
            raise ConfigError(
                f"{self}: there are {len(parts)} lists of indices for {clients} clients"
            )
        every = np.concatenate(parts)
        if not np.issubdtype(every.dtype, np.integer) or (
            len(every) and not 0 <= every.min() <= every.max() < samples
        ):
            raise ConfigError(f"{self}: indices must be whole numbers from 0 to {samples - 1}")
        values, counts = np.unique(every, return_counts=True)
        if len(values) < len(every):
            raise ConfigError(
                f"{self}: sample {values[counts > 1][0]} is given away more than once"
            )


def _shuffled_by_class(labels: Indices, rng: np.random.Generator) -> list[Indices]:
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(int(labels.max()) + 1)]


def _cut(indices: Indices, shares: np.ndarray[Any, Any]) -> list[Indices]:
    """The indices in consecutive pieces, in proportion to the shares."""
    total = shares.sum()
    ends = (
        (np.cumsum(shares)[:-1] / total * len(indices)).round().astype(int)
        if total > 0
        else np.zeros(len(shares) - 1, int)
    )
    return [part.astype(np.int64) for part in np.split(indices, ends)]


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Equal shares of a shuffled whole."""

    summary = "equal shares of the shuffled whole"

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        return [
            part.astype(np.int64) for part in np.array_split(rng.permutation(len(labels)), clients)
        ]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Label skew drawn from a Dirichlet distribution (Hsu et al. 2019)."""

    summary = "label skew: Dirichlet(alpha), a small alpha gives each client few classes"

    alpha: Positive = 0.1  # α: concentration; 0.1 is strongly skewed, 1.0 mildly, 100 almost not
    balanced: bool = False  # whether every client gets the same number of samples

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        split = self._balanced if self.balanced else self._by_class
        best: list[Indices] = []
        for _ in range(TRIES):
            parts = split(labels, clients, rng)
            if not best or min(map(len, parts)) > min(map(len, best)):
                best = parts
            if min(map(len, best)) >= self.min_samples:
                return best
        raise ConfigError(
            f"dirichlet(alpha={self.alpha:g}) over {clients} clients: the smallest client got at "
            f"most {min(map(len, best))} samples in {TRIES} draws, {self.min_samples} are asked for; "
            "take a larger partition.alpha, fewer clients, a smaller partition.min_samples, or partition.balanced=true"
        )

    def _by_class(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Each class is dealt out by a draw of its own (Dirichlet over clients)."""
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for members in _shuffled_by_class(labels, rng):
            for mine, piece in zip(
                pieces, _cut(members, _dirichlet(self.alpha, clients, rng)), strict=True
            ):
                mine.append(piece)
        return [np.concatenate(mine) for mine in pieces]

    def _balanced(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Each client fills an equal quota by a class mix of its own, from what is left of every class."""
        stacks = _shuffled_by_class(labels, rng)
        left = np.array([len(stack) for stack in stacks])
        parts: list[Indices] = []
        for k in range(clients):
            quota = (k + 1) * len(labels) // clients - k * len(labels) // clients
            mix, taken = _dirichlet(self.alpha, len(stacks), rng), np.zeros(len(stacks), dtype=int)
            while taken.sum() < quota:
                open_ = left - taken > 0
                weights = np.where(open_, np.maximum(mix, 1e-12), 0)
                more = rng.multinomial(quota - taken.sum(), weights / weights.sum())
                taken += np.minimum(more, left - taken)
            starts = np.array([len(stack) for stack in stacks]) - left
            pieces = [stack[s : s + n] for stack, s, n in zip(stacks, starts, taken, strict=True)]
            parts.append(np.concatenate(pieces).astype(np.int64))
            left = left - taken
        return parts


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A draw that stays a distribution where alpha is so small that all its gammas are zero."""
    draw = rng.dirichlet(np.full(size, alpha))
    return draw if np.isfinite(draw).all() and draw.sum() > 0 else np.eye(size)[rng.integers(size)]


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """A fixed number of classes per client."""

    summary = "label skew: every client holds so many classes"

    per_client: Count = 2  # classes that each client holds

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        classes = int(labels.max()) + 1
        if self.per_client > classes:
            raise ConfigError(
                f"partition.per_client={self.per_client}: there are only {classes} classes"
            )
        shares = np.zeros((clients, classes))
        for k in range(clients):
            # The classes that were handed out least often so far, chance deciding among equals.
            rarest = np.lexsort((rng.random(classes), shares.sum(0)))
            shares[k, rarest[: self.per_client]] = 1
        return _deal(labels, shares, rng)


def _deal(labels: Indices, shares: np.ndarray[Any, Any], rng: np.random.Generator) -> list[Indices]:
    """Each class cut up by its column of a client-by-class table of shares; a class nobody wants is left out."""
    stacks = _shuffled_by_class(labels, rng)
    cuts = [
        _cut(stack, shares[:, c]) if shares[:, c].sum() > 0 else None
        for c, stack in enumerate(stacks)
    ]
    nothing = np.zeros(0, dtype=np.int64)
    return [
        np.concatenate([nothing, *(cut[k] for cut in cuts if cut is not None)])
        for k in range(len(shares))
    ]


@dataclass(frozen=True, kw_only=True)
class Dominant(Partition):
    """One class that dominates, and two others (FedFree's settings)."""

    summary = "label skew: one dominant class and two others, 8:1:1 or 6:2:2"

    ratio: Literal["8:1:1", "6:2:2"] = "8:1:1"  # a client's shares of its three classes

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        classes = int(labels.max()) + 1
        if classes < 3:
            raise ConfigError(f"partition 'dominant' needs three classes, there are {classes}")
        mix = [int(part) / 10 for part in self.ratio.split(":")]
        stacks, deck = _shuffled_by_class(labels, rng), rng.permutation(classes)
        wanted = np.zeros((clients, classes))
        for k in range(clients):
            for share, place in zip(mix, (k, k + 1, k + 2), strict=True):
                wanted[k, deck[place % classes]] += share
        # All clients are of one size, as large as the scarcest class allows, so that the ratio is met exactly.
        demand = wanted.sum(0)
        size = min(len(stacks[c]) / demand[c] for c in range(classes) if demand[c])
        counts = np.floor(wanted * size + 1e-9).astype(int)
        ends = counts.cumsum(0)
        return [
            np.concatenate(
                [stacks[c][ends[k, c] - counts[k, c] : ends[k, c]] for c in range(classes)]
            ).astype(np.int64)
            for k in range(clients)
        ]


@dataclass(frozen=True, kw_only=True)
class Quantity(Partition):
    """Equal class mixes, unequal sizes."""

    summary = "quantity skew: sizes from Dirichlet(alpha), class mixes alike"

    alpha: Positive = 0.5  # α: concentration of the clients' sizes

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        spare = len(labels) - clients * self.min_samples
        sizes = self.min_samples + np.floor(_dirichlet(self.alpha, clients, rng) * spare).astype(
            int
        )
        sizes[-1] += len(labels) - sizes.sum()
        return [
            part.astype(np.int64)
            for part in np.split(rng.permutation(len(labels)), sizes.cumsum()[:-1])
        ]


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """Feature skew: every client sees one domain."""

    summary = "feature skew: every client has one domain, shared evenly where there are more clients than domains"

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        count = int(domains.max()) + 1
        if count == 1:
            raise ConfigError(
                "partition 'domains': this data set has one domain only; use data.source=domains:PATH"
            )
        if clients < count:
            raise ConfigError(
                f"partition 'domains': {clients} clients for {count} domains; take at least {count} clients"
            )
        parts: list[Indices] = [np.zeros(0, dtype=np.int64)] * clients
        for d in range(count):
            mine = range(d, clients, count)
            shares = np.array_split(rng.permutation(np.flatnonzero(domains == d)), len(mine))
            for k, share in zip(mine, shares, strict=True):
                parts[k] = share.astype(np.int64)
        return parts


@dataclass(frozen=True, kw_only=True)
class Listed(Partition):
    """Lists of indices, one for each client, from Python."""

    summary = "lists of indices from Python"

    lists: str = ""  # a short name for exactly these lists

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Listed:
        """The partition into these lists."""
        parts = [np.asarray(part, dtype=None if len(part) else np.int64) for part in lists]
        whole = "/".join(",".join(map(str, part.tolist())) for part in parts)
        listed = cls(
            min_samples=1, lists=hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        )
        object.__setattr__(listed, "parts", parts)
        return listed

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        parts: list[Indices] | None = getattr(self, "parts", None)
        if parts is None:
            raise ConfigError(
                "this run's lists of indices were given in Python: resume it there, with resume=True"
            )
        return parts


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "classes": Classes,
    "dominant": Dominant,
    "quantity": Quantity,
    "domains": Domains,
}
