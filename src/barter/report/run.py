"""The report of a run."""

from __future__ import annotations

import io
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.errors import BarterError
from barter.core.params import BY_PYTHON
from barter.core.record import Round
from barter.core.variant import PAPER_PRESET, differences_from_paper
from barter.data.task import SITES, make_task
from barter.privacy.show import conclusion, statement_cells
from barter.privacy.statement import Statement
from barter.report import charts
from barter.report.image_sheets import pictures
from barter.report.page import (
    Section,
    Tile,
    chart,
    code,
    fold,
    page,
    side_by_side,
    strip,
    table,
    text_block,
)
from barter.report.units import format_seconds
from barter.runs.folder import METRICS_FILE, PRIVACY, count_rounds, has_ended, read_records
from barter.runs.picture import ImageRow
from barter.runs.progress import format_bytes, pluralise
from barter.runs.summary import cumulative_bytes, cumulative_seconds
from barter.runs.tables import CLIENT_HEADINGS, accuracy_gain, closing_cells, participants
from barter.setup.config import Config, describe_wire, to_toml
from barter.setup.participants import architecture_names, narrowed_name
from barter.setup.trust import read_run

__all__ = [
    "TEST_TITLES",
    "RunReport",
    "Split",
    "citation_section",
    "failure_section",
    "phase_seconds",
]

TEST_TITLES = {"global": "global test set", "local": "local tests"}
# Metrics that other sections show, and numbers of test images, which only weigh clients.
SHOWN_ELSEWHERE = {
    *TEST_TITLES,
    *(f"before_{test}" for test in TEST_TITLES),
    "bytes_up",
    "bytes_down",
    "device_memory",
    "flops",
    "simulated_call_seconds",
}
SHOWN_ELSEWHERE |= {f"{test}_images" for test in TEST_TITLES}
# Metrics of [evaluate] are called TEST_METRIC, and before_TEST_METRIC before an exchange.
PER_CLASS = re.compile(rf"({'|'.join(TEST_TITLES)})_class_(\d+)")
FURTHER = re.compile(rf"({'|'.join(TEST_TITLES)})_(loss|macro_f1|auc|calibration)")
# Limits that keep the page small.
SHOWN = 5  # rounds and parties with images
REPORT_COLUMNS = 8  # images of each party
SIDE = 48  # pixels of an image's longer side
LOSSLESS_SIDE = 16  # images of at most this side are stored without loss


class Split:
    """The number of images by client and class, or the reason why it is unknown.

    Reading the data can take long. Until `read` is called, the reason says that it is under way.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counts: list[list[int]] = []
        self.classes: Sequence[str] = ()
        self.unknown = "The data are being read: the split is in the next page."
        self._read = False

    def read(self) -> None:
        """Compute the split from the data; only the first call does.

        Nothing is downloaded. If the data are not here, `unknown` says why, and nothing is raised.
        """
        if self._read:
            return
        self._read = True
        config = self.config
        data = replace(config.data, download=False)  # A report does not download data.
        try:
            host = torch.device("cpu")
            task = make_task(data, config.partition, config.clients, config.seed, host, shared=True)
        except BarterError as error:
            self.unknown = f"it cannot be shown here. {error}"
        else:
            self.counts = task.class_table().tolist()
            self.classes = task.classes

    def section(self, caption: str) -> Section:
        """Return the section of the split's chart; empty, with the reason, if unknown."""
        shown = (
            [chart(caption, charts.split_chart(self.counts, self.classes))] if self.counts else []
        )
        return Section("Split", shown, self.unknown)


