"""What the documents show is what the code is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from barter import ALGORITHMS
from barter.models.zoo import ZOO
from tests.forked import forked, status

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_the_readme_holds_fedavgs_file_and_the_loop_whole() -> None:
    for path in ("src/barter/algorithms/fedavg.py", "examples/loop.py"):
        assert f"```python\n{(ROOT / path).read_text().strip()}\n```" in README, path


def test_the_readme_lists_every_algorithm() -> None:
    for name in ALGORITHMS:
        assert f"| `{name}` |" in README


def headings(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    titles = (re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in re.findall(r"^#+ (.+)$", text, re.M))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        if ":" in path:
            assert re.match(r"https://[\w.-]+\.\w+(/\S*)?$", path), f"{link} is no address"
            continue
        target = document.parent / path if path else document
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in headings(target), f"{link}: {target.name} has no such heading"


def test_the_changelog_counts_architectures_rightly() -> None:
    assert f"{len(ZOO)} architectures" in (ROOT / "CHANGELOG.md").read_text()


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
LONG = {"loop.py": [pytest.mark.slow]}  # a minute; what it calls is tested elsewhere


@pytest.mark.parametrize("example", [pytest.param(name, marks=LONG.get(name, [])) for name in EXAMPLES])
def test_examples_run(example: str, tmp_path: Path) -> None:
    def run() -> int:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
        return 0

    ended = status(forked(run, tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert ended == 0, said
    assert "%" in said
