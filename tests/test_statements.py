"""Sentences that compare results agree with the stored runs, like the tables beside them.

A page's tables are generated, its sentences are not. Each sentence here is computed from the stored
runs and must stand in its page word for word. A failure prints the sentence that is true now.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from barter.recipes.recipe import find_recipe
from barter.recipes.stored import StoredRun, spread_over_seeds
from benchmarks.htfllib import later_seconds, pair_runs
from benchmarks.measured import RESULTS
from benchmarks.tables import stored_rows

ROOT = Path(__file__).parent.parent
DFFKE = "dffke-cifar100-alpha-{}"
FEDAVG = "averaging: fedavg, partition.alpha={}"
ORACLE = "averaging: oracle, partition.alpha={}"
LONG_DFFKE = "averaging: dffke, partition.alpha=0.1"  # seed 0, 50 rounds
DECODER_STEPS = "warm_decoder=true, decoder_steps=70, decoder_batch=50"
PRESET = "dffke-cifar100-preset-paper"
FEDAF = "fedaf-cifar10-alpha-0.1"
PLATEAU = range(13, 60)  # the rounds in which the preset's accuracy no longer rises
AVERAGING = "paper-fedaf: {}, partition.alpha=0.1"
CLIENTS = 10


@cache
def rows() -> dict[str, list[StoredRun]]:
    """Return all stored runs by row."""
    return stored_rows()


def points(row: str, at: int, metric: str = "global") -> float:
    """Return the mean of a metric over seeds after a round, in percent."""
    spread = spread_over_seeds(rows()[row], metric, at)
    assert spread is not None, f"{row} has no {metric} after round {at}"
    assert len(spread.values) == len(rows()[row]), f"a seed of {row} has no {metric} there"
    return 100 * spread.mean


def fedavg(alpha: str, at: int) -> float:
    """Return the accuracy of FedAvg's server after a round, in percent."""
    return points(FEDAVG.format(alpha), at, "server")


def only(row: str, seed: int = 0) -> StoredRun:
    """Return the run of a row with this seed."""
    (run,) = (run for run in rows()[row] if run.seed == seed)
    return run


def rounds_to_match(alpha: str) -> int:
    """Return the first round in which FedAvg has DFFKE's accuracy of round 14."""
    wanted = points(DFFKE.format(alpha), 14)
    return next(at for at in range(1, 51) if fedavg(alpha, at) >= wanted)


def gigabytes(row: str, rounds: int) -> float:
    """Return what a client moves in as many rounds, in GB."""
    total = only(row).total("bytes", rounds)
    assert total is not None
    return total / CLIENTS / 1e9


def lead(alpha: str, at: int) -> float:
    """Return how many points FedAvg's round `at` is above DFFKE's round 14."""
    return fedavg(alpha, at) - points(DFFKE.format(alpha), 14)


def above_paper(recipe: str, at: int) -> float:
    """Return how many points a recipe's mean is above its paper's figure after a round."""
    figure = find_recipe(recipe).paper
    assert figure is not None
    assert isinstance(figure.accuracy, float)
    return points(recipe, at) - figure.accuracy


def first_round_below(row: str, other: str) -> int:
    """Return the round from which on a row's only run is below the other's server for good."""
    below = [at for at in range(1, 51) if points(row, at) < points(other, at, "server") and at > 10]
    assert below == list(range(below[0], 51)), "it stays below"
    return below[0]


def first_round_above(row: str, other: str) -> int:
    """Return the round from which on one row's server is above another's in all rounds of both.

    Each row has one run.
    """
    rounds = min(len(only(row).rounds), len(only(other).rounds))
    above = [
        at for at in range(1, rounds + 1) if points(row, at, "server") > points(other, at, "server")
    ]
    assert above == list(range(above[0], rounds + 1)), "it falls back"
    return above[0]


def find_plateau() -> tuple[float, float]:
    """Return the lowest and highest global test accuracy of the preset in its plateau, in percent."""
    values = [points(PRESET, at, "global") for at in PLATEAU]
    return min(values), max(values)


