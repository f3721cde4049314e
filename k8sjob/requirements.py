"""Requirements files of pip."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIP_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?=[\s\[<>=!~;@(]|$)")
"""The name of a package, at the beginning of a requirement."""
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*")
_FILE = re.compile(r"\S+\.(?:whl|zip|tar\.\w+)(?:\s|$)")


def requirements_text(path: Path) -> str:
    """The text of a requirements file, which editors of Windows write in UTF-16, as pip reads it.

    Raises:
        ImageError: it cannot be read.
    """
    try:
        is_wide = path.read_bytes().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return path.read_text(encoding="utf-16" if is_wide else "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        message = f"image.requirements: {path} cannot be read: {reason}"
        raise ImageError(message, "specify a file inside the context") from None


def requirement_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a requirements file as pip joins them, numbered, without comments."""
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


def required_names(text: str) -> list[str]:
    """The packages that requirements name on any platform; not those of files and URLs."""
    lines = (line for _, line in requirement_lines(text))
    plain = (line for line in lines if not (";" in line or "://" in line or _FILE.match(line)))
    return [name[0] for line in plain if (name := PIP_NAME.match(line))]
