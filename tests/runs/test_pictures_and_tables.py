from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from barter.core.errors import ConfigError
from barter.core.record import Round
from barter.runs import picture
from barter.runs.picture import COLOURS, Kinds, draw_bubbles, draw_curves
from barter.runs.progress import Watcher, format_bytes, format_duration
from barter.runs.tables import accuracy_gain, closing_cells, closing_table, count_table


def record(t: int, up: int) -> Round:
    clients = {
        0: {
            "global": 0.5,
            "local": 0.9,
            "before_global": 0.25,
            "before_local": 0.95,
            "bytes_up": up,
            "bytes_down": 0,
        },
        1: {"global": 0.7, "local": 0.8, "bytes_up": 0, "bytes_down": 2500},
    }
    return Round(
        t,
        clients,
        {"global": 0.61},
        {"round": 1.0},
        {"m": {"up": up, "down": 2500}},
        ["client 1 failed"],
    )


def rendered(item: object) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(item)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_closing_table_says_it_all() -> None:
    text = rendered(
        closing_table(
            [record(1, 1000), record(2, 500)], ["cnn", "mlp"], [1200, 80], [[0, 3], [*range(12)]]
        )
    )
    row = next(line for line in text.splitlines() if "cnn" in line)
    assert row.split() == [
        "0",
        "cnn",
        "1,200",
        "0",
        "3",
        "25.0",
        "95.0",
        "50.0",
        "90.0",
        "2",
        "kB",
        "0",
        "B",
    ]
    both, mean = [line for line in text.splitlines() if "mean" in line]
    # The client that has a value from before: 25 and 95 alone, 50 and 90 after.
    assert both.split() == ["mean", "of", "1", "with", "both", "25.0", "95.0", "50.0", "90.0"]
    assert mean.split() == [
        "mean",
        "of",
        "2,",
        "or",
        "sum",
        "1,280",
        "-",
        "-",
        "60.0",
        "85.0",
        "2",
        "kB",
        "5",
        "kB",
    ]
    assert "12 classes" in text
    late = closing_table(
        [
            Round(1, {k: {"bytes_up": 0, "bytes_down": 0} for k in (0, 1)}, {}, {}, {}, []),
            record(2, 5),
        ],
        ["a", "b"],
        [1, 1],
        [[0], [1]],
    )
    assert "25.0" in rendered(late), "who joins late was alone until then"
    assert "61.0" in next(line for line in text.splitlines() if "server" in line)


def test_means_compare_the_same_clients_and_count_the_idle_ones() -> None:
    def client(accuracy: float, before: float | None = None) -> dict[str, float]:
        found = {"global": accuracy, "local": accuracy, "bytes_up": 1, "bytes_down": 1}
        return found if before is None else {**found, "before_global": before}

    first = Round(
        1, {0: client(0.3, 0.2), 1: client(0.1), 2: client(0.1)}, {}, {}, {}, [], participants=[0]
    )
    second = Round(
        2, {0: client(0.3), 1: client(0.5), 2: client(0.1)}, {}, {}, {}, [], participants=[1]
    )
    assert accuracy_gain([first, second], "global").points == pytest.approx(10.0)
    _, together = closing_cells([first, second], ["a", "b", "c"], None, None)
    assert [row[0] for row in together] == [
        "mean of 1 with both",
        "mean of 2 active",
        "mean of 3 (1 idle)",
    ]
    # Alone 20, after 30 of client 0; clients 0 and 1: (30 + 50) / 2; all: (30 + 50 + 10) / 3.
    assert [(row[3], row[5]) for row in together] == [
        ("20.0", "30.0"),
        ("-", "40.0"),
        ("-", "30.0"),
    ]


@pytest.mark.parametrize("columns", [1, 4, 10])
def test_the_title_of_a_sheet_is_seen_whole_and_above_its_images(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: drawn.append(figure))
    title = "DFRD, round 2: private images and what was made of them. Experimenter's view only"
    picture.draw_sheet(
        [("server", None, torch.zeros(columns, 8, 8, 1), ["1"] * columns)],
        title,
        tmp_path / "sheet.png",
    )
    (figure,) = drawn
    words, first = figure._suptitle.get_window_extent(), figure.axes[0].title.get_window_extent()
    assert 0 <= words.x0 <= words.x1 <= figure.bbox.x1
    assert first.y1 < words.y0
    plt.close(figure)


def test_a_sheet_labels_its_images_and_leaves_the_callers_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: drawn.append(figure))
    before = plt.get_backend()
    images = torch.zeros(2, 8, 8, 1)
    rows = [("client 0", images, images, "ab"), ("guess", None, images, "ab")]
    try:
        plt.switch_backend("svg")
        picture.draw_sheet(rows, "title", tmp_path / "s.png", "reconstructed", "from the class")
        assert plt.get_backend() == "svg"
    finally:
        plt.switch_backend(before)
    labels = [axes.texts[0].get_text() for axes in drawn[0].axes if axes.texts]
    assert labels == ["client 0\nprivate", "reconstructed", "guess\nfrom the class"]


