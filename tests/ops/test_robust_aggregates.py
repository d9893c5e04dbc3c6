"""Every kind of aggregate under every rule: an adversarial client beside honest ones changes little."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.algorithms.fedaf import mean_by_class
from barter.core import robust
from barter.core.clients import Replies
from barter.core.images import Spec
from barter.core.model import SplitClassifier
from barter.core.nodes import Server
from barter.core.robust import AggregationRule, Defence
from barter.ops.average import average
from barter.ops.condense import Lot
from barter.ops.ensemble import mean_predictions, merge_logits, select_teachers
from barter.ops.prototypes import ByClass, mean_table, select_trusted_tables
from barter.ops.statistics import combine_statistics
from barter.ops.submodel import average_submodels
from barter.ops.synthesis import joint_prediction
from barter.ops.trust import (
    clients_with_consistent_labels,
    confirmed_teachers,
    consistent_clients,
    trusted_sets,
)

RULES = [
    "median",
    "trimmed-mean",
    "clip",
    "krum",
    "multi-krum",
    "geometric-median",
    "cosine",
    "auto",
]
N = 10  # clients, of which the last two are adversarial


@pytest.fixture(params=RULES)
def defended(request: pytest.FixtureRequest) -> Iterator[AggregationRule]:
    torch.manual_seed(0)
    with robust.using(Defence(request.param, 0.2)):
        yield request.param


def near(found: Tensor, expected: Tensor, by: float) -> bool:
    return bool((found - expected).abs().max() <= by)


def states(start: Tensor, step: Tensor, factor: float) -> Replies[dict[str, Tensor]]:
    """Clients that move by about one step, and two by `factor` times that."""
    answers = {}
    for k in range(N):
        moved = step + 0.1 * torch.randn_like(step)
        answers[k] = {
            "weight": start + (factor if k >= N - 2 else 1.0) * moved,
            "num_batches_tracked": torch.tensor(5 + k % 2),
        }
    return Replies(answers, dict.fromkeys(answers, 20), {})


def test_states(defended: AggregationRule) -> None:
    start, step = torch.randn(40), torch.randn(40)
    since = {"weight": start, "num_batches_tracked": torch.tensor(0)}
    result = average(states(start, step, -10.0), since=since)
    # Clipping bounds the opposite steps by an ordinary one: (8 - 2) / 10 of it is left.
    rest = 0.45 * float(step.abs().max()) if defended == "clip" else 0.0
    assert near(result["weight"], start + step, 0.25 + rest)
    assert result["num_batches_tracked"] in (5, 6)


def test_states_without_a_common_start(defended: AggregationRule) -> None:
    start, step = torch.randn(40), torch.randn(40)
    result = average(states(start, step, -10.0))
    assert near(result["weight"], start + step, 0.35)


def test_the_mean_without_a_defence_is_far_away() -> None:
    torch.manual_seed(0)
    start, step = torch.randn(40), torch.randn(40)
    assert not near(average(states(start, step, -10.0))["weight"], start + step, 1.0)


def test_submodels(defended: AggregationRule) -> None:
    full = {"weight": torch.zeros(4, 3), "rest": torch.zeros(2)}
    step = torch.randn(4, 3)
    every = torch.arange(3)
    widths = [4, 2] * (N // 2)
    where = {k: {"weight": (torch.arange(widths[k]), every)} for k in range(N)}
    parts = {
        k: {"weight": (-10.0 if k >= N - 2 else 1.0) * step[: widths[k]] + 0.01 * torch.randn(1)}
        for k in range(N)
    }
    places = {k: {**part, "rest": (torch.arange(0),)} for k, part in where.items()}
    states_of_parts = {k: {**part, "rest": torch.zeros(0)} for k, part in parts.items()}
    result = average_submodels(full, states_of_parts, places, dict.fromkeys(parts, 1.0))
    rest = 0.6 * step.abs().max() if defended == "clip" else 0.0
    assert near(result["weight"], step, 0.1 + rest)
    assert result["rest"].tolist() == [0, 0]  # Nobody had these.


def predictions() -> tuple[Tensor, Tensor]:
    """Logits of honest networks and of two that answer at random; and what honest ones agree on."""
    truth = 4 * torch.randn(30, 5)
    logits = truth + 0.3 * torch.randn(N, 30, 5)
    logits[-2:] = 100 * torch.randn(2, 30, 5)
    return logits, truth


def test_logits(defended: AggregationRule) -> None:
    logits, truth = predictions()
    equal = torch.full((N, 5), 1 / N)
    by_image = torch.full((N, 30), 1 / N)
    for result in (
        mean_predictions(list(logits)),
        mean_predictions(list(logits), equal),
        joint_prediction(logits, by_image),
    ):
        assert result.shape == truth.shape
        assert near(result, truth, 2.5)
        assert (result.argmax(1) == truth.argmax(1)).float().mean() > 0.9


def test_teachers_whose_predictions_contradict_the_others() -> None:
    truth = 5 * torch.eye(5).repeat(4, 1)
    predictions = dict.fromkeys(range(10, 16), truth)
    predictions[12] = truth.flip(1)
    honest = [k for k in predictions if k != 12]
    assert select_teachers(predictions) == list(predictions)
    with robust.using(Defence("median")):
        assert select_teachers(predictions) == list(predictions), "the rule selects nobody"
    with robust.using(Defence("auto")):
        assert select_teachers(predictions) == honest


def test_probabilities(defended: AggregationRule) -> None:
    logits, truth = predictions()
    several = logits[None].expand(2, N, 30, 5)  # FedZGE asks for several images at once.
    result = merge_logits(several, torch.full((N, 5), 1 / N))
    assert result.shape == (2, 30, 5)
    assert (result[0].argmax(1) == truth.argmax(1)).float().mean() > 0.9


def prototypes(attack: str) -> tuple[dict[int, ByClass], Tensor]:
    """Tables of clients of which each lacks one of five classes; two are adversarial."""
    truth = 3 * torch.randn(5, 16).relu() + 0.5
    tables: dict[int, ByClass] = {}
    for k in range(N):
        classes = torch.tensor([c for c in range(5) if c != k % 5])
        vectors = truth[classes] + 0.1 * torch.randn(4, 16)
        if k >= N - 2:
            vectors = -10 * vectors if attack == "extreme" else truth[4 - classes]
        tables[k] = {"classes": classes, "vectors": vectors}
    return tables, truth


@pytest.mark.parametrize("attack", ["extreme", "flipped"])
def test_prototypes(defended: AggregationRule, attack: str) -> None:
    tables, truth = prototypes(attack)
    result = mean_table(tables.values())
    assert result["classes"].tolist() == [0, 1, 2, 3, 4]
    # Of a class, two of eight vectors are adversarial: more than the assumed share.
    exact = defended in ("median", "krum", "cosine", "auto")
    scale = 0.15 if exact else 0.7
    assert near(result["vectors"], truth, scale * float(truth.abs().max()))
    by_class, known = mean_by_class(6, {k: (t["classes"], t["vectors"]) for k, t in tables.items()})
    assert torch.equal(by_class[:5], result["vectors"])
    assert known.tolist() == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("attack", ["extreme", "flipped"])
def test_tables_that_a_server_learns_from(defended: AggregationRule, attack: str) -> None:
    tables, _ = prototypes(attack)
    assert select_trusted_tables(tables) == [tables[k] for k in range(N - 2)]


def test_statistics_of_normalisation(defended: AggregationRule) -> None:
    parts = [
        {"means": torch.full((3,), 1.0), "variances": torch.full((3,), 2.0)} for _ in range(N - 1)
    ]
    parts.append({"means": torch.full((3,), 900.0), "variances": torch.full((3,), 1e5)})
    result = combine_statistics(parts, [4] * N)  # type: ignore[arg-type]
    assert near(result["means"], torch.ones(3), 1e-3)
    assert near(result["variances"], torch.full((3,), 2.0), 1e-3)


def test_condensed_sets(defended: AggregationRule) -> None:
    spec = Spec(1, 4, 4, 3, (0.0,), (1.0,))
    model = SplitClassifier(nn.Flatten(), nn.Linear(16, 3))
    server = Server(spec, {}, model, torch.device("cpu"))
    truth = torch.randint(256, (3, 1, 4, 4))
    lots: dict[int, Lot] = {}
    for k in range(N):
        images = (truth.repeat_interleave(2, 0) + torch.randint(-9, 10, (6, 1, 4, 4))).clamp(0, 255)
        if k == N - 2:
            images = images.flip(0)
        elif k == N - 1:
            images = torch.randint(2, images.shape) * 255
        lots[k] = {
            "classes": torch.arange(3),
            "sizes": torch.full((3,), 2),
            "images": images.to(torch.uint8),
        }
    assert trusted_sets(server, lots) == list(range(N - 2))


def test_all_sets_count_without_a_defence() -> None:
    assert trusted_sets(None, {1: None, 4: None}) == [1, 4]  # type: ignore[arg-type, dict-item]
    assert consistent_clients({0: 0.9, 1: 0.9, 2: 0.0}) == [0, 1, 2]


class Linear(nn.Module):
    """A network that knows each image by its brightest pixel."""

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return 5 * x.flatten(1)[:, self.order]


def test_teachers_whom_others_contradict_are_left_out(defended: AggregationRule) -> None:
    right = Linear(torch.arange(4))
    replicas: dict[int, nn.Module] = dict.fromkeys(range(6), right)
    images = {k: torch.eye(4).repeat(5, 1)[:, None, None] for k in range(6)}
    logits = {k: right(images[k]) for k in range(6)}
    logits[3] = 50 * torch.randn(20, 4)  # Says something else than the network it uploaded.
    replicas[5] = Linear(torch.arange(4).flip(0))  # Learned from wrong labels, and says so.
    logits[5] = replicas[5](images[5])
    server: Any = SimpleNamespace(report={}, replica=lambda k, weights: replicas[k])
    found = confirmed_teachers(server, {k: {} for k in logits}, logits, images.__getitem__)
    assert found == [0, 1, 2, 4]
    assert server.report == {"left_out": 2}


def labelled(wrong: int) -> tuple[Any, dict[int, Tensor], dict[int, Tensor]]:
    """Return a server, the embeddings of five clients, and labels; those of one are wrong."""
    heads = SimpleNamespace(logits=lambda e: e)
    server: Any = SimpleNamespace(report={}, replica=lambda k, weights: heads)
    embeddings = {k: torch.eye(4).repeat(3, 1)[:, None] for k in range(5)}
    labels = {k: torch.arange(4).repeat(3) for k in range(5)}
    labels[wrong] = labels[wrong].flip(0)
    return server, embeddings, labels


def test_clients_whose_labels_contradict_their_network_are_left_out(
    defended: AggregationRule,
) -> None:
    server, embeddings, labels = labelled(wrong=2)
    server.report = {"left_out": 1.0}
    found = clients_with_consistent_labels(server, {k: {} for k in labels}, embeddings, labels)
    assert found == [0, 1, 3, 4]
    assert server.report == {"left_out": 2.0}, "added to those left out before"


def test_without_a_defence_nobody_is_left_out_or_asked() -> None:
    _, embeddings, labels = labelled(wrong=2)
    server: Any = SimpleNamespace(report={})  # It has no networks to ask.
    found = clients_with_consistent_labels(server, {}, embeddings, labels)
    assert found == confirmed_teachers(server, {}, labels, labels.__getitem__) == [0, 1, 2, 3, 4]
    assert server.report == {}


def test_auto_without_adversaries_is_the_mean_of_the_method() -> None:
    torch.manual_seed(0)
    start, step = torch.randn(40), torch.randn(40)
    counts = {k: 5 + 7 * k for k in range(N)}
    answers = Replies(dict(states(start, step, 1.0)), counts, {})
    logits = list(torch.randn(1, 30, 5) + 0.3 * torch.randn(N, 30, 5))
    shares = torch.rand(N, 5)
    shares = shares / shares.sum(0)
    tables, _ = prototypes("none")
    honest = [tables[k] for k in range(N - 2)]
    parts = {k: {"weight": w["weight"][: 20 + 10 * (k % 3)]} for k, w in answers.items()}
    where = {k: {"weight": (torch.arange(len(part["weight"])),)} for k, part in parts.items()}
    weights = {k: float(n) for k, n in counts.items()}
    statistics = [{"means": torch.rand(3), "variances": 1 + torch.rand(3)} for _ in range(N)]

    def everything() -> list[Tensor]:
        since = {"weight": start, "num_batches_tracked": torch.tensor(0)}
        measured = combine_statistics(statistics, list(counts.values()))  # type: ignore[arg-type]
        return [
            average(answers, since=since)["weight"],
            average(answers)["weight"],
            average_submodels({"weight": start}, parts, where, weights)["weight"],
            mean_predictions(logits),
            mean_predictions(logits, shares),
            merge_logits(torch.stack(logits), shares),
            mean_table(honest)["vectors"],
            measured["means"],
            measured["variances"],
        ]

    expected = everything()
    with robust.using(Defence("auto")):
        found = everything()
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(one, other, atol=1e-5), i
