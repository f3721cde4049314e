"""What is in a file, or comes in on standard input, before anyone knows what it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__all__ = ["JOB_FILE", "MAX_BYTES", "content", "job_file"]

JOB_FILE: Final = "job.yaml"
"""The name of a job's file in its folder."""

MAX_BYTES: Final = 2**20
"""Largest text that is taken for a document; an apiserver takes no larger object either."""


def content(file: str | Path) -> bytes:
    """The bytes of a file, to be parsed; one more than MAX_BYTES of a file that has more.

    So a file without an end (/dev/zero, a socket) is refused for its size, as any other.

    Args:
        file: its path, "-" for standard input.

    Raises:
        OSError: it cannot be read.
    """
    if str(file) == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with Path(file).open("rb") as opened:
        return opened.read(MAX_BYTES + 1)


def job_file(path: Path) -> Path:
    """The file that is meant: of a folder its job.yaml, and job.yml where that is the one there."""
    file = path / JOB_FILE if path.is_dir() else path
    if file.name == JOB_FILE and not file.exists():
        other = file.with_suffix(".yml")
        return other if other.is_file() else file
    return file
