"""The page: sections of text, tables, charts and pictures in one HTML file. What comes in is escaped here."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly.graph_objects as go

from barter.core.errors import ConfigError
from barter.core.files import replace_text, writing
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
    """A number that says much."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, made by the functions of this file."""

    title: str
    parts: Sequence[str]


def page(
    title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section], live: str = ""
) -> str:
    """The whole page; a live one reads itself again and again, and says why."""
    templates = files("barter.report") / "templates"
    template = Template((templates / "report.html").read_text())
    anchors = {section.title: section.title.lower().replace(" ", "-") for section in sections}
    return template.substitute(
        mark=f'{MARK} {__version__}">',
        title=escape(title),
        subtitle=escape(subtitle),
        live=f"<p class=live>{escape(live)}</p>" if live else "",
        refresh=f"setTimeout(() => location.reload(), {1000 * REFRESH})" if live else "",
        tiles="".join(
            f"<div class=tile><span>{escape(tile.name)}</span><b>{escape(tile.value)}</b>"
            f"<small>{escape(tile.note)}</small></div>"
            for tile in tiles
        ),
        links="".join(f'<a href="#{anchors[s.title]}">{escape(s.title)}</a>' for s in sections),
        sections="".join(
            f'<section id="{anchors[s.title]}"><h2>{escape(s.title)}</h2>{"".join(s.parts)}</section>'
            for s in sections
        ),
        version=__version__,
        plotly=(
            templates / "plotly-cartesian.min.js"
        ).read_text(),  # a third of all of Plotly: it opens much sooner
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


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    together: Sequence[Sequence[str]] = (),
    best: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """A table, below it rows for all of it; the cells that are the best are bold."""

    def cell(i: int, j: int, content: str) -> str:
        shown = escape(content)
        return f"<td>{f'<b>{shown}</b>' if (i, j) in best else shown}</td>"

    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(cell(i, j, c) for j, c in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    foot = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in together)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot>"
    return f"<div class=wide><table>{parts}</table></div>"


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
