"""Plotly figures of a run's rounds and of a comparison."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import plotly.graph_objects as go

from barter.core.record import Round
from barter.report.colours import GAINED, GREY, GRID, INK, LOST, PAPER, REST, SCALE, SOFT
from barter.report.units import time_unit
from barter.runs.picture import COLOURS, Curve, mean_and_deviation
from barter.runs.summary import Results, final_value, is_share
from barter.runs.tables import accuracy_gain, last_accuracies, participants

__all__ = [
    "BarQuantity",
    "bar_chart",
    "gain_chart",
    "learning_chart",
    "method_chart",
    "outcome_chart",
    "price_chart",
    "round_chart",
    "seed_chart",
    "split_chart",
]

# Plotly reads names as HTML, so names of clients, classes and methods are escaped everywhere below.

BarQuantity: TypeAlias = Literal["bytes", "seconds", "number"]  # the quantity that a bar shows

MAX_COLOURED_LINES = len(COLOURS)  # number of lines that have different colours
SHARE = "~%"  # format of accuracies along an axis: 40%, or 97.5% if ticks are that close
TITLE = {"standoff": 6, "font": {"size": 12, "color": SOFT}}
THICK = 40  # maximum thickness of a bar in pixels
SPIKE = {"spikethickness": 1, "spikecolor": GREY, "spikedash": "solid"}
# Parts of bars that have the same colour in all charts.
PARTS = {"up": COLOURS[0], "down": COLOURS[5], "the rest": REST}
STYLE = {
    "layout": {
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 13,
            "color": INK,
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 12, "b": 8},
        "height": 360,
        "xaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "automargin": True,
            "title": TITLE,
            **SPIKE,
        },
        "yaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "automargin": True,
            "ticklabelstandoff": 4,
            "title": TITLE,
        },
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0,
            "traceorder": "normal",
            "font": {"size": 12},
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": INK},
        "hoverlabel": {
            "bgcolor": PAPER,
            "bordercolor": GRID,
            "font": {"color": INK},
            "namelength": -1,
        },
        "colorway": list(COLOURS),
        "bargap": 0.25,
        "hoverdistance": -1,
    }
}


def learning_chart(records: Sequence[Round], metric: str, names: Sequence[str]) -> go.Figure:
    """Draw each client's accuracy by round, the mean, and the local-only mean.

    The local-only mean is a dotted line. Rounds without evaluation are omitted. If only some
    clients have a local-only accuracy, the mean over these clients is drawn too, since only it can
    be compared with the dotted line. On the global test set the server's model is drawn as well.

    Args:
        records: The rounds, of which at least one was evaluated.
        metric: The test set, "global" or "local".
        names: The clients' names, by client id.
    """
    tested = [r for r in records if r.values(metric) or _server(r, metric) is not None]
    few = len(names) <= MAX_COLOURED_LINES
    figure = _figure("round", SHARE, _span(tested), hovermode="x unified" if few else "closest")
    if few:
        figure.update_layout(legend={"entrywidth": 0.33, "entrywidthmode": "fraction"})
    hover = "%{y:.1%}" if few else "round %{x}: %{y:.1%}"

    def add(name: str, values: Iterable[float | None], **style: Any) -> None:
        column = _column(values)
        markers = len(column) <= 20 or np.isnan(column).any()
        figure.add_scatter(
            y=column,
            name=escape(name),
            mode="lines+markers" if markers else "lines",
            hovertemplate=hover,
            **_spacing(tested),
            **style,
        )

    for k, name in enumerate(names):
        add(
            name,
            (r.clients[k].get(metric) for r in tested),
            line={"width": 1.2, "color": COLOURS[k] if few else GREY},
            marker={"size": 4},
            opacity=0.8 if few else 0.3,
            showlegend=few,
        )
    by_server = metric == "global" and tested[-1].primary == "server"
    strong = {"line": {"width": 3.5, "color": INK}, "marker": {"size": 8}}
    weaker = {"line": {"width": 2.5, "color": COLOURS[1], "dash": "dash"}, "marker": {"size": 6}}
    means = [_mean(r.values(metric).values()) for r in tested]
    if any(mean is not None for mean in means):
        counts = [len(values) for r in tested if (values := r.values(metric))]
        fewest = "" if min(counts) == max(counts) else f"{min(counts)} to "
        add(f"mean of {fewest}{_clients(max(counts))}", means, **(weaker if by_server else strong))
    if any(_server(r, metric) is not None for r in tested):
        models = [_server(r, metric) for r in tested]
        add("server's model", models, **(strong if by_server else weaker))
    known = accuracy_gain(records, metric).before
    if known:
        fewer = len(known) < len(names)
        if fewer:
            add(
                f"mean of the {len(known)} with local only",
                (_mean(r.values(metric, known).values()) for r in tested),
                line={"width": 2, "color": COLOURS[2], "dash": "dot"},
                marker={"size": 5},
            )
        level = sum(known.values()) / len(known)
        measured = [value for r in tested for value in r.values(metric).values()]
        lowest = all(level <= value for value in measured)  # Then the label is above the line.
        label = {
            "text": f"local only {level:.1%}" + (f", {_clients(len(known))}" if fewer else ""),
            "textposition": "end",
            "yanchor": "bottom" if lowest else "top",
        }
        figure.add_hline(y=level, line={"width": 1.5, "color": INK, "dash": "dot"}, label=label)
    return figure


def gain_chart(records: Sequence[Round], metric: str, names: Sequence[str]) -> go.Figure:
    """Draw each client's local-only accuracy and its last one, connected by a line.

    Clients without a local-only accuracy have a point only. Those that never took part have open
    circles.

    Args:
        records: The rounds.
        metric: The test set, "global" or "local".
        names: The clients' names, by client id.
    """
    clients = range(len(names))
    before = accuracy_gain(records, metric).before
    after = last_accuracies(records, metric)
    took_part = participants(records) or set(clients)  # Records may lack participants.
    many = len(names) > 30
    figure = _figure("client", SHARE, len(names))
    both = [k for k in clients if k in before and k in after]
    for name, colour, chosen in (
        ("gained", GAINED, [k for k in both if after[k] >= before[k]]),
        ("lost", LOST, [k for k in both if after[k] < before[k]]),
    ):
        figure.add_scatter(
            x=[x for k in chosen for x in (k, k, None)],
            y=[y for k in chosen for y in (before[k], after[k], None)],
            mode="lines",
            line={"width": 2 if many else 5, "color": colour},
            hoverinfo="skip",
            name=name,
            showlegend=bool(chosen),
        )
    size = 5 if many else 11
    idle = {k: share for k, share in after.items() if k not in took_part}
    active = {k: share for k, share in after.items() if k in took_part}
    for name, marker, values in (
        ("local only", {"size": size, "color": GREY}, before),
        ("after", {"size": size, "color": COLOURS[0]}, active),
        ("never took part", {"size": size, "color": GREY, "symbol": "circle-open"}, idle),
    ):
        figure.add_scatter(
            y=_column(values.get(k) for k in clients),
            mode="markers",
            marker=marker,
            name=name,
            text=[escape(client) for client in names],
            hovertemplate="%{text}: %{y:.1%}",
            showlegend=bool(values),
        )
    return figure


def split_chart(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> go.Figure:
    """Draw a heat map of images by client and class, first class at the bottom.

    The chart of `barter show partition` has the same orientation.

    Args:
        counts: Client -> number of its images of each class.
        classes: The classes' names.
    """
    table = np.array(counts, dtype=np.int32).T
    small = table.size <= 150
    figure = _figure("client", "", len(counts), height=min(720, max(260, 110 + 24 * len(classes))))
    figure.add_heatmap(
        z=table,
        y=[escape(name) for name in classes],
        colorscale=[list(step) for step in SCALE],
        xgap=2 if small else 0,
        ygap=2 if small else 0,
        text=[[str(n or "") for n in row] for row in table.tolist()] if small else None,
        texttemplate="%{text}" if small else None,
        hovertemplate="client %{x}, class %{y}: %{z:,} images<extra></extra>",
        colorbar={
            "thickness": 10,
            "outlinewidth": 0,
            "title": {"text": "images", "side": "right", "font": {"size": 12, "color": SOFT}},
        },
    )
    figure.update_xaxes(showgrid=False)
    return figure.update_yaxes(showgrid=False, type="category", title={"text": "class"})


def round_chart(
    records: Sequence[Round], parts: Mapping[str, Sequence[float | None]], quantity: BarQuantity
) -> go.Figure:
    """Draw a stacked column for each round.

    Args:
        records: The rounds.
        parts: Name of a part of the columns -> its value in each round; None for no value.
        quantity: The quantity, which determines units: values are bytes, seconds or numbers.
    """
    figure = _figure("round", "", _span(records), barmode="stack", hovermode="x unified")
    totals = [sum(filter(None, column)) for column in zip(*parts.values(), strict=True)]
    scale = _Scale(quantity, totals)
    for name, values in parts.items():
        figure.add_bar(
            **_spacing(records),
            y=scale.column(values),
            name=escape(name),
            marker={"color": PARTS.get(name)},
            hovertemplate=f"%{{y:{scale.precise}}}{scale.suffix}",
        )
    figure.update_yaxes(tickformat=scale.ticks, ticksuffix=scale.suffix, rangemode="tozero")
    if len(records) <= 4:
        bargap = 0.6
    elif len(records) <= 50:
        bargap = 0.25
    else:
        bargap = 0.0
    return figure.update_layout(bargap=bargap, showlegend=len(parts) > 1)


def bar_chart(
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    quantity: BarQuantity,
    lowest: int = 360,
) -> go.Figure:
    """Draw a stacked horizontal bar for each label.

    Args:
        labels: Names of the bars, at least one.
        parts: Part of the bars -> its value in each bar.
        quantity: The quantity, which determines units: values are bytes, seconds or numbers.
        lowest: Least height of the figure in pixels.
    """
    height = max(lowest, 110 + 36 * len(labels))
    room = (height - 110) / len(labels)
    figure = _figure("", "", barmode="stack", bargap=1 - min(0.6, THICK / room), height=height)
    scale = _Scale(quantity, [sum(column) for column in zip(*parts.values(), strict=True)])
    for name, values in parts.items():
        figure.add_bar(
            y=_labels(labels),
            x=scale.column(values),
            name=escape(name),
            orientation="h",
            marker={"color": PARTS.get(name)},
            hovertemplate=f"%{{x:{scale.precise}}}{scale.suffix}",
        )
    figure.update_layout(margin={"r": 28})  # for the last tick's label
    figure.update_xaxes(tickformat=scale.ticks, ticksuffix=scale.suffix, nticks=6)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure.update_layout(showlegend=len(parts) > 1)


def outcome_chart(columns: Mapping[str, Mapping[str, Sequence[float]]]) -> go.Figure:
    """Draw a bar per method and kind of accuracy, with the deviation over seeds.

    Args:
        columns: Kind of accuracy -> method -> its values over the seeds, from 0 to 1.
    """
    methods = list(dict.fromkeys(name for values in columns.values() for name in values))
    height = 110 + 22 * len(methods) * len(columns) + 16 * len(methods)
    figure = _figure("", "", barmode="group", bargap=0.3, height=max(200, height))
    for i, (kind, values) in enumerate(columns.items()):
        known = [name for name in methods if values.get(name)]
        spread = [
            float(np.std(values[name], ddof=1)) if len(values[name]) > 1 else 0 for name in known
        ]
        figure.add_bar(
            y=_labels(known),
            x=_column(sum(values[name]) / len(values[name]) for name in known),
            error_x={"type": "data", "array": spread, "color": INK, "thickness": 1.2, "width": 3}
            if any(spread)
            else None,
            customdata=_column(spread),
            name=escape(kind),
            orientation="h",
            marker={"color": COLOURS[i % MAX_COLOURED_LINES]},
            hovertemplate="%{x:.1%} ± %{customdata:.1%}",
        )
    figure.update_layout(margin={"r": 28}, showlegend=len(columns) > 1)
    figure.update_xaxes(tickformat=SHARE, nticks=6, rangemode="tozero")
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def method_chart(
    lines: Mapping[str, Mapping[int, Curve]],
    metric: str,
    positions: Mapping[str, Mapping[int, float]] | None = None,
    quantity: BarQuantity = "number",
) -> go.Figure:
    """Draw a line per method: mean over seeds, with a band of one standard deviation.

    Args:
        lines: Method -> seed -> curve.
        metric: The metric, which determines the format.
        positions: Method -> round -> what it has cost until then, which is drawn along the x axis;
            None draws by round.
        quantity: The quantity of the positions, which determines units: bytes or seconds.
    """
    ticks, precise = _formats(metric)
    if positions is None:
        figure = _figure("round", ticks, _longest(lines), height=420, hovermode="x unified")
        scale = None
    else:
        scale = _Scale(quantity, [x for by_round in positions.values() for x in by_round.values()])
        figure = _figure("", ticks, height=420)
        figure.update_xaxes(tickformat=scale.ticks, ticksuffix=scale.suffix, nticks=6)
        figure.update_xaxes(autorangeoptions={"include": 0})
        figure.update_layout(margin={"r": 28})  # for the last tick's label
    for i, (name, seeds) in enumerate(lines.items()):
        rounds, means, spread = (np.array(column) for column in mean_and_deviation(seeds.values()))
        if not len(rounds):  # Colours depend on i, so that a method has the same one in all charts.
            continue
        places = rounds
        if positions is not None and scale is not None:
            places = scale.column(positions[name][int(t)] for t in rounds)
        edge = {
            "x": places,
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        }
        group = {"legendgroup": str(i)}
        figure.add_scatter(y=means - spread, **edge, **group)
        figure.add_scatter(
            y=means + spread, fill="tonexty", fillcolor=_faint(_line(i)["color"]), **edge, **group
        )
        figure.add_scatter(
            x=places,
            y=means,
            name=escape(name),
            customdata=spread,
            line={"width": 2.5, **_line(i)},
            **group,
            mode="lines+markers" if len(rounds) <= 20 else "lines",
            hovertemplate=f"%{{y:{precise}}} ± %{{customdata:{precise}}}",
        )
    return figure


def seed_chart(results: Results, metric: str) -> go.Figure:
    """Draw a metric after the last round by seed, with a line per method."""
    ticks, precise = _formats(metric)
    figure = _figure("seed", ticks, hovermode="x unified")
    for i, (name, runs) in enumerate(results.items()):
        figure.add_scatter(
            x=[str(seed) for seed in runs],
            y=_column(final_value(rounds, metric) for rounds in runs.values()),
            name=escape(name),
            mode="lines+markers",
            line={"width": 1, **_line(i)},
            marker={"size": 9},
            hovertemplate=f"%{{y:{precise}}}",
        )
    seeds = sorted({seed for runs in results.values() for seed in runs})
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[str(seed) for seed in seeds]
    )
    return figure


def price_chart(results: Results, metric: str) -> go.Figure:
    """Draw a metric after the last round over the traffic, with a point per run.

    Traffic is the sum of a run's bytes in both directions. Its axis is logarithmic if the largest
    is at least ten times the smallest and the smallest is not 0.
    """
    ticks, precise = _formats(metric)
    figure = _figure("bytes, both ways", ticks)
    totals = {
        name: [sum(r.traffic("up") + r.traffic("down") for r in rounds) for rounds in runs.values()]
        for name, runs in results.items()
    }
    for i, (name, runs) in enumerate(results.items()):
        figure.add_scatter(
            x=_column(totals[name]),
            y=_column(final_value(rounds, metric) for rounds in runs.values()),
            name=escape(name),
            mode="markers",
            marker={"size": 11, "color": _line(i)["color"], "opacity": 0.8},
            text=[f"seed {seed}" for seed in runs],
            hovertemplate=f"%{{text}}: %{{y:{precise}}}, %{{x:.3s}}B",
        )
    amounts = [amount for column in totals.values() for amount in column]
    figure.update_layout(margin={"r": 28})  # for the last tick's label
    figure.update_xaxes(tickformat="~s", ticksuffix="B", nticks=6)
    if 0 < 10 * min(amounts) <= max(amounts):  # A linear axis would crowd the small amounts.
        return figure.update_xaxes(type="log", dtick=1)
    return figure.update_xaxes(autorangeoptions={"include": 0})


def _formats(metric: str) -> tuple[str, str]:
    """Return the number formats of a metric, for axes and for labels."""
    return (SHARE, ".1%") if is_share(metric) else ("", ".4~g")


def _figure(x: str, tickformat: str, count: int | None = None, **layout: Any) -> go.Figure:
    """Return an empty figure in the page's style, whose caption names the y axis.

    Args:
        x: The title of the x axis.
        tickformat: The number format of the y axis.
        count: The number of positions along x, if they are numbered.
        layout: Other layout options of Plotly.
    """
    figure = go.Figure(layout={"template": STYLE, **layout})
    figure.update_xaxes(dtick=1 if count is not None and count <= 20 else None)
    if x:
        figure.update_xaxes(title={"text": x}, unifiedhovertitle={"text": f"{x} %{{x}}"})
    if tickformat == SHARE:
        figure.update_yaxes(autorangeoptions={"clipmin": -0.03, "clipmax": 1.03})
    return figure.update_yaxes(tickformat=tickformat)


def _longest(lines: Mapping[str, Mapping[int, Curve]]) -> int:
    return max(len(curve) for seeds in lines.values() for curve in seeds.values())


def _line(i: int) -> dict[str, str]:
    """Return colour and dash of the i-th line; the dash changes when colours repeat."""
    return {
        "color": COLOURS[i % MAX_COLOURED_LINES],
        "dash": ("solid", "dash", "dot")[i // MAX_COLOURED_LINES % 3],
    }


def _faint(colour: str) -> str:
    """Return a colour with an opacity of 15 %."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _column(values: Iterable[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return values as an array, which is compact in the page; None is a gap."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


