"""Reports: that a page says what the records say, holds all it needs, and works in a browser."""

from __future__ import annotations

import base64
import html
import importlib
import io
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from plotly.offline import get_plotlyjs_version

from barter.algorithms.local import Local
from barter.cli import inspecting
from barter.cli.app import main
from barter.compare.comparison import Comparison
from barter.compare.specification import ComparisonSpec
from barter.core.errors import ConfigError
from barter.core.record import Primary, Round
from barter.report import page
from barter.report.charts import bar_chart, learning_chart, round_chart, split_chart
from barter.report.colours import DARK, INK
from barter.runs.folder import read_records
from barter.runs.picture import COLOURS
from barter.runs.tables import closing_cells
from barter.setup.config import resolve, to_toml, with_settings
from tests.browser import CHROMIUM, Browser
from tests.test_cli import QUICK

ODD = "<script>alert(1)</script> & $co's"


def record(t: int, clients: int, gain: float = 0.02) -> Round:
    def told(k: int) -> dict[str, float]:
        now = {"global": 0.3 + gain * t + 0.001 * k, "local": 0.9 - 0.001 * k * t}
        return {
            **now,
            "before_global": 0.25 + 0.002 * k,
            "before_local": 0.8,
            "bytes_up": 40,
            "bytes_down": 300,
        }

    return Round(
        t,
        {k: told(k) for k in range(clients)},
        {"global": 0.5 + 0.01 * t, "decoder_loss": 1 / t, "device_memory": 3e9 + t},
        {"learn": 1.5, "teach": 0.5 * t, "round": 2.25 + 0.5 * t},
        {"learn": {"up": 40 * clients, "down": 0}, "teach": {"up": 0, "down": 300 * clients}},
        [f"client 1 failed in 'learn', round {t}: {ODD}"] if t == 2 else [],
        list(range(clients)),
    )


def begun(folder: Path, clients: int = 3, rounds: int = 4, *settings: str) -> Path:
    config = resolve(
        with_settings(
            {}, [f"clients={clients}", f"rounds={rounds}", "algorithm.name=local", *settings]
        )
    )
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    return folder


def go_on(folder: Path, *rounds: Round) -> Path:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(r.to_json() + "\n" for r in rounds)
    return folder


def written(folder: Path, clients: int = 3, rounds: int = 4, *settings: str) -> Path:
    return go_on(
        begun(folder, clients, rounds, *settings),
        *(record(t, clients) for t in range(1, rounds + 1)),
    )


def compared(
    folder: Path,
    names: Sequence[str] = ("alone", ODD),
    missing: int = 0,
    rounds: int = 3,
    seeds: Sequence[int] = (0, 1, 2),
) -> Path:
    variants = {
        name: ["algorithm.name=local", f"algorithm.max_epochs={i + 1}"]
        for i, name in enumerate(names)
    }
    question = {"baseline": names[0], "target": 0.34}
    _, jobs = Comparison.plan(
        folder,
        ComparisonSpec(variants, list(seeds), {}, [f"rounds={rounds}", "clients=2"], question),
    )
    for job in jobs[: len(jobs) - missing]:
        job.folder.mkdir(parents=True)
        (job.folder / "config.toml").write_text(to_toml(job.config))
        gain = 0.01 * (1 + job.seed) * (1 + names.index(job.variant))
        go_on(job.folder, *(record(t, 2, gain) for t in range(1, rounds + 1)))
    return folder


def report(folder: Path, *options: str) -> str:
    assert main(["report", str(folder), *options]) == 0
    return (folder / "report.html").read_text()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def charts(content: str) -> dict[str, list[dict[str, Any]]]:
    """The traces of every chart of a page, by its caption; numbers as lists."""
    found = re.findall(
        r"<figcaption>([^<]*)</figcaption><div class=chart[^>]*><script[^>]*>([^<]*)</script>",
        content,
    )

    def plain(item: Any) -> Any:
        if isinstance(item, dict) and "bdata" in item:
            values = np.frombuffer(base64.b64decode(item["bdata"]), item["dtype"])
            return values.reshape(
                [int(n) for n in item["shape"].split(",")] if "shape" in item else -1
            ).tolist()
        return item

    return {
        html.unescape(caption): [
            {key: plain(item) for key, item in trace.items()} for trace in json.loads(text)["data"]
        ]
        for caption, text in found
    }


def layouts(content: str) -> list[dict[str, Any]]:
    found = re.findall(r"<div class=chart[^>]*><script[^>]*>([^<]*)</script>", content)
    return [json.loads(text)["layout"] for text in found]


