"""Reports: that a page says what the records say, holds all it needs, and works in a browser."""

from __future__ import annotations

import base64
import html
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
from barter.compare.specification import Request
from barter.core.record import Round
from barter.report import page
from barter.report.charts import learning
from barter.runs.folder import records
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


def compared(folder: Path, names: Sequence[str] = ("alone", ODD), missing: int = 0) -> Path:
    variants = {
        name: ["algorithm.name=local", f"algorithm.max_epochs={i + 1}"]
        for i, name in enumerate(names)
    }
    question = {"baseline": names[0], "target": 0.34}
    _, jobs = Comparison.planned(
        folder, Request(variants, [0, 1, 2], {}, ["rounds=3", "clients=2"], question)
    )
    for job in jobs[: len(jobs) - missing]:
        job.folder.mkdir(parents=True)
        (job.folder / "config.toml").write_text(to_toml(job.config))
        gain = 0.01 * (1 + job.seed) * (1 + names.index(job.variant))
        go_on(job.folder, *(record(t, 2, gain) for t in (1, 2, 3)))
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


def named(traces: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(trace for trace in traces if html.unescape(trace.get("name", "")) == name)


def test_the_page_of_a_run_says_what_its_records_say(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3, 4, "models=small-mlp")
    rounds, content = records(run), report(run)
    drawn = charts(content)
    for test, key in (
        ("on the global test set", "global"),
        ("on the client's own mix of classes", "local"),
    ):
        lines = drawn[f"Accuracy {test}, by round"]
        for k in range(3):
            assert named(lines, f"{k} small-mlp")["y"] == [r.clients[k][key] for r in rounds]
        assert named(lines, "mean")["y"] == pytest.approx([r.mean(key) for r in rounds])
        assert {(line["x0"], line["dx"]) for line in lines} == {(1, 1)}
        gains = drawn[f"Accuracy {test}, by client"]
        assert named(gains, "alone")["y"] == [
            rounds[0].clients[k][f"before_{key}"] for k in range(3)
        ]
        assert named(gains, "after")["y"] == [rounds[-1].clients[k][key] for k in range(3)]
    assert named(drawn["Accuracy on the global test set, by round"], "server's model")["y"] == [
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
    (by_phase,) = drawn["Seconds by phase, over all rounds"]
    assert dict(zip(by_phase["y"], by_phase["x"], strict=True)) == {
        "learn": 6,
        "teach": 5,
        "the rest": 3,
    }
    assert named(drawn["Seconds by round"], "teach")["y"] == [0.5, 1.0, 1.5, 2.0]
    assert drawn["Peak of the device by round"][0]["y"] == [
        r.server["device_memory"] for r in rounds
    ]
    assert drawn["decoder loss, server"][0]["y"] == [1, 1 / 2, 1 / 3, 1 / 4]
    counts = np.array(split["z"]).T
    held = [[c for c, n in enumerate(row) if n] for row in counts.tolist()]
    names = [f"{k} small-mlp" for k in range(3)]
    for row in [
        row for part in closing_cells(rounds, names, counts.sum(1).tolist(), held) for row in part
    ]:
        assert "".join(f"<td>{html.escape(cell)}</td>" for cell in row) in content
    assert "Local on digits" in content
    assert html.escape(Local.citation()) in content
    assert html.escape((run / "config.toml").read_text()) in content


@pytest.mark.parametrize(("gain", "side"), [(0.02, "bottom"), (-0.05, "top")])
def test_what_was_known_alone_is_labelled_where_the_chart_has_room(gain: float, side: str) -> None:
    figure = learning([record(t, 3, gain) for t in (1, 2)], "global", ["a", "b", "c"])
    (line,) = figure.layout.shapes
    assert (line.label.text, line.label.yanchor) == ("alone 25.2%", side), (
        "above a line that is the lowest"
    )


def test_what_a_client_did_not_report_is_a_gap_and_no_zero(tmp_path: Path) -> None:
    first, second = record(1, 2), record(2, 2)
    del first.clients[1]["global"], first.clients[1]["before_global"]
    lines = charts(report(go_on(begun(tmp_path / "run", 2, 2), first, second)))
    curve = named(lines["Accuracy on the global test set, by round"], "1 small-vgg")["y"]
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
    assert "The clients report no accuracy." in content
    assert "Nothing was exchanged." in content
    (mood,) = charts(content)["mood, mean of clients"]
    assert np.isnan(mood["y"][0])
    assert mood["y"][1] == 0.5
    full = replace(
        half, round=3, clients={k: {**half.clients[k], "global": 0.4, "local": 0.7} for k in (0, 1)}
    )
    drawn = charts(report(go_on(begun(tmp_path / "other", 2, 2), full)))
    assert named(drawn["Accuracy on the client's own mix of classes, by client"], "after")["y"] == [
        0.7,
        0.7,
    ]


def test_the_page_of_a_comparison_says_what_its_runs_say(tmp_path: Path) -> None:
    content = report(compared(tmp_path / "c", missing=1))
    drawn = charts(content)
    reached = {
        (i, s): record(3, 2, 0.01 * (1 + s) * (1 + i)).mean("global")
        for i in (0, 1)
        for s in (0, 1, 2)
    }
    curves = drawn["Accuracy, global"]
    assert named(curves, "alone")["y"][-1] == pytest.approx(
        statistics.fmean(reached[0, s] for s in (0, 1, 2))
    )
    assert named(curves, "alone")["customdata"][-1] == pytest.approx(
        statistics.stdev(reached[0, s] for s in (0, 1, 2))
    )
    assert named(curves, ODD)["y"][-1] == pytest.approx(
        statistics.fmean(reached[1, s] for s in (0, 1))
    )
    by_seed = drawn["Global accuracy in the end, seed by seed"]
    assert named(by_seed, ODD)["y"] == pytest.approx([reached[1, 0], reached[1, 1]])
    assert named(by_seed, ODD)["x"] == ["0", "1"]
    assert named(drawn["Bytes of a run, mean over seeds"], "down")["x"] == [1800, 1800]
    assert named(drawn["Seconds of a run by phase, mean over seeds"], "teach")["x"] == [3, 3]
    assert named(drawn["What it took"], "alone")["x"] == [2040] * 3
    assert "5 of 6 runs are finished" in content
    assert f"Not finished: {html.escape(ODD)}, seed 2." in content
    assert "global above alone (95 %)" in content
    assert "client 1 failed in &#x27;learn&#x27;, round 2" in content


def test_odd_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    for content in (report(written(tmp_path / "run")), report(compared(tmp_path / "c"))):
        assert "<script>alert" not in content
        assert html.escape(ODD) in content
        assert content.count("<script") == content.count("</script>")
    assert "</title>" not in page.page("</title><script>", "", [], []).partition("<title>")[2][:8]


def test_a_page_of_many_clients_and_rounds_stays_small(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 100, 200, "partition.alpha=1"))
    assert len(content.encode()) < 3e6
    lines = charts(content)["Accuracy on the global test set, by round"]
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
        assert "is no report of barter's" in refused(capsys, str(run), "--to", str(run / name))
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
    assert "The split cannot be shown here." in content
    assert "gone.npz" in content
    assert "Accuracy on the global test set, by round" in charts(content)


def test_a_run_across_machines_has_a_page_without_what_is_at_its_sites(tmp_path: Path) -> None:
    content = report(
        written(
            tmp_path / "run", 2, 3, "algorithm.name=dffke", "data.source=sites", "engine=flower"
        )
    )
    assert "every site brings its own data" in content
    assert "images are at their sites" in content
    assert "<td>client 1</td><td>-</td><td>-</td>" in content


def test_networks_from_python_have_no_name_here(tmp_path: Path) -> None:
    content = report(written(tmp_path / "run", 2, 3, "models=(given in Python)"))
    assert named(charts(content)["Accuracy on the global test set, by round"], "client 1")["y"]


def test_looking_downloads_nothing(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        2,
        3,
        "data.source=mnist",
        f"data.root={tmp_path / 'data'}",
        "data.download=true",
    )
    assert "The split cannot be shown here." in report(run)
    assert not (tmp_path / "data").exists()


def test_a_live_page_follows_the_run_and_comes_to_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = begun(tmp_path / "run", 2, 3), list[str]()

    def a_round_later(_: float) -> None:
        seen.append((run / "report.html").read_text())
        go_on(run, record(len(records(run)) + 1, 2))

    monkeypatch.setattr(
        inspecting, "time", SimpleNamespace(sleep=a_round_later)
    )  # not for all: threads sleep
    seen.append(report(run, "--live"))
    for done, content in enumerate(seen):
        assert f"{done} of 3 rounds" in content
        assert ("location.reload()" in content.rpartition("<script>")[2]) == (done < 3)
    assert "No round is finished yet." in seen[0]
    assert "Its last round ended at" in seen[1]


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
        assert main(["report", str(folder), "--live"]) == 1
        assert "stopped" in capsys.readouterr().err
        assert (
            "location.reload()"
            not in (folder / "report.html").read_text().rpartition("<script>")[2]
        )


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
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["few", "many", "comparison"])
def test_in_a_browser(tmp_path: Path, browser: Browser, kind: str, width: int) -> None:
    folder = {"few": (3, 4), "many": (40, 60)}
    made = (
        compared(tmp_path / "c")
        if kind == "comparison"
        else written(tmp_path / "run", *folder[kind])
    )
    content = report(made)
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
