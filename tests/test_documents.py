"""What the documents show is what the code is."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import barter
import barter.algorithms
from barter import ALGORITHMS
from barter.cli.app import app
from barter.compare.comparison import Comparison
from barter.compare.specification import ComparisonSpec
from barter.core.errors import BarterError
from barter.core.params import describe_fields
from barter.models.zoo import ZOO
from barter.setup.config import find_algorithm, read_toml, resolve, with_settings
from tests.browser import CHROMIUM, Browser
from tests.forked import forked, status

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_documents_show_whole_files_as_they_are() -> None:
    guide = (ROOT / "docs" / "write-a-method.md").read_text()
    shown = {"src/barter/algorithms/fedavg.py": guide, "examples/loop.py": README}
    for path, document in shown.items():
        assert f"```python\n{(ROOT / path).read_text().strip()}\n```" in document, path


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_changelog_starts_with_what_a_user_gets() -> None:
    release = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert len(release.splitlines()) < 40


def test_the_list_of_methods_is_complete() -> None:
    text = (ROOT / "docs" / "methods" / "index.md").read_text()
    assert [name for name in ALGORITHMS if f"[`{name}`]({name}.md)" not in text] == []


def test_snippets_parse() -> None:
    """Python and TOML of every document are at least well-formed; recipes are run below."""
    for document in DOCUMENTS:
        for language, block in re.findall(
            r"^ *```(python|toml)\n((?:.*\n)*?) *```$", document.read_text(), re.M
        ):
            block = textwrap.dedent(block)
            try:
                ast.parse(block) if language == "python" else tomllib.loads(block)
            except (SyntaxError, tomllib.TOMLDecodeError) as error:
                pytest.fail(f"{document.relative_to(ROOT)}: {error}\n{block}")


def pages_of(navigation: list[Any]) -> Iterator[str]:
    """The pages that a navigation names, and its folders, which end in a slash."""
    for entry in navigation:
        for target in [entry] if isinstance(entry, str) else entry.values():
            yield from pages_of(target) if isinstance(target, list) else [target]


def test_every_page_of_the_site_can_be_reached() -> None:
    """What `make docs` would complain of: a page without an entry, an entry without a page."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = list(pages_of(settings["nav"]))
    hooks = (ROOT / "docs" / "hooks.py").read_text()
    outside = set(re.findall(r'"[\w/]+\.md": "([\w-]+\.md)"', hooks))
    outside |= {f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}
    assert outside <= set(named)
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    for page in named:
        assert page.endswith("/") or page in pages | outside, page
    folders = tuple(page for page in named if page.endswith("/"))
    top = {
        page for page in pages if "/" not in page and "./" in folders
    }  # at the end of the guides
    left_out = {page for page in pages - set(named) - top if not page.startswith(folders)}
    assert left_out == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make docs` writes, with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere_and_has_all_public_names(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    loaded = r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:[^"' >]+)|<link[^>]*\shref=["']?(https?:[^"' >]+)"""
    for page in pages:
        assert re.findall(loaded, page.read_text()) == [], page
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="barter\.[\w.]*?(\w+)"', reference))
    public = set(barter.__all__) - set(barter.algorithms.__all__)
    assert public - {"ALGORITHMS"} <= anchors
    assert {"Count", "lane_module", "fit", "Trainer", "index_batches", "Dirichlet"} <= anchors
    numbers = re.findall(r"<td>[\d.]+(.)±(.)[\d.]+", (site / "results" / "dffke.html").read_text())
    assert numbers
    assert set(numbers) == {("\N{NO-BREAK SPACE}",) * 2}, "no line ends inside a number"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_site_can_be_searched_from_disk_and_fits_a_phone(site: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        for width in (1400, 390):
            for page in ("index.html", "choose.html", "methods/dffke.html"):
                browser.open(site / page, width)
                assert browser.value("document.documentElement.scrollWidth") <= width, page
                assert browser.said == [], page
        browser.value("document.querySelector('[data-md-toggle=search]').click()")
        field = "document.querySelector('.md-search__input')"
        browser.value(f"{field}.focus(), {field}.value = 'canary'")
        browser.value(f"{field}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")
        found = "[...document.querySelectorAll('.md-search-result__article h1')].map(e => e.textContent)"
        browser.until(f"{found}[0] == 'Attack a run'")


def headings(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    titles = (
        re.sub(r"[^\w\- ]", "", title.strip().lower())
        for title in re.findall(r"^#+ (.+)$", text, re.M)
    )
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        if ":" in path:
            assert re.match(r"https://[\w.-]+\.\w+(/\S*)?$", path), f"{link} is no address"
            continue
        target = document.parent / path if path else document
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in headings(target), (
            f"{link}: {target.name} has no such heading"
        )


def test_method_pages_agree_with_the_code() -> None:
    """The generated parts are those that docs/method_pages.py writes, and no method lacks any."""
    script = runpy.run_path(str(ROOT / "docs" / "method_pages.py"))
    found = list(script["pages"]())
    for path, kind in found:
        text = path.read_text()
        assert script["fill"](text, kind) == text, f"{path}: run python docs/method_pages.py"
    folder = ROOT / "docs" / "methods"
    assert {path for path, _ in found} | {folder / "index.md"} == set(folder.glob("*.md"))
    listed = (folder / "index.md").read_text()
    for name, kind in ALGORITHMS.items():
        page = (folder / f"{name}.md").read_text()
        titles = ("One round", "When to use it", "What it exposes", "Results", "Fields")
        assert re.findall(r"^## (.+)$", page, re.M)[:4] == list(titles[:4]), name
        assert "\n## Fields\n" in page, name
        fields = folder / f"{name}-fields.md"
        shown = fields.read_text() if fields.exists() else page
        for field in describe_fields(kind):
            assert f"| `{field.name}` | " in shown, f"{name}.{field.name}"
        assert f"[`{name}`]({name}.md)" in listed


def test_generated_parts_are_written_anew_and_nothing_else() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "method_pages.py"))
    written = (
        "# A\n\n| by hand |\n\n## One round\n\nLead.\n\n1. old\n2. older\n\n| old |\n\nText.\n"
        "\n## Results\n\nCaption.\n\n| old |\n\nText.\n\n## Fields\n\nold\n"
    )
    made = script["fill"](written, ALGORITHMS["fedavg"])
    assert "old" not in made
    for kept in ("| by hand |", "Lead.", "Caption.", "Text.\n\n## Results", "Text.\n\n## Fields"):
        assert kept in made
    assert "\n1. The server samples" in made
    assert "| `epochs` | `5` | int >= 1 | E: local epochs |" in made
    with pytest.raises(ValueError, match="no line starts with"):
        script["fill"](written.replace("| old |", ""), ALGORITHMS["fedavg"])


@pytest.mark.parametrize(("folder", "longest"), [("methods", 80), ("results", 120)])
def test_pages_are_short(folder: str, longest: int) -> None:
    for page in (ROOT / "docs" / folder).glob("*.md"):
        assert len(page.read_text().splitlines()) <= longest, page.name


def tables_of(page: str, heading: str) -> list[dict[str, list[str]]]:
    """Return the tables below a heading: the first cell of each row -> the other cells."""
    below = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = []
    for is_table, lines in groupby(below.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            tables.append({cells[0]: cells[1:] for cells in rows[2:]})
    return tables


def stored(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_accuracies_under_protection_agree_with_stored_results() -> None:
    names = {"none": "nothing", '`reveal = "nothing"`': "noise-for-embeddings"}
    names["the same, `noise=1`"] = "noise-for-embeddings, noise=1"
    known = stored("dffke-privacy.json")
    digits, fashion = tables_of("docs/results/privacy.md", "DFFKE under attack")
    (seeds,) = tables_of("docs/research-log/2026-11-17.md", "Attacks on seed 1")
    order = ("digits", "digits, seed 1", "fashion-2k", "fashion-2k, seed 1")
    assert len(digits) == len(fashion) == len(seeds) == 13
    for label, cells in seeds.items():
        name = names.get(label, re.sub(r"\W+", "-", label))
        runs = [known[data][name] for data in order]
        both = [(f"{run['rounds'][-1]:.1f}", f"{run['own']:.1f}") for run in runs]
        assert cells == [f"{everywhere} ({local})" for everywhere, local in both], label
        assert digits[label][1:3] == list(both[0]), label
        assert fashion[label][1:3] == list(both[2]), label


def test_the_promises_of_security_have_their_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| promise" not in line]
    assert rows
    for row in rows:
        assert "`tests/" in row, f"no test holds: {row}"
    for path, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", text):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_the_changelog_counts_architectures_rightly() -> None:
    assert f"{len(ZOO)} architectures" in (ROOT / "CHANGELOG.md").read_text()


