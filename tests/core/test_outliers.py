"""Answers that are far larger than the others' are found, and honest ones are not."""

from __future__ import annotations

import math
from typing import Annotated, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from barter.core.answers import Known, shapes_of, validate
from barter.core.contracts import Floats
from barter.core.errors import PayloadError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.outliers import Initial, compare_answers, find_large_logits, probe
from barter.core.payload import State
from barter.models import zoo

SPEC = Spec(channels=1, height=8, width=8, classes=10, mean=(0.5,), std=(0.2,))


def network(name: str = "small-cnn") -> Classifier:
    torch.manual_seed(0)
    return zoo.build_network(name, SPEC)


class Methods:
    """Methods that return weights, values, and values that are not or not always compared."""

    is_strict = False

    def train(self, client: Any) -> State: ...  # type: ignore[empty-body]
    def predict(self, client: Any) -> dict[int, list[Tensor]]: ...  # type: ignore[empty-body]
    def answer(self, client: Any) -> Annotated[Tensor, Floats("n", compared=False)]: ...  # type: ignore[empty-body]
    def guess(self, client: Any) -> Annotated[Tensor, Floats("n", compared="is_strict")]: ...  # type: ignore[empty-body]
    def embed(self, client: Any) -> Annotated[Tensor, Floats("n", "m", rare_peaks=True)]: ...  # type: ignore[empty-body]


def sizes(state: State) -> Initial:
    return {
        name: (float(value.abs().max()), float(value.double().square().mean().sqrt()))
        for name, value in state.items()
        if value.is_floating_point()
    }


def refused(
    answers: dict[int, Any],
    method: str = "train",
    initial: State | None = None,
    received: Any = (),
) -> dict[int, str]:
    """The clients whose answers are too large, and why."""
    measured = {}
    for k, answer in answers.items():
        net = answer if method == "train" else {}
        parameters = frozenset(name for name in net if "running" not in name)
        known = Known(SPEC, 10, weights=shapes_of(net), parameters=parameters)
        measured[k] = validate(answer, Methods(), method, (), known).magnitudes
    start = sizes(initial or {})
    found = compare_answers(measured, lambda k: start, lambda k: received)
    return {k: str(one) for k, one in found.items() if one.is_excessive}


def scale(state: State, times: float, only: str = "") -> State:
    return {
        name: value * times if value.is_floating_point() and only in name else value
        for name, value in state.items()
    }


def fill(state: State, name: str, number: float) -> State:
    return {**state, name: torch.full_like(state[name], number)}


STATE = network().state_dict()
HEAD = "head.weight"


@pytest.mark.parametrize(
    ("extreme", "where"),
    [
        (scale(STATE, 1000), "train"),
        (fill(STATE, HEAD, 1e6), "train"),
        (fill(STATE, "body.2.1.bias", -1e6), "train"),
        (fill(STATE, "body.0.1.running_mean", 1e6), "train.body.0.1.running_mean"),
        (scale(STATE, 1000, only="running_var"), "train.body.0.1.running_var"),
        (scale(STATE, 1000, only=HEAD), "train.head.weight"),
    ],
    ids=["all", "head", "bias", "mean", "variance", "one"],
)
@pytest.mark.parametrize("others", [1, 2, 5])
def test_extreme_weights_are_found(extreme: State, where: str, others: int) -> None:
    honest = {k: scale(STATE, 1 + 0.1 * k) for k in range(others)}
    found = refused({**honest, 9: extreme}, initial=STATE)
    assert list(found) == [9]
    assert found[9].startswith(where)
    assert "times the reference" in found[9]


def test_a_single_answer_is_compared_with_initial_and_received_weights() -> None:
    assert "initial or received" in refused({0: scale(STATE, 2000)}, initial=STATE)[0]
    assert not refused({0: scale(STATE, 90)}, initial=STATE)
    large = scale(STATE, 5000)
    assert not refused({0: large}, initial=STATE, received=({"weights": large},))
    assert not refused({0: large}), "nothing is known"


def test_weights_do_not_grow_from_round_to_round() -> None:
    start = network().state_dict()
    grown = scale(start, 95)  # Everybody's weights, after a poisoned average.
    honest = {k: scale(grown, 1.09) for k in range(3)}
    assert not refused(honest, initial=start, received=(grown,)), "they may still change"
    found = refused({**honest, 3: scale(grown, 1.2)}, initial=start, received=(grown,))
    assert list(found) == [3]
    assert "initial or received weights" in found[3]
    assert not refused({0: scale(start, 99), 1: start, 2: start}, initial=start)


def test_a_minority_cannot_move_the_reference() -> None:
    answers = dict.fromkeys(range(3), STATE) | {k: scale(STATE, 1e3) for k in (3, 4)}
    assert list(refused(answers)) == [3, 4]


def trained_little(state: State) -> State:
    return {n: torch.zeros_like(v) if n.endswith("bias") else v for n, v in state.items()}