def headings(content: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<h2>([^<]*)</h2>", content)]


def cards(content: str) -> list[tuple[str, str, list[str]]]:
    """The cards of a page: name, value and notes."""
    found = re.findall(r"<div class=tile><span>(.*?)</span><b>(.*?)</b>(.*?)</div>", content)
    return [
        (html.unescape(name), value, re.findall("<small>(.*?)</small>", html.unescape(notes)))
        for name, value, notes in found
    ]


def named(traces: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(trace for trace in traces if html.unescape(trace.get("name", "")) == name)


def test_the_page_of_a_run_says_what_its_records_say(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3, 4, "models=small-mlp")
    rounds, content = read_records(run), report(run)
    drawn = charts(content)
    for test, key in (
        ("global test set", "global"),
        ("local tests", "local"),
    ):
        lines = drawn[f"Accuracy by round, {test}"]
        for k in range(3):
            assert named(lines, f"{k} small-mlp")["y"] == [r.clients[k][key] for r in rounds]
        assert named(lines, "mean of 3 clients")["y"] == pytest.approx(
            [r.mean(key) for r in rounds]
        )
        assert {(line["x0"], line["dx"]) for line in lines} == {(1, 1)}
        gains = drawn[f"Accuracy by client, {test}"]
        assert named(gains, "local only")["y"] == [
            rounds[0].clients[k][f"before_{key}"] for k in range(3)
        ]
        assert named(gains, "after")["y"] == [rounds[-1].clients[k][key] for k in range(3)]
    assert named(drawn["Accuracy by round, global test set"], "server's model")["y"] == [
        0.51,
        0.52,
        0.53,
        0.54,
    ]
    (split,) = drawn["Images by client and class"]
    assert np.shape(split["z"]) == (10, 3)
    assert np.sum(split["z"]) == 1433, "all of digits' training images"
    by_method = drawn["Bytes by method, over all rounds"]
    assert {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in by_method} == {
        "up": {"learn": 480, "teach": 0},
        "down": {"learn": 0, "teach": 3600},
    }
    assert named(drawn["Bytes by round"], "down")["y"] == [900] * 4
    (by_phase,) = drawn["Time by phase, over all rounds"]
    assert dict(zip(by_phase["y"], by_phase["x"], strict=True)) == {
        "learn": 6,
        "teach": 5,
        "the rest": 3,
    }
    assert named(drawn["Time by round"], "teach")["y"] == [0.5, 1.0, 1.5, 2.0]
    assert drawn["Peak of the device by round"][0]["y"] == [
        r.server["device_memory"] for r in rounds
    ]
    assert drawn["decoder loss, server"][0]["y"] == [1, 1 / 2, 1 / 3, 1 / 4]
    counts = np.array(split["z"]).T
    held = [[c for c, n in enumerate(row) if n] for row in counts.tolist()]
    names = [f"{k} small-mlp" for k in range(3)]
    cells = content.replace("<td class=n>", "<td>")
    for row in [
        row for part in closing_cells(rounds, names, counts.sum(1).tolist(), held) for row in part
    ]:
        assert "".join(f"<td>{html.escape(cell)}</td>" for cell in row) in cells
    assert "Local on digits" in content
    assert html.escape(Local.citation()) in content
    assert html.escape((run / "config.toml").read_text()) in content


def test_simulated_time_has_a_section_and_axes_of_its_own(tmp_path: Path) -> None:
    timed = [
        replace(record(t, 3), simulated={"learn": 3000.0, "server": 600.0, "round": 3600.0})
        for t in (1, 2, 3, 4)
    ]
    content = report(go_on(begun(tmp_path / "run", 3, 4), *timed))
    drawn = charts(content)
    by_time = named(drawn["Accuracy, global test set, by simulated time"], "accuracy")
    assert by_time["x"] == [1, 2, 3, 4], "hours"
    assert by_time["y"] == [r.headline() for r in timed]
    by_bytes = named(drawn["Accuracy, global test set, by bytes"], "accuracy")
    assert by_bytes["x"] == [1020, 2040, 3060, 4080]
    (phases,) = drawn["Simulated time by phase, over all rounds"]
    assert dict(zip(phases["y"], phases["x"], strict=True)) == pytest.approx(
        {"learn": 10 / 3, "server": 2 / 3}
    )
    assert ("Simulated time, all rounds", "4 h 00 min", ["1 h 00 min a round"]) in cards(content)
    assert "Simulated network" not in report(written(tmp_path / "without"))


@pytest.mark.parametrize(("gain", "side"), [(0.02, "bottom"), (-0.05, "top")])
def test_what_was_known_alone_is_labelled_where_the_chart_has_room(gain: float, side: str) -> None:
    figure = learning_chart([record(t, 3, gain) for t in (1, 2)], "global", ["a", "b", "c"])
    (line,) = figure.layout.shapes
    assert (line.label.text, line.label.yanchor) == ("local only 25.2%", side), (
        "above a line that is the lowest"
    )


def test_what_a_client_did_not_report_is_a_gap_and_no_zero(tmp_path: Path) -> None:
    first, second = record(1, 2), record(2, 2)
    del first.clients[1]["global"], first.clients[1]["before_global"]
    lines = charts(report(go_on(begun(tmp_path / "run", 2, 2), first, second)))
    curve = named(lines["Accuracy by round, global test set"], "1 small-vgg")["y"]
    assert np.isnan(curve[0])
    assert curve[1] == second.clients[1]["global"]


def test_a_method_may_report_what_it_likes(tmp_path: Path) -> None:
    bare = Round(
        1, {k: {"bytes_up": 0, "bytes_down": 0} for k in (0, 1)}, {}, {"round": 1.0}, {}, []
    )
    half = replace(
        bare,
        round=2,
        clients={k: {**bare.clients[k], "before_global": 0.1, "mood": 0.5} for k in (0, 1)},
    )
    content = report(go_on(begun(tmp_path / "run", 2, 2), bare, half))
    assert "Learning: the clients report no accuracy." in content
    assert "Traffic: nothing was exchanged." in content
    assert headings(content) == [
        "Clients",
        "Split",
        "Time",
        "Noted by the method",
        "Method",
        "Configuration",
    ]
    (mood,) = charts(content)["mood, mean of clients"]
    assert np.isnan(mood["y"][0])
    assert mood["y"][1] == 0.5
    full = replace(
        half, round=3, clients={k: {**half.clients[k], "global": 0.4, "local": 0.7} for k in (0, 1)}
    )
    drawn = charts(report(go_on(begun(tmp_path / "other", 2, 2), full)))
    assert named(drawn["Accuracy by client, local tests"], "after")["y"] == [
        0.7,
        0.7,
    ]


def sampled(folder: Path, primary: Primary = "server") -> Path:
    """A run of ten clients: 0 and 1 take part in round 1, 1 and 2 in round 2, others never."""

    def told(t: int, k: int) -> dict[str, float]:
        trained = {"before_global": 0.2 + 0.01 * k} if t == 1 and k < 2 else {}
        now = {"global": 0.3 + 0.01 * k if k < t + 1 else 0.1, "bytes_up": 4, "bytes_down": 4}
        return {**now, **trained}

    rounds = [
        Round(
            t,
            {k: told(t, k) for k in range(10)},
            {"global": 0.4 + 0.1 * t},
            {"learn": 0.05, "round": 0.06},
            {"learn": {"up": 40, "down": 40}},
            [],
            [t - 1, t],
            primary,
        )
        for t in (1, 2)
    ]
    return go_on(begun(folder, 10, 2), *rounds)


def test_cards_name_model_test_set_clients_and_round(tmp_path: Path) -> None:
    found = cards(report(sampled(tmp_path / "run")))
    assert found[0] == ("Accuracy of the server's model", "60.0%", ["global test set, round 2"])
    assert found[1] == (
        "Accuracy of the clients' models",
        f"{(0.30 + 0.31 + 0.32 + 7 * 0.1) / 10:.1%}",
        [
            "global test set, mean of 10 clients, round 2",
            "+10.0 points over local only, same 2 clients",
            "7 of these never took part",
        ],
    ), "the difference is that of the two clients that have both values"
    assert found[2] == ("Clients that took part", "3 of 10", ["7 of 10 clients never took part"])
    first = cards(report(sampled(tmp_path / "other", "clients")))[0]
    assert first[0] == "Accuracy of the clients' models", "the primary model is the first"


def test_local_only_is_drawn_beside_the_same_clients(tmp_path: Path) -> None:
    content = report(sampled(tmp_path / "run"))
    drawn = charts(content)
    lines = drawn["Accuracy by round, global test set"]
    same = named(lines, "mean of the 2 with local only")
    assert same["y"] == pytest.approx([0.305, 0.305])
    assert named(lines, "mean of 10 clients")["y"][0] == pytest.approx(0.141)
    assert layouts(content)[0]["shapes"][0]["label"]["text"] == "local only 20.5%, 2 clients"
    dots = drawn["Accuracy by client, global test set"]
    idle, after = named(dots, "never took part")["y"], named(dots, "after")["y"]
    assert [k for k in range(10) if not np.isnan(idle[k])] == [3, 4, 5, 6, 7, 8, 9]
    assert [k for k in range(10) if not np.isnan(after[k])] == [0, 1, 2]


def test_everybody_took_part_where_no_record_says_who_did(tmp_path: Path) -> None:
    rounds = [replace(record(t, 2), participants=[]) for t in (1, 2)]
    content = report(go_on(begun(tmp_path / "run", 2, 2), *rounds))
    assert "never took part" not in html.unescape(re.sub("<script.*?</script>", "", content))


@pytest.mark.parametrize(
    ("longest", "unit", "shown"),
    [(0.06, " ms", 60), (2.5, " s", 2.5), (600, " min", 10), (7200 * 2, " h", 4)],
)
def test_times_have_units_that_people_use(longest: float, unit: str, shown: float) -> None:
    figure = bar_chart(["learn", "teach"], {"time": [longest, longest / 5]}, "seconds")
    assert (figure.layout.xaxis.ticksuffix, figure.layout.xaxis.tickformat) == (unit, ",~r")
    assert figure.data[0].x[0] == pytest.approx(shown)
    stacked = round_chart(
        [record(1, 1), record(2, 1)], {"a": [longest / 2, 0], "b": [longest / 2, 0]}, "seconds"
    )
    assert stacked.layout.yaxis.ticksuffix == unit, "by the height of a column"


def test_a_single_round_has_no_curve(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 3, 1))
    drawn = charts(content)
    assert not [caption for caption in drawn if "by round" in caption]
    assert "Accuracy by client, global test set" in drawn
    assert "<td>decoder loss, server</td><td class=n>1</td>" in content
    assert "Learning" not in headings(content)
    folder = compared(tmp_path / "c", rounds=1, seeds=[0])
    content = report(folder)
    drawn = charts(content)
    assert not [caption for caption in drawn if "by round" in caption or "seed by seed" in caption]
    clients, _, server = drawn[
        "Accuracy after the round, mean over seeds and one standard deviation to each side"
    ]
    assert html.unescape(clients["name"]) == "Accuracy of the clients' models, global test set"
    assert clients["x"] == pytest.approx(
        [record(1, 2, 0.01).mean("global"), record(1, 2, 0.02).mean("global")]
    )
    assert server["x"] == [0.51, 0.51]


def test_a_sweep_of_one_method_is_not_several_methods(tmp_path: Path) -> None:
    content = report(compared(tmp_path / "c", ["one", "two", "three"]))
    assert "<h1>Local on digits: 3 variants</h1>" in content
    assert "2 clients, 3 rounds, 3 seeds; 9 of 9 runs finished" in content
    waiting = compared(tmp_path / "other", ["one", "two"], missing=3)
    assert "<h1>2 variants on digits</h1>" in report(waiting), "the second is not started"
    for _, value, notes in cards(content):
        assert value.endswith("%")
        assert notes[0] == "Accuracy of the clients' models, global test set"
        assert re.fullmatch(r"round 3, mean ± \S+ over 3 seeds", notes[1])


def test_metrics_beside_accuracy_have_a_section(tmp_path: Path) -> None:
    rounds = [record(t, 2) for t in (1, 2)]
    for r in rounds:
        for k in (0, 1):
            r.clients[k] |= {"global_loss": 2.0 + k, "before_global_loss": 3.0, "local_images": 9}
            r.clients[k] |= {"global_class_0": 0.5 + 0.1 * k, "global_class_3": 0.25}
        r.server["global_class_0"] = 0.75
    drawn = charts(report(go_on(begun(tmp_path / "run", 2, 2), *rounds)))
    assert drawn["global loss, mean of clients"][0]["y"] == [2.5, 2.5]
    server, clients = drawn["Accuracy by class, global test set, round 2"]
    assert (server["y"], server["x"]) == (["0"], [0.75])
    assert clients["y"] == ["0", "3"]
    assert clients["x"] == pytest.approx([0.55, 0.25])
    assert not [caption for caption in drawn if "before" in caption or "images, mean" in caption]


def test_words_are_left_and_numbers_right() -> None:
    headings = ["name", "classes", "share", "time", "said", "ε", "none"]
    rows = [
        ["a", "0", "1.5 ± 0.2", "1 min 04 s", "not 1", "∞", "-"],
        ["b", "1", "-", "3.1 MB", "2", "0.5", ""],
    ]
    content = page.table(headings, rows, words=("classes",))
    assert re.findall(r"<th( class=n)?>", content) == [
        "",
        "",
        " class=n",
        " class=n",
        "",
        " class=n",
        "",
    ]
    assert content.count("<td class=n>") == 6
    listed = page.table(["round", "0 1"], [["0 1 5", "+1.0 [-0.5, +2.5]"]])
    assert "<td>0 1 5</td><td class=n>" in listed, "a list of classes is no number"


def test_a_table_on_a_phone_hides_no_column() -> None:
    content = page.table(["part", "ε"], [["weights", "8"]], stacked=True)
    assert '<td data-label="part">weights</td><td class=n data-label="ε">8</td>' in content
    assert "Scroll sideways for more columns" in page.table(["part"], [["weights"]])


def test_the_split_is_the_same_way_up_as_its_picture() -> None:
    figure = split_chart([[1, 0, 2], [0, 5, 0]], ["first", "second", "third"])
    assert figure.layout.yaxis.autorange is None, "not reversed: the first class is at the bottom"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("client", "class")
    assert figure.data[0].colorbar.title.text == "images"


def test_sections_without_content_have_no_heading(tmp_path: Path) -> None:
    rounds = [replace(record(t, 2), failures=[], server={}) for t in (1, 2)]
    content = report(go_on(begun(tmp_path / "run", 2, 2), *rounds))
    assert headings(content) == [
        "Learning",
        "Clients",
        "Split",
        "Traffic",
        "Time",
        "Method",
        "Configuration",
    ]
    assert 'href="#failures"' not in content
    end = content.partition("<footer>")[2].partition("</footer>")[0]
    assert "Failures: none" in end
    assert "Memory: the run was on a CPU" in end
    assert "Images: " in end
    assert "made no images" in end
    assert "Wire: exact." in content
    elsewhere = begun(tmp_path / "flower", 2, 2, "engine=flower")
    said = "Wire: lean (default on Flower; wire.profile=exact sends exact values)."
    assert said in report(go_on(elsewhere, *rounds))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_charts_can_be_read_on_a_dark_page(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 7, 3))
    assert "prefers-color-scheme: dark" in content
    dark = re.search(r"prefers-color-scheme: dark\) \{\s*:root \{[^}]*--paper: (#\w{6})", content)
    assert dark is not None
    ground = luminance(dark[1])
    used = {layout["template"]["layout"]["font"]["color"] for layout in layouts(content)}
    for traces in charts(content).values():
        for trace in traces:
            used |= {
                trace[part]["color"]
                for part in ("line", "marker")
                if "color" in trace.get(part, {})
            }
    assert {INK, *COLOURS} <= used
    for colour in used:
        contrast = (luminance(DARK.get(colour, colour)) + 0.05) / (ground + 0.05)
        assert contrast > 3, colour
    assert json.dumps(DARK) in content