OURS = r"(barter +[a-z]|python +(benchmarks/|docs/|-m +benchmarks\.))"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of ours in a document's blocks, without prompts, comments and placeholders."""
    blocks = re.findall(r"^ *```(.*)\n((?:.*\n)*?) *```$", text, re.M)
    lines = "".join(block for language, block in blocks if language not in ("python", "toml"))
    for line in lines.replace("\\\n", " ").splitlines():
        if not re.search(rf"(^ *|[;&|$] *|\bdo +|=\S+ +){OURS}", line):
            continue
        shell = shlex.shlex(line, posix=True, punctuation_chars=True)
        shell.whitespace_split = True
        for _, words in groupby(shell, lambda word: set(word) <= set("();<>|&")):
            command = list(
                dropwhile(lambda word: word in ("$", "do") or re.match(r"\w+=", word), words)
            )
            if re.match(OURS, " ".join(command)):
                yield [word for word in command if word != "..."]


def understood(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that is asked for and what its parameters would be."""
    command, rest = typer.main.get_command(app), words
    while hasattr(command, "resolve_command"):  # a group, of whichever click typer uses
        _, found, rest = command.resolve_command(command.context_class(command), rest)
        command = found or command
    name = " ".join(words[: len(words) - len(rest)])
    return name, command.make_context(name, rest).params


def check_command(words: list[str], folder: Path) -> None:
    """Raise what is wrong with a command, as far as that can be told without running it; `folder` is to write into."""
    if words[0] == "python":
        file = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
        script = (ROOT / file).read_text()
        assert all(f'"{word}"' in script for word in words if word.startswith("--")), (
            f"no such option: {words}"
        )
        return
    name, given = understood(words[1:])
    if name == "show algorithm":
        find_algorithm(given["name"])
    file = Path(given.get("config") or given.get("what") or "")
    if "settings" not in given or (file.name and file.suffix != ".toml"):  # a folder is looked at
        return
    tree = (
        read_toml(ROOT / file) if file.parent != Path() else {}
    )  # one without a folder is the reader's own
    settings = list(given["settings"] or [])
    if name == "compare":
        asked = {key: given[key] for key in ("baseline", "metric", "target")}
        vary, only = (list(given[key] or []) for key in ("vary", "only"))
        Comparison.plan(
            folder,
            ComparisonSpec.of(
                tree, given["algorithms"], given["seeds"], settings, vary, asked, only
            ),
        )
        return
    table = "partition" if name == "show partition" else "algorithm"
    kind = given.get("algorithm") or given.get("name")
    if kind and Path(kind).suffix == ".toml":  # the reader's own configuration
        return
    tree = with_settings(tree, [*([f"{table}.name={kind}"] if kind else []), *settings])
    if ":" not in tree.get("algorithm", {}).get("name", ""):  # else the reader's own
        resolve(tree)


COMMANDS = [
    pytest.param(words, id=f"{document.relative_to(ROOT)}: {shlex.join(words)}")
    for document in DOCUMENTS
    for words in commands(document.read_text())
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_can_be_given_as_shown(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "barter.setup.config.clients_in", lambda path: 5
    )  # data are the reader's own
    check_command(words, tmp_path / "compared")


WRONG = {
    "barter run --data digits": "No such option",
    "barter run --set round=1": "unknown key",
    "barter run --algorithm fedavg --set algorithm.share=0.1": "unknown",
    "barter compare --algorithms local,fedavg:share=0.1": "unknown",
    "barter compare benchmarks/suites/dffke.toml --only dffk": "no variant",
    "barter compare benchmarks/suites/dffk.toml": "no such file",
    "python benchmarks/sped.py": "No such file",
    "python benchmarks/speed.py --section cpu": "no such option",
    "python -m benchmarks.tables --chek": "no such option",
    "python docs/method_page.py": "No such file",
}


@pytest.mark.parametrize(("line", "why"), WRONG.items())
def test_commands_that_cannot_be_given_are_found(line: str, why: str, tmp_path: Path) -> None:
    broken = line.replace(" --", " \\\n  --")
    text = f"```python\n1\n```\n\n```\n$ barter report a | tee b  # c's\nfor x in *; do {broken} ...; done &\n```\n"
    right, wrong = commands(text)
    assert right == ["barter", "report", "a"]
    check_command(right, tmp_path)
    usage_error = typer.BadParameter.__mro__[-4]  # below Exception, BaseException and object
    with pytest.raises((BarterError, usage_error, OSError, AssertionError), match=why):
        check_command(wrong, tmp_path / "compared")


@pytest.mark.usefixtures("few_images")
def test_the_loop_goes_on_after_the_first_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (ROOT / "examples" / "loop.py").read_text()
    quick = "DFFKE(max_epochs=1, share=0.1, decoder_epochs=1, decoder_steps=1, exchange_steps=1, docking_epochs=1)"
    for slow, fast in (("DFFKE()", quick), ("rounds(10)", "rounds(2)"), ("> 0.6", "> 1")):
        assert slow in code
        code = code.replace(slow, fast)
    (tmp_path / "loop.py").write_text(code)
    runpy.run_path(str(tmp_path / "loop.py"))
    assert "round 2: " in capsys.readouterr().out


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
LONG = {"loop.py": [pytest.mark.slow]}  # a minute; what it calls is tested elsewhere


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=LONG.get(name, [])) for name in EXAMPLES]
)
@pytest.mark.usefixtures("few_images")
def test_examples_run(example: str, tmp_path: Path) -> None:
    def run() -> int:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
        return 0

    ended = status(forked(run, tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert ended == 0, said
    assert "%" in said


RECIPES = re.findall(
    r"^## (.+?)$.*?^```python\n(.*?)^```", (ROOT / "docs" / "howto.md").read_text(), re.M | re.S
)


@pytest.mark.parametrize(("title", "code"), RECIPES, ids=[title for title, _ in RECIPES])
@pytest.mark.usefixtures("few_images")
def test_recipes_run(
    title: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.py").write_text(code)
    said = runpy.run_path(str(tmp_path / "recipe.py"))
    printed = capsys.readouterr().out
    assert printed.strip(), "a recipe shows what came of it"
    if title == "Freeze a body":
        assert len(said["changed"]) == 2, "the last layer alone was trained"
    if title == "Clients that drop out":
        assert "0 of 6 failed" not in printed


def test_every_section_of_the_recipes_has_one() -> None:
    text = (ROOT / "docs" / "howto.md").read_text()
    assert [title for title, _ in RECIPES] == re.findall(r"^## (.+)$", text, re.M)
