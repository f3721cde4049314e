"""The files that pages show, written into the pages: `python docs/generate_shown.py`.

A block under `<!-- shows: FILE -->` is the whole file; under `<!-- shows: FILE only A, B -->` it is
those top-level parts of the file, under a comment with its path: keys of a YAML file, functions and
classes of a Python file by name, and `with` for its with statement.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.compile(
    r"^(?P<mark><!-- shows: (?P<file>\S+)(?: only (?P<parts>[\w, ]+))? -->\n```\w+\n).*?^```$",
    re.MULTILINE | re.DOTALL,
)
PART = re.compile(r"^(?:def |class )?(?P<name>\w+).*\n(?:(?:[ \])}].*)?\n)*", re.MULTILINE)


def filled(text: str) -> str:
    """A page's text with each block under `<!-- shows: FILE -->` as the file is now."""
    return SHOWN.sub(lambda m: f"{m['mark']}{_shown(m['file'], m['parts'])}```", text)


def _shown(file: str, parts: str | None) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    if parts is None:
        return text
    found = {m["name"]: m[0].rstrip("\n") + "\n" for m in PART.finditer(text)}
    between = "\n\n" if file.endswith(".py") else ""
    return f"# {file}\n" + between.join(found[name] for name in parts.split(", "))


if __name__ == "__main__":
    for page in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