def find_changes(phase: str, metric: str, sign: int) -> tuple[float, float]:
    """Return the smallest and largest change in accuracy by a phase of the preset, in points.

    Args:
        phase: "local training" or "exchange", of each round after the first of the plateau.
        metric: The test: "global", or "own" for local tests.
        sign: -1 to count falls as positive, 1 to count rises.
    """
    trained = {"global": "trained", "own": "trained-own"}[metric]
    changes = []
    for at in PLATEAU[1:]:
        before, after_training = points(PRESET, at - 1, metric), points(PRESET, at, trained)
        after_exchange = points(PRESET, at, metric)
        by_phase = {
            "local training": after_training - before,
            "exchange": after_exchange - after_training,
        }
        changes.append(sign * by_phase[phase])
    return min(changes), max(changes)


def htfllib_ratios() -> tuple[float, float]:
    """Return how many times as fast as HtFLlib's a round of barter is, at least and at most."""
    runs = json.loads((RESULTS / "htfllib.json").read_text())["runs"]
    ratios = [later_seconds(theirs) / later_seconds(ours) for theirs, ours in pair_runs(runs)]
    return min(ratios), max(ratios)


def momentum_gain() -> float:
    """Return how many points momentum brings FedAvg's server on CIFAR-10 after 20 rounds."""
    without = points("paper-fedaf: fedavg, alpha 0.1", 20, "server")
    return points(AVERAGING.format("fedavg, momentum=0.9"), 20, "server") - without


def best_server(row: str, at: int) -> float:
    """Return the best accuracy of the server of a row's only run, which it has in this round."""
    best = only(row).best("server")
    assert best is not None
    assert best[0] == at
    return best[1]


def fedtgp_lead(clients: str, at: int) -> float:
    """Return how many points DFFKE's participants are above FedTGP's on local tests."""
    row = "paper-dffke-clients: {}" + clients
    return points(row.format(""), at, "participants-own") - points(
        row.format("fedtgp, "), at, "participants-own"
    )


def best_of(row: str) -> tuple[int, float]:
    """Return the round in which the only run of a row is best, and its accuracy in percent."""
    best = only(row).best("global")
    assert best is not None
    return best[0], 100 * best[1]


def value(row: str, seed: int, at: int) -> float:
    """Return the accuracy of one seed after a round, in percent."""
    found = only(row, seed).value("global", at)
    assert found is not None
    return 100 * found