def test_the_page_of_a_comparison_says_what_its_runs_say(tmp_path: Path) -> None:
    content = report(compared(tmp_path / "c", missing=1))
    drawn = charts(content)
    reached = {
        (i, s): record(3, 2, 0.01 * (1 + s) * (1 + i)).mean("global")
        for i in (0, 1)
        for s in (0, 1, 2)
    }
    curves = drawn["Accuracy of the clients' models, global test set, by round"]
    assert named(curves, "alone")["y"][-1] == pytest.approx(
        statistics.fmean(reached[0, s] for s in (0, 1, 2))
    )
    assert named(curves, "alone")["customdata"][-1] == pytest.approx(
        statistics.stdev(reached[0, s] for s in (0, 1, 2))
    )
    assert named(curves, ODD)["y"][-1] == pytest.approx(
        statistics.fmean(reached[1, s] for s in (0, 1))
    )
    by_seed = drawn["Accuracy of the clients' models, global test set, seed by seed"]
    assert named(by_seed, ODD)["y"] == pytest.approx([reached[1, 0], reached[1, 1]])
    assert named(by_seed, ODD)["x"] == ["0", "1"]
    assert named(drawn["Bytes of a run, mean over seeds"], "down")["x"] == [1800, 1800]
    assert named(drawn["Time of a run by phase, mean over seeds"], "teach")["x"] == [3, 3]
    assert not any("bytes it took" in caption for caption in drawn), "all runs took the same"
    by_bytes = drawn["Accuracy of the clients' models, global test set, by bytes, both ways"]
    assert named(by_bytes, "alone")["x"] == [680, 1360, 2040]
    assert named(by_bytes, "alone")["y"] == named(curves, "alone")["y"]
    assert not any("simulated" in caption for caption in drawn)
    assert "5 of 6 runs finished" in content
    assert f"Not finished: {html.escape(ODD)}, seed 2." in content
    assert "accuracy above alone (95 %)" in content
    assert "client 1 failed in &#x27;learn&#x27;, round 2" in content


