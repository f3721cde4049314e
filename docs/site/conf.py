"""The documentation site: sphinx-build -W -c docs/site docs site (`make docs-site`).

The pages are the Markdown files as they are, with two changes while they are read: the contents of
the sidebar are added, and a link to a folder or to a file outside docs/ becomes plain text.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1]
_PROJECT: Final = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]

project = "k8sjob"
author = "The k8sjob authors"
release = version = _PROJECT["version"]
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["site"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]  # smaller tables: some have nine columns
html_title = f"k8sjob {release}"
html_show_copyright = html_show_sphinx = html_copy_source = False
suppress_warnings = ["misc.highlighting_failure"]  # consoles with `...` are no language's

_LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CONTENTS: Final = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""
_SECTIONS: Final = {
    "Tutorial": "tutorial",
    "How-to": "how-to",
    "Explanation": "explanation",
    "Reference": "reference",
}


def _pages(folder: str, *, korean: bool) -> list[str]:
    found = sorted(page for page in (DOCS / folder).glob("*.md"))
    names = [page.relative_to(DOCS).as_posix() for page in found]
    return [name for name in names if name.endswith(".ko.md") == korean]


def _contents() -> str:
    parts = {caption: _pages(folder, korean=False) for caption, folder in _SECTIONS.items()}
    parts["한국어"] = [page for f in _SECTIONS.values() for page in _pages(f, korean=True)]
    return "".join(
        _CONTENTS.format(caption=caption, pages="\n".join(pages))
        for caption, pages in parts.items()
        if pages
    )


def _read(_app: Any, name: str, source: list[str]) -> None:
    """Adapt one page; `source` has its text as its one item."""
    folder = (DOCS / name).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        outside = not target.is_relative_to(DOCS)
        return match[1] if outside or target.is_dir() else match[0]

    source[0] = _LINK.sub(link, source[0])
    if name == root_doc:
        source[0] += _contents()


def _finished(app: Any, error: Exception | None) -> None:
    """Let a server find the first page."""
    if error is None and app.builder.name == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finished)
