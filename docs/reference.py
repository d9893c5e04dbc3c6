"""The reference, made of the docstrings: python docs/reference.py FOLDER."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc.render

import barter

PARTS = (
    "barter",
    "barter.core",
    "barter.ops",
    "barter.data",
    "barter.trained.model",
)  # for authors and users
PARTS += (
    "barter.compute.lanes",
    "barter.compute.trainer",
    "barter.compute.precision",
)  # other files there want Triton


def build(folder: Path) -> None:
    """Write a page for each module; whatever pdoc would warn of is an error."""
    vars(barter).update(
        {name: getattr(barter, name) for name in barter.__all__}
    )  # they come when asked for
    pdoc.render.configure(
        docformat="markdown", footer_text=f"barter {barter.__version__}", show_source=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings(
            "ignore", r".* barter\.ops\.(inversion|fit)\.\w+\.__init__"
        )  # their NamedTuples puzzle pdoc
        pdoc.pdoc(*PARTS, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