def test_a_comparison_is_drawn_by_simulated_time_and_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compared(tmp_path / "c", seeds=(0, 1), rounds=2)
    for i, path in enumerate(sorted(folder.glob("*/seed-*"))):
        seconds = {
            "round": 7200.0 * (1 + i % 2)
        }  # two hours a round with one seed, four with another
        timed = [replace(r, simulated=seconds) for r in read_records(path)]
        (path / "metrics.jsonl").unlink()
        go_on(path, *timed)
    drawn: dict[str, Any] = {}

    def note(curves: Any, label: str, path: Path, positions: Any = None, axis: str = "") -> None:
        drawn[path.name] = positions, axis
        drawn[label] = curves

    monkeypatch.setattr("barter.compare.comparison.draw_curves", note)
    _, _, paths = Comparison.at(folder).write()
    assert {path.name for path in paths if path.suffix == ".svg"} == {
        "curves.svg",
        "curves-time.svg",
        "curves-bytes.svg",
    }
    assert drawn["curves.svg"][0] is None
    (label,) = (label for label in drawn if "(%)" in label)
    shares = {at: r.mean("global") for at, r in enumerate(read_records(folder / "alone/seed-0"), 1)}
    assert drawn[label]["alone"][0] == [(at, 100 * share) for at, share in shares.items()]
    hours, axis = drawn["curves-time.svg"]
    assert (hours["alone"], axis) == ({1: 3.0, 2: 6.0}, "simulated time (hours)")
    gigabytes, _ = drawn["curves-bytes.svg"]
    assert gigabytes["alone"] == {1: 680e-9, 2: 1360e-9}
    caption = "Accuracy of the clients' models, global test set, by simulated time"
    assert named(charts(report(folder))[caption], "alone")["x"] == [3, 6]