class RunReport:
    """The report of a run; the split of its data is computed once."""

    def __init__(self, run: Path, *, images: bool) -> None:
        self.run = run
        self.images = images
        self.config = read_run(run)
        self.names = _names(self.config)
        self.split = Split(self.config)

    @property
    def done(self) -> int:
        return count_rounds(self.run)

    @property
    def empty(self) -> bool:
        return not read_records(self.run)

    @property
    def finished(self) -> bool:
        return has_ended(self.run, self.config.rounds)

    @property
    def progress(self) -> str:
        return f"{self.done} of {self.config.rounds} rounds"

    def page(self, *, live: bool, quick: bool = False) -> str:
        """Return the HTML page of the finished rounds.

        Args:
            live: The page reloads itself, and lacks images and the method's remarks.
            quick: Do not read the data, which may take long; the split is then omitted, unless it
                is known from an earlier page.
        """
        rounds = read_records(self.run)
        config = self.config
        if rounds and not quick:
            self.split.read()
        title = f"{type(config.algorithm).__name__} on {config.data.source}"
        subtitle = (
            f"{pluralise(config.clients, 'client')}, {len(rounds)} of "
            f"{pluralise(config.rounds, 'round')}, seed {config.seed}"
        )
        sections = [] if not rounds else self._results(rounds, live=live)
        sections += [
            citation_section([config.algorithm]),
            Section("Configuration", [code(to_toml(config))]),
        ]
        message = ""
        if live:
            message = f"The run is not finished. {self._last()} This page reloads itself every few seconds."
        return page(title, subtitle, make_tiles(rounds) if rounds else [], sections, message)

    def _last(self) -> str:
        """Return a sentence that says when the last round ended."""
        if not self.done:
            return "No round is finished yet."
        written = time.localtime((self.run / METRICS_FILE).stat().st_mtime)
        return f"Its last round ended at {time.strftime('%H:%M:%S', written)}."

    def _results(self, rounds: Sequence[Round], *, live: bool) -> list[Section]:
        """Return the sections about the finished rounds: charts, tables, images.

        Args:
            rounds: The finished rounds.
            live: Leave out what is slow or final: remarks of the method, and images.
        """
        tests = [key for key in TEST_TITLES if any(r.values(key) for r in rounds)]
        learning = [
            chart(
                f"Accuracy by round, {TEST_TITLES[key]}",
                charts.learning_chart(rounds, key, self.names),
            )
            for key in tests
            if len([r for r in rounds if r.values(key)]) > 1  # A single round has no curve.
        ]
        gains = [
            chart(
                f"Accuracy by client, {TEST_TITLES[key]}",
                charts.gain_chart(rounds, key, self.names),
            )
            for key in tests
        ]
        remarks = [
            text_block(f"Round {r.round}: {warning}.") for r in rounds for warning in r.warnings
        ]
        if not live:
            remarks += [text_block(remark) for remark in self.config.algorithm.remarks(rounds)]
        missing = "" if tests else "the clients report no accuracy."
        return [
            Section("Remarks", remarks),
            Section("Learning", [side_by_side(*learning)] if learning else [], missing),
            Section(
                "Clients",
                [*([side_by_side(*gains)] if gains else []), self._clients(rounds)],
            ),
            self.split.section("Images by client and class"),
            *([] if live or not self.images else [_gallery(self.run)]),
            *_privacy(self.run),
            _traffic(rounds, self.config),
            _time(rounds),
            _simulated(rounds),
            _memory(rounds),
            _metrics(rounds, self.split.classes),
            _recorded_section(rounds),
            failure_section(
                "round", [[str(r.round), failure] for r in rounds for failure in r.failures]
            ),
        ]

    def _clients(self, rounds: Sequence[Round]) -> str:
        """Return the table of all clients."""
        counts = self.split.counts
        samples = [sum(row) for row in counts] or None
        held = [[c for c, n in enumerate(row) if n] for row in counts] or None
        cells = closing_cells(rounds, self.names, samples, held)
        content = table(CLIENT_HEADINGS, *cells, words=("classes",))
        title = f"Every client after round {rounds[-1].round}, accuracy in %"
        return fold(title, content, unfolded=len(self.names) <= 20)


def _names(config: Config) -> list[str]:
    """Return the clients' names: number and, if known, architecture."""
    if config.data.source == SITES or config.models == BY_PYTHON:
        return [f"client {k}" for k in range(config.clients)]
    algorithm = config.algorithm
    clients = config.clients
    names = architecture_names(algorithm, config.models, clients)
    return [
        f"{k} {narrowed_name(name, algorithm.budget(k, clients))}" for k, name in enumerate(names)
    ]


