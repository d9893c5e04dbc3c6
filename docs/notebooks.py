"""Execute the notebooks and store their outputs; turn notebooks into pages of the site.

    pip install nbclient ipykernel
    python docs/notebooks.py                              # all notebooks
    python docs/notebooks.py first-federation             # one of them

Each notebook runs in a temporary folder, so that its runs leave nothing behind. Execution counts and
times are not stored: a notebook that is executed again differs only where its results do.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
CONTROLS = re.compile(r"\x1b\[[\d;]*m|\r(?=\n)")  # colours and line ends of a terminal
MAX_SECONDS = 600  # of one cell
# Notebooks in the order in which they are read.
NAMES = ("first-federation", "bring-your-own", "compare-and-attack")


def read_notebook(name: str) -> dict[str, Any]:
    """Return a notebook as plain data."""
    notebook: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return notebook


def execute_notebook(name: str) -> dict[str, Any]:
    """Execute a notebook in an empty folder and return it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    # Cells start `barter`, which is beside this Python even if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=MAX_SECONDS, resources=resources)
        client.execute(env={**os.environ, "PATH": path})
    return tidy_outputs(json.loads(nbformat.writes(notebook)))


def tidy_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Remove what differs between executions or names the machine; join pieces of text."""
    notebook["metadata"]["language_info"] = {"name": "python"}
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] != "code":
            continue
        cell["execution_count"] = None
        joined: list[dict[str, Any]] = []
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = None
            if "text" in output:
                output["text"] = [CONTROLS.sub("", line) for line in output["text"]]
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/plain", None)
            if joined and output["output_type"] == joined[-1]["output_type"] == "stream":
                joined[-1]["text"] = [*joined[-1]["text"], *output["text"]]
            else:
                joined.append(output)
        cell["outputs"] = joined
    return notebook


def write_notebook(name: str, notebook: dict[str, Any]) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.ipynb").write_text(text + "\n")


def to_markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, and the pictures that it shows.

    Args:
        notebook: The notebook, with its outputs.
        name: The page's name, with which the names of its pictures begin.

    Returns:
        The Markdown, and file name -> PNG.
    """
    parts = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "console" if source.startswith("!") else "python"
        parts.append(f"```{language}\n{source.removeprefix('!')}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures)}.png"
                pictures[file] = base64.b64decode("".join(data["image/png"]))
                width = output["metadata"].get("image/png", {}).get("width")
                size = f'{{ width="{width}" }}' if width else ""
                parts.append(f"![{_caption(parts)}]({file}){size}")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]).strip())
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _caption(parts: list[str]) -> str:
    """Return the last heading, as the alternative text of a picture."""
    headings = re.findall(r"^#+ (.+)$", "\n".join(p for p in parts if p[:1] != "`"), re.M)
    return str(headings[-1])


def main(names: list[str]) -> None:
    for name in names or NAMES:
        began = time.monotonic()
        write_notebook(name, execute_notebook(name))
        sys.stdout.write(f"{name}: {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