@pytest.mark.parametrize(
    "honest",
    [
        # Biases were zero in the beginning, and one client has trained for long.
        {0: trained_little(STATE), 1: trained_little(STATE), 2: scale(STATE, 3)},
        {0: STATE, 1: STATE, 2: fill(fill(STATE, "head.bias", 1.5), "body.0.1.bias", 2.0)},
        # Noise of a privacy mechanism is far larger than any weight.
        {k: {n: 50 * torch.randn(v.shape) for n, v in STATE.items() if n == HEAD} for k in (1, 2)},
        # Activations of other sizes.
        {0: STATE, 1: STATE, 2: scale(STATE, 90, only="running_var")},
        # Dead channels.
        {0: STATE, 1: STATE, 2: scale(STATE, 0, only="running_var")},
        # Networks of all kinds.
        {
            k: network(name).state_dict()
            for k, name in enumerate(("small-cnn", "small-mlp", "vit-tiny", "mobilenet-v3-small"))
        },
    ],
    ids=["biases", "bias", "noise", "activations", "dead", "architectures"],
)
def test_honest_weights_are_not_refused(honest: dict[int, State]) -> None:
    assert refused(honest) == {}


def rows(n: int, size: float) -> dict[int, list[Tensor]]:
    return {0: [torch.full((n, 10), size)]}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        # Confident networks beside those that have hardly been trained, or have no rows at all.
        ({0: rows(3, 0.01), 1: rows(1, 0.02), 2: rows(9, 80.0)}, []),
        ({0: rows(3, 1e-9), 1: rows(2, 0.0), 2: rows(0, 0.0), 3: rows(5, 30.0)}, []),
        ({0: rows(3, 5.0), 1: rows(2, 4.0), 2: rows(7, 5000.0)}, [2]),
        ({0: rows(3, 5.0), 1: rows(2, -1e6), 2: rows(7, 3.0)}, [1]),
        ({0: rows(3, 5.0), 1: {5: [torch.zeros(3), torch.full((1, 10), 1e6)]}}, [1]),
        ({0: rows(3, 1e6)}, []),
    ],
    ids=["confident", "zeros", "scaled", "bound", "elsewhere", "alone"],
)
def test_values_are_compared_with_the_others(values: dict[int, Any], found: list[int]) -> None:
    assert list(refused(values, "predict")) == found


def one_large(value: float, rest: float = 1.0) -> Tensor:
    """Return 1,000 rows of ten numbers, of which a single one differs from the others."""
    numbers = torch.full((1000, 10), rest)
    numbers[7, 3] = value
    return numbers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (one_large(900.0), None),  # the root mean square is sqrt(1 + 81) = 9.06
        (one_large(-900.0), None),
        (one_large(1100.0), "largest absolute value is 1.1e+03, 1.1e+03 times"),
        (one_large(99.0, rest=99.0), None),
        (one_large(101.0, rest=101.0), "root mean square is 101, 101 times"),
    ],
)
def test_a_single_feature_may_be_larger_than_all_together(
    answer: Tensor, reason: str | None
) -> None:
    found = refused({0: one_large(1.0), 1: one_large(1.0), 2: answer}, "embed")
    assert list(found) == ([] if reason is None else [2])
    if reason is not None:
        assert reason in found[2]


def test_a_single_other_value_may_not() -> None:
    usual = {k: {0: [one_large(1.0)]} for k in (0, 1)}
    assert list(refused({**usual, 2: {0: [one_large(101.0)]}}, "predict")) == [2]
    assert not refused({**usual, 2: {0: [one_large(99.0)]}}, "predict")


def test_what_a_network_computes_is_compared() -> None:
    net = network("small-vgg")
    trained = {
        k: float(probe(network("small-vgg"), scale(net.state_dict(), 1 + k), SPEC)) for k in (0, 1)
    }
    start = dict.fromkeys(range(4), trained[0])
    assert find_large_logits(trained, start) == {}
    clear = scale(net.state_dict(), 0, only="running_var")
    large = float(probe(net, clear, SPEC))
    found = find_large_logits({**trained, 2: large}, start)
    assert list(found) == [2]
    assert "largest logit for random images" in found[2]
    assert find_large_logits({**trained, 2: large}, {**start, 2: large}) == {}, "a deep network"
    assert list(find_large_logits({**trained, 3: math.nan}, start)) == [3]
    assert find_large_logits({**trained, 3: math.nan}, {**start, 3: math.inf}) == {}
    assert list(find_large_logits({3: math.inf}, start)) == [3]
    assert find_large_logits(dict.fromkeys((1, 2), math.nan), start) == {}, "whose fault is it?"
    assert net.training is False
    before = torch.get_rng_state()
    probe(net, clear, SPEC)
    assert torch.equal(before, torch.get_rng_state()), "no random stream is used up"


def test_every_family_member_is_unlike_the_others_and_accepted() -> None:
    """Networks at their start, with and without normalisation, whose logits differ much."""
    names = ("cnn", "small-mlp", "small-separable", "resnet4", "shufflenet-v2-x1.5", "vit-tiny")
    spec = Spec(channels=3, height=32, width=32, classes=10, mean=(0.5,) * 3, std=(0.2,) * 3)
    peaks = {}
    for k, name in enumerate(names):
        net: nn.Module = zoo.build_network(name, spec)
        peaks[k] = float(probe(net, net.state_dict(), spec))  # type: ignore[arg-type]
    assert find_large_logits(peaks, dict.fromkeys(peaks, 0.0)) == {}


def test_values_that_do_no_harm_may_differ_by_any_factor() -> None:
    answers = {0: torch.ones(3), 1: torch.ones(3), 2: torch.full((3,), 5e5)}
    assert refused(answers, "answer") == {}
    assert refused(answers, "guess") == {}
    with patch.object(Methods, "is_strict", True):
        assert list(refused(answers, "guess")) == [2]
    with pytest.raises(PayloadError, match="expected -1000000 to 1000000"):
        refused({0: torch.full((3,), 2e6)}, "answer")
