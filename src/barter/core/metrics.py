"""Settings of the evaluation, and metrics computed from logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core import seeds
from barter.core.params import Count, check_fields

__all__ = [
    "MANY_CLIENTS",
    "Evaluation",
    "Metric",
    "auc",
    "calibration_error",
    "macro_f1",
    "measure",
]

Metric: TypeAlias = Literal["loss", "macro_f1", "auc", "calibration", "per_class"]

# From more clients than this on, a round's cost should depend on the sampled clients only.
MANY_CLIENTS = 100
BINS = 15  # Number of confidence bins of the calibration error.


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The table [evaluate]: test sets, interval, evaluated clients and metrics.

    >>> from barter.core.metrics import Evaluation
    >>> every_third = Evaluation(every=3)
    >>> [t for t in range(1, 9) if every_third.is_due(t, last=8)]
    [1, 3, 6, 8]
    """

    # test sets: global is shared by all clients (all classes), local has the client's class
    # frequencies
    tests: tuple[Literal["global", "local"], ...] = ("global", "local")
    # rounds between two evaluations; the first and the last round are always evaluated
    every: Count = 1
    # evaluated clients: all, those that took part in the round (sampled), or this number of
    # clients, the same in every round; auto is all of up to 100 clients, of more the sampled ones
    clients: Literal["auto", "all", "sampled"] | Count = "auto"
    # metrics besides accuracy: loss, macro_f1, auc (macro average, one class against the rest),
    # calibration (expected calibration error), per_class (accuracy of each class)
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "evaluate.")

    def is_due(self, t: int, last: int) -> bool:
        """Return whether round t is evaluated, in a run whose last round is `last`.

        Evaluated are round 1, the multiples of `every`, and round `last`.
        """
        return t == 1 or t % self.every == 0 or t == last

    def includes(self, client: int, ids: Collection[int], participants: Collection[int]) -> bool:
        """Return whether a client is evaluated in a round that is due (`is_due`).

        If `clients` is a number, it is that many of the sorted ids, chosen by a fixed seed: the
        same in every round and in every run with these ids.

        Args:
            client: The client's id.
            ids: All clients of the run.
            participants: The clients that took part in this round so far.
        """
        clients = self.settle(len(ids)).clients
        if clients == "all":
            return True
        if clients == "sampled":
            return client in participants
        return client in self.choose(ids, participants)

    def choose(self, ids: Collection[int], participants: Collection[int]) -> Set[int]:
        """Return all clients that are evaluated in a round that is due; see `includes`."""
        clients = self.settle(len(ids)).clients
        if clients == "all":
            return set(ids)
        if isinstance(clients, str):
            return set(participants)
        generator = torch.Generator().manual_seed(seeds.stream_seed(0, "evaluated clients"))
        order = torch.randperm(len(ids), generator=generator)[:clients]
        listed = sorted(ids)
        return {listed[i] for i in order.tolist()}

    def settle(self, clients: int) -> Evaluation:
        """Return the evaluation of a run with this number of clients, without "auto".

        "auto" becomes "all" for up to 100 clients, and "sampled" for more.
        """
        if self.clients != "auto":
            return self
        return replace(self, clients="all" if clients <= MANY_CLIENTS else "sampled")

    def runs(self, test: str) -> bool:
        """Return whether a test set is used.

        "global" and "local" are used if `tests` lists them, all others, such as validation sets,
        always.
        """
        return test not in ("global", "local") or test in self.tests


def macro_f1(logits: Tensor, labels: Tensor) -> float:
    """Return the mean F1 score over classes, each with the same weight, from 0 to 1.

    Classes that are neither among the labels nor among the predictions do not count.
    """
    classes = logits.shape[1]
    predicted = logits.argmax(1)
    hits = torch.bincount(labels[predicted == labels], minlength=classes).double()
    actual = torch.bincount(labels, minlength=classes).double()
    claimed = torch.bincount(predicted, minlength=classes).double()
    occurs = (actual + claimed) > 0
    return float((2 * hits[occurs] / (actual + claimed)[occurs]).mean())


def auc(logits: Tensor, labels: Tensor) -> float:
    """Return the macro-averaged area under the ROC curve, one class against the rest.

    Scores are probabilities. Classes without a positive or without a negative image are left out;
    with none left the result is 0.5.
    """
    scores = logits.double().softmax(1)
    areas = []
    for c in range(logits.shape[1]):
        positive = labels == c
        n = int(positive.sum())
        m = int((~positive).sum())
        if n and m:
            ranks = _mean_ranks(scores[:, c])
            # The Mann-Whitney U statistic, divided by its largest value.
            areas.append((float(ranks[positive].sum()) - n * (n + 1) / 2) / (n * m))
    return sum(areas) / len(areas) if areas else 0.5


def _mean_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    _, inverse, count = torch.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum(0)
    ranks: Tensor = (last - (count - 1) / 2)[inverse].double()
    return ranks


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error with 15 bins of equal width.

    As defined by Guo et al. (ICML 2017), for the confidence of the predicted class: the mean over
    images of |accuracy - mean confidence| of the image's bin.
    """
    confidence, predicted = logits.double().softmax(1).max(1)
    gap = (predicted == labels).double() - confidence
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    sums = torch.zeros(BINS, dtype=torch.double, device=logits.device).index_add_(0, bins, gap)
    return float(sums.abs().sum() / len(labels))


def _loss(logits: Tensor, labels: Tensor) -> float:
    return float(F.cross_entropy(logits.double(), labels))


SCALARS: dict[Metric, Callable[[Tensor, Tensor], float]] = {
    "loss": _loss,
    "macro_f1": macro_f1,
    "auc": auc,
    "calibration": calibration_error,
}


def measure(
    test: str, logits: Tensor, labels: Tensor, metrics: Collection[Metric]
) -> dict[str, float]:
    """Return the accuracy under the test's name, other metrics as TEST_METRIC.

    The accuracy is a fraction of 1. "per_class" gives TEST_class_C, the accuracy on images of class
    C, for each class that occurs among the labels.

    >>> import torch
    >>> from barter.core.metrics import measure
    >>> measure("global", torch.eye(2), torch.tensor([0, 0]), ["per_class"])
    {'global': 0.5, 'global_class_0': 0.5}
    """
    correct = (logits.argmax(1) == labels).double()
    results = {test: float(correct.mean())}
    for metric in metrics:
        if metric == "per_class":
            for c in sorted(set(labels.tolist())):
                results[f"{test}_class_{c}"] = float(correct[labels == c].mean())
        else:
            results[f"{test}_{metric}"] = SCALARS[metric](logits, labels)
    return results
