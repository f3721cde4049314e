"""Writes the files that pages show into them anew: `python docs/generate_shown.py`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.compile(r"(^<!-- shows: (?P<file>\S+) -->\n```\w+\n).*?^```$", re.MULTILINE | re.DOTALL)


def filled(text: str) -> str:
    """A page's text with each block under `<!-- shows: FILE -->` as the file is now."""
    return SHOWN.sub(lambda m: f"{m[1]}{(ROOT / m['file']).read_text(encoding='utf-8')}```", text)


if __name__ == "__main__":
    for page in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