def test_odd_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    for content in (report(written(tmp_path / "run")), report(compared(tmp_path / "c"))):
        assert "<script>alert" not in content
        assert html.escape(ODD) in content
        assert content.count("<script") == content.count("</script>")
    assert "</title>" not in page.page("</title><script>", "", [], []).partition("<title>")[2][:8]


def test_a_page_of_many_clients_and_rounds_stays_small(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 100, 200, "partition.alpha=1"))
    assert len(content.encode()) < 3e6
    lines = charts(content)["Accuracy by round, global test set"]
    assert len(lines) == 102, "every client, their mean, and the server's model"
    assert len(lines[99]["y"]) == 200


def test_the_browser_has_the_plotly_that_the_figures_are_made_for() -> None:
    carried = (files("barter.report") / "templates" / "plotly-cartesian.min.js").read_text()
    found = re.search(r"plotly\.js \(cartesian - minified\) v(\d+)\.", carried[:200])
    assert found is not None
    assert found[1] == get_plotlyjs_version().split(".")[0]


def test_what_is_no_run_or_empty_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "neither a run nor a comparison" in refused(capsys, str(tmp_path))
    assert "neither a run nor a comparison" in refused(capsys, str(tmp_path / "nowhere"))
    empty = begun(tmp_path / "empty")
    assert "no finished round yet: --live waits" in refused(capsys, str(empty))
    (empty / "metrics.jsonl").write_text('{"round": 1, "clie')
    assert "no finished round yet" in refused(capsys, str(empty)), (
        "a line that a kill cut short is none"
    )
    assert "no finished run yet: --live waits" in refused(
        capsys, str(compared(tmp_path / "c", missing=6))
    )
    assert not (empty / "report.html").exists()


