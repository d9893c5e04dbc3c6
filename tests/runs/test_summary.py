"""Tables over seeds, against numbers derived by hand."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barter.core.record import Round
from barter.runs.summary import (
    Column,
    Question,
    confidence_interval,
    cumulative_seconds,
    known_metrics,
    mean_positions,
    metric_value,
    summarise,
    summary_cells,
    to_csv,
    to_latex,
    to_markdown,
    to_round_csv,
)


def rounds(*accuracies: float, server: float | None = None) -> list[Round]:
    """A run of two clients whose mean on the global test is this, round by round; their own is 0.1 above."""
    made = []
    for t, accuracy in enumerate(accuracies, start=1):
        clients = {
            k: {"global": accuracy + shift, "local": accuracy + 0.1}
            for k, shift in ((0, 0.05), (1, -0.05))
        }
        reported = {} if server is None else {"global": server}
        made.append(
            Round(
                t,
                clients,
                reported,
                {"round": 2.0, "learn": 1.0},
                {"learn": {"up": 3, "down": 4}},
                [],
            )
        )
    return made


RESULTS = {
    "alone": {0: rounds(0.2, 0.30), 1: rounds(0.2, 0.32), 2: rounds(0.2, 0.31)},
    "good": {
        0: rounds(0.5, 0.61, server=0.7),
        1: rounds(0.3, 0.64, server=0.8),
        2: rounds(0.3, 0.61, server=0.9),
    },
    "short": {1: rounds(0.1, 0.2)},
}


def test_what_a_round_is_worth() -> None:
    record = rounds(0.4, server=0.9)[0]
    assert metric_value(record, "global") == pytest.approx(0.4)
    assert metric_value(record, "own") == pytest.approx(0.5)
    assert metric_value(record, "server") == 0.9
    assert metric_value(rounds(0.4)[0], "server") is None
    assert metric_value(Round(1, {0: {"epochs": 3.0}}, {}, {}, {}, []), "own") is None
    trained = Round(
        1,
        {0: {"before_global": 0.2, "before_local": 0.6}, 1: {"before_global": 0.4}},
        {},
        {},
        {},
        [],
    )
    assert (metric_value(trained, "trained"), metric_value(trained, "trained-own")) == (
        pytest.approx(0.3),
        pytest.approx(0.6),
    )


def test_means_and_deviations_by_hand() -> None:
    alone, good, short = summarise(RESULTS, Question("global", "alone", 0.35)).rows
    assert alone.accuracies["global"].mean == pytest.approx(0.31)
    assert alone.accuracies["global"].deviation == pytest.approx(0.01)  # of -0.01, 0.01, 0
    assert good.accuracies["own"].mean == pytest.approx(0.72)
    assert good.accuracies["server"].mean == pytest.approx(0.8)
    assert alone.accuracies["server"].mean is None
    assert (good.bytes.mean, good.seconds.mean) == (14, 4)  # two rounds of 7 bytes and 2 seconds
    assert (alone.reached.values, good.reached.values, short.reached.values) == ((), (1, 2, 2), ())
    assert alone.difference.values == ()
    assert good.difference.values == pytest.approx((0.31, 0.32, 0.30))
    assert short.difference.values == pytest.approx((-0.12,)), "of the one seed that both have"


def test_the_interval_is_students() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1, and the 97.5 % quantile of t with two degrees of freedom is 4.302653.
    assert confidence_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6
    )
    # With 4 degrees of freedom it is 2.776445; the deviation of 0, 0, 0, 0, 5 is the root of 5.
    assert confidence_interval([0.0, 0.0, 0.0, 0.0, 5.0]) == pytest.approx(
        (1 - 2.776445, 1 + 2.776445), rel=1e-6
    )
    assert confidence_interval([1.0, 2.0]) is None
    assert confidence_interval([]) is None


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=9), st.floats(-1, 1))
def test_an_interval_holds_its_mean_and_moves_with_it(values: list[float], shift: float) -> None:
    low, high = confidence_interval(values) or (0.0, 0.0)
    mean = Column(tuple(values)).mean
    assert mean is not None
    assert low <= mean + 1e-12
    assert mean <= high + 1e-12
    assert confidence_interval([v + shift for v in values]) == pytest.approx(
        (low + shift, high + shift), abs=1e-9
    )


def test_cells_say_what_is_best_and_what_is_not_sure() -> None:
    headings, rows = summary_cells(summarise(RESULTS, Question("global", "alone", 0.35)))
    assert headings == [
        *("method", "seeds", "clients: global test", "clients: local test", "server: global test"),
        *("bytes", "seconds", "rounds to 35% clients: global test", "bytes to it"),
        "clients: global test above alone (95 %)",
    ]
    text = {row[0][0]: [cell for cell, _ in row[1:]] for row in rows}
    assert text["alone"] == ["3", "31.0 ± 1.0", "41.0 ± 1.0", "-", "14 B", "4 s", "never", "-", "-"]
    # 0.31, 0.32, 0.30: mean 0.31, deviation 0.01, so 4.302653 * 0.01 / 3 ** 0.5 = 0.0248 to each side.
    good = [
        "3",
        "62.0 ± 1.7",
        "72.0 ± 1.7",
        "80.0 ± 10.0",
        "14 B",
        "4 s",
        "1.7",
        "12 B",  # 7, 14 and 14
        "+31.0 [+28.5, +33.5]",
    ]
    assert text["good"] == good
    assert text["short"] == [
        "1",
        "20.0",
        "30.0",
        "-",
        "14 B",
        "4 s",
        "never",
        "-",
        "-12.0 (too few seeds)",
    ]
    assert [[cell for cell, best in row if best] for row in rows] == [[], good[1:4], []]


def test_without_baseline_and_target_there_are_no_such_columns() -> None:
    headings, rows = summary_cells(summarise({"alone": RESULTS["alone"]}, Question()))
    assert headings == [
        *("method", "seeds", "clients: global test", "clients: local test", "bytes", "seconds"),
    ]
    assert {len(row) for row in rows} == {len(headings)}


def test_time_to_target_is_the_simulated_time_until_the_first_round_at_it() -> None:
    def timed(seconds: float, *accuracies: float) -> list[Round]:
        return [replace(r, simulated={"round": seconds}) for r in rounds(*accuracies)]

    results = {
        "slow": {0: timed(3600, 0.2, 0.5, 0.6), 1: timed(1800, 0.4, 0.5, 0.6)},
        "never": {0: timed(60, 0.1, 0.2, 0.3)},
    }
    compared = summarise(results, Question("global", None, 0.35))
    slow, never = compared.rows
    assert slow.simulated.values == (10800, 5400)
    assert slow.seconds_to_target.values == (7200, 1800)
    assert slow.bytes_to_target.values == (14, 7)
    assert never.seconds_to_target.values == ()
    headings, rows = summary_cells(compared)
    cells = [dict(zip(headings, [text for text, _ in row], strict=True)) for row in rows]
    assert [row["simulated time"] for row in cells] == ["2 h 15 min", "3 min 00 s"]
    assert [row["simulated time to it"] for row in cells] == ["1 h 15 min", "-"]
    (line, _) = csv.DictReader(io.StringIO(to_csv(compared)))
    assert (line["simulated_seconds"], line["simulated_seconds_to_target"]) == ("8100.0", "4500.0")
    lines = list(csv.DictReader(io.StringIO(to_round_csv(results))))
    assert [row["simulated_seconds"] for row in lines] == ["3600"] * 3 + ["1800"] * 3 + ["60"] * 3
    assert mean_positions(results["slow"], cumulative_seconds) == {1: 2700, 2: 5400, 3: 8100}
    assert mean_positions(RESULTS["good"], cumulative_seconds) == {}, "none where there is none"


def test_a_loss_reaches_its_target_from_above() -> None:
    """Rounds in which it was not measured do not count as zero."""
    losses = [None, 2.5, 1.4, 0.9]
    clients = [{} if value is None else {"global_loss": value} for value in losses]
    run = [
        Round(t, {0: measured}, {}, {"round": 1.0}, {}, [])
        for t, measured in enumerate(clients, start=1)
    ]
    compared = summarise({"a": {0: run}}, Question("global_loss", target=1.5))
    assert compared.rows[0].reached.values == (3,)
    headings, rows = summary_cells(compared)
    assert rows[0][headings.index("rounds to 1.5 global_loss")][0] == "3.0"
    assert summarise({"a": {0: run}}, Question("global_loss", target=0.5)).rows[
        0
    ].reached == Column(())


def test_the_same_table_in_markdown_latex_and_csv() -> None:
    compared = summarise(
        {**RESULTS, "a_b|50% $x$ \\": {0: rounds(0.2)}}, Question("global", "alone", 0.35)
    )
    lines = to_markdown(compared).splitlines()
    assert lines[2].startswith("| alone | 3 | 31.0 ± 1.0 |")
    assert lines[3].startswith("| good | 3 | **62.0 ± 1.7** |")
    assert lines[5].startswith(r"| a_b\|50% $x$ \ | 1 |")
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    latex = to_latex(compared)
    assert r"good & 3 & \textbf{62.0 $\pm$ 1.7} &" in latex
    assert r"$-$12.0 (too few seeds) \\" in latex
    assert r"a\_b|50\% \$x\$ \textbackslash{} & 1 &" in latex
    assert latex.startswith("\\begin{tabular}{lrrrrrrrrr}\n\\toprule\n")
    assert latex.endswith("\\bottomrule\n\\end{tabular}\n")
    table = list(csv.DictReader(io.StringIO(to_csv(compared))))
    assert [row["method"] for row in table] == ["alone", "good", "short", "a_b|50% $x$ \\"]
    assert float(table[1]["global_mean"]) == pytest.approx(0.62)
    assert float(table[1]["low"]) == pytest.approx(0.31 - 4.302653 * 0.01 / 3**0.5, abs=1e-6)
    assert (table[1]["reached"], table[0]["difference"], table[2]["low"]) == ("3", "", "")


def test_who_trains_in_the_first_round_only_is_asked_about_that() -> None:
    first = Round(1, {0: {"global": 0.3, "before_global": 0.2}}, {}, {"round": 1.0}, {}, [])
    last = Round(2, {0: {"global": 0.5}}, {}, {"round": 1.0}, {}, [])
    silent = Round(3, {0: {}}, {}, {"round": 1.0}, {}, [])
    (row,) = summarise({"a": {0: [first, last]}}, Question("trained")).rows
    assert (row.accuracies["trained"].values, row.accuracies["global"].values) == ((0.2,), (0.5,))
    (row,) = summarise({"a": {0: [first, last, silent]}}, Question("trained")).rows
    assert (row.accuracies["trained"].values, row.accuracies["global"].values) == ((0.2,), ()), (
        "nothing is made up"
    )


def test_what_came_of_local_training_stands_in_the_table_if_asked_for() -> None:
    def trained(before: float) -> list[Round]:
        return [Round(1, {0: {"global": 0.5, "before_global": before}}, {}, {"round": 1.0}, {}, [])]

    results = {"a": {0: trained(0.25)}, "b": {0: trained(0.75)}}
    assert "trained: global test" not in summary_cells(summarise(results, Question()))[0]
    headings, rows = summary_cells(summarise(results, Question("trained")))
    at = headings.index("trained: global test")
    assert [row[at] for row in rows] == [("25.0", False), ("75.0", True)]


def by_server(accuracy: float, client: float) -> list[Round]:
    clients = {0: {"global": client, "local": 0.5}, 1: {"global": client, "local": 0.5}}
    server = {"global": accuracy, "drift": 3.5}
    return [Round(1, clients, server, {"round": 1.0}, {}, [], [0], primary="server")]


def test_methods_are_judged_by_their_primary_model() -> None:
    """One model for all is what averaging trains; its clients' networks are what training left behind."""
    results = {"alone": {0: rounds(0.3)}, "average": {0: by_server(0.6, 0.2)}}
    headings, rows = summary_cells(summarise(results, Question(baseline="alone", target=0.5)))
    assert headings[:5] == ["method", "seeds", "model", "accuracy", "clients: global test"]
    assert [row[2][0] for row in rows] == ["clients", "server"]
    assert [row[3] for row in rows] == [("30.0", False), ("60.0", True)]
    assert [row[4] for row in rows] == [("30.0", True), ("20.0", False)]
    average = summarise(results, Question(baseline="alone", target=0.5)).rows[1]
    assert average.difference.values == pytest.approx((0.3,)), "0.6 of the server, 0.3 of clients"
    assert average.reached.values == (1,)
    headings, _ = summary_cells(summarise({"average": results["average"]}, Question()))
    assert headings[2] == "server: global test", "if all have one, it comes first"


