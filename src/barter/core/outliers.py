"""Compare the answers of one call with each other; find far too large ones.

The contract of an answer bounds its numbers by a million, which a single answer at the bound
exploits: an average with it is useless, and the clients' next answers exceed the bound. So numbers
are also bounded relative to what is usual:

- The weights of a network: as a whole and tensor by tensor, by the other clients' weights of the
  same names and shapes, the client's initial weights, and what the client received.
  Since these references grow with the weights if one client sends large ones in every round, the
  network as a whole is also bounded by its initial weights.
- Statistics of normalisation: tensor by tensor, by the same.
- Other values (logits, prototypes, gradients): by the other clients' values in the same place.

The size of weights does not limit what a network computes: ten times the weights in each of four
layers are ten thousand times the logits, and with variances of zero the activations of a deep
network overflow. So the logits of uploaded networks for the same random images are compared too.

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

from barter.core.answers import AnswerKind, Magnitude
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.payload import Payload, State, leaves

__all__ = ["OutlierComparison", "compare_answers", "find_large_logits", "probe"]

# An answer may be this many times as large as its reference.
OUTLIER_FACTOR = 100.0
# A single number may be this many times as large where the contract says `rare_peaks`: features.
# A unit that is nearly always silent has a small standard deviation, by which batch normalisation
# divides, so that one rare image can excite it far more than usual. The root mean square bounds how
# far all values together can be off.
PEAK_FACTOR = 1000.0
# The same as OUTLIER_FACTOR if no other client answered, so that only initial or received weights
# can be compared.
FACTOR_WITHOUT_OTHERS = 1000.0
# Weights may be this many times as large as the initial ones, and larger only by GROWTH times what
# the client received. The other references follow what earlier answers have done to the weights.
INITIAL_FACTOR = 100.0
GROWTH = 1.1
# Values and statistics below it are never too large: activations and logits are of this order.
USUAL_VALUE = 1.0
USUAL_LOGIT = 10.0  # The same for logits of random images.
PROBES = 4  # Number of random images.
# Indices of lists and integer keys of dicts, which may differ between clients.
INDEX = re.compile(r"\[\d+\]|\.\d+(?=[.\[]|$)")

Initial = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class _Size:
    """Largest absolute value and root mean square of one or several tensors."""

    peak: float = 0.0
    rms: float = 0.0

    def at_least(self, *others: _Size) -> _Size:
        """Return the largest peak and the largest rms among this size and the others."""
        peak = max(size.peak for size in (self, *others))
        return _Size(peak, max(size.rms for size in (self, *others)))


@dataclass(frozen=True)
class OutlierComparison:
    """A number of an answer and the reference that it is compared with."""

    path: str
    title: str  # what the number is
    value: float
    usual: float  # the reference
    times: float  # the limit, as a multiple of the reference
    whose: str  # the reference, in words

    @property
    def ratio(self) -> float:
        return self.value / self.usual

    @property
    def is_excessive(self) -> bool:
        return self.value > self.times * self.usual

    def __str__(self) -> str:
        return (
            f"{self.path}: its {self.title} is {self.value:.3g}, {self.ratio:.3g} times the "
            f"reference {self.usual:.3g} ({self.whose})"
        )


def compare_answers(
    answers: Mapping[int, Sequence[Magnitude]],
    initial: Callable[[int], Initial],
    received: Callable[[int], Payload],
) -> dict[int, OutlierComparison]:
    """Compare each answer with its references.

    The limit is 100 times the reference. It is 1000 times for the largest absolute value where the
    contract says `rare_peaks`, and for weights that no other client sent, except in the comparison
    with initial weights. Values and statistics that no other client sent are not compared. What
    the client received counts only if the answer exceeds its limit without it.

    Args:
        answers: Client -> magnitudes of its answer's tensors.
        initial: Client -> peak and root mean square of its network's initial weights, by name;
            empty if the server does not know the network.
        received: Client -> the arguments that the client received.

    Returns:
        For each client the one comparison that comes closest to its limit or exceeds it most; it
        need not be excessive (`is_excessive`). A client without anything that could be compared is
        left out.
    """
    found: dict[int, OutlierComparison] = {}
    tables = {k: _Table(magnitudes) for k, magnitudes in answers.items()}
    for k, table in tables.items():
        others = [other for j, other in tables.items() if j != k]
        largest = table.compare(others, initial(k), {})
        # Received tensors are read only if the answer is too large for all other references.
        if largest is not None and largest.is_excessive:
            largest = table.compare(others, initial(k), _sizes_by_name(received(k)))
        if largest is not None:
            found[k] = largest
    return found


@torch.no_grad()
def probe(network: Classifier, weights: State, spec: Spec) -> Tensor:
    """Return the largest absolute logit of a network for random images.

    The four images are always the same; no global generator is used. The network keeps the weights
    and is left in evaluation mode. The result is a tensor without axes, NaN if a logit is.

    Args:
        network: A network of the same architecture on the device of the weights, which replace its
            own.
        weights: The weights.
        spec: The input format.
    """
    network.load_state_dict(weights)
    device = next(iter(weights.values())).device
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PROBES, *spec.shape, generator=generator).to(device)
    logits: Tensor = network.eval()(images)
    return logits.float().abs().amax()


def find_large_logits(peaks: Mapping[int, float], initial: Mapping[int, float]) -> dict[int, str]:
    """Return clients whose network's logits are far larger than usual, with reasons.

    A finite peak is too large above 100 times its reference: the largest of 10, the client's
    initial peak, and the lower median of the other clients' finite peaks. If no other client has a
    finite peak, it is never too large. NaN or infinity is too large if another client's peak is
    finite, or there is no other client.

    Args:
        peaks: Client -> the largest absolute logit that `probe` found.
        initial: Client -> the same of its network with initial weights. Of a very deep network it
            is large, as long as its statistics of normalisation are not those of its inputs. A
            client whose number is not finite is not judged.
    """
    found: dict[int, str] = {}
    for k, peak in peaks.items():
        if not math.isfinite(initial[k]):
            continue
        finite = [other for j, other in peaks.items() if j != k and math.isfinite(other)]
        usual_peak = statistics.median_low(finite) if finite else 0.0
        reference = max(USUAL_LOGIT, initial[k], usual_peak)
        usual = f"; at most {OUTLIER_FACTOR:g} times {reference:.3g} are accepted"
        if not math.isfinite(peak) and (finite or len(peaks) == 1):
            found[k] = f"the uploaded network computes NaN or infinity for random images{usual}"
        elif finite and peak > OUTLIER_FACTOR * reference:
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
        members: dict[tuple[str, AnswerKind], list[Magnitude]] = {}
        for found in magnitudes:
            if found.kind == "weight":
                members.setdefault((found.group, found.kind), []).append(found)
            elif found.kind == "value":
                place = INDEX.sub("[]", found.path)
                members.setdefault((place, found.kind), []).append(found)
        self.members = members
        self.groups = {key: _joint_size(group) for key, group in members.items()}

    def compare(
        self, others: Sequence[_Table], initial: Initial, received: Mapping[str, _Size]
    ) -> OutlierComparison | None:
        """Return the comparison that comes closest to its limit; None if there is none.

        Args:
            others: The other clients' answers.
            initial: Peak and rms of the client's initial weights, by name.
            received: The sizes of tensors that the client received, by name.
        """
        found_all: list[OutlierComparison] = []
        usual_weights: dict[str, float] = {}
        for (place, kind), size in self.groups.items():
            same = [other.groups[place, kind] for other in others if (place, kind) in other.groups]
            reference = _median(same)
            if kind == "weight":
                names = [(found.name, found.shape) for found in self.members[place, kind]]
                start = _joint(initial, names)
                now = _joint_received(received, names)
                reference = reference.at_least(start, now)
                usual_weights[place] = reference.rms
                if start != _Size():
                    found_all += _compare_with_start(place, size, start, now)
            elif same:
                reference = reference.at_least(_Size(USUAL_VALUE, USUAL_VALUE))
            else:
                continue
            found_all += _compare(
                place,
                size,
                reference,
                without_others=not same,
                rare_peaks=all(found.rare_peaks for found in self.members[place, kind]),
            )
        for key, found in self.tensors.items():
            same = [_size(other.tensors[key]) for other in others if key in other.tensors]
            reference = _median(same).at_least(*_of(received, found.name))
            if found.name in initial:
                reference = reference.at_least(_Size(*initial[found.name]))
            if not same and (reference == _Size() or found.kind == "statistic"):
                continue
            # A tensor may be zero at first, such as a bias: then the others of its network count.
            floor = USUAL_VALUE if found.kind == "statistic" else usual_weights[found.group]
            reference = reference.at_least(_Size(floor, floor))
            found_all += _compare(found.path, _size(found), reference, without_others=not same)
        return max(found_all, key=lambda one: one.ratio / one.times, default=None)


def _compare(
    path: str, size: _Size, reference: _Size, *, without_others: bool, rare_peaks: bool = False
) -> list[OutlierComparison]:
    """Compare peak and rms of an answer's part with a reference, unless it is zero.

    Args:
        path: The place in the answer.
        size: The part's peak and rms.
        reference: What is usual.
        without_others: Whether the reference comes from no other client, which widens the limit.
        rare_peaks: Whether its contract says so, which widens the limit of its peak.
    """
    times = FACTOR_WITHOUT_OTHERS if without_others else OUTLIER_FACTOR
    whose = (
        "initial or received weights" if without_others else "what is usual among the other clients"
    )
    return _pair(path, size, reference, times, whose, PEAK_FACTOR if rare_peaks else times)


def _compare_with_start(
    path: str, size: _Size, start: _Size, received: _Size
) -> list[OutlierComparison]:
    """Compare peak and rms of a network's weights with the initial ones.

    A client that received weights near the limit or above it may return slightly larger ones.
    """
    share = GROWTH / INITIAL_FACTOR
    reference = start.at_least(_Size(share * received.peak, share * received.rms))
    return _pair(path, size, reference, INITIAL_FACTOR, "initial or received weights")


def _pair(
    path: str,
    size: _Size,
    reference: _Size,
    times: float,
    whose: str,
    peak_times: float | None = None,
) -> list[OutlierComparison]:
    """Return the comparisons of peak and rms with those references that are not zero.

    Their limit is `times` the reference, that of the peak `peak_times` if it is given.
    """
    peak_times = times if peak_times is None else peak_times
    pairs = (
        ("largest absolute value", size.peak, reference.peak, peak_times),
        ("root mean square", size.rms, reference.rms, times),
    )
    return [
        OutlierComparison(path, title, value, usual, limit, whose)
        for title, value, usual, limit in pairs
        if usual > 0
    ]


def _size(found: Magnitude) -> _Size:
    return _Size(found.peak, found.rms)


def _joint_size(group: Iterable[Magnitude]) -> _Size:
    """Return the largest peak of several tensors, and the rms of all their entries."""
    found = list(group)
    count = sum(one.shape.numel() for one in found)
    squares = sum(one.norm**2 for one in found)
    return _Size(max(one.peak for one in found), math.sqrt(squares / count))


def _joint(sizes: Initial, names: Sequence[tuple[str, torch.Size]]) -> _Size:
    """Return the joint size of those tensors whose sizes are known; zero without any."""
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
    """Return the lower median of the peaks and that of the rms values.

    Without sizes, both are zero.
    """
    if not sizes:
        return _Size()
    return _Size(
        statistics.median_low(size.peak for size in sizes),
        statistics.median_low(size.rms for size in sizes),
    )


def _of(received: Mapping[str, _Size], name: str) -> list[_Size]:
    return [received[name]] if name in received else []


def _sizes_by_name(received: Payload) -> dict[str, _Size]:
    """Return the size of every float tensor in a payload, by name.

    A tensor is stored under its path and every ending of it ("a.b.c", "b.c", "c"). Tensors of the
    same name share the largest values.
    """
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
