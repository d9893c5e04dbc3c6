"""Submodels by width: choose channels, extract them, aggregate the results.

The channels that are kept of a layer depend on nothing but its width. So consecutive layers, and
those that write to one residual stream, agree without an analysis of the network's graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from barter.core import robust, seeds
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import State
from barter.ops.average import is_statistic

__all__ = [
    "Extraction",
    "SubmodelIndices",
    "average_submodels",
    "extract_submodel",
    "head_names",
    "kept_channels",
    "submodel_indices",
    "verify_submodel",
    "width_budget",
]

OTHERWISE = "use a plain or residual network, such as small-cnn or resnet18"

Extraction: TypeAlias = Literal["static", "random", "rolling"]
# For every tensor of a submodel, its indices in the full network along each axis.
SubmodelIndices: TypeAlias = dict[str, tuple[Tensor, ...]]


def width_budget(client: int, clients: int, rho: int, sigma: int) -> float:
    """Return a client's fraction of the width, R_i = (1/2)^min(σ, ⌊ρ i / N⌋).

    Args:
        client: Index of the client, from 0; i = client + 1.
        clients: N, the number of clients.
        rho: ρ, the number of halvings that the last client would have without σ.
        sigma: σ, the largest number of halvings.
    """
    return 0.5 ** min(sigma, rho * (client + 1) // clients)


def kept_channels(width: int, part: int, rule: Extraction, t: int) -> Tensor:
    """Return the indices (part,) of a layer's channels that are kept in round t.

    Args:
        width: Number of channels of the full layer.
        part: Number of channels to keep.
        rule: "static" keeps the first, "random" a random subset in random order (from torch's
            global generator of the CPU), "rolling" a window that wraps around: it begins at channel
            0 in round 1, and one channel lower in each further round, as in FedRolex's code. Its
            paper lets the window begin one channel higher; over `width` rounds, both train every
            channel equally often.
        t: The round, from 1.
    """
    if rule == "random":
        return torch.randperm(width)[:part]
    every = torch.arange(width)
    return every[:part] if rule == "static" else every.roll((t - 1) % width)[:part]


def submodel_indices(
    full: Mapping[str, Tensor], part: Mapping[str, Tensor], rule: Extraction, t: int
) -> SubmodelIndices:
    """Return each submodel tensor's indices in the full network, by axis.

    Layers with the same width in the full network, and in the submodel, keep the same channels.
    States list tensors layer by layer, with outputs along the first axis. The inputs of a linear
    layer may be channels times positions; all positions of a channel are then kept together.

    Args:
        full: State of the full network.
        part: State of the submodel. Of both states only names and shapes are used.
        rule: Which channels are kept, see `kept_channels`.
        t: The round, from 1.
    """
    chosen: dict[tuple[int, int], Tensor] = {}  # by width in the full network and in the part

    def pick(width: int, narrow: int) -> Tensor:
        if width == narrow:
            return torch.arange(width)
        if (width, narrow) not in chosen:
            chosen[width, narrow] = kept_channels(width, narrow, rule, t)
        return chosen[width, narrow]

    indices: SubmodelIndices = {}
    previous = (1, 1)  # outputs of the layer before, in the full network and in the part
    for name, tensor in part.items():
        sizes = list(zip(full[name].shape, tensor.shape, strict=True))
        axes = [pick(*size) for size in sizes[:1]]
        for width, narrow in sizes[1:]:
            positions = width // previous[0]
            flattened = (width, narrow) == (positions * previous[0], positions * previous[1])
            if width != narrow and tensor.ndim == 2 and flattened:
                first_positions = pick(*previous)[:, None] * positions
                axes.append((first_positions + torch.arange(positions)).flatten())
            else:
                axes.append(pick(width, narrow))
        indices[name] = tuple(axes)
        previous = sizes[0] if sizes else previous
    return indices


def _grid(along: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return indices that address a block of a tensor, from one index per axis.

    Args:
        along: For each axis, the indices that the block covers.
        device: Device of the result.

    Returns:
        The same indices, shaped so that `tensor[result]` is the block.
    """
    return tuple(
        index.to(device).view([-1 if axis == other else 1 for other in range(len(along))])
        for axis, index in enumerate(along)
    )


def extract_submodel(full: Mapping[str, Tensor], where: SubmodelIndices) -> State:
    """Return a copy of the entries at these indices as a state of their own."""
    return {
        name: full[name][_grid(along, full[name].device)].clone() for name, along in where.items()
    }


