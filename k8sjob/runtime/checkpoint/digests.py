"""Digests of the files of a checkpoint, to detect a damaged or incomplete file.

They protect against faults of disks and copies, not against people: anyone who can change a file
can change its digest, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["FILE", "Digest", "check", "measure", "read", "write"]

FILE: Final = "digests.json"


class Digest(NamedTuple):
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


def measure(file: Path) -> Digest:
    """The digest of a file now; the interpreter's lock is released meanwhile."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256")
        return Digest(stream.tell(), found.hexdigest())


def write(folder: Path, digests: Mapping[str, Digest]) -> None:
    """Write the digests of a folder's files into it, and wait until they are on the disk."""
    body = {"files": {name: digest._asdict() for name, digest in sorted(digests.items())}}
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        json.dump(body, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Digest]:
    """The digests by file name, as write() wrote them.

    Raises:
        ValueError: the list is missing or torn, or names a file elsewhere.
        OSError: it cannot be read.
    """
    try:
        body = json.loads((folder / FILE).read_bytes())
        found = {
            str(name): Digest(int(digest["size"]), str(digest["sha256"]))
            for name, digest in body["files"].items()
        }
    except FileNotFoundError:
        raise ValueError(f"it is torn: {FILE} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"it is torn: {FILE} is not a list of digests") from None
    for name in found:
        if "/" in name or name in {"", ".", ".."}:
            raise ValueError(f"{FILE} names {name!r}, which is not a file of the folder")
    return found


def check(folder: Path, digests: Mapping[str, Digest], names: Iterable[str]) -> None:
    """Compare the named files of a folder with their digests.

    Raises:
        ValueError: the first file that is missing, too short or changed, and how.
        OSError: one cannot be read.
    """
    for name in names:
        wanted, file = digests[name], folder / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"it is torn: {name} is missing") from None
        if size != wanted.size:
            raise ValueError(f"it is torn: {name} has {size} bytes, not {wanted.size}")
        if measure(file) != wanted:
            raise ValueError(f"it is torn: {name} does not match its digest")
