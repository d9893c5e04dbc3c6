"""The page: sections of text, tables, charts and pictures in one HTML file. What comes in is escaped here."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly.graph_objects as go

from barter.core.errors import ConfigError
from barter.core.files import replace_text, writing
from barter.report.colours import DARK
from barter.version import __version__

__all__ = [
    "Section",
    "Tile",
    "chart",
    "code",
    "folded",
    "page",
    "side_by_side",
    "strip",
    "table",
    "text",
    "write",
]

REFRESH = 10  # seconds after which a live page is read again
MARK = '<meta name="generator" content="barter'  # by which a page of ours is known


@dataclass(frozen=True)
class Tile:
    """A card: a number, what it is, and lines that say of what, over how many, and when."""

    name: str
    value: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A heading and the parts below it, made by the functions of this file.

    A section without parts has no heading either. The end of the page gives its reason, if any.
    """

    title: str
    parts: Sequence[str]
    reason: str = ""

    @property
    def empty(self) -> bool:
        return not any(self.parts)


def page(
    title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section], live: str = ""
) -> str:
    """Return the whole page; a live one reloads itself, and says why."""
    templates = files("barter.report") / "templates"
    template = Template((templates / "report.html").read_text())
    shown = [section for section in sections if not section.empty]
    omitted = [section for section in sections if section.empty and section.reason]
    anchors = {section.title: section.title.lower().replace(" ", "-") for section in shown}
    return template.substitute(
        mark=f'{MARK} {__version__}">',
        title=escape(title),
        subtitle=escape(subtitle),
        live=f"<p class=live>{escape(live)}</p>" if live else "",
        refresh=f"setTimeout(() => location.reload(), {1000 * REFRESH})" if live else "",
        tiles="".join(map(_card, tiles)),
        links="".join(f'<a href="#{anchors[s.title]}">{escape(s.title)}</a>' for s in shown),
        sections="".join(
            f'<section id="{anchors[s.title]}"><h2>{escape(s.title)}</h2>{"".join(s.parts)}</section>'
            for s in shown
        ),
        omitted="".join(f"<p>{escape(s.title)}: {escape(s.reason)}</p>" for s in omitted),
        dark=json.dumps(DARK),
        version=__version__,
        plotly=(
            templates / "plotly-cartesian.min.js"
        ).read_text(),  # a third of all of Plotly: it opens much sooner
    )


def _card(tile: Tile) -> str:
    notes = "".join(f"<small>{escape(note)}</small>" for note in tile.notes)
    return (
        f"<div class=tile><span>{escape(tile.name)}</span><b>{escape(tile.value)}</b>{notes}</div>"
    )


def write(to: Path, content: str) -> None:
    """The file holds either the page it held or the new one; a file that is no page of ours is left alone."""
    with writing(to):
        known = not to.exists() or MARK.encode() in to.read_bytes()[:1000]
    if not known:
        raise ConfigError(f"{to} exists and is no report of barter's: choose another --to")
    replace_text(to, content)


def text(*paragraphs: str) -> str:
    """Plain text."""
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)


def code(content: str) -> str:
    """Text as it stands in a file."""
    return f"<pre>{escape(content)}</pre>"


def folded(summary: str, *parts: str, unfolded: bool = False) -> str:
    """What one opens to see it."""
    return f"<details{' open' * unfolded}><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


# A number with a unit, or several as in "1 min 04 s"; a spread, an interval or a remark may follow.
_NUMBER = r"[+\-\u2212]?(?:\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|\u221e)"
_UNIT = r"(?:%|B|kB|MB|GB|TB|ms|s|min|h)"
_QUANTITY = re.compile(
    rf"{_NUMBER}(?: ?{_UNIT}(?: {_NUMBER} {_UNIT})*)?(?: \u00b1 {_NUMBER})?(?: [\[(].*)?"
)
_MISSING = ("", "-", "never")


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    together: Sequence[Sequence[str]] = (),
    best: frozenset[tuple[int, int]] = frozenset(),
    *,
    words: Collection[str] = (),
    stacked: bool = False,
) -> str:
    """Return a table: words on the left of their columns, numbers on the right.

    Args:
        headings: The columns' names.
        rows: The cells.
        together: Rows for all of the table, below it.
        best: Places (row, column) of cells to print bold.
        words: Headings of columns whose digits are names, not numbers.
        stacked: Whether a narrow screen shows every row as a block, a line for each cell, so that
            no column is out of sight. Other tables scroll sideways there and say so.
    """
    columns = list(zip(*rows, strict=True)) or [() for _ in headings]
    numeric = [
        heading not in words and _is_numeric(column)
        for heading, column in zip(headings, columns, strict=True)
    ]
    kinds = [" class=n" if number else "" for number in numeric]
    labels = [f' data-label="{escape(heading)}"' if stacked else "" for heading in headings]

    def cell(j: int, content: str, *, bold: bool = False) -> str:
        shown = f"<b>{escape(content)}</b>" if bold else escape(content)
        return f"<td{kinds[j]}{labels[j]}>{shown}</td>"

    head = "".join(
        f"<th{kind}>{escape(heading)}</th>" for kind, heading in zip(kinds, headings, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(cell(j, c, bold=(i, j) in best) for j, c in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    foot = "".join(f"<tr>{''.join(cell(j, c) for j, c in enumerate(row))}</tr>" for row in together)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot>"
    return (
        f'<div class="table{" stacked" * stacked}"><div class=wide><table>{parts}</table></div>'
        "<p class=hint>Scroll sideways for more columns \u2192</p></div>"
    )


def _is_numeric(cells: Sequence[str]) -> bool:
    known = [cell for cell in cells if cell not in _MISSING]
    return bool(known) and all(_QUANTITY.fullmatch(cell) for cell in known)


def chart(title: str, figure: go.Figure) -> str:
    """A chart, drawn when the page opens."""
    content = figure.to_json().replace("<", "\\u003c")  # so that no name can end the element
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class=chart style="height:{figure.layout.height or figure.layout.template.layout.height}px">'
        f"<script type=application/json>{content}</script></div></figure>"
    )


def side_by_side(*parts: str) -> str:
    """Two or more in a row where there is room."""
    return f"<div class=pair>{''.join(parts)}</div>"


def strip(caption: str, kind: str, image: bytes, labels: Sequence[str]) -> str:
    """Equally wide pictures beside each other, as one image of this kind, and what each of them shows."""
    source = base64.b64encode(image).decode()
    names = "".join(f"<span>{escape(label)}</span>" for label in labels)
    return (
        f"<figure class=strip><figcaption>{escape(caption)}</figcaption>"
        f'<div class=labels style="grid-template-columns:repeat({len(labels)},1fr)">{names}</div>'
        f'<img alt="{escape(caption)}" src="data:image/{kind};base64,{source}"></figure>'
    )
