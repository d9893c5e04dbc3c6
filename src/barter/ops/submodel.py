"""Parts of a network by width: which channels a client gets, cutting them out, and averaging what comes back.

The channels that are kept of a layer depend on its width and on nothing else of it. So layers that follow one another,
and those that write to one residual stream, agree without anybody having to look at the network's graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from barter.core import seeds
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import State

__all__ = [
    "Extraction",
    "Places",
    "budget",
    "channels",
    "combined",
    "extracted",
    "head_of",
    "places",
    "verify",
]

OTHERWISE = "use a plain or residual network, such as small-cnn or resnet18"

Extraction: TypeAlias = Literal["static", "random", "rolling"]
Places: TypeAlias = dict[
    str, tuple[Tensor, ...]
]  # for every tensor, the indices that are kept along each axis


def budget(client: int, clients: int, rho: int, sigma: int) -> float:
    """R_i = (1/2)^min(σ, ⌊ρ i / N⌋) for i = 1 .. N: the share of the width that the i-th client can afford."""
    return 0.5 ** min(sigma, rho * (client + 1) // clients)


def channels(width: int, part: int, rule: Extraction, t: int) -> Tensor:
    """Which channels of a layer are kept in round t: the first, some at random, or those of a window that rolls on."""
    if rule == "random":
        return torch.randperm(width)[:part]
    every = torch.arange(width)
    return every[:part] if rule == "static" else every.roll((t - 1) % width)[:part]


def places(
    full: Mapping[str, Tensor], part: Mapping[str, Tensor], rule: Extraction, t: int
) -> Places:
    """Where each entry of a narrower network's state stands in that of the full one.

    Tensors come layer by layer, outputs along their first axis. What enters a linear layer may be channels times
    positions; then all positions of a channel go together.
    """
    chosen: dict[tuple[int, int], Tensor] = {}

    def pick(width: int, left: int) -> Tensor:
        if width == left:
            return torch.arange(width)
        if (width, left) not in chosen:
            chosen[width, left] = channels(width, left, rule, t)
        return chosen[width, left]

    found: Places = {}
    before = (1, 1)
    for name, tensor in part.items():
        sizes = list(zip(full[name].shape, tensor.shape, strict=True))
        along = [pick(*size) for size in sizes[:1]]
        for width, left in sizes[1:]:
            positions = width // before[0]
            if (
                width != left
                and tensor.ndim == 2
                and (width, left) == (positions * before[0], positions * before[1])
            ):
                along.append(
                    (pick(*before)[:, None] * positions + torch.arange(positions)).flatten()
                )
            else:
                along.append(pick(width, left))
        found[name] = tuple(along)
        before = sizes[0] if sizes else before
    return found


def _grid(along: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The indices shaped so that together they address the block of a tensor."""
    return tuple(
        index.to(device).view([-1 if axis == other else 1 for other in range(len(along))])
        for axis, index in enumerate(along)
    )


def extracted(full: Mapping[str, Tensor], where: Places) -> State:
    """The entries of a state at these places, by themselves."""
    return {
        name: full[name][_grid(along, full[name].device)].clone() for name, along in where.items()
    }


def combined(
    full: Mapping[str, Tensor],
    parts: Mapping[int, State],
    where: Mapping[int, Places],
    weights: Mapping[int, float],
    owned: Mapping[int, Tensor] | None = None,
    head: frozenset[str] = frozenset(),
) -> State:
    """Every entry the weighted mean over the clients that hold it; what nobody holds stays as it was (Eq. 1 of DFRD).

    Of the tensors named in `head`, a client counts only in the rows of classes that it owns.
    """
    result: State = {}
    for name, old in full.items():
        total = torch.zeros(old.shape, dtype=torch.double, device=old.device)
        cover = torch.zeros_like(total)
        for k, state in parts.items():
            block = _grid(where[k][name], old.device)
            share = torch.full(state[name].shape, weights[k], dtype=torch.double, device=old.device)
            if owned is not None and name in head:
                share = share * (owned[k] > 0).to(share).view(-1, *[1] * (share.ndim - 1))
            total[block] += share * state[name]
            cover[block] += share
        mean = torch.where(cover > 0, total / cover.clamp_min(1e-300), old.double())
        result[name] = (mean if old.is_floating_point() else mean.round()).to(old.dtype)
    return result


def head_of(model: nn.Module) -> frozenset[str]:
    """The names of the tensors of the last linear layer, one row for each class."""
    linears = [at for at, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return frozenset(f"{at}.{part}" for at in linears[-1:] for part in ("weight", "bias"))


def verify(full: Classifier, part: Classifier, spec: Spec) -> None:
    """Refuse a narrower network that does not compute what the full one does when all it lacks is zero."""
    name = type(getattr(full, "body", full)).__name__
    small, large = (copy.deepcopy(model).double().eval() for model in (part, full))
    with seeds.scope(0, "verify"), torch.no_grad():
        state = {at: _redrawn(tensor) for at, tensor in large.state_dict().items()}
        where = places(state, small.state_dict(), "random", 1)
        held = {at: torch.zeros_like(tensor) for at, tensor in state.items()}
        for at, along in where.items():
            block = _grid(along, held[at].device)
            held[at][block] = state[at][block]
        try:
            small.load_state_dict(extracted(state, where))
            large.load_state_dict(held)
            x = torch.randn(2, *spec.shape, dtype=torch.double)
            one, other = small(x), large(x)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(f"{name} cannot be cut by width ({error}); {OTHERWISE}") from error
    if not (one - other).abs().max() <= 1e-6 * other.abs().max():
        raise ConfigError(
            f"{name} cannot be cut by width: its parts mix up the channels; {OTHERWISE}"
        )


def _redrawn(tensor: Tensor) -> Tensor:
    """Values to tell channels apart by: those of a new network may all be zero or one."""
    if tensor.ndim > 1:
        return torch.randn_like(tensor).div(tensor[0].numel() ** 0.5)
    return tensor + torch.rand_like(tensor) if tensor.is_floating_point() else tensor
