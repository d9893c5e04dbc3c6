"""Build a self-contained HTML page from text, tables, charts and images.

All input is escaped.
"""

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
from barter.core.files import convert_disk_errors, replace_text
from barter.report.colours import DARK
from barter.version import __version__

__all__ = [
    "Section",
    "Tile",
    "chart",
    "code",
    "fold",
    "page",
    "side_by_side",
    "strip",
    "table",
    "text_block",
    "write_page",
]

REFRESH = 10  # seconds between two reloads of a live page
MARK = '<meta name="generator" content="barter'  # identifies a page that barter wrote


@dataclass(frozen=True)
class Tile:
    """A card with a number."""

    name: str
    value: str
    notes: Sequence[str] = ()  # such as the test set, the number of clients, the round


@dataclass(frozen=True)
class Section:
    """A heading and the HTML parts below it.

    A section without parts is omitted, and the page's footer gives the reason, if any.
    """

    title: str
    parts: Sequence[str]  # from the functions of this module
    reason: str = ""

    @property
    def empty(self) -> bool:
        return not any(self.parts)


def page(
    title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section], live: str = ""
) -> str:
    """Return the HTML of the whole page.

    Args:
        title: The page's title.
        subtitle: A line below it.
        tiles: Cards below the title.
        sections: The sections; empty ones are omitted.
        live: A message of a page that reloads itself; empty for a finished page.
    """
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
        # A third of the full Plotly, so the page opens much faster.
        plotly=(templates / "plotly-cartesian.min.js").read_text(),
    )


def _card(tile: Tile) -> str:
    notes = "".join(f"<small>{escape(note)}</small>" for note in tile.notes)
    return (
        f"<div class=tile><span>{escape(tile.name)}</span><b>{escape(tile.value)}</b>{notes}</div>"
    )


def write_page(to: Path, content: str) -> None:
    """Write a page atomically; overwrite nothing but an earlier page.

    Raises:
        ConfigError: The file exists and is not a report.
        CheckpointError: The file cannot be read or written.
    """
    with convert_disk_errors(to):
        known = not to.exists() or MARK.encode() in to.read_bytes()[:1000]
    if not known:
        raise ConfigError(f"{to} exists and is not a report of barter: choose another --to")
    replace_text(to, content)


def text_block(*paragraphs: str) -> str:
    """Return the HTML of paragraphs of plain text, which is escaped."""
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)


def code(content: str) -> str:
    """Return the HTML of preformatted text, which is escaped."""
    return f"<pre>{escape(content)}</pre>"


def fold(summary: str, *parts: str, unfolded: bool = False) -> str:
    """Return the HTML of a block that the reader can fold and unfold.

    Args:
        summary: The line that always shows, as text; it is escaped.
        *parts: The contents, as HTML; they are joined without escaping.
        unfolded: Whether the contents show at first.
    """
    start = f"<details{' open' * unfolded}><summary>{escape(summary)}</summary>"
    return f"{start}{''.join(parts)}</details>"


# A number with a unit, or several as in "1 min 04 s"; a deviation, interval or note may follow.
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
    """Return the HTML of a table, with numbers aligned right.

    Args:
        headings: The columns' names.
        rows: The cells.
        together: Summary rows below the others.
        best: Positions (row, column) of cells to print bold.
        words: Headings of columns whose digits are names, not numbers.
        stacked: On a narrow screen, show every row as a block with one line per cell. Other tables
            scroll sideways there, with a hint.
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
    """Return whether all known cells of a column, at least one, are quantities."""
    known = [cell for cell in cells if cell not in _MISSING]
    return bool(known) and all(_QUANTITY.fullmatch(cell) for cell in known)


def chart(title: str, figure: go.Figure) -> str:
    """Return the HTML of a chart, which is drawn when the page opens."""
    content = figure.to_json().replace("<", "\\u003c")  # Otherwise a name could end the element.
    height = figure.layout.height or figure.layout.template.layout.height
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class=chart style="height:{height}px">'
        f"<script type=application/json>{content}</script></div></figure>"
    )


def side_by_side(*parts: str) -> str:
    """Return HTML with parts (HTML) side by side where the screen is wide enough."""
    return f"<div class=pair>{''.join(parts)}</div>"


def strip(caption: str, kind: str, image: bytes, labels: Sequence[str]) -> str:
    """Return the HTML of a row of equally wide pictures with labels.

    Args:
        caption: The row's caption.
        kind: The format of the image, such as "png".
        image: All pictures as one image file.
        labels: A label for each picture.
    """
    source = base64.b64encode(image).decode()
    names = "".join(f"<span>{escape(label)}</span>" for label in labels)
    return (
        f"<figure class=strip><figcaption>{escape(caption)}</figcaption>"
        f'<div class=labels style="grid-template-columns:repeat({len(labels)},1fr)">{names}</div>'
        f'<img alt="{escape(caption)}" src="data:image/{kind};base64,{source}"></figure>'
    )
