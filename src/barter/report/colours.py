"""Colours of charts on a light background, and replacements on a dark one."""

from __future__ import annotations

from barter.runs.picture import COLOURS

__all__ = ["DARK", "GAINED", "GREY", "GRID", "INK", "LOST", "PAPER", "REST", "SCALE", "SOFT"]

INK = "#1f2933"  # text, and the lines that matter most
SOFT = "#5f6c7b"  # titles of axes
GREY = "#8794a3"  # elements that stay in the background
GRID = "#e6eaef"
PAPER = "#ffffff"  # background of labels
REST = "#c3ccd6"
GAINED = "#8fcbb7"
LOST = "#efa98d"
SCALE = ((0, "#f3f5f7"), (1e-6, "#d9e8f3"), (1, COLOURS[0]))  # heat map: none, few, many images

# The browser replaces these colours if the user prefers dark pages. All others are visible on both
# backgrounds.
DARK: dict[str, str] = {
    INK: "#e8edf2",
    SOFT: "#a7b3c0",
    GRID: "#303943",
    PAPER: "#262e37",
    REST: "#6b7988",
    COLOURS[0]: "#3d9fe0",
    COLOURS[5]: "#9ad8f7",
    COLOURS[6]: "#f4f4f4",
    SCALE[0][1]: "#20272f",
    SCALE[1][1]: "#1f3b50",
}