class _Scale:
    """The unit of an axis, and the formats of its ticks and labels."""

    def __init__(self, quantity: BarQuantity, values: Iterable[float]) -> None:
        unit = time_unit(values)
        self.factor = 1 / unit.seconds if quantity == "seconds" else 1.0
        self.suffix = {"bytes": "B", "seconds": f" {unit.name}", "number": ""}[quantity]
        self.ticks = {"bytes": "~s", "seconds": ",~r", "number": ""}[quantity]
        self.precise = {"bytes": ".3s", "seconds": ",.3~r", "number": ".4~g"}[quantity]

    def column(self, values: Iterable[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return _column(values) * self.factor


def _labels(names: Sequence[str]) -> list[str]:
    return [escape(name).replace(", ", ",<br>") for name in names]


def _spacing(records: Sequence[Round]) -> dict[str, Any]:
    """Return the x positions of rounds, compact if they are evenly spaced."""
    rounds = [r.round for r in records]
    steps = {b - a for a, b in pairwise(rounds)} or {1}
    return {"x0": rounds[0], "dx": steps.pop()} if len(steps) == 1 else {"x": rounds}


def _span(records: Sequence[Round]) -> int:
    return records[-1].round - records[0].round + 1


def _server(record: Round, metric: str) -> float | None:
    """Return the server model's accuracy; None except on the global test set."""
    return record.server.get("global") if metric == "global" else None


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _clients(count: int) -> str:
    return f"{count} client{'s' * (count != 1)}"
