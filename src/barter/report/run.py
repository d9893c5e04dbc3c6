"""The page of a run."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.errors import BarterError
from barter.core.params import BY_PYTHON
from barter.core.record import Round
from barter.data.task import SITES, make_task
from barter.privacy.show import cells, conclusion
from barter.privacy.statement import Statement
from barter.report import charts
from barter.report.image_sheets import pictures
from barter.report.page import (
    Section,
    Tile,
    chart,
    code,
    folded,
    page,
    side_by_side,
    strip,
    table,
    text,
)
from barter.runs.folder import METRICS, PRIVACY, ended, records, rounds_done
from barter.runs.picture import Row
from barter.runs.progress import duration, size
from barter.runs.tables import HEADINGS, alone, closing_cells
from barter.setup.config import Config, read, resolve, to_toml
from barter.setup.participants import names_of, narrowed

__all__ = ["RunReport", "Split", "cited", "failures", "phases"]

TESTS = {"global": "on the global test set", "local": "on the client's own mix of classes"}
TOLD = {
    *TESTS,
    *(f"before_{name}" for name in TESTS),
    "bytes_up",
    "bytes_down",
    "device_memory",
}  # in other sections
# So that the page stays small: rounds and parties with images, images of each, pixels, and how many are kept exactly.
SHOWN, COLUMNS, SIDE, EXACT = 5, 8, 48, 16


class Split:
    """Who holds how many images of which class; or why nobody can say here.

    Reading the data can take long: until `read` is called, the section says that it is on its way.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counts: list[list[int]] = []
        self.classes: Sequence[str] = ()
        self.unknown = "The data are being read: the split is in the next page."
        self._read = False

    def read(self) -> None:
        """Find the split, once."""
        if self._read:
            return
        self._read = True
        config = self.config
        data = replace(config.data, download=False)  # who only looks fetches nothing
        try:
            task = make_task(
                data, config.partition, config.clients, config.seed, torch.device("cpu")
            )
        except BarterError as error:
            self.unknown = f"The split cannot be shown here. {error}"
        else:
            self.counts, self.classes = task.class_table().tolist(), task.classes

    def section(self, caption: str) -> Section:
        shown = (
            chart(caption, charts.split(self.counts, self.classes))
            if self.counts
            else text(self.unknown)
        )
        return Section("Split", [shown])


class RunReport:
    """What a run has come to, whenever one asks; the split of its data is found once."""

    def __init__(self, run: Path, *, images: bool) -> None:
        self.run, self.images = run, images
        self.config = resolve(read(run / "config.toml"))
        self.names, self.split = _names(self.config), Split(self.config)

    @property
    def done(self) -> int:
        return rounds_done(self.run)

    @property
    def empty(self) -> bool:
        return not records(self.run)

    @property
    def finished(self) -> bool:
        return ended(self.run, self.config.rounds)

    @property
    def progress(self) -> str:
        return f"{self.done} of {self.config.rounds} rounds"

    def page(self, *, live: bool, quick: bool = False) -> str:
        """The page of the rounds that are done; a quick one does not wait for data that are not read yet."""
        rounds, config = records(self.run), self.config
        if rounds and not quick:
            self.split.read()
        title = f"{type(config.algorithm).__name__} on {config.data.source}"
        subtitle = (
            f"{config.clients} clients, {len(rounds)} of {config.rounds} rounds, seed {config.seed}"
        )
        sections = [] if not rounds else self._results(rounds, live=live)
        sections += [cited([config.algorithm]), Section("Configuration", [code(to_toml(config))])]
        goes_on = (
            f"The run goes on. {self._last()} This page reads itself again every few seconds."
            if live
            else ""
        )
        return page(title, subtitle, tiles(rounds) if rounds else [], sections, goes_on)

    def _last(self) -> str:
        if not self.done:
            return "No round is finished yet."
        written = time.localtime((self.run / METRICS).stat().st_mtime)
        return f"Its last round ended at {time.strftime('%H:%M:%S', written)}."

    def _results(self, rounds: Sequence[Round], *, live: bool) -> list[Section]:
        tests = {
            key: title
            for key, title in TESTS.items()
            if any(key in c for r in rounds for c in r.clients.values())
        }
        learning = [
            chart(f"Accuracy {tests[key]}, by round", charts.learning(rounds, key, self.names))
            for key in tests
        ]
        gains = [
            chart(f"Accuracy {tests[key]}, by client", charts.gains(rounds, key, self.names))
            for key in tests
        ]
        remarks = [] if live else [text(remark) for remark in self.config.algorithm.remarks(rounds)]
        return [
            *([Section("Remarks", remarks)] if remarks else []),
            Section(
                "Learning",
                [side_by_side(*learning) if tests else text("The clients report no accuracy.")],
            ),
            Section("Alone and after", [side_by_side(*gains), self._clients(rounds)]),
            self.split.section("Images by client and class"),
            *([] if live or not self.images else [_gallery(self.run)]),
            *_privacy(self.run),
            _traffic(rounds),
            _time(rounds),
            _memory(rounds),
            *_noted(rounds),
            failures("round", [[str(r.round), failure] for r in rounds for failure in r.failures]),
        ]

    def _clients(self, rounds: Sequence[Round]) -> str:
        counts = self.split.counts
        samples = [sum(row) for row in counts] or None
        held = [[c for c, n in enumerate(row) if n] for row in counts] or None
        content = table(HEADINGS, *closing_cells(rounds, self.names, samples, held))
        title = f"Every client after round {rounds[-1].round}, accuracy in %"
        return folded(title, content, unfolded=len(self.names) <= 20)