def make_tiles(rounds: Sequence[Round]) -> list[Tile]:
    """Return the cards of a run: accuracies, the primary model's first, and costs.

    A card on participation is added if some clients never took part. There must be a round.
    """
    of_clients = [card for test in TEST_TITLES if (card := _clients_card(rounds, test)) is not None]
    of_server = [card for card in [_server_card(rounds)] if card is not None]
    last = rounds[-1]
    cards = of_server + of_clients if last.primary == "server" else of_clients + of_server
    idle = _idle(rounds)
    if idle:
        n_clients = len(last.clients)
        share = f"{n_clients - len(idle)} of {n_clients}"
        note = f"{len(idle)} of {pluralise(n_clients, 'client')} never took part"
        cards.append(Tile("Clients that took part", share, [note]))
    up, down = (sum(r.traffic(way) for r in rounds) for way in ("up", "down"))
    cards.append(
        Tile(
            "Exchanged, all rounds",
            format_bytes(up + down),
            [f"{format_bytes(up)} up, {format_bytes(down)} down"],
        )
    )
    spent = sum(r.seconds["round"] for r in rounds)
    each = [f"{format_seconds(spent / len(rounds))} a round"] if len(rounds) > 1 else []
    cards.append(Tile("Time, all rounds", format_seconds(spent), each))
    simulated = cumulative_seconds(rounds)
    if simulated is not None:
        mean = [f"{format_seconds(simulated[-1] / len(rounds))} a round"]
        cards.append(Tile("Simulated time, all rounds", format_seconds(simulated[-1]), mean))
    failed = sum(len(r.failures) for r in rounds)
    answered = (
        "calls that a client did not answer" if failed else "every client answered every call"
    )
    return [*cards, Tile("Failures", str(failed), [answered])]


def _server_card(rounds: Sequence[Round]) -> Tile | None:
    last = next((r for r in reversed(rounds) if "global" in r.server), None)
    if last is None:
        return None
    notes = [f"{TEST_TITLES['global']}, round {last.round}"]
    return Tile("Accuracy of the server's model", f"{last.server['global']:.1%}", notes)


def _clients_card(rounds: Sequence[Round], test: str) -> Tile | None:
    """Return the card of the clients' mean accuracy and gain over local only.

    The accuracy is that of the last round that evaluated a client; None if there is none. The gain
    is the mean over the clients that have both values.
    """
    last = next((r for r in reversed(rounds) if r.values(test)), None)
    if last is None:
        return None
    after = last.values(test)
    adversarial = any("adversarial" in metrics for metrics in last.clients.values())
    group = pluralise(len(after), "honest client" if adversarial else "client")
    group = last.describe_clients(test) or group
    notes = [f"{TEST_TITLES[test]}, mean of {group}, round {last.round}"]
    change = accuracy_gain(rounds, test)
    if change.points is not None:
        same_clients = change.before.keys() == after.keys()
        whose = "" if same_clients else f", same {pluralise(len(change.before), 'client')}"
        notes.append(f"{change.points:+.1f} points over local only{whose}")
    idle = _idle(rounds) & after.keys()
    if idle:
        notes.append(f"{len(idle)} of these never took part")
    return Tile("Accuracy of the clients' models", f"{last.mean(test):.1%}", notes)


def _idle(rounds: Sequence[Round]) -> set[int]:
    """Return the clients that took part in no round; none if no record says who did."""
    active = participants(rounds)
    # Records without participants do not say which clients took part.
    return set(rounds[-1].clients) - active if active else set()


def _privacy(run: Path) -> list[Section]:
    """Return the section with what clients released, and the guarantee that follows.

    The list is empty if the run has no privacy statement.
    """
    if not (run / PRIVACY).is_file():
        return []
    statement = Statement.read(run / PRIVACY)
    parts = table(*statement_cells(statement), stacked=True) if statement.rows else ""
    return [Section("Privacy", [parts, *map(text_block, conclusion(statement))])]


