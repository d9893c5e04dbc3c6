"""What the documents show is what the code is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from barter import ALGORITHMS
from barter.models.zoo import ZOO

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readme_holds_fedavgs_file_and_the_loop_whole() -> None:
    for path in ("src/barter/algorithms/fedavg.py", "examples/loop.py"):
        assert f"```python\n{(ROOT / path).read_text().strip()}\n```" in README, path


def test_the_readme_lists_every_algorithm() -> None:
    for name in ALGORITHMS:
        assert f"| `{name}` |" in README


def test_links_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_changelog_counts_architectures_rightly() -> None:
    assert f"{len(ZOO)} architectures" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "%" in done.stdout