# Page, sentence, and what its gaps are filled with.
STATEMENTS: list[tuple[str, str, Callable[[], list[float | int]]]] = [
    (
        "README.md",
        "FedAvg reaches DFFKE's accuracy of round 14 after {} (alpha 1.0) and {} rounds (alpha 0.1)",
        lambda: [rounds_to_match("1.0"), rounds_to_match("0.1")],
    ),
    (
        "README.md",
        "A client has moved {:.1f} GB by then with DFFKE, {:.1f} and {:.1f} GB with FedAvg",
        lambda: [
            gigabytes(LONG_DFFKE, 14),
            gigabytes(FEDAVG.format("1.0"), rounds_to_match("1.0")),
            gigabytes(FEDAVG.format("0.1"), rounds_to_match("0.1")),
        ],
    ),
    (
        "README.md",
        "After 50 rounds FedAvg is {:.1f} points (alpha 1.0) and {:.1f} points (alpha 0.1) above "
        "DFFKE's round 14",
        lambda: [lead("1.0", 50), lead("0.1", 50)],
    ),
    (
        "README.md",
        "is below FedAvg at the same round from round {} on",
        lambda: [first_round_below(LONG_DFFKE, FEDAVG.format("0.1"))],
    ),
    (
        "README.md",
        "after five rounds, DFFKE has {:.1f}, class moments with ε = 8 have [{:.1f}]",
        lambda: [points("dffke-cifar10-alpha-0.1", 5), points("moments-cifar10-epsilon-8", 5)],
    ),
    (
        "README.md",
        'DFFKE with `reveal = "statistics"` has {:.1f} (one seed',
        lambda: [points("dffke-cifar10-statistics-alpha-0.1", 5)],
    ),
    (
        "README.md",
        "Local training has {:.1f}, DFFKE in its paper 43.2",
        lambda: [points("dffke-cifar10-alpha-0.1", 1, "trained")],
    ),
    (
        "docs/methods/dffke.md",
        "{:.1f} % instead of {:.1f} % on CIFAR-100",
        lambda: [points(DFFKE.format("1.0"), 14), points(DFFKE.format("1.0"), 1, "trained")],
    ),
    (
        "docs/methods/dffke.md",
        '`"statistics"` has {:.1f} instead of {:.1f} on CIFAR-100, and {:.1f} instead of {:.1f} on '
        "CIFAR-10",
        lambda: [
            points("dffke-cifar100-statistics-alpha-1.0", 14),
            points(DFFKE.format("1.0"), 14),
            points("dffke-cifar10-statistics-alpha-1.0", 6),
            points("dffke-cifar10-alpha-1.0", 6),
        ],
    ),
    (
        "docs/choose.md",
        '{:.1f} % global with `reveal = "statistics"`, {:.1f} % by default, and clients that only '
        "train locally have {:.1f} %",
        lambda: [
            points("dffke-cifar100-statistics-alpha-1.0", 14),
            points(DFFKE.format("1.0"), 14),
            points(DFFKE.format("1.0"), 1, "trained"),
        ],
    ),
    (
        "docs/results/dffke.md",
        "by {:.1f} points (CIFAR-100, alpha 1.0), {:.1f} (alpha 0.1), {:.1f} and {:.1f} (CIFAR-10)",
        lambda: [
            above_paper(DFFKE.format("1.0"), 14),
            above_paper(DFFKE.format("0.1"), 14),
            above_paper("dffke-cifar10-alpha-0.1", 5),
            above_paper("dffke-cifar10-alpha-1.0", 6),
        ],
    ),
    (
        "docs/results/dffke.md",
        "by {:.1f} points after eight rounds and by {:.1f} after nine",
        lambda: [
            -above_paper("dffke-cifar100-htfe-2", 8),
            -above_paper("dffke-cifar100-htfe-5", 9),
        ],
    ),
    (
        "docs/results/dffke.md",
        "brings HtFE-5 {:.1f} points** after eight rounds ({:.1f} instead of {:.1f}, one seed each)",
        lambda: [
            points("dffke-cifar100-htfe-5", 8) - points("paper-dffke: htfe-5, logits refused", 8),
            points("dffke-cifar100-htfe-5", 8),
            points("paper-dffke: htfe-5, logits refused", 8),
        ],
    ),
    (
        "docs/results/averaging.md",
        "After 14 it is {:.1f} points (alpha 1.0) and {:.1f} points (alpha 0.1) above FedAvg, which "
        "reaches DFFKE's accuracy after {} and {} rounds",
        lambda: [
            -lead("1.0", 14),
            -lead("0.1", 14),
            rounds_to_match("1.0"),
            rounds_to_match("0.1"),
        ],
    ),
    (
        "docs/results/averaging.md",
        "has its best after round {} ({:.1f}) and falls to {:.1f}, below FedAvg's {:.1f} and from "
        "round {} on below FedAvg at the same round",
        lambda: [
            *best_of(LONG_DFFKE),
            points(LONG_DFFKE, 50),
            fedavg("0.1", 50),
            first_round_below(LONG_DFFKE, FEDAVG.format("0.1")),
        ],
    ),
    (
        "docs/results/averaging.md",
        "The other two seeds have {:.1f} and {:.1f} after round 14",
        lambda: [value(DFFKE.format("0.1"), seed, 14) for seed in (1, 2)],
    ),
    (
        "docs/results/averaging.md",
        "for 16 rounds has {:.1f} after round 14 and {:.1f} after round 16",
        lambda: [value(DFFKE.format("1.0"), 2, at) for at in (14, 16)],
    ),
    (
        "docs/results/averaging.md",
        "**Decoding costs {:.1f} and {:.1f} points after 14 rounds** (seed 0)",
        lambda: [
            points(ORACLE.format(alpha), 14) - value(DFFKE.format(alpha), 0, 14)
            for alpha in ("1.0", "0.1")
        ],
    ),
    (
        "docs/results/averaging.md",
        "cost FedAvg {:.1f} points after 14 rounds and {:.1f} after 50, DFFKE {:.1f} and the oracle "
        "{:.1f} after 14",
        lambda: [
            fedavg("1.0", 14) - fedavg("0.1", 14),
            fedavg("1.0", 50) - fedavg("0.1", 50),
            points(DFFKE.format("1.0"), 14) - points(DFFKE.format("0.1"), 14),
            points(ORACLE.format("1.0"), 14) - points(ORACLE.format("0.1"), 14),
        ],
    ),
    (
        "docs/results/dffke-participation.md",
        "by {:.1f}, {:.1f} and {:.1f} points after the last round",
        lambda: [
            fedtgp_lead("20 clients, half in a round", 8),
            fedtgp_lead("50 clients, a fifth in a round", 10),
            fedtgp_lead("100 clients, a tenth in a round", 10),
        ],
    ),
    (
        "docs/results/dffke-participation.md",
        "it leads by {:.1f} points**: {:.1f} and {:.1f} after eight rounds",
        lambda: [
            fedtgp_lead("10 clients, all in a round", 8),
            points("paper-dffke-clients: 10 clients, all in a round", 8, "participants-own"),
            points(
                "paper-dffke-clients: fedtgp, 10 clients, all in a round", 8, "participants-own"
            ),
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "its best is {1:.1f} in round {0}",
        lambda: [*best_of(PRESET)],
    ),
    (
        "docs/results/dffke-preset.md",
        "Clients begin lower here: at {:.1f}, where the paper has 31.25 without collaboration "
        "(Table 6), so that exchange brings {:.1f} points here and 16.2 in the paper. barter's "
        "default has {:.1f} after round 14, from {:.1f}",
        lambda: [
            points(PRESET, 1, "trained"),
            best_of(PRESET)[1] - points(PRESET, 1, "trained"),
            points(DFFKE.format("1.0"), 14),
            points(DFFKE.format("1.0"), 1, "trained"),
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "lowers the global test by {:.1f} to {:.1f} points and raises local tests by {:.1f} to "
        "{:.1f}",
        lambda: [
            *find_changes("local training", "global", -1),
            *find_changes("local training", "own", 1),
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "lowers local tests by {:.1f} to {:.1f}, to {:.1f} in round 59, where clients had {:.1f}",
        lambda: [
            *find_changes("exchange", "own", -1),
            points(PRESET, 59, "own"),
            points(PRESET, 1, "trained-own"),
        ],
    ),
    *(
        (page, "{:.1f} to {:.1f} from round 13 to round 59", lambda: [*find_plateau()])
        for page in ("README.md", "docs/results/dffke.md", "docs/results/dffke-preset.md")
    ),
    (
        "docs/results/dffke-preset.md",
        "the preset has {:.1f} instead of {:.1f}, with a decoder that continues {:.1f}, with both "
        "{:.1f}",
        lambda: [
            points(f"dffke-preset: {row}", 8)
            for row in (
                "share=1",
                "preset paper",
                "warm_decoder=true",
                "share=1, warm_decoder=true",
            )
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "the preset has {:.1f}. Whitened codes, which the paper does not have, raise this to "
        "{:.1f}, but local tests fall from {:.1f} to {:.1f}; alone they change nothing ({:.1f}). "
        "The default has [{:.1f}]",
        lambda: [
            points(f"dffke-preset: {DECODER_STEPS}", 8),
            points(f"dffke-preset: whiten=0.1, {DECODER_STEPS}", 8),
            points(f"dffke-preset: {DECODER_STEPS}", 8, "own"),
            points(f"dffke-preset: whiten=0.1, {DECODER_STEPS}", 8, "own"),
            points("dffke-preset: whiten=0.1", 8),
            points("dffke-digits: dffke (default)", 5),
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "clients have {:.1f} instead of {:.1f} on local tests, but {:.1f} instead of {:.1f} on the "
        "global test",
        lambda: [
            points(f"dffke-preset: {row}", 8, metric)
            for metric in ("own", "global")
            for row in ("local_review=true", "preset paper")
        ],
    ),
    (
        "docs/results/dffke-preset.md",
        "the global test falls by {:.0f} points and local tests by {:.0f}",
        lambda: [
            points("dffke-preset: preset paper", 8, metric)
            - points("dffke-preset: later_epochs=0", 8, metric)
            for metric in ("global", "own")
        ],
    ),
    (
        "README.md",
        "DFFKE has {:.1f} after 14 rounds, and",
        lambda: [points(PRESET, 14)],
    ),
    (
        "docs/results/fedaf-cifar10.md",
        "FedAvg, FedProx and MOON have {:.1f}, {:.1f} and (after 18 rounds) {:.1f}, where FedAF has "
        "{:.1f} ({:.1f})",
        lambda: [
            points(AVERAGING.format("fedavg, momentum=0.9"), 20, "server"),
            points(AVERAGING.format("fedprox, momentum=0.9"), 20, "server"),
            points(AVERAGING.format("moon"), 18, "server"),
            points(FEDAF, 20, "server"),
            points(FEDAF, 18, "server"),
        ],
    ),
    *(
        (page, "{:.1f} to {:.1f} times as fast", lambda: [*htfllib_ratios()])
        for page in (
            "README.md",
            "docs/coming-from.md",
            "docs/results/htfllib.md",
            "docs/results/speed.md",
        )
    ),
    *(
        (page, sentence, lambda: [momentum_gain()])
        for page, sentence in (
            ("README.md", "on CIFAR-10 momentum brought it [{:.1f} points]"),
            ("docs/methods/fedavg.md", "[brought the server {:.1f} points]"),
            ("docs/results/averaging.md", "brought FedAvg [{:.1f} points on CIFAR-10]"),
        )
    ),
    (
        "docs/results/fedaf-cifar10.md",
        "MOON passes it in round {}, and FedAvg and FedProx with momentum in round {}",
        lambda: [
            first_round_above(AVERAGING.format("moon"), FEDAF),
            *{
                first_round_above(AVERAGING.format(f"{name}, momentum=0.9"), FEDAF)
                for name in ("fedavg", "fedprox")
            },
        ],
    ),
    (
        "docs/results/systems.md",
        "FedAvg with momentum has {:.1f} after 20 rounds, MOON {:.1f} after 18",
        lambda: [
            points(AVERAGING.format("fedavg, momentum=0.9"), 20, "server"),
            points(AVERAGING.format("moon"), 18, "server"),
        ],
    ),
    (
        "docs/results/systems.md",
        "alone have their best in round 2, {:.1f} and {:.1f}",
        lambda: [
            100 * best_server(f"paper-others: {name}", 2) for name in ("fedrolex", "heterofl")
        ],
    ),
    (
        "docs/results/systems.md",
        "DFRD is {:.1f} points above FedRolex alone; the best rounds, chosen on the test set, "
        "differ by {:.1f}",
        lambda: [
            points("dfrd-cifar10-after-fedrolex", 13, "server")
            - points("paper-others: fedrolex", 13, "server"),
            100
            * (
                best_server("dfrd-cifar10-after-fedrolex", 12)
                - best_server("paper-others: fedrolex", 2)
            ),
        ],
    ),
    (
        "docs/choose.md",
        "after 18 rounds `moon` has {:.1f} %, `fedavg` with momentum {:.1f} %, `fedaf` {:.1f} % "
        "and `fedavg` without momentum {:.1f} %",
        lambda: [
            points(row, 18, "server")
            for row in (
                AVERAGING.format("moon"),
                AVERAGING.format("fedavg, momentum=0.9"),
                FEDAF,
                "paper-fedaf: fedavg, alpha 0.1",
            )
        ],
    ),
]


@pytest.mark.parametrize(("page", "sentence", "gaps"), STATEMENTS)
def test_sentences_agree_with_stored_results(
    page: str, sentence: str, gaps: Callable[[], list[float | int]]
) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert sentence.format(*gaps()) in text
