"""The search for credentials in files that go into an image."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_OVERLAP: Final = 4096
"""Bytes of the previous block that are scanned again: a secret may lie across two blocks."""
_ASSIGNED: Final = r"\W{1,40}(?:value\W{1,6})?"
"""What may stand between a name and its value in code, shells, JSON, YAML, and lists of env."""
_LONG: Final = 20
"""Characters of a word that a token has at least, with the beginning by which it is known."""
_MARKS: Final = re.sub(rb"[^w]", b" ", re.sub(rb"[\w./+=~-]", b"w", bytes(range(256))))
"""A w for each character that tokens have."""
_PLACEHOLDER: Final = rb"([\w*.-])\1{7}|EXAMPLE"
"""What the text of a match has that stands for a credential: documents have hf_xxxxxxxx."""


@cache
def _forms() -> dict[str, list[tuple[bytes, str, bytes]]]:
    """The forms in secrets.tsv by section: the literal that begins each, kind, and pattern."""
    forms: dict[str, list[tuple[bytes, str, bytes]]] = {"token": [], "named": [], "short": []}
    for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[4:]:
        section, kind, literals, form = line.split("\t")
        for literal in literals.split():
            start = rf"\b{re.escape(literal)}" if section == "token" else ""
            pattern = start + form.replace("(...)", _ASSIGNED)
            forms[section].append((literal.encode(), kind, pattern.encode()))
    return forms


class Secret(NamedTuple):
    """A line (from 1) that looks like a credential, and of which kind; its value is never shown."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class SecretScanner:
    """Looks through one file, block by block; one finding for each form and line."""

    def __init__(self, path: str) -> None:
        self._path, self._data, self._lines, self._continued = path, b"", 1, False
        self._findings: set[Secret] = set()

    def feed(self, block: bytes) -> None:
        """Take the next block, and look through the one before it."""
        # Not this one: most files are of one block, which is then looked through once, as a whole.
        if data := self._data:
            self._scan(whole=False)
            self._data = data[-_OVERLAP:]
            # The overlap is scanned again, so its lines are not counted yet.
            self._lines += data.count(b"\n", 0, len(data) - len(self._data))
            self._continued = len(self._data) == _OVERLAP
        self._data += block

    def finish(self) -> list[Secret]:
        """What the file has, after its last block."""
        self._scan(whole=True)
        return sorted(self._findings)

    def _scan(self, *, whole: bool) -> None:
        data = self._data
        for kind, match in _matches(data):
            # At an edge of the data it may be a part of a longer word, which is no token; the
            # overlap brings it again with what follows, and had it before with what precedes.
            cut = match.end() == len(data) and len(match[0]) < _OVERLAP and not whole
            if not (
                cut or (self._continued and match.start() == 0) or re.search(_PLACEHOLDER, match[0])
            ):
                line = self._lines + data.count(b"\n", 0, match.start())
                self._findings.add(Secret(self._path, line, kind))


def _long_words(data: bytes) -> Iterator[bytes]:
    """The words of at least _LONG characters: a few percent of code, and nothing of most data."""
    marked, end = data.translate(_MARKS) + b" ", 0
    while (start := marked.find(b"w" * _LONG, end)) >= 0:
        end = marked.find(b" ", start)
        yield data[start:end]


def _matches(data: bytes) -> Iterator[tuple[str, re.Match[bytes]]]:
    """What has one of the forms, with its kind."""
    # To look for each beginning of a token in all of the data takes as long as to pack it.
    words = b"\n".join(set(_long_words(data)))
    tokens = [form for form in _forms()["token"] if form[0] in words] if words else []
    # The names of variables are written in any case; the patterns themselves say which.
    named = _forms()["short"] + (_forms()["named"] if words else [])
    for text, forms in ((data, tokens), (data.lower(), named)):
        for literal, kind, pattern in forms:
            start = text.find(literal)
            while start >= 0:
                # Only here: an expression that searches is far slower than bytes.find.
                if match := re.compile(pattern).match(data, start, start + _OVERLAP):
                    yield kind, match
                start = text.find(literal, match.end() if match else start + 1)
