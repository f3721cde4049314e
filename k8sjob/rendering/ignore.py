"""What a .dockerignore leaves out, by the rules of docker and buildah (moby's patternmatcher).

Patterns are read in order and the last one that matches decides; `!` takes a file back in. A
pattern that matches a folder matches all that is in it.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from typing import TYPE_CHECKING

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Ignore"]

_UP_TO_A_STAR = re.compile(r"(?:[^*/\\\[\]]|\\[^/])*(?=\*(?!\*))")
"""What stands between two `*` of one name, each part of which fits one character."""


class Ignore:
    """The patterns of one .dockerignore."""

    def __init__(self, text: str) -> None:
        """Read the patterns.

        Args:
            text: the file's content; empty ignores nothing.

        Raises:
            ImageError: a pattern that docker would refuse.
        """
        patterns: list[tuple[str, bool]] = []
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            taken_back = pattern.startswith("!")
            cleaned = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
            try:
                patterns.append((re.compile(_regex(cleaned)).pattern, taken_back))
            except re.error as error:
                raise ImageError(
                    f".dockerignore:{number}: {pattern!r} is not a pattern: {error}; correct it"
                ) from None
        # Neighbours of the same kind are one expression: thousands of files are looked at.
        self._groups = [
            (re.compile(rf"(?:{'|'.join(regex for regex, _ in group)})(?:/[\s\S]*)?"), taken_back)
            for taken_back, group in itertools.groupby(patterns, key=lambda pattern: pattern[1])
        ]

    def __call__(self, path: str) -> bool:
        """Whether the file or folder is left out.

        Args:
            path: relative to the context, with '/' between its parts.
        """
        ignored = False
        for pattern, taken_back in self._groups:
            if taken_back == ignored and pattern.fullmatch(path):
                ignored = not taken_back
        return ignored

    def hides(self, folder: str) -> bool:
        """Whether the folder is left out with all that is in it: no later pattern takes it back."""
        return self(folder) and not any(taken_back for _, taken_back in self._groups)

    def walk(self, folder: Path) -> Iterator[str]:
        """The files and links of a folder that are not left out, relative and in a fixed order."""
        for at, folders, files in os.walk(folder):
            base = os.path.relpath(at, folder)
            names = [posixpath.normpath(f"{base}/{name}") for name in [*folders, *files]]
            links = {name for name in names if (folder / name).is_symlink()}
            for name in sorted(names):
                kept = (folder / name).is_file() or name in links
                if kept and not self(name):
                    yield name
            folders[:] = sorted(
                name
                for name in folders
                if (path := posixpath.normpath(f"{base}/{name}")) not in links
                and not self.hides(path)
            )


def _regex(pattern: str) -> str:
    """Moby's own translation: `**` goes over folders, `*` and `?` stay in one."""
    made, at = "", 0
    while at < len(pattern):
        character, rest = pattern[at], pattern[at + 1 :]
        at += 1
        if character == "*" and rest.startswith("*"):
            at += 2 if rest[1:2] == "/" else 1
            made += ".*" if at >= len(pattern) else "(.*/)?"
        elif character == "*":
            between = _UP_TO_A_STAR.match(rest)
            if between:  # only the last `*` of a name may have to try more than the first fit
                made += f"(?>[^/]*?{_regex(between[0])})"
                at += between.end()
            else:
                made += "[^/]*"
        elif character == "?":
            made += "[^/]"
        elif character == "\\" and rest:
            made += re.escape(rest[0])
            at += 1
        elif character in "[]^-":
            made += character
        else:
            made += re.escape(character)
    return made