def _traffic(rounds: Sequence[Round], config: Config) -> Section:
    methods = list(dict.fromkeys(method for r in rounds for method in r.bytes))
    sums: dict[str, list[int]] = {"up": [], "down": []}
    for way, totals in sums.items():
        for method in methods:
            totals.append(sum(r.bytes.get(method, {}).get(way, 0) for r in rounds))
    if not any(map(any, sums.values())):
        return Section("Traffic", [], "nothing was exchanged.")
    by_round = {way: [r.traffic(way) for r in rounds] for way in ("up", "down")}
    figures = _costs("Bytes", "method", rounds, (methods, sums), by_round)
    return Section("Traffic", [figures, text_block(f"Wire: {describe_wire(config)}.")])


def _costs(
    what: Literal["Bytes", "Time", "Simulated time"],
    kind: str,
    rounds: Sequence[Round],
    sums: tuple[Sequence[str], Mapping[str, Sequence[float]]],
    by_round: Mapping[str, Sequence[float]],
) -> str:
    """Draw the costs of all rounds and, if there are several, the costs of each.

    Args:
        what: The quantity.
        kind: What the bars stand for, such as "method".
        rounds: The finished rounds.
        sums: Names of the bars, and part -> its sum in each bar.
        by_round: Part -> its value in each round.
    """
    quantity: charts.BarQuantity = "bytes" if what == "Bytes" else "seconds"
    if len(rounds) == 1:
        return chart(f"{what} by {kind}", charts.bar_chart(*sums, quantity, lowest=0))
    return side_by_side(
        chart(f"{what} by {kind}, over all rounds", charts.bar_chart(*sums, quantity)),
        chart(f"{what} by round", charts.round_chart(rounds, by_round, quantity)),
    )


