"""The patterns of a .dockerignore, by the rules of docker and buildah (moby's patternmatcher).

Patterns are read in order and the last one that matches decides; `!` takes a file back in. A
pattern that matches a folder matches all that is in it.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.rendering.image_files import OWN_IGNORE
from k8sjob.rendering.template import templates_dir
from k8sjob.targets import MANIFEST_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLASS = re.compile(r"\[(\^?)(\]?(?:[^\]\\*?/]|\\.)*)\]")
_IN_CLASS = re.compile(r"\\(.)|([^-])")

_OWN: Final = "\n".join(
    (
        "# Files of the build itself",
        "Dockerfile",
        ".dockerignore",
        *MANIFEST_FILES,
        "",
    )
)


class Ignore:
    """The patterns of one .dockerignore."""

    def __init__(self, text: str) -> None:
        """Read the patterns from a file's content; empty ignores nothing.

        Raises:
            ImageError: a pattern that docker would refuse.
        """
        self._groups = _groups(text)

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
        waiting = [""]
        while waiting:
            base = waiting.pop()
            with suppress(OSError), os.scandir(folder / base) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
                folders = []
                for entry in entries:
                    name = f"{base}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders += [] if self.hides(name) else [f"{name}/"]
                    elif (entry.is_file() or entry.is_symlink()) and not self(name):
                        yield name
                waiting += reversed(folders)


def dockerignore() -> str:
    """A .dockerignore for contexts that have none: no secrets, no history, no caches."""
    return f"{_template()}\n{_OWN}"


def private_patterns() -> str:
    """The patterns of files that often hold credentials, and of a repository's history.

    What was committed once and taken out again is in the history.
    """
    return "**/.git\n" + _template().rpartition("# Files that often contain credentials\n")[2]


def _template() -> str:
    return (templates_dir() / "dockerignore").read_text(encoding="utf-8")


def own_patterns(path: Path) -> str | None:
    """The content of a .dockerignore; None: there is none.

    Raises:
        ImageError: it cannot be read.
    """
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
            reason = "a link that leads out of its folder"
        elif path.is_file():
            return path.read_text(encoding="utf-8")
        elif not path.exists():
            return None
        else:
            reason = "not a file"
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "not UTF-8"
    raise ImageError(f"{path}: cannot be read: {reason}; repair it or remove it")


def has_script(context: Path, name: str) -> bool:
    """Whether a script, or a package that is run, is in a context."""
    # An absolute path of this machine is none in the image.
    path = context / name
    return not name.startswith("/") and (path.is_file() or (path / "__main__.py").is_file())


def leaves_out(context: Path, name: str) -> bool:
    """Whether the .dockerignore of a context, or that of those without one, leaves a file out.

    Raises:
        ImageError: it cannot be read.
    """
    patterns = own_patterns(context / OWN_IGNORE)
    return Ignore(dockerignore() if patterns is None else patterns)(name)


@lru_cache(maxsize=8)
def _groups(text: str) -> list[tuple[re.Pattern[str], bool]]:
    """The patterns of a file as expressions, each with whether it takes back; see Ignore."""
    patterns: list[tuple[str, bool]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        taken_back = pattern.startswith("!")
        cleaned = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
        try:
            regex = _regex(cleaned)
            if "[" in cleaned:  # nothing else can be wrong
                re.compile(regex)
        except re.error as error:
            message = f"{pattern[:80]!r} is not a pattern: {error}; correct it"
            raise ImageError(f".dockerignore:{number}: {message}") from None
        patterns.append((regex, taken_back))
    # Adjacent patterns of the same kind are one expression: thousands of files are looked at.
    return [
        (re.compile(rf"(?:{'|'.join(regex for regex, _ in group)})(?:/[\s\S]*)?"), taken_back)
        for taken_back, group in itertools.groupby(patterns, key=lambda pattern: pattern[1])
    ]


def _regex(pattern: str) -> str:
    """Moby's own translation: `**` goes over folders, `*` and `?` stay in one."""
    regex, at = "", 0
    while at < len(pattern):
        translated, at = _token(pattern, at)
        regex += translated
    return regex


def _token(pattern: str, at: int) -> tuple[str, int]:
    """The next part of a pattern as a regular expression, and where the part after it begins."""
    character, following = pattern[at], pattern[at + 1 :]
    if pattern.startswith("**", at):
        at += 3 if pattern[at + 2 : at + 3] == "/" else 2
        return "(?:.*/)?" if pattern[at:] else ".*", at
    if character == "*":
        return "[^/]*", at + 1
    if character == "[":
        return _class(pattern, at)
    if character == "\\" and following:
        return re.escape(following[0]), at + 2
    if character == "?":
        return "[^/]", at + 1
    return character if character in "]^-" else re.escape(character), at + 1


def _class(pattern: str, at: int) -> tuple[str, int]:
    match = _CLASS.match(pattern, at)
    if match is None:
        raise re.error("a '[' without its ']', or with a '*', '?' or '/' before it")
    characters = _IN_CLASS.sub(lambda part: re.escape(part[1] or part[2]), match[2])
    return f"[{match[1]}{characters}]", match.end()
