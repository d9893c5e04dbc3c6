"""Aggregation of model states: weighted mean, median and trimmed mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from barter.core import robust
from barter.core.clients import Replies
from barter.core.payload import State

__all__ = ["Average", "average", "entrywise_median", "entrywise_trimmed_mean", "is_statistic"]

Average: TypeAlias = Literal["mean", "median", "trimmed"]
TRIM = 5  # The trimmed mean drops one in TRIM clients at each end.


def is_statistic(name: str) -> bool:
    """Return whether a tensor's name is that of a batch-norm statistic or counter."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def average(
    states: Replies[State],
    *,
    alike: bool = False,
    by: Average = "mean",
    since: Mapping[str, Tensor] | None = None,
) -> State:
    """Aggregate the clients' states: mean, median or trimmed mean of each entry.

    Integer entries, such as the step counters of batch normalisation, are averaged and rounded. The
    run's defence (`robust`) replaces the mean, not the median or the trimmed mean. Defences other
    than "cosine" give all clients the same weight.

    Args:
        states: One state per client, at least one, all with the same names and shapes.
        alike: Give all clients the same weight in the mean.
        by: "mean" weights clients by their numbers of examples (w = sum n_k / n w_k). "median" and
            "trimmed" are robust: a few clients cannot move the result far. They ignore the numbers
            of examples.
        since: The weights that all clients started from, for the run's defence; None if they
            started from different ones. Without a defence it has no effect.

    Returns:
        The aggregated state, with the data types of the first client's.
    """
    first = next(iter(states.values()))
    if by == "mean" and robust.active().defends("states"):
        means = _defended(states, since, alike=alike)
    elif by == "mean":
        counts = dict.fromkeys(states, 1) if alike else states.num_examples
        weights = {k: counts[k] / sum(counts.values()) for k in states}
        means = {
            name: torch.as_tensor(sum(weights[k] * w[name].double() for k, w in states.items()))
            for name in first
        }
    else:
        rule = ROBUST[by]
        means = {
            name: rule(torch.stack([w[name].double() for w in states.values()])) for name in first
        }
    result: State = {}
    for name, mean in means.items():
        like = first[name]
        result[name] = (mean if like.is_floating_point() else mean.round()).to(like.dtype)
    return result


def _defended(
    states: Replies[State], since: Mapping[str, Tensor] | None, *, alike: bool
) -> dict[str, Tensor]:
    """Aggregate the clients' states by the run's defence, in float64.

    The caller rounds and casts the result. Only parameters decide norms, distances and which
    clients are selected; batch-norm statistics, whose scale is another, follow these clients.

    Args:
        states: Each client's state, all with the same names.
        since: The state that all clients started from, with every name in `states`. None or empty
            if there is none: "clip" then measures from the clients' median, and "cosine" compares
            norms only, not directions.
        alike: Give all clients the same weight. Otherwise the rule "cosine" weights them by their
            numbers of images; the other rules always give the same weight.
    """
    names = list(next(iter(states.values())))
    rows = [torch.stack([w[name].double() for w in states.values()]) for name in names]
    decides = [not is_statistic(name) for name in names]
    starts = None if not since else [since[name].double() for name in names]
    defence = robust.active()
    weights = None
    if defence.keeps_weights("states") and not alike:
        counts = torch.tensor([float(states.num_examples[k]) for k in states]).double()
        weights = [
            counts.to(block.device).view(-1, *[1] * (block.ndim - 1)).expand(block.shape)
            for block in rows
        ]
    combined = defence.combine(rows, "states", weights, decides, starts)
    return dict(zip(names, combined, strict=True))


def entrywise_median(rows: Tensor) -> Tensor:
    """Return the median of each entry over all rows (Yin et al., ICML 2018).

    For an even number of rows this is the mean of the two middle values.
    """
    ordered = rows.sort(0).values
    n = len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def entrywise_trimmed_mean(rows: Tensor) -> Tensor:
    """Return the trimmed mean of each entry over all rows (Yin et al., ICML 2018).

    The lowest and the highest fifth of the values, rounded down, are left out; of three or more
    rows at least one value at each end, of one or two rows none.
    """
    cut = max(len(rows) // TRIM, len(rows) > 2)
    return rows.sort(0).values[cut : len(rows) - cut].mean(0)


ROBUST: dict[str, Callable[[Tensor], Tensor]] = {
    "median": entrywise_median,
    "trimmed": entrywise_trimmed_mean,
}