def _names(config: Config) -> list[str]:
    """What the clients are called: number and architecture, where the configuration says it."""
    if config.data.source == SITES or config.models == BY_PYTHON:
        return [f"client {k}" for k in range(config.clients)]
    algorithm, clients = config.algorithm, config.clients
    names = names_of(algorithm, config.models, clients)
    return [f"{k} {narrowed(name, algorithm.budget(k, clients))}" for k, name in enumerate(names)]


def tiles(rounds: Sequence[Round]) -> list[Tile]:
    """The run in a few numbers."""
    last, found = rounds[-1], []
    for key, name in (("global", "global accuracy"), ("local", "own accuracy")):
        if any(key in client for client in last.clients.values()):
            before = [
                told
                for k in last.clients
                if (told := alone(rounds, k).get(f"before_{key}")) is not None
            ]
            gain = (
                f"{100 * (last.mean(key) - sum(before) / len(before)):+.1f} points over alone"
                if before
                else ""
            )
            found.append(Tile(name, f"{last.mean(key):.1%}", gain))
    if "global" in last.server:
        found.append(
            Tile("server's model", f"{last.server['global']:.1%}", "on the global test set")
        )
    up, down = (sum(r.traffic(way) for r in rounds) for way in ("up", "down"))
    found.append(Tile("exchanged", size(up + down), f"{size(up)} up, {size(down)} down"))
    spent = sum(r.seconds["round"] for r in rounds)
    found.append(Tile("time", duration(spent), f"{duration(spent / len(rounds))} a round"))
    failed = sum(len(r.failures) for r in rounds)
    return [
        *found,
        Tile("failures", str(failed), "of clients' calls" if failed else "every client answered"),
    ]


def _privacy(run: Path) -> list[Section]:
    """What left the clients, and what that promises."""
    if not (run / PRIVACY).is_file():
        return []
    statement = Statement.read(run / PRIVACY)
    parts = table(*cells(statement)) if statement.rows else ""
    return [Section("Privacy", [parts, *map(text, conclusion(statement))])]


def _traffic(rounds: Sequence[Round]) -> Section:
    methods = list(dict.fromkeys(method for r in rounds for method in r.bytes))
    if not methods:
        return Section("Traffic", [text("Nothing was exchanged.")])
    sums = {
        way: [sum(r.bytes.get(m, {}).get(way, 0) for r in rounds) for m in methods]
        for way in ("up", "down")
    }
    by_round = {way: [r.traffic(way) for r in rounds] for way in ("up", "down")}
    return Section(
        "Traffic",
        [
            side_by_side(
                chart("Bytes by method, over all rounds", charts.bars(methods, sums, "B")),
                chart("Bytes by round", charts.by_round(rounds, by_round, "B")),
            )
        ],
    )


def phases(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """The seconds of every phase in each round, and those between phases."""
    parts = [{key: s for key, s in r.seconds.items() if key != "round"} for r in rounds]
    rest = [
        max(0.0, r.seconds["round"] - sum(part.values()))
        for r, part in zip(rounds, parts, strict=True)
    ]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [part.get(name, 0.0) for part in parts] for name in names} | {"the rest": rest}


