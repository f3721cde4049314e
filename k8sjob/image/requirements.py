"""Requirements for uv, which runs on this machine: wheels alone, so that nothing of them runs.

Lines as `--no-binary` and `-e` take precedence over uv's own `--only-binary`. So uv never reads the
user's file: it reads the lines that have been checked here, each written as it was understood.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.errors import redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.image.dependencies import Dependencies

__all__ = ["checked_lines", "logical_lines", "refused_line"]

_COMMENT: Final = re.compile(r"(?:^|(?<=\s))#.*")
_OPTION: Final = re.compile(
    r"--(?:no-index|pre|prefer-binary|require-hashes)"
    r"|(?:-i|-f|--index-url|--extra-index-url|--find-links)[\s=]++https?://\S++"
)
"""Options that change where wheels come from, and not that they are wheels."""
_HASH: Final = re.compile(r"\s--hash[\s=]\s*\w+:[0-9a-fA-F]+(?=\s|$)")
_REQUIREMENT: Final = re.compile(
    r"(?!.*\s-)[A-Za-z0-9][\w.-]*+\s*+(?:\[[\s\w.,-]*+\]\s*+)?+"
    r"(?:@\s*https?://[^\s;?#]+\.whl(?:#[^\s;]*+)?\s*+|[\s\w.,<>=!~*+()-]*+)(?:;.*)?",
    re.ASCII,
)
"""name[extras], then versions or the URL of a wheel, then a marker; no options."""


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a requirements file as pip joins them, without comments and blank ones.

    Args:
        text: contents of the file.

    Yields:
        The number of the first line of each, counted from 1, and what it says.
    """
    parts: list[str] = []
    first = 1
    lines = text.removeprefix("\ufeff").splitlines()
    for number, line in enumerate(lines, 1):
        continued = line.endswith("\\") and not line.lstrip().startswith("#")
        parts.append(line[:-1] if continued else line)
        if not continued or number == len(lines):
            if whole := _COMMENT.sub("", "".join(parts)).strip():
                yield first, whole
            parts, first = [], number + 1


def checked_lines(wanted: Dependencies) -> list[str]:
    """What uv is to read."""
    return [line for _, line in _placed(wanted)]


def refused_line(wanted: Dependencies) -> str | None:
    """The first line that uv must not read, and why; None: there is none."""
    for place, line in _placed(wanted):
        plain = _HASH.sub("", line)
        if not (_OPTION if plain.startswith("-") else _REQUIREMENT).fullmatch(plain):
            return (
                f"{place}: {redacted(line)!r} is not a package by name and version, nor the"
                " http(s) URL of a wheel or of an index; anything else could run code on this"
                " machine: take --builder buildah, podman or buildx, which install in a container"
            )
    return None


def _placed(wanted: Dependencies) -> Iterator[tuple[str, str]]:
    for number, value in enumerate(wanted.pip):
        yield f"image.pip[{number}]", value
    for number, line in logical_lines(wanted.requirements or ""):
        yield f"image.requirements:{number}", line
