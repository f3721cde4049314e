"""The tables of docs/reference/errors*.md: every row is an input, and the error that it gives.

A table belongs to the comment `<!-- errors: KIND -->` in front of it. In a cell ↵ is a line break,
⇥ a tab, \\| a bar, and ... stands for anything.
"""

import ast
import re
from typing import NamedTuple

TABLE = re.compile(r"^<!-- errors: (?P<kind>.+?) -->\n\n?(?P<rows>(?:^\|.*\n)+)", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    kind: str
    line: int
    given: str
    error: str
    exit_code: int | None = None


def rows(page):
    text = page.read_text()
    for table in TABLE.finditer(text):
        first = text[: table.start("rows")].count("\n") + 1
        for number, row in enumerate(table["rows"].splitlines()[2:], first + 2):
            given, error, *code = (plain(cell) for cell in CELL.split(row.strip())[1:-1])
            yield Row(table["kind"], number, given, error, *map(int, code))


def kinds(page):
    return re.findall(r"<!-- errors: (.+?) -->", page.read_text())


def plain(cell):
    text = cell.strip().replace("\\|", "|")
    ticks = re.fullmatch(r"(`+)(.*)\1", text)
    if ticks:
        padded = len(ticks[1]) > 1  # `` x `` may hold a backtick
        text = ticks[2][1:-1] if padded else ticks[2]
    return text.replace("↵", "\n").replace("⇥", "\t")


def pattern(error):
    return "(?s:.*)".join(re.escape(part) for part in error.split("..."))


def literal(node):
    """A message in the source as a pattern."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        re.escape(str(part.value)) if isinstance(part, ast.Constant) else "(?s:.*)"
        for part in parts
    )
