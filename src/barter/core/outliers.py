"""Compare the answers of one call with each other, and find those that are far too large.

The contract of an answer bounds its numbers by a million, which a single answer at the bound
exploits: an average with it is useless, and the clients' next answers exceed the bound. So numbers
are also bounded relative to what is usual:

- The weights of a network: as a whole and tensor by tensor, by the other clients' weights of the
  same names and shapes, the client's initial weights, and what the client received.
- Statistics of normalisation: tensor by tensor, by the same.
- Other values (logits, prototypes, gradients): by the other clients' values in the same place.

Numbers alone do not tell what a network computes: with variances of zero, a deep network of usual
weights multiplies its inputs beyond all numbers. Where the server runs uploaded networks, the
logits of each for the same random images are compared too.

References are medians, which a minority of the clients cannot move. Limits are wide, because honest
clients differ in networks, data and training: a confident network's logits are a hundred times
those of a network that has hardly been trained.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from barter.core.answers import Kind, Magnitude
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import Payload, State, leaves

__all__ = ["find_large_logits", "find_outliers", "probe"]

# An answer may be this many times as large as its reference.
TIMES = 100.0
# The same if no other client answered, so that only initial or received weights can be compared.
TIMES_ALONE = 1000.0
# Values and statistics below it are never too large: activations and logits are of this order.
USUAL = 1.0
# The same for logits of random images, which differ more between networks.
LOGIT_TIMES = 1000.0
USUAL_LOGIT = 10.0
PROBES = 8  # Number of random images.
# Indices of lists and integer keys of dicts, which may differ between clients.
INDEX = re.compile(r"\[\d+\]|\.\d+(?=[.\[]|$)")

Initial = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class _Size:
    """Largest absolute value and root mean square of one or several tensors."""

    peak: float = 0.0
    rms: float = 0.0

    def at_least(self, *others: _Size) -> _Size:
        """Return the larger of both numbers, among this size and others."""
        peak = max(size.peak for size in (self, *others))
        return _Size(peak, max(size.rms for size in (self, *others)))


def find_outliers(
    answers: Mapping[int, Sequence[Magnitude]],
    initial: Callable[[int], Initial],
    received: Callable[[int], Payload],
) -> dict[int, str]:
    """Return the clients whose answer is far larger than its references, and why.

    Args:
        answers: Client -> magnitudes of its answer's tensors.
        initial: Client -> peak and root mean square of its network's initial weights, by name;
            empty if the server does not know the network.
        received: Client -> the arguments that the client received.
    """
    found: dict[int, str] = {}
    tables = {k: _Table(magnitudes) for k, magnitudes in answers.items()}
    for k, table in tables.items():
        others = [other for j, other in tables.items() if j != k]
        # Received tensors are read only if the answer is too large for all other references.
        if table.excess(others, initial(k), {}):
            reason = table.excess(others, initial(k), _sizes_by_name(received(k)))
            if reason:
                found[k] = reason
    return found


@torch.no_grad()
def probe(network: Classifier, weights: State, spec: Spec) -> Tensor:
    """Return the largest absolute logit of a network with these weights for random images.

    Args:
        network: A network of the same architecture, whose weights are replaced.
        weights: The weights.
        spec: The input format.
    """
    network.load_state_dict(weights)
    device = next(iter(weights.values())).device
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PROBES, *spec.shape, generator=generator).to(device)
    return network.eval()(images).float().abs().amax()


def find_large_logits(peaks: Mapping[int, float]) -> dict[int, str]:
    """Return the clients whose network's logits are far larger than the others', and why.

    Args:
        peaks: Client -> the largest absolute logit that `probe` found.
    """
    found: dict[int, str] = {}
    for k, peak in peaks.items():
        finite = [other for j, other in peaks.items() if j != k and math.isfinite(other)]
        reference = max(USUAL_LOGIT, statistics.median_low(finite) if finite else 0.0)
        usual = f"; at most {LOGIT_TIMES:g} times {reference:.3g} are accepted"
        if not math.isfinite(peak) and (finite or len(peaks) == 1):
            found[k] = f"the uploaded network computes NaN or infinity for random images{usual}"
        elif finite and peak > LOGIT_TIMES * reference:
            found[k] = (
                f"the uploaded network's largest logit for random images is {peak:.3g}{usual}"
            )
    return found


class _Table:
    """The sizes of an answer's tensors, and of the groups to which they belong."""

    def __init__(self, magnitudes: Sequence[Magnitude]) -> None:
        self.tensors = {
            (found.path, found.shape): found for found in magnitudes if found.kind != "value"
        }
        members: dict[tuple[str, Kind], list[Magnitude]] = {}
        for found in magnitudes:
            if found.kind == "weight":
                members.setdefault((found.group, found.kind), []).append(found)
            elif found.kind == "value":
                place = INDEX.sub("[]", found.path)
                members.setdefault((place, found.kind), []).append(found)
        self.members = members
        self.groups = {key: _joint_size(group) for key, group in members.items()}

    def excess(
        self, others: Sequence[_Table], initial: Initial, received: Mapping[str, _Size]
    ) -> str:
        """Describe what is too large in the answer; empty if nothing is.

        Args:
            others: The other clients' answers.
            initial: The client's initial weights.
            received: The sizes of tensors that the client received, by name.
        """
        usual_weights: dict[str, float] = {}
        for (place, kind), size in self.groups.items():
            same = [other.groups[place, kind] for other in others if (place, kind) in other.groups]
            reference = _median(same)
            if kind == "weight":
                names = [(found.name, found.shape) for found in self.members[place, kind]]
                reference = reference.at_least(
                    _joint(initial, names), _joint_received(received, names)
                )
                usual_weights[place] = reference.rms
            elif same:
                reference = reference.at_least(_Size(USUAL, USUAL))
            else:
                continue
            reason = _compare(place, size, reference, alone=not same)
            if reason:
                return reason
        for key, found in self.tensors.items():
            same = [_size(other.tensors[key]) for other in others if key in other.tensors]
            reference = _median(same).at_least(*_of(received, found.name))
            if found.name in initial:
                reference = reference.at_least(_Size(*initial[found.name]))
            if reference == _Size() and not same:
                continue
            # A tensor may be zero at first, such as a bias: then the others of its network count.
            floor = USUAL if found.kind == "statistic" else usual_weights[found.group]
            reference = reference.at_least(_Size(floor, floor))
            reason = _compare(found.path, _size(found), reference, alone=not same)
            if reason:
                return reason
        return ""


