"""Partitions: rules that split samples over clients; `PARTITIONS` lists them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from barter.core.errors import ConfigError
from barter.core.params import Count, Positive, check_fields

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
MAX_DRAWS = 20  # draws of a Dirichlet partition before it gives up


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Base class of rules that give every sample to at most one client."""

    summary: ClassVar[str]
    min_samples: Count = 2  # minimum number of samples per client

    def __post_init__(self) -> None:
        check_fields(self, "partition.")

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        """Return each client's sample indices, in any order; subclasses implement this.

        A sample is given to one client or to none. Callers use `__call__`, which checks the result.

        Args:
            labels: The class of every sample.
            domains: The domain of every sample.
            clients: The number of clients.
            rng: The source of randomness.
        """
        raise NotImplementedError

    def __call__(self, labels: Indices, domains: Indices, clients: int, seed: int) -> list[Indices]:
        """Return the sorted indices of each client's samples.

        The same seed gives the same partition.

        Args:
            labels: The class of every sample.
            domains: The domain of every sample.
            clients: The number of clients.
            seed: The seed of the partition.

        Raises:
            ConfigError: If a client would get fewer than `min_samples` samples, or the rule returns
                invalid indices.
        """
        if clients * self.min_samples > len(labels):
            raise ConfigError(
                f"{clients} clients with at least {self.min_samples} samples each need "
                f"{clients * self.min_samples} samples, there are {len(labels)}: use fewer clients "
                "or a smaller partition.min_samples"
            )
        parts = self.split(labels, domains, clients, np.random.default_rng(seed))
        self._require_sound(parts, clients, len(labels))
        smallest = min(len(part) for part in parts)
        if smallest < self.min_samples:
            raise ConfigError(
                f"{self}: the smallest of {clients} clients would get {smallest} samples, "
                f"{self.min_samples} are required: lower partition.min_samples or use fewer clients"
            )
        return [np.sort(part) for part in parts]

    def _require_sound(self, parts: Sequence[Indices], clients: int, samples: int) -> None:
        """Raise ConfigError unless indices are valid and no sample occurs twice."""
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
            raise ConfigError(f"{self}: sample {values[counts > 1][0]} is assigned more than once")


