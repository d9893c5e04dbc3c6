"""Averages of states."""

from __future__ import annotations

import torch

from barter.core.clients import Replies
from barter.core.payload import State

__all__ = ["average"]


def average(states: Replies[State], *, alike: bool = False) -> State:
    """The mean of the clients' states, weighted by their numbers of examples (w = sum n_k / n w_k), or all alike.

    Integer entries, such as the step counters of batch normalisation, are averaged and rounded.
    """
    counts = dict.fromkeys(states, 1) if alike else states.num_examples
    weights = {k: counts[k] / sum(counts.values()) for k in states}
    names = next(iter(states.values()))
    means = {name: sum(weights[k] * state[name].double() for k, state in states.items()) for name in names}
    return {
        name: (torch.as_tensor(mean) if names[name].is_floating_point() else torch.as_tensor(mean).round()).to(
            names[name].dtype
        )
        for name, mean in means.items()
    }