def test_no_file_is_lost_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run")
    for name in ("metrics.jsonl", "config.toml"):
        before = (run / name).read_text()
        assert "is not a report of barter" in refused(capsys, str(run), "--to", str(run / name))
        assert (run / name).read_text() == before
    assert "cannot be written" in refused(
        capsys, str(run), "--to", str(tmp_path / "nowhere" / "page.html")
    )
    assert "cannot be written" in refused(capsys, str(run), "--to", str(run))
    assert main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 0
    assert main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 0, (
        "a report may be written again"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "metrics.jsonl"]


def test_without_plotly_an_error_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("barter.report", "plotly"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert refused(capsys, str(written(tmp_path / "run"))).endswith(
        "pip install '.[report]' in a checkout of barter"
    )


def test_data_that_are_not_here_cost_the_split_alone(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3, 4, f"data.source=npz:{tmp_path / 'gone.npz'}")
    content = report(run)
    assert "Split: it cannot be shown here." in content
    assert "gone.npz" in content
    assert "Accuracy by round, global test set" in charts(content)


def test_a_run_across_machines_has_a_page_without_what_is_at_its_sites(tmp_path: Path) -> None:
    content = report(
        written(
            tmp_path / "run", 2, 3, "algorithm.name=dffke", "data.source=sites", "engine=flower"
        )
    )
    assert "every site brings its own data" in content
    assert "images are at their sites" in content
    assert "<td>client 1</td><td>-</td><td>-</td>" in content.replace("<td class=n>", "<td>")


def test_networks_from_python_have_no_name_here(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 2, 3, "models=(given in Python)"))
    assert named(charts(content)["Accuracy by round, global test set"], "client 1")["y"]