def average_submodels(
    full: Mapping[str, Tensor],
    parts: Mapping[int, State],
    where: Mapping[int, SubmodelIndices],
    weights: Mapping[int, float],
    owned: Mapping[int, Tensor] | None = None,
    head: frozenset[str] = frozenset(),
) -> State:
    """Average submodels entry by entry over the clients with the entry (DFRD, Eq. 1).

    A run with a defence on states uses its robust aggregate instead of the mean, in which clients
    have equal weights unless the rule is "cosine".

    Args:
        full: State of the full network, which is not modified; entries that no client holds keep
            their values.
        parts: Each client's state.
        where: Each client's indices in the full network, see `submodel_indices`.
        weights: Each client's weight; only their ratios matter.
        owned: Each client's number of images of each class, for the tensors in `head`; None treats
            these like all others.
        head: Names of tensors with one row per class. A client counts only in the rows of classes
            of which it owns images.

    Returns:
        The new state of the full network; integer entries are rounded.
    """
    if robust.active().defends("states"):
        kept = weights if robust.active().keeps_weights("states") else dict.fromkeys(parts, 1.0)
        return _defended(full, parts, where, kept, owned, head)
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


def _defended(
    full: Mapping[str, Tensor],
    parts: Mapping[int, State],
    where: Mapping[int, SubmodelIndices],
    client_weights: Mapping[int, float],
    owned: Mapping[int, Tensor] | None,
    head: frozenset[str],
) -> State:
    """Aggregate submodels by the run's defence, entry by entry.

    Only clients that hold an entry take part in it. The arguments are those of `average_submodels`.
    """
    all_rows = []
    all_weights = []
    for name, old in full.items():
        rows = torch.zeros(len(parts), *old.shape, dtype=torch.double, device=old.device)
        weights = torch.zeros_like(rows)
        for i, (k, state) in enumerate(parts.items()):
            block = _grid(where[k][name], old.device)
            share = torch.full_like(state[name], client_weights[k], dtype=torch.double)
            if owned is not None and name in head:
                share = share * (owned[k] > 0).to(share).view(-1, *[1] * (share.ndim - 1))
            rows[i][block] = state[name].double()
            weights[i][block] = share
        all_rows.append(rows)
        all_weights.append(weights)
    decides = [not is_statistic(name) for name in full]
    starts = [old.double() for old in full.values()]
    combined = robust.active().combine(all_rows, "states", all_weights, decides, starts)
    result: State = {}
    for (name, old), weights, value in zip(full.items(), all_weights, combined, strict=True):
        mean = torch.where(weights.sum(0) > 0, value, old.double())
        result[name] = (mean if old.is_floating_point() else mean.round()).to(old.dtype)
    return result


def head_names(model: nn.Module) -> frozenset[str]:
    """Return the tensor names of the linear layer defined last.

    The layer has one row per class. The names are NAME.weight and NAME.bias, even if the layer has
    no bias. Without linear layers there are none.
    """
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return frozenset(f"{name}.{part}" for name in linears[-1:] for part in ("weight", "bias"))


def verify_submodel(full: Classifier, part: Classifier, spec: Spec) -> None:
    """Check that a submodel computes what the full network does with masked weights.

    Both are copied and get the same random weights, with random channels in the submodel; the
    weights outside of it are zero in the full network. Neither network is changed, nor the global
    random state.

    Args:
        full: The full network, on the CPU.
        part: The submodel, on the CPU.
        spec: Format of the images.

    Raises:
        ConfigError: If the network cannot be narrowed, or its submodel computes something else.
    """
    name = type(getattr(full, "body", full)).__name__
    small = copy.deepcopy(part).double().eval()
    large = copy.deepcopy(full).double().eval()
    with seeds.scope(0, "verify"), torch.no_grad():
        state = {key: _random_values(tensor) for key, tensor in large.state_dict().items()}
        where = submodel_indices(state, small.state_dict(), "random", 1)
        masked = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        for key, axes in where.items():
            block = _grid(axes, masked[key].device)
            masked[key][block] = state[key][block]
        try:
            small.load_state_dict(extract_submodel(state, where))
            large.load_state_dict(masked)
            x = torch.randn(2, *spec.shape, dtype=torch.double)
            found = small(x)
            expected = large(x)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(f"{name} cannot be cut by width ({error}); {OTHERWISE}") from error
    # The negated comparison also refuses NaN.
    if not (found - expected).abs().max() <= 1e-6 * expected.abs().max():
        raise ConfigError(
            f"{name} cannot be cut by width: its parts mix up the channels; {OTHERWISE}"
        )


def _random_values(tensor: Tensor) -> Tensor:
    """Return random values of a tensor's shape that differ from channel to channel.

    The values of a new network may all be 0 or 1, which would hide mixed-up channels. Integers are
    returned unchanged.
    """
    if tensor.ndim > 1:
        return torch.randn_like(tensor).div(tensor[0].numel() ** 0.5)
    return tensor + torch.rand_like(tensor) if tensor.is_floating_point() else tensor