def phase_seconds(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Return the seconds of every phase in each round: phase -> seconds by round.

    A phase that a round lacks took 0 s. What a round took outside of all phases is the last one,
    "the rest", at least 0.
    """
    parts = [{key: s for key, s in r.seconds.items() if key != "round"} for r in rounds]
    rest = [
        max(0.0, r.seconds["round"] - sum(part.values()))
        for r, part in zip(rounds, parts, strict=True)
    ]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [part.get(name, 0.0) for part in parts] for name in names} | {"the rest": rest}


def _time(rounds: Sequence[Round]) -> Section:
    by_phase = phase_seconds(rounds)
    sums = {"time": [sum(values) for values in by_phase.values()]}
    return Section("Time", [_costs("Time", "phase", rounds, (list(by_phase), sums), by_phase)])


def _simulated(rounds: Sequence[Round]) -> Section:
    """Return the section of the simulated network.

    It shows accuracy by simulated time and by bytes, and the costs.
    """
    seconds = cumulative_seconds(rounds)
    if seconds is None:
        return Section("Simulated network", [])
    phases = dict.fromkeys(phase for r in rounds for phase in r.simulated if phase != "round")
    by_phase = {phase: [r.simulated.get(phase, 0.0) for r in rounds] for phase in phases}
    sums = {"time": [sum(values) for values in by_phase.values()]}
    parts = [_costs("Simulated time", "phase", rounds, (list(by_phase), sums), by_phase)]
    curve = [(r.round, r.headline()) for r in rounds]
    if len([value for _, value in curve if value is not None]) > 1:
        lines = {"accuracy": {0: curve}}
        places = [r.round for r in rounds]
        by_time = {"accuracy": dict(zip(places, seconds, strict=True))}
        by_bytes = {"accuracy": dict(zip(places, cumulative_bytes(rounds), strict=True))}
        what = f"Accuracy, {TEST_TITLES['global']}"
        figures = [
            chart(
                f"{what}, by simulated time",
                charts.method_chart(lines, "global", by_time, "seconds"),
            ),
            chart(f"{what}, by bytes", charts.method_chart(lines, "global", by_bytes, "bytes")),
        ]
        parts.insert(0, side_by_side(*figures))
    return Section("Simulated network", parts)


def _memory(rounds: Sequence[Round]) -> Section:
    peaks = [r.server.get("device_memory") for r in rounds]
    if not any(peaks):
        reason = "the run was on a CPU, and records hold the memory of CUDA devices only."
        return Section("Memory", [], reason)
    if len(rounds) == 1:
        return Section(
            "Memory", [text_block(f"Peak of the device: {format_bytes(peaks[0] or 0)}.")]
        )
    figure = charts.round_chart(rounds, {"peak": peaks}, "bytes")
    return Section("Memory", [chart("Peak of the device by round", figure)])


def _metrics(rounds: Sequence[Round], classes: Sequence[str]) -> Section:
    """Return the section of further metrics: by round, and accuracy by class."""
    parts = _by_round(rounds, [key for key in _keys(rounds) if FURTHER.fullmatch(key)])
    for test, title in TEST_TITLES.items():
        last = next((r for r in reversed(rounds) if _class_shares(r, test)), None)
        if last is not None:
            shares = _class_shares(last, test)
            named = {
                whose: {
                    classes[c] if c < len(classes) else f"class {c}": values
                    for c, values in sorted(by_class.items())
                }
                for whose, by_class in shares.items()
            }
            parts.append(
                chart(
                    f"Accuracy by class, {title}, round {last.round}", charts.outcome_chart(named)
                )
            )
    return Section("Metrics", [side_by_side(*parts)] if parts else [])


def _class_shares(record: Round, test: str) -> dict[str, dict[int, list[float]]]:
    """Return accuracies by class, of the server's model and of all clients.

    Clients without test images of a class are left out.

    Returns:
        "server's model" or "mean of clients" -> class -> accuracies.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for whose, party in (("server's model", "server"), ("mean of clients", "clients")):
        for node in _of(record, party):
            for key, share in node.items():
                match = PER_CLASS.fullmatch(key)
                if match is not None and match[1] == test:
                    found.setdefault(whose, {}).setdefault(int(match[2]), []).append(share)
    return found


def _recorded_section(rounds: Sequence[Round]) -> Section:
    """Return the section with the numbers that the method itself recorded."""

    def is_own(key: str) -> bool:
        name = key.removeprefix("before_")
        return (
            name not in SHOWN_ELSEWHERE
            and not FURTHER.fullmatch(name)
            and not PER_CLASS.fullmatch(name)
        )

    parts = _by_round(rounds, [key for key in _keys(rounds) if is_own(key)])
    return Section("Noted by the method", [side_by_side(*parts)] if parts else [])


def _keys(rounds: Sequence[Round]) -> list[str]:
    keys: dict[str, None] = {}  # a set in the order of insertion
    for party in ("server", "clients"):
        for r in rounds:
            for node in _of(r, party):
                keys |= dict.fromkeys(node)
    return list(keys)


def _by_round(rounds: Sequence[Round], keys: Sequence[str]) -> list[str]:
    """Draw recorded numbers by round; list them in a table if there is one round."""
    found: dict[str, tuple[str, list[float | None]]] = {}
    for party, whose in (("server", "server"), ("clients", "mean of clients")):
        for key in keys:
            values = [[node[key] for node in _of(r, party) if key in node] for r in rounds]
            if any(values):
                means = [sum(v) / len(v) if v else None for v in values]
                found[f"{key.replace('_', ' ')}, {whose}"] = key, means
    if len(rounds) == 1:
        rows = [
            [name, format_bytes(mean or 0) if "bytes" in key else f"{mean:.4g}"]
            for name, (key, [mean]) in found.items()
        ]
        return [table(["number", f"round {rounds[0].round}"], rows)] if rows else []
    return [
        chart(
            name, charts.round_chart(rounds, {key: means}, "bytes" if "bytes" in key else "number")
        )
        for name, (key, means) in found.items()
    ]


def _of(record: Round, party: str) -> list[Mapping[str, float]]:
    return [record.server] if party == "server" else list(record.clients.values())


def failure_section(where: str, rows: Sequence[Sequence[str]]) -> Section:
    """Return the section of calls that clients did not answer.

    Args:
        where: The heading of the first column, such as "round".
        rows: (where, what happened) for each call; if there are none, the section is empty.
    """
    if not rows:
        return Section("Failures", [], "none, every client that was asked answered.")
    title = f"{pluralise(len(rows), 'call')} that a client did not answer"
    listed = table([where, "what happened"], rows, words=(where,))
    return Section("Failures", [fold(title, listed, unfolded=len(rows) <= 20)])


def citation_section(algorithms: Sequence[Algorithm]) -> Section:
    """Return the report's section that describes the algorithms.

    For each class of algorithm it has the citation and what each client method sends up and down;
    then, for each algorithm, the fields in which it differs from its paper.
    """
    parts = []
    for kind in dict.fromkeys(type(algorithm) for algorithm in algorithms):
        rows = [[method, str(crossing)] for method, crossing in kind.crosses.items()]
        parts += [
            text_block(kind.citation()),
            table(["method", "what crosses"], rows) if rows else "",
        ]
    for algorithm in algorithms:
        parts += _variant(algorithm)
    kinds = {type(algorithm) for algorithm in algorithms}
    return Section("Method" if len(kinds) == 1 else "Methods", parts)


def _variant(algorithm: Algorithm) -> list[str]:
    """Return the HTML that shows how the run differs from the published method.

    It is a list of one unfolded block: a note and a table with a row (field, this run, paper) for
    each of `differences_from_paper`. The list is empty if there are none.
    """
    found = differences_from_paper(algorithm)
    if not found:
        return []
    name = type(algorithm).__name__
    title = f"{name} as run here differs from its paper in {pluralise(len(found), 'field')}"
    rows = [[d.field, str(d.value), str(d.paper)] for d in found]
    note = text_block(f"preset={PAPER_PRESET} is the published method.")
    return [fold(title, note, table(["field", "this run", "paper"], rows), unfolded=True)]


def _gallery(run: Path) -> Section:
    """Return the section with images of the last rounds, or why there is none."""
    try:
        found = deque(pictures(run, REPORT_COLUMNS), maxlen=SHOWN)
    except BarterError as error:
        return Section("Images", [], str(error))
    note = (
        "Private images, and below each the image synthesised from it; a single row shows images "
        "that were synthesised from no single image. "
        "No party of the run sees all of this: it is for the experimenter's eyes, and --no-images "
        "leaves it out."
    )
    parts = [text_block(note)]
    for t, rows in found:
        some = f", the first {SHOWN} of {len(rows)} parties" if len(rows) > SHOWN else ""
        strips = [strip(row[0], *_encode_row(row), row[3]) for row in rows[:SHOWN]]
        parts.append(fold(f"Round {t}{some}", side_by_side(*strips), unfolded=t == found[-1][0]))
    return Section("Images", parts)


def _encode_row(row: ImageRow) -> tuple[str, bytes]:
    """Encode private images above synthetic ones; return format and bytes.

    Images of up to `LOSSLESS_SIDE` pixels are stored as PNG, without loss, others as JPEG; those
    larger than `SIDE` are scaled down to it.
    """
    _, private, synthetic, _ = row
    lines = [images for images in (private, synthetic) if images is not None]
    strips = [np.concatenate([_add_frame(image) for image in images], axis=1) for images in lines]
    sheet = np.concatenate(strips)
    image = Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet)
    side = max(synthetic.shape[1:3])
    shrink = SIDE / side
    if shrink < 1:
        image = image.resize(
            (round(image.width * shrink), round(image.height * shrink)), Image.Resampling.LANCZOS
        )
    kind = "png" if side <= LOSSLESS_SIDE else "jpeg"
    file = io.BytesIO()
    image.save(file, kind, quality=80)
    return kind, file.getvalue()


def _add_frame(image: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return an image as bytes with a white frame."""
    pixels = (255 * image).round().byte().numpy()
    edge = max(1, max(pixels.shape[:2]) // 16)
    return np.pad(pixels, ((edge, edge), (edge, edge), (0, 0)), constant_values=255)