def test_metrics_over_clients_by_hand() -> None:
    clients = {
        0: {"global": 0.2, "local": 0.5, "local_images": 30.0, "mood": 7.0},
        1: {"global": 0.6, "local": 0.9, "local_images": 10.0},
    }
    record = Round(1, clients, {"drift": 3.5}, {"round": 1.0}, {}, [], [0, 1])
    assert metric_value(record, "own") == pytest.approx(0.7), "clients count alike"
    assert metric_value(record, "own-by-images") == pytest.approx((30 * 0.5 + 10 * 0.9) / 40)
    assert (metric_value(record, "worst"), metric_value(record, "worst-own")) == (0.2, 0.5)
    assert metric_value(record, "spread") == pytest.approx(0.2), "0.4 is the mean, each is 0.2 away"
    assert (metric_value(record, "mood"), metric_value(record, "server:drift")) == (7.0, 3.5)
    results = {"a": {0: [record]}}
    assert {"mood", "server:drift", "worst"} <= set(known_metrics(results))
    (line,) = csv.DictReader(io.StringIO(to_round_csv(results)))
    assert (line["mood"], line["server:drift"], line["participants"]) == ("7.0", "3.5", "2")
    headings, rows = summary_cells(summarise(results, Question("mood")))
    assert rows[0][headings.index("mood")] == ("7", True), "no share: not in percent"


def test_every_round_of_every_run_is_a_line() -> None:
    table = list(csv.DictReader(io.StringIO(to_round_csv(RESULTS))))
    assert len(table) == 7 * 2
    first = next(
        line
        for line in table
        if (line["method"], line["seed"], line["round"]) == ("good", "1", "2")
    )
    assert float(first["global"]) == pytest.approx(0.64)
    assert (first["server"], first["trained"], first["trained_own"]) == ("0.8", "", "")
    assert (first["bytes"], first["seconds"]) == ("7", "2.0")
