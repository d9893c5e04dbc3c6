"""Averages of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from barter.core.clients import Replies
from barter.core.payload import State

__all__ = ["Average", "average", "median", "trimmed"]

Average: TypeAlias = Literal["mean", "median", "trimmed"]
TRIM = 5  # of so many clients one is left out at each end


def average(states: Replies[State], *, alike: bool = False, by: Average = "mean") -> State:
    """The mean of the clients' states, weighted by their numbers of examples (w = sum n_k / n w_k), or all alike; or
    what a few of them cannot move far, in which all count alike.

    Integer entries, such as the step counters of batch normalisation, are averaged and rounded.
    """
    names = next(iter(states.values()))
    if by == "mean":
        counts = dict.fromkeys(states, 1) if alike else states.num_examples
        weights = {k: counts[k] / sum(counts.values()) for k in states}
        means = {
            at: torch.as_tensor(sum(weights[k] * w[at].double() for k, w in states.items()))
            for at in names
        }
    else:
        means = {
            at: ROBUST[by](torch.stack([w[at].double() for w in states.values()])) for at in names
        }
    return {
        at: (x if names[at].is_floating_point() else x.round()).to(names[at].dtype)
        for at, x in means.items()
    }


def median(rows: Tensor) -> Tensor:
    """Of each entry the one in the middle of all rows', or the mean of the two there (Yin et al., ICML 2018)."""
    ordered, n = rows.sort(0).values, len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed(rows: Tensor) -> Tensor:
    """Of each entry the mean without the fifth of the rows that has the least and the fifth that has the largest, one
    at least of three or more (Yin et al., ICML 2018)."""
    cut = max(len(rows) // TRIM, len(rows) > 2)
    return rows.sort(0).values[cut : len(rows) - cut].mean(0)


ROBUST: dict[str, Callable[[Tensor], Tensor]] = {"median": median, "trimmed": trimmed}