def _time(rounds: Sequence[Round]) -> Section:
    by_phase = phases(rounds)
    sums = {"seconds": [sum(values) for values in by_phase.values()]}
    return Section(
        "Time",
        [
            side_by_side(
                chart("Seconds by phase, over all rounds", charts.bars(list(by_phase), sums, " s")),
                chart("Seconds by round", charts.by_round(rounds, by_phase, " s")),
            )
        ],
    )


def _memory(rounds: Sequence[Round]) -> Section:
    peaks = [r.server.get("device_memory") for r in rounds]
    if not any(peaks):
        return Section(
            "Memory",
            [text("The run was on a CPU: its records hold the memory of CUDA devices only.")],
        )
    return Section(
        "Memory",
        [chart("Peak of the device by round", charts.by_round(rounds, {"peak": peaks}, "B"))],
    )


def _noted(rounds: Sequence[Round]) -> list[Section]:
    """Numbers that the method itself put into the record."""
    found = []
    for party in ("server", "clients"):
        for key in dict.fromkeys(
            key for r in rounds for node in _of(r, party) for key in node if key not in TOLD
        ):
            values = [[node[key] for node in _of(r, party) if key in node] for r in rounds]
            means = [sum(v) / len(v) if v else None for v in values]
            name = (
                f"{key.replace('_', ' ')}, {'server' if party == 'server' else 'mean of clients'}"
            )
            found.append(
                chart(name, charts.by_round(rounds, {key: means}, "B" if "bytes" in key else ""))
            )
    return [Section("Noted by the method", [side_by_side(*found)])] if found else []


def _of(record: Round, party: str) -> list[Mapping[str, float]]:
    return [record.server] if party == "server" else list(record.clients.values())


def failures(where: str, rows: Sequence[Sequence[str]]) -> Section:
    """Calls that clients did not answer: where each was, and what happened."""
    if not rows:
        return Section("Failures", [text("None: every client that was asked answered.")])
    title = f"{len(rows)} call{'s' * (len(rows) > 1)} that a client did not answer"
    return Section(
        "Failures", [folded(title, table([where, "what happened"], rows), unfolded=len(rows) <= 20)]
    )


def cited(algorithms: Sequence[Algorithm]) -> Section:
    """Where the methods come from, and what crosses between their parties."""
    parts = []
    for kind in dict.fromkeys(type(algorithm) for algorithm in algorithms):
        rows = [[method, what] for method, what in kind.crosses.items()]
        parts += [text(kind.citation()), table(["method", "what crosses"], rows) if rows else ""]
    return Section("Method" if len(parts) == 2 else "Methods", parts)


def _gallery(run: Path) -> Section:
    """Private images of the last rounds and what was made of them; or why there are none."""
    try:
        found = deque(pictures(run, COLUMNS), maxlen=SHOWN)
    except BarterError as error:
        return Section("Images", [text(str(error))])
    note = (
        "Private images and below each what was made of it; a single row was made of no single image. "
        "No party of the run sees all of this: it is for the experimenter's eyes, and --no-images leaves it out."
    )
    parts = [text(note)]
    for t, rows in found:
        some = f", the first {SHOWN} of {len(rows)} parties" if len(rows) > SHOWN else ""
        strips = [strip(row[0], *_drawn(row), row[3]) for row in rows[:SHOWN]]
        parts.append(folded(f"Round {t}{some}", side_by_side(*strips), unfolded=t == found[-1][0]))
    return Section("Images", parts)


def _drawn(row: Row) -> tuple[str, bytes]:
    """Real images above those made of them, with gaps; small ones exactly."""
    _, real, made, _ = row
    lines = [images for images in (real, made) if images is not None]
    sheet = np.concatenate(
        [np.concatenate([_framed(image) for image in images], axis=1) for images in lines]
    )
    image = Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet)
    side = max(made.shape[1:3])
    shrink = SIDE / side
    if shrink < 1:
        image = image.resize(
            (round(image.width * shrink), round(image.height * shrink)), Image.Resampling.LANCZOS
        )
    kind, file = "png" if side <= EXACT else "jpeg", io.BytesIO()
    image.save(file, kind, quality=80)
    return kind, file.getvalue()


def _framed(image: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    pixels = (255 * image).round().byte().numpy()
    edge = max(1, max(pixels.shape[:2]) // 16)
    return np.pad(pixels, ((edge, edge), (edge, edge), (0, 0)), constant_values=255)