def test_the_class_table_adds_up() -> None:
    text = rendered(count_table("class", [[3, 0], [1, 5]], ["a", "b"]))
    assert text.split()[-4:] == ["all", "4", "5", "9"]


def test_sizes_and_durations() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2_340_000, 5e9, 5e12)] == [
        "0 B",
        "999 B",
        "2 kB",
        "2.3 MB",
        "5.0 GB",
        "5000.0 GB",
    ]
    assert [format_duration(s) for s in (0.01, 0.34, 4.44, 9.97, 65, 3600 * 2 + 125)] == [
        "under 0.1 s",
        "0.3 s",
        "4.4 s",
        "10 s",
        "1 min 05 s",
        "2 h 02 min",
    ]


def test_progress_in_plain_lines_and_on_a_terminal() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)
        watcher = Watcher(console, rounds=2)
        watcher.begin(0)
        with watcher.phase("learn", 2):
            watcher.advance(1)
            watcher.advance(1)
        watcher.finish(record(1, 1000))
        watcher.advance(1)  # outside of any phase: nothing to show
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert "round 1/2 learn" in text
        assert "left" in text
        assert "client 1 failed" in text
        assert ("100%" in text) == terminal


def ink(path: Path, colour: str) -> np.ndarray:
    """Where a picture has a colour."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return np.abs(pixels - wanted).sum(2) < 30


def test_bubbles_show_where_samples_are(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    kinds = [
        Kinds("class", ["a", "b"], [[100, 0], [0, 25]]),
        Kinds("domain", ["x", "y"], [[100, 0], [25, 0]]),
    ]
    draw_bubbles(kinds, "title", path)
    blue, red = ink(path, COLOURS[0]), ink(path, COLOURS[1])
    columns = np.flatnonzero(blue.any(0))
    gap = int(np.argmax(np.diff(columns)))
    left, right = (
        blue[:, span[0] : span[-1] + 1].sum() for span in (columns[: gap + 1], columns[gap + 1 :])
    )
    assert left / right == pytest.approx(4, rel=0.1), "areas are in proportion to samples"
    assert np.flatnonzero(red.any(1))[0] > np.flatnonzero(blue.any(1))[-1], (
        "domains are below classes"
    )
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_bubbles(kinds, "title", tmp_path / "none" / "p.png")
    with pytest.raises(ConfigError, match="ending .png"):
        draw_bubbles(kinds, "title", tmp_path / "p.jpeg2")


@pytest.mark.parametrize("clients", [1, 7, 120])
def test_nothing_of_a_split_is_cut_off(clients: int, tmp_path: Path) -> None:
    path, names = tmp_path / "p.png", ["a name that is much longer than one would like", "$b$"]
    draw_bubbles(
        [Kinds("class", names, [[4, 9]] * clients)],
        "folder:/" + "a/very/long/path/" * 6 + "\nalpha 1",
        path,
    )
    image = np.asarray(Image.open(path).convert("L"))
    edge = np.concatenate(
        [image[:6].ravel(), image[-6:].ravel(), image[:, :6].ravel(), image[:, -6:].ravel()]
    )
    assert edge.min() == 255
    assert image.shape[1] < 2200, "many clients stand in several rows"
    rows = ink(path, COLOURS[0]).any(1).astype(int)
    assert (np.diff(rows) == 1).sum() == 2 * (3 if clients == 120 else 1)


@pytest.mark.parametrize("methods", [2, 5, 40])
def test_the_names_of_many_methods_leave_their_curves_room(methods: int, tmp_path: Path) -> None:
    lines = {
        f"method {i}, with a field": {0: [(1, i / 100), (2, 0.5 + i / 100)]} for i in range(methods)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where nothing is left of the axes
        draw_curves(lines, "accuracy (%)", tmp_path / "curves.png")
    picture = np.asarray(Image.open(tmp_path / "curves.png").convert("L"))
    spine = max(
        (column < 50).sum() for column in picture.T[: picture.shape[1] // 4]
    )  # the vertical axis
    assert spine > 1.6 * 150, "at least so many inches of 150 dots"


def test_a_long_label_is_broken_to_fit_its_axis(tmp_path: Path) -> None:
    label = "accuracy on the global test set (%), mean of clients or server's model"
    draw_curves({"local": {0: [(1, 0.5), (2, 0.6)]}}, label, tmp_path / "curves.svg")
    texts = re.findall(
        r"<tspan[^>]*>([^<]+)|<text[^>]*>([^<]+)", (tmp_path / "curves.svg").read_text()
    )
    assert max(len(one or other) for one, other in texts) <= 40
