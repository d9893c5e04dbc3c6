"""Aggregation of model states: weighted mean, median and trimmed mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from barter.core.clients import Replies
from barter.core.payload import State

__all__ = ["Average", "average", "median", "trimmed"]

Average: TypeAlias = Literal["mean", "median", "trimmed"]
TRIM = 5  # The trimmed mean drops one in TRIM clients at each end.


def average(states: Replies[State], *, alike: bool = False, by: Average = "mean") -> State:
    """Aggregate the clients' states entry by entry.

    Integer entries, such as the step counters of batch normalisation, are averaged and rounded.

    Args:
        states: One state per client, all with the same names and shapes.
        alike: Give all clients the same weight in the mean.
        by: "mean" weights clients by their numbers of examples (w = sum n_k / n w_k). "median" and
            "trimmed" are robust: a few clients cannot move the result far. They ignore the numbers
            of examples.

    Returns:
        The aggregated state, with the data types of the first client's.
    """
    first = next(iter(states.values()))
    if by == "mean":
        counts = dict.fromkeys(states, 1) if alike else states.num_examples
        weights = {k: counts[k] / sum(counts.values()) for k in states}
        means = {
            name: torch.as_tensor(sum(weights[k] * w[name].double() for k, w in states.items()))
            for name in first
        }
    else:
        robust = ROBUST[by]
        means = {
            name: robust(torch.stack([w[name].double() for w in states.values()])) for name in first
        }
    result: State = {}
    for name, mean in means.items():
        like = first[name]
        result[name] = (mean if like.is_floating_point() else mean.round()).to(like.dtype)
    return result


def median(rows: Tensor) -> Tensor:
    """Return the median of each entry over all rows (Yin et al., ICML 2018).

    For an even number of rows this is the mean of the two middle values.
    """
    ordered = rows.sort(0).values
    n = len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed(rows: Tensor) -> Tensor:
    """Return the trimmed mean of each entry over all rows (Yin et al., ICML 2018).

    The lowest and the highest fifth of the values are left out; of three or more rows at least one
    value at each end.
    """
    cut = max(len(rows) // TRIM, len(rows) > 2)
    return rows.sort(0).values[cut : len(rows) - cut].mean(0)


ROBUST: dict[str, Callable[[Tensor], Tensor]] = {"median": median, "trimmed": trimmed}
