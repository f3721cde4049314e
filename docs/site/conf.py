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
    "Tutorial": "tutorial/*.md",
    "How-to": "how-to/*.md",
    "From tutorials and other tools": "how-to/from-*.md",
    "Explanation": "explanation/*.md",
    "Reference": "reference/*.md",
}


def _contents() -> str:
    """The sidebar: sections of pages, in the order in which the first page names them."""
    linked = [match[2] for match in _LINK.finditer((DOCS / "README.md").read_text("utf-8"))]
    order = {name: number for number, name in reversed([*enumerate(linked)])}
    section_of = {
        page.relative_to(DOCS).as_posix(): caption
        for caption, pattern in _SECTIONS.items()
        for page in DOCS.glob(pattern)
    }
    section_of |= dict.fromkeys((name for name in section_of if name.endswith(".ko.md")), "한국어")
    names = sorted(section_of, key=lambda name: (order.get(name, len(order)), name))
    parts = {
        caption: [name for name in names if section_of[name] == caption]
        for caption in (*_SECTIONS, "한국어")
    }
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
