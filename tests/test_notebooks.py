"""The notebooks run, show what they say, and are pages of the site."""

from __future__ import annotations

import base64
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from barter.attacks import inversion
from barter.cli import running
from barter.cli.app import main
from barter.cli.common import make_console
from barter.compare.comparison import RunJob
from barter.experiment import Experiment
from tests.conftest import TINY, fewer_digits
from tests.forked import forked, status

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
NAMES: tuple[str, ...] = TOOL["NAMES"]
PNG = b"\x89PNG\r\n"

# What replaces the settings of a notebook's cell with the tag "parameters".
QUICK = {
    "first-federation": f"ROUNDS = 1\nmethod = DFFKE(**{TINY['dffke']})",
    "bring-your-own": "ROUNDS = 1\nIMAGES = 100\nmethod = FedProto(features=8, batch_size=50)",
    "compare-and-attack": f"METHODS = 'local,fedavg'\nSEEDS = '0'\nROUNDS = 1\ndffke = {TINY['dffke']}",
}


def code_cells(name: str) -> list[dict[str, Any]]:
    return [c for c in TOOL["read_notebook"](name)["cells"] if c["cell_type"] == "code"]


def run_here(jobs: Sequence[RunJob], *_: object) -> list[RunJob]:
    """Run the jobs of a comparison in this process, with little work."""
    for job in jobs:
        little = TINY[type(job.config.algorithm).__name__.lower()]
        small = replace(job.config, algorithm=replace(job.config.algorithm, **little))
        list(Experiment.from_config(small, job.folder).rounds(small.rounds))
    return []


def command(line: str, names: dict[str, Any]) -> None:
    """Run a cell's command, with the variables that it names in braces."""
    words = shlex.split(line.removeprefix("!").replace("\\\n", " ").format(**names))
    assert words[0] == "barter"
    assert main(words[1:]) == 0, line


def display_module() -> ModuleType:
    """Stand in for IPython.display, which is not needed to run the cells."""

    def image(path: str, width: int) -> None:
        assert Path(path).read_bytes().startswith(PNG), path
        assert 0 < width <= 700

    def markdown(text: str) -> None:
        assert text.strip()

    module: Any = ModuleType("IPython.display")
    module.Image = image
    module.Markdown = markdown
    return module


def run_cells(name: str, parameters: str | None) -> Callable[[], int]:
    """Return a function that runs a notebook's cells; its value is an exit status.

    Args:
        name: The notebook.
        parameters: What follows the cell of settings; None to run the notebook as it is.
    """

    def run() -> int:
        if parameters:
            # In a process of its own: nothing of this has to be taken back.
            running.run_all = run_here  # type: ignore[assignment]
            inversion.COPIES = 200
            inversion.EPOCHS = 1
            inversion.DESCENT = 2
        sys.modules["IPython.display"] = display_module()
        names: dict[str, Any] = {"__name__": "__main__"}
        for cell in code_cells(name):
            source = "".join(cell["source"])
            if source.startswith("!"):
                command(source, names)
                continue
            exec(compile(source, name, "exec"), names)  # noqa: S102
            if parameters and "parameters" in cell["metadata"].get("tags", []):
                exec(parameters, names)  # noqa: S102
        return 0

    return run


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = [cell for cell in code_cells(name) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    monkeypatch.chdir(tmp_path)
    # Statistics of classes, which one of them compares, need more images than the others.
    with nullcontext() if name == "compare-and-attack" else fewer_digits():
        ended = status(forked(run_cells(name, QUICK[name]), tmp_path / "said"))
    assert ended == 0, (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_in_full(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Jupyter's machinery where nbclient and a kernel are installed, otherwise cell by cell."""
    try:
        import ipykernel  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError:
        monkeypatch.chdir(tmp_path)
        ended = status(forked(run_cells(name, None), tmp_path / "said"), seconds=3600)
        assert ended == 0, (tmp_path / "said").read_text()
    else:
        made = TOOL["execute_notebook"](name)
        kept = TOOL["read_notebook"](name)
        for cell, old in zip(made["cells"], kept["cells"], strict=True):
            kinds = [[o["output_type"] for o in c.get("outputs", [])] for c in (cell, old)]
            assert kinds[0] == kinds[1], cell["source"]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_with_outputs_and_without_traces_of_a_machine(name: str) -> None:
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    assert not re.search(r"/(home|root|tmp|work|Users)/|\\u001b|\\r|\"traceback\"", text)
    assert len(text) < 600_000
    page, pictures = TOOL["to_markdown"](TOOL["read_notebook"](name), name)
    assert len(pictures) >= 3
    for file, content in pictures.items():
        assert content.startswith(PNG), file
        assert f"]({file})" in page
    for cell in code_cells(name):
        source = "".join(cell["source"])
        shows = ("Image(", "Markdown(", "print(", "plt.show()", "!")
        assert bool(cell["outputs"]) or not any(
            line.startswith(shows) for line in source.splitlines()
        ), f"not executed: {source}"


def test_a_notebook_becomes_a_page() -> None:
    picture = {"image/png": base64.b64encode(PNG).decode()}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {
            "cell_type": "code",
            "source": ["!barter list"],
            "outputs": [{"output_type": "stream", "text": ["a\n", "b\n"]}],
        },
        {
            "cell_type": "code",
            "source": ["show()"],
            "outputs": [
                {
                    "output_type": "display_data",
                    "data": picture,
                    "metadata": {"image/png": {"width": 9}},
                }
            ],
        },
    ]
    page, pictures = TOOL["to_markdown"]({"cells": cells}, "n")
    assert pictures == {"n-0.png": PNG}
    assert page == textwrap.dedent(
        """\
        # Title
        Text.

        ```console
        barter list
        ```

        ```text
        a
        b
        ```

        ```python
        show()
        ```

        ![Title](n-0.png){ width="9" }
        """
    )


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebooks_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", (ROOT / "notebooks" / f"{name}.ipynb").read_text())
    assert links
    for link in links:
        assert (ROOT / "notebooks" / link).exists(), link


def test_all_notebooks_are_listed() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(NAMES)


def test_commands_of_a_notebook_print_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jupyter gives them a pseudo-terminal, and its own variables ask for colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert make_console(wide=True).is_terminal
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not make_console().is_terminal
    assert make_console(wide=True).width == 140