def test_looking_downloads_nothing(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        2,
        3,
        "data.source=mnist",
        f"data.root={tmp_path / 'data'}",
        "data.download=true",
    )
    assert "Split: it cannot be shown here." in report(run)
    assert not (tmp_path / "data").exists()


def test_a_live_page_follows_the_run_and_comes_to_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = begun(tmp_path / "run", 2, 3), list[str]()

    def a_round_later(_: float) -> None:
        seen.append((run / "report.html").read_text())
        go_on(run, record(len(read_records(run)) + 1, 2))

    monkeypatch.setattr(
        inspecting, "time", SimpleNamespace(sleep=a_round_later)
    )  # not for all: threads sleep
    seen.append(report(run, "--live"))
    for done, content in enumerate(seen):
        assert f"{done} of 3 rounds" in content
        assert ("location.reload()" in content.rpartition("<script>")[2]) == (done < 3)
    assert "No round is finished yet." in seen[0]
    assert "Its last round ended at" in seen[1]


def test_a_live_page_does_not_wait_for_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large data take long to read: the first page comes before, and the next one has the split."""
    run = go_on(begun(tmp_path / "run", 2, 3), record(1, 2))
    first = list[str]()

    def slow(*_: object, **__: object) -> None:
        first.append((run / "report.html").read_text())
        raise ConfigError("no such data")

    # Not by its dotted name: other tests load the package anew.
    monkeypatch.setattr(importlib.import_module("barter.report.run"), "make_task", slow)

    def last_rounds(_: float) -> None:
        go_on(run, record(2, 2), record(3, 2))

    monkeypatch.setattr(inspecting, "time", SimpleNamespace(sleep=last_rounds))
    last = report(run, "--live")
    assert len(first) == 1, "the data are read once"
    assert "1 of 3 rounds" in first[0]
    assert "The data are being read" in first[0]
    assert "no such data" in last


def test_a_live_page_that_is_stopped_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspecting, "time", SimpleNamespace(sleep=stop))
    for folder in (
        go_on(begun(tmp_path / "run", 2, 3), record(1, 2)),
        compared(tmp_path / "c", missing=6),
    ):
        assert main(["report", str(folder), "--live"]) == 130
        assert "stopped" in capsys.readouterr().err
        assert (
            "location.reload()"
            not in (folder / "report.html").read_text().rpartition("<script>")[2]
        )


@pytest.mark.usefixtures("few_images")
def test_images_are_in_the_page_where_there_are_some(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["run", "--out", str(run), *QUICK]) == 0
    images = re.findall(
        r'<img [^>]*src="data:image/png;base64,([^"]+)', report(run).partition("<footer>")[0]
    )
    assert len(images) == 3 * 2, "for every client and round"
    with Image.open(io.BytesIO(base64.b64decode(images[0]))) as strip:
        assert strip.size == (8 * 10, 2 * 10), (
            "eight images of 8 pixels with an edge, and those made of them"
        )
    assert "<img" not in report(run, "--no-images").partition("<footer>")[0]
    assert "made no images" in report(written(tmp_path / "local"))


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@needs_chromium
@pytest.mark.parametrize("kind", ["few", "many", "comparison"])
def test_in_a_browser(tmp_path: Path, browser: Browser, kind: str) -> None:
    folder = {"few": (3, 4), "many": (40, 60)}
    made = (
        compared(tmp_path / "c")
        if kind == "comparison"
        else written(tmp_path / "run", *folder[kind])
    )
    content = report(made)
    for width in (1280, 390):
        browser.open(made / "report.html", width)
        browser.until("document.querySelectorAll('.chart > script').length === 0")
        assert browser.said == [], "no error, no warning, nothing asked of any network"
        sizes = browser.value(
            "[...document.querySelectorAll('.chart .nsewdrag')].map(p => p.getBoundingClientRect().width)"
        )
        assert len(sizes) == len(charts(content)) > 5
        assert min(sizes) > width / 6
        assert browser.value("document.documentElement.scrollWidth") == width, "nothing sticks out"
        browser.hover("document.querySelector('.chart .nsewdrag')")
        browser.until("document.querySelector('.chart .hoverlayer').textContent.includes('%')")
        if kind == "comparison":
            for place in (".legendtext", ".ytick text"):
                shown = browser.value(
                    f"[...document.querySelectorAll('{place}')].map(t => t.textContent)"
                )
                assert ODD in shown, "as it was written"


@needs_chromium
def test_on_a_phone_no_column_is_out_of_sight(tmp_path: Path, browser: Browser) -> None:
    names = ["what left the clients", "of", "protected by", "times", "ε"]
    parts = [["results of evaluation", "training images", "independent of any image", "3", "∞"]]
    wide = page.table([f"column {i}" for i in range(9)], [["client 0"] + ["12.3 ± 4.5"] * 8])
    sections = [page.Section("Privacy", [page.table(names, parts, stacked=True), wide])]
    file = tmp_path / "page.html"
    file.write_text(page.page("tables", "", [], sections))
    browser.open(file, 390)
    edges = (
        "[...document.querySelectorAll('.stacked td')].map(c => c.getBoundingClientRect().right)"
    )
    assert max(browser.value(edges)) <= 390
    hints = "[...document.querySelectorAll('.hint')].map(h => h.offsetHeight > 0)"
    browser.until(f"{hints}[1]")
    assert browser.value(hints) == [False, True], "only where something is cut off"
    browser.value("document.querySelectorAll('.wide')[1].scrollTo(9999, 0)")
    browser.until(f"!{hints}[1]")
    first = browser.value("document.querySelectorAll('tbody td')[5].getBoundingClientRect().left")
    assert first >= 0, "the name of the row stays"


@needs_chromium
def test_charts_follow_the_colour_scheme(tmp_path: Path, browser: Browser) -> None:
    run = written(tmp_path / "run", 3, 2)
    report(run)
    colour = "getComputedStyle(document.querySelector('.xtick text')).fill"
    drawn = "document.querySelectorAll('.chart > script').length === 0"
    for scheme, ink in (("dark", DARK[INK]), ("light", INK)):
        shown = f"rgb({', '.join(str(int(ink[at : at + 2], 16)) for at in (1, 3, 5))})"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        if scheme == "dark":
            browser.open(run / "report.html", 1280)
        browser.until(f"{drawn} && {colour} === '{shown}'")
    assert browser.said == []


@needs_chromium
def test_a_live_page_reads_itself_again(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "REFRESH", 0.5)
    file = tmp_path / "page.html"
    file.write_text(page.page("first", "", [], [], live="goes on"))
    browser.open(file, 800)
    file.write_text(page.page("second", "", [], []))
    browser.until("document.title === 'second'")
    time.sleep(1)
    assert browser.value("performance.getEntriesByType('navigation')[0].type") == "reload"
    assert browser.value("performance.now()") > 800, "and rests then"


def test_a_card_names_the_rounds_of_runs_that_stopped_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compared(tmp_path / "c", seeds=(0, 1), rounds=3)
    shorter = folder / "alone" / "seed-1" / "metrics.jsonl"
    shorter.write_text("".join(shorter.read_text().splitlines(keepends=True)[:2]))
    monkeypatch.setattr("barter.compare.comparison.has_stopped_early", lambda _: True)
    content = report(folder)
    assert "rounds 2 to 3, mean" in content
    assert "round 3, mean" in content, "of the method whose runs all ended"
