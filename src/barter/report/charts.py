"""Charts of what rounds left behind, for a page: Plotly's figures, whose numbers are those of the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from barter.core.record import Round
from barter.runs.picture import COLOURS, Curve, band
from barter.runs.summary import Results, value
from barter.runs.tables import alone

__all__ = ["bars", "by_round", "by_seed", "gains", "learning", "methods", "price", "split"]

# Plotly reads names as HTML, so names of clients, classes and methods are escaped everywhere below.

INK, GREY, GRID = "#1f2933", "#8794a3", "#e6eaef"
FEW = len(COLOURS)  # lines that can be told apart by their colours
SHARE = ".0%"  # how accuracies are written along an axis
TITLE = {"standoff": 6, "font": {"size": 12, "color": "#5f6c7b"}}
SPIKE = {"spikethickness": 1, "spikecolor": GREY, "spikedash": "solid"}
PARTS = {
    "up": COLOURS[0],
    "down": COLOURS[5],
    "the rest": "#c3ccd6",
}  # what has the same colour everywhere
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
        "yaxis": {"gridcolor": GRID, "zeroline": False, "automargin": True, "ticklabelstandoff": 4},
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
            "bgcolor": "white",
            "bordercolor": GRID,
            "font": {"color": INK},
            "namelength": -1,
        },
        "colorway": list(COLOURS),
        "bargap": 0.25,
        "hoverdistance": -1,
    }
}


def learning(records: Sequence[Round], metric: str, names: Sequence[str]) -> go.Figure:
    """A line for each client by round and a strong one for their mean; dotted, what they knew alone."""
    few = len(names) <= FEW
    figure = _figure("round", SHARE, len(records), hovermode="x unified" if few else "closest")
    figure.update_layout(legend={"entrywidth": 0.33, "entrywidthmode": "fraction"})
    shown = {
        "x0": records[0].round,
        "dx": 1,
        "mode": "lines+markers" if len(records) <= 20 else "lines",
        "hovertemplate": "%{y:.1%}" if few else "round %{x}: %{y:.1%}",
    }
    for k, name in enumerate(names):
        line = {"width": 1.2, "color": COLOURS[k] if few else GREY}
        own = {
            "name": escape(name),
            "showlegend": few,
            "opacity": 0.8 if few else 0.3,
            "marker": {"size": 4},
        }
        figure.add_scatter(
            y=_column(r.clients[k].get(metric) for r in records), line=line, **own, **shown
        )
    values = [[c[metric] for c in r.clients.values() if metric in c] for r in records]
    mean = _column(sum(v) / len(v) if v else None for v in values)
    figure.add_scatter(
        y=mean, name="mean", line={"width": 3.5, "color": INK}, marker={"size": 8}, **shown
    )
    if metric == "global" and any("global" in r.server for r in records):
        line = {"width": 2.5, "color": COLOURS[1], "dash": "dash"}
        server = _column(r.server.get("global") for r in records)
        figure.add_scatter(y=server, name="server's model", line=line, marker={"size": 6}, **shown)
    known = [
        told
        for k in range(len(names))
        if (told := alone(records, k).get(f"before_{metric}")) is not None
    ]
    if known:
        level = sum(known) / len(known)
        lowest = all(
            level <= value for row in values for value in row
        )  # nothing is drawn below it, nor is its label
        label = {
            "text": f"alone {level:.1%}",
            "textposition": "end",
            "yanchor": "bottom" if lowest else "top",
        }
        figure.add_hline(y=level, line={"width": 1.5, "color": INK, "dash": "dot"}, label=label)
    return figure


def gains(records: Sequence[Round], metric: str, names: Sequence[str]) -> go.Figure:
    """For each client what it knew alone and what it knows now, and a line between the two."""
    before = [alone(records, k).get(f"before_{metric}") for k in range(len(names))]
    after = [records[-1].clients[k].get(metric) for k in range(len(names))]
    many = len(names) > 30
    figure = _figure("client", SHARE, len(names))
    moved = [
        (k, a, b)
        for k, (a, b) in enumerate(zip(before, after, strict=True))
        if a is not None and b is not None
    ]
    for name, colour, chosen in (
        ("gained", "#8fcbb7", [(k, a, b) for k, a, b in moved if b >= a]),
        ("lost", "#efa98d", [(k, a, b) for k, a, b in moved if b < a]),
    ):
        x, y = (
            [x for k, _, _ in chosen for x in (k, k, None)],
            [y for _, a, b in chosen for y in (a, b, None)],
        )
        line = {"width": 2 if many else 5, "color": colour}
        figure.add_scatter(
            x=x, y=y, mode="lines", line=line, hoverinfo="skip", name=name, showlegend=bool(chosen)
        )
    for name, colour, values in (("alone", GREY, before), ("after", COLOURS[0], after)):
        figure.add_scatter(
            y=_column(values),
            mode="markers",
            marker={"size": 5 if many else 11, "color": colour},
            name=name,
            text=[escape(client) for client in names],
            hovertemplate="%{text}: %{y:.1%}",
            showlegend=any(value is not None for value in values),
        )
    return figure


def split(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> go.Figure:
    """Clients by classes: the darker, the more images."""
    table = np.array(counts, dtype=np.int32).T
    small = table.size <= 150
    figure = _figure("client", "", len(counts), height=min(720, max(260, 110 + 24 * len(classes))))
    figure.add_heatmap(
        z=table,
        y=[escape(name) for name in classes],
        colorscale=[[0, "#f3f5f7"], [1e-6, "#d9e8f3"], [1, COLOURS[0]]],
        xgap=2 if small else 0,
        ygap=2 if small else 0,
        text=[[str(n or "") for n in row] for row in table.tolist()] if small else None,
        texttemplate="%{text}" if small else None,
        hovertemplate="client %{x}, class %{y}: %{z:,} images<extra></extra>",
        colorbar={"thickness": 10, "outlinewidth": 0},
    )
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False, type="category", autorange="reversed")
    return figure


def by_round(
    records: Sequence[Round], parts: Mapping[str, Sequence[float | None]], unit: str
) -> go.Figure:
    """A column for each round, made of its parts."""
    figure = _figure(
        "round", "~s" if unit else "", len(records), barmode="stack", hovermode="x unified"
    )
    for name, values in parts.items():
        figure.add_bar(
            **{"x0": records[0].round, "dx": 1, "y": _column(values), "name": escape(name)},
            marker={"color": PARTS.get(name)},
            hovertemplate=f"%{{y:.3s}}{unit}" if unit else "%{y:.4~g}",
        )
    figure.update_yaxes(ticksuffix=unit, rangemode="tozero")
    return figure.update_layout(bargap=0.25 if len(records) <= 50 else 0, showlegend=len(parts) > 1)


def bars(labels: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> go.Figure:
    """A bar for each label, made of its parts."""
    figure = _figure("", "", barmode="stack", bargap=0.4, height=max(360, 110 + 36 * len(labels)))
    for name, values in parts.items():
        figure.add_bar(
            **{
                "y": [escape(label).replace(", ", ",<br>") for label in labels],
                "x": _column(values),
                "name": escape(name),
            },
            orientation="h",
            marker={"color": PARTS.get(name)},
            hovertemplate=f"%{{x:.3s}}{unit}",
        )
    figure.update_layout(margin={"r": 28})  # for the last tick's label
    figure.update_xaxes(tickformat="~s", ticksuffix=unit, nticks=6)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure.update_layout(showlegend=len(parts) > 1)


def methods(lines: Mapping[str, Mapping[int, Curve]]) -> go.Figure:
    """A line per method by round: the mean over seeds, and a band of one standard deviation to each side."""
    figure = _figure("round", SHARE, _longest(lines), height=420, hovermode="x unified")
    for i, (name, seeds) in enumerate(lines.items()):
        rounds, means, spread = (np.array(column) for column in band(seeds.values()))
        edge = {
            "x": rounds,
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
            **{
                "x": rounds,
                "y": means,
                "name": escape(name),
                "customdata": spread,
                "line": {"width": 2.5, **_line(i)},
            },
            **group,
            mode="lines+markers" if len(rounds) <= 20 else "lines",
            hovertemplate="%{y:.1%} ± %{customdata:.1%}",
        )
    return figure


def by_seed(results: Results, metric: str) -> go.Figure:
    """The last accuracy of every method, seed by seed."""
    figure = _figure("seed", SHARE, hovermode="x unified")
    for i, (name, runs) in enumerate(results.items()):
        figure.add_scatter(
            **{
                "x": [str(seed) for seed in runs],
                "y": _column(value(rounds[-1], metric) for rounds in runs.values()),
            },
            name=escape(name),
            mode="lines+markers",
            line={"width": 1, **_line(i)},
            marker={"size": 9},
            hovertemplate="%{y:.1%}",
        )
    seeds = sorted({seed for runs in results.values() for seed in runs})
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[str(seed) for seed in seeds]
    )
    return figure


def price(results: Results, metric: str) -> go.Figure:
    """What every run reached, and the bytes that it took."""
    figure = _figure("bytes, both ways", SHARE)
    totals = {
        name: [sum(r.traffic("up") + r.traffic("down") for r in rounds) for rounds in runs.values()]
        for name, runs in results.items()
    }
    for i, (name, runs) in enumerate(results.items()):
        figure.add_scatter(
            **{
                "x": _column(totals[name]),
                "y": _column(value(rounds[-1], metric) for rounds in runs.values()),
            },
            name=escape(name),
            mode="markers",
            marker={"size": 11, "color": _line(i)["color"], "opacity": 0.8},
            text=[f"seed {seed}" for seed in runs],
            hovertemplate="%{text}: %{y:.1%}, %{x:.3s}B",
        )
    wide = min(map(min, totals.values())) > 0
    return figure.update_xaxes(
        tickformat="~s", ticksuffix="B", type="log" if wide else "linear", nticks=6
    )


def _figure(x: str, tickformat: str, count: int | None = None, **layout: Any) -> go.Figure:
    """An empty figure in the house's style, its x counting so many; what its y is stands above it in the page."""
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
    """A colour and a dash for the i-th of several."""
    return {"color": COLOURS[i % FEW], "dash": ("solid", "dash", "dot")[i // FEW % 3]}


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _column(values: Iterable[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Exact and compact in the page; a value that is missing is a gap."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