def _compare(path: str, size: _Size, reference: _Size, *, alone: bool) -> str:
    """Describe how a size exceeds its reference; empty if it does not."""
    times = TIMES_ALONE if alone else TIMES
    pairs = (
        ("largest absolute value", size.peak, reference.peak),
        ("root mean square", size.rms, reference.rms),
    )
    for title, value, usual in pairs:
        if usual and value > times * usual:
            whose = "of the initial or received weights" if alone else "of the other clients"
            return (
                f"{path}: its {title} is {value:.3g}, {value / usual:.3g} times that {whose} "
                f"({usual:.3g}); at most {times:g} times are accepted"
            )
    return ""


def _size(found: Magnitude) -> _Size:
    return _Size(found.peak, found.rms)


def _joint_size(group: Iterable[Magnitude]) -> _Size:
    """Return the size of several tensors together."""
    found = list(group)
    count = sum(one.shape.numel() for one in found)
    squares = sum(one.norm**2 for one in found)
    return _Size(max(one.peak for one in found), math.sqrt(squares / count))


def _joint(sizes: Initial, names: Sequence[tuple[str, torch.Size]]) -> _Size:
    """Return the size of those tensors together whose own sizes are known."""
    known = [(sizes[name], shape.numel()) for name, shape in names if name in sizes]
    if not known:
        return _Size()
    count = sum(n for _, n in known)
    squares = sum(rms**2 * n for (_, rms), n in known)
    return _Size(max(peak for (peak, _), _ in known), math.sqrt(squares / count))


def _joint_received(
    received: Mapping[str, _Size], names: Sequence[tuple[str, torch.Size]]
) -> _Size:
    return _joint({name: (size.peak, size.rms) for name, size in received.items()}, names)


def _median(sizes: Sequence[_Size]) -> _Size:
    """Return the median of both numbers, the lower one of an even number; zero of nothing."""
    if not sizes:
        return _Size()
    return _Size(
        statistics.median_low(size.peak for size in sizes),
        statistics.median_low(size.rms for size in sizes),
    )


def _of(received: Mapping[str, _Size], name: str) -> list[_Size]:
    return [received[name]] if name in received else []


def _sizes_by_name(received: Payload) -> dict[str, _Size]:
    """Return the size of every float tensor in a payload, under all names that end its path."""
    sizes: dict[str, _Size] = {}
    for path, value in leaves(received, ""):
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        exact = value.double()
        size = _Size(float(exact.abs().amax()), float(exact.square().mean().sqrt()))
        name = path
        while name:
            sizes[name] = sizes.get(name, _Size()).at_least(size)
            name = name.partition(".")[2]
    return sizes