def _shuffled_by_class(labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Return the shuffled indices of each class from 0 to the largest label."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(int(labels.max()) + 1)]


def _cut(indices: Indices, shares: np.ndarray[Any, Any]) -> list[Indices]:
    """Cut indices into consecutive pieces whose sizes are proportional to the shares.

    Ends are rounded, and every index is in one piece. If all shares are 0, the last piece has all.
    """
    total = shares.sum()
    if total > 0:
        ends = (np.cumsum(shares)[:-1] / total * len(indices)).round().astype(int)
    else:
        ends = np.zeros(len(shares) - 1, int)
    return [part.astype(np.int64) for part in np.split(indices, ends)]


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """All samples shuffled and split into equal parts."""

    summary = "no skew: samples are shuffled and split into equal parts"

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        shuffled = rng.permutation(len(labels))
        return [part.astype(np.int64) for part in np.array_split(shuffled, clients)]


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
        for _ in range(MAX_DRAWS):
            parts = split(labels, clients, rng)
            if not best or min(map(len, parts)) > min(map(len, best)):
                best = parts
            if min(map(len, best)) >= self.min_samples:
                return best
        raise ConfigError(
            f"dirichlet(alpha={self.alpha:g}) over {clients} clients: the smallest client got at "
            f"most {min(map(len, best))} samples in {MAX_DRAWS} draws, {self.min_samples} are required; "
            "use a larger partition.alpha, fewer clients, a smaller partition.min_samples, or "
            "partition.balanced=true"
        )

    def _by_class(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Split each class over the clients by its own Dirichlet draw."""
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for members in _shuffled_by_class(labels, rng):
            shares = _dirichlet(self.alpha, clients, rng)
            for k, piece in enumerate(_cut(members, shares)):
                pieces[k].append(piece)
        return [np.concatenate(own) for own in pieces]

    def _balanced(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Fill an equal quota for each client by its own Dirichlet draw over classes.

        Samples come from those that remain of every class; where a class is used up, others take
        its place by the same draw. Quotas differ by one sample at most.
        """
        stacks = _shuffled_by_class(labels, rng)
        left = np.array([len(stack) for stack in stacks])
        parts: list[Indices] = []
        for k in range(clients):
            quota = (k + 1) * len(labels) // clients - k * len(labels) // clients
            mix = _dirichlet(self.alpha, len(stacks), rng)
            taken = np.zeros(len(stacks), dtype=int)
            while taken.sum() < quota:
                available = left - taken > 0
                weights = np.where(available, np.maximum(mix, 1e-12), 0)
                more = rng.multinomial(quota - taken.sum(), weights / weights.sum())
                taken += np.minimum(more, left - taken)
            starts = np.array([len(stack) for stack in stacks]) - left
            pieces = [stack[s : s + n] for stack, s, n in zip(stacks, starts, taken, strict=True)]
            parts.append(np.concatenate(pieces).astype(np.int64))
            left = left - taken
        return parts


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw from a symmetric Dirichlet distribution; the result sums to 1.

    If `alpha` is so small that the draw underflows, one random entry is 1.
    """
    draw = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(draw).all() and draw.sum() > 0:
        return draw
    one_hot: np.ndarray[Any, Any] = np.eye(size)[rng.integers(size)]
    return one_hot


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """A fixed number of classes per client."""

    summary = "label skew: every client holds a fixed number of classes"

    per_client: Count = 2  # number of classes per client

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
            # The classes assigned least often so far come first; ties are broken at random.
            rarest = np.lexsort((rng.random(classes), shares.sum(0)))
            shares[k, rarest[: self.per_client]] = 1
        return _deal(labels, shares, rng)


def _deal(labels: Indices, shares: np.ndarray[Any, Any], rng: np.random.Generator) -> list[Indices]:
    """Split each class over the clients in proportion to their shares of it.

    Args:
        labels: The class of every sample.
        shares: Shares (clients, classes). A class that no client has a share of is left out.
        rng: Source of random numbers.

    Returns:
        The indices of each client's samples.
    """
    cuts = []
    for c, members in enumerate(_shuffled_by_class(labels, rng)):
        if shares[:, c].sum() > 0:
            cuts.append(_cut(members, shares[:, c]))
    empty = np.zeros(0, dtype=np.int64)
    return [np.concatenate([empty, *(cut[k] for cut in cuts)]) for k in range(len(shares))]


@dataclass(frozen=True, kw_only=True)
class Dominant(Partition):
    """One dominant class and two others per client (the settings of FedFree)."""

    summary = "label skew: one dominant class and two others, 8:1:1 or 6:2:2"

    ratio: Literal["8:1:1", "6:2:2"] = "8:1:1"  # shares of a client's three classes

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        classes = int(labels.max()) + 1
        if classes < 3:
            raise ConfigError(f"partition 'dominant' needs three classes, there are {classes}")
        mix = [int(part) / 10 for part in self.ratio.split(":")]
        stacks = _shuffled_by_class(labels, rng)
        deck = rng.permutation(classes)
        wanted = np.zeros((clients, classes))
        for k in range(clients):
            for offset, share in enumerate(mix):
                wanted[k, deck[(k + offset) % classes]] += share
        # All clients have the same size, limited by the scarcest class, so that the ratio is exact.
        demand = wanted.sum(0)
        size = min(len(stacks[c]) / demand[c] for c in range(classes) if demand[c])
        counts = np.floor(wanted * size + 1e-9).astype(int)
        ends = counts.cumsum(0)
        starts = ends - counts
        parts = []
        for k in range(clients):
            pieces = [stacks[c][starts[k, c] : ends[k, c]] for c in range(classes)]
            parts.append(np.concatenate(pieces).astype(np.int64))
        return parts


@dataclass(frozen=True, kw_only=True)
class Quantity(Partition):
    """Unequal numbers of samples with the same class distribution."""

    summary = "quantity skew: sizes from Dirichlet(alpha), the same class distribution"

    alpha: Positive = 0.5  # α: concentration of the clients' sizes

    def split(
        self, labels: Indices, domains: Indices, clients: int, rng: np.random.Generator
    ) -> list[Indices]:
        spare = len(labels) - clients * self.min_samples
        extra = np.floor(_dirichlet(self.alpha, clients, rng) * spare).astype(int)
        sizes = self.min_samples + extra
        sizes[-1] += len(labels) - sizes.sum()
        shuffled = rng.permutation(len(labels))
        return [part.astype(np.int64) for part in np.split(shuffled, sizes.cumsum()[:-1])]


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """Feature skew: every client has one domain."""

    summary = (
        "feature skew: every client has one domain; domains are split evenly if there are more "
        "clients"
    )

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
                f"partition 'domains': {clients} clients for {count} domains; use at least {count} "
                "clients"
            )
        parts: list[Indices] = [np.zeros(0, dtype=np.int64)] * clients
        for d in range(count):
            owners = range(d, clients, count)
            shuffled = rng.permutation(np.flatnonzero(domains == d))
            pieces = np.array_split(shuffled, len(owners))
            for k, piece in zip(owners, pieces, strict=True):
                parts[k] = piece.astype(np.int64)
        return parts


@dataclass(frozen=True, kw_only=True)
class Listed(Partition):
    """Lists of indices, one per client, passed from Python."""

    summary = "lists of indices from Python"

    lists: str = ""  # hash of the lists

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Listed:
        """Return the partition that gives client k the samples of list k, at least one.

        Indices are into the training images; they are checked when the partition is called. A
        configuration stores a hash of the lists alone: a partition read from it cannot split.
        """
        parts = [np.asarray(part, dtype=None if len(part) else np.int64) for part in lists]
        text = "/".join(",".join(map(str, part.tolist())) for part in parts)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        listed = cls(min_samples=1, lists=digest)
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
