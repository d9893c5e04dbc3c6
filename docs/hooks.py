"""Adapt the repository's Markdown to the site that mkdocs builds.

The same files are read on a forge and as a site. Links that lead out of `docs/` therefore get a
target inside the site: documents of the repository become pages, other files are copied along.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
# Documents outside of docs/ that are pages of the site, by their path in the repository.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
# Turns notebooks into pages; a script, as this file is, so it cannot be imported by name.
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
# Pages that tell of the past.
OLD = ("history.md", "research-log/")
# The text of a link, which may hold code, its path, and its anchor.
LINK = re.compile(r"(!?\[(?:`[^`]*`|[^\]`])*\])\(([^)\s#]+)((?:#[^)\s]*)?)\)")
# Spaces of a table at which a line must not end: 35.2 ± 0.1, 6.0 MB, 71.7 (6).
INSIDE_NUMBER = re.compile(r"(?<=\d) (?=±|%|dB\b|[kMG]?B\b|s\b|\(\d+\))|(?<=±) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that forges give them, and expand folders of the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    nav = config.nav or []
    config.nav = expand(nav, Path(config.docs_dir), set(pages_of(nav)))
    return config


def pages_of(nav: list[Any]) -> Iterator[str]:
    """Yield the pages and folders that a navigation names."""
    for entry in nav:
        for target in [entry] if isinstance(entry, str) else entry.values():
            if isinstance(target, list):
                yield from pages_of(target)
            else:
                yield target


def expand(nav: list[Any], docs: Path, named: set[str]) -> list[Any]:
    """Replace each folder of a navigation, such as `methods/`, by those of its pages not yet named.

    Pages of a method's fields are left out: the method's page links them.
    """
    expanded: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, target),) = entry.items()
            expanded.append(
                {title: expand(target, docs, named)} if isinstance(target, list) else entry
            )
        elif entry.endswith("/"):
            folder = entry.removeprefix("./")  # "./" is docs/ itself
            names = sorted(page.name for page in (docs / folder).glob("*.md"))
            names.sort(key=lambda name: name != "index.md")
            if entry == "methods/":
                names = [name for name in names if not name.endswith("-fields.md")]
            pages = [folder + name for name in names]
            expanded += [page for page in pages if page not in named]
        else:
            expanded.append(entry)
    return expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents that lie outside of docs/."""
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for name in NOTEBOOKS["NAMES"]:
        text, pictures = NOTEBOOKS["to_markdown"](NOTEBOOKS["read_notebook"](name), name)
        text += f"\nThis page is a notebook: [{name}.ipynb]({name}.ipynb).\n"
        files.append(File.generated(config, f"notebooks/{name}.md", content=text))
        notebook = ROOT / "notebooks" / f"{name}.ipynb"
        files.append(File.generated(config, f"notebooks/{name}.ipynb", abs_src_path=str(notebook)))
        for file, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{file}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to pages or copies inside the site."""
    sources = {page: source for source, page in PAGES.items()}
    here = page.file.src_uri
    if here.startswith(OLD):
        page.meta["search"] = {"boost": 0.1}  # what holds today is found first
    if here.startswith("notebooks/"):
        return _link_notebooks(markdown)
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3]
        if ":" in link:
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, link))
        if target == "README.md":
            inside = "index.md"
        elif target in PAGES:
            inside = PAGES[target]
        elif target.startswith("notebooks/") and target.endswith(".ipynb"):
            inside = target.removesuffix("ipynb") + "md"
        elif target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            inside, anchor = f"files/{target}", ""
            if files.get_file_from_path(inside) is None:
                copy = File.generated(config, inside, abs_src_path=str(ROOT / target))
                files.append(copy)
        elif (ROOT / target).is_dir():
            return text.strip("[]")  # a folder has no page
        else:
            return match[0]  # mkdocs warns
        inside = posixpath.relpath(inside, posixpath.dirname(here) or ".")
        return f"{text}({inside}{anchor})"

    # Blocks of code are not touched: what looks like a link there is none.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    parts[::2] = [keep_numbers(LINK.sub(rewrite, part)) for part in parts[::2]]
    return "".join(parts)


def keep_numbers(markdown: str) -> str:
    """Keep a number of a table on one line with its deviation, unit or round."""
    lines = markdown.split("\n")
    return "\n".join(
        INSIDE_NUMBER.sub("\N{NO-BREAK SPACE}", line) if line.startswith("|") else line
        for line in lines
    )


def _link_notebooks(markdown: str) -> str:
    """Let a notebook's links lead to the pages of other notebooks and of docs/.

    The link to the file itself is the page's last one, and stays.
    """
    body, mark, end = markdown.rpartition("\nThis page is a notebook: ")
    body = re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", body)
    return body.replace("](../docs/", "](../") + mark + end
