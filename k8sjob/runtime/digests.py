"""What the files of a folder were when they were written, to find out whether they still are.

Against disks and copies that go wrong, not against people: whoever changes a file can change its
digest, too.
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
    """A file's content, in short.

    Attributes:
        size: bytes.
        sha256: in hexadecimal.
    """

    size: int
    sha256: str


def measure(file: Path) -> Digest:
    """The digest of a file as it is now; the interpreter's lock is free meanwhile."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256")
        return Digest(stream.tell(), found.hexdigest())


def write(folder: Path, digests: Mapping[str, Digest]) -> None:
    """Leave the digests of a folder's files in it, on the disk and not only on its way there."""
    body = {"files": {name: digest._asdict() for name, digest in sorted(digests.items())}}
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        json.dump(body, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Digest]:
    """What write() left: digests by file name.

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
        raise ValueError(f"it is torn: {FILE} is no list of digests") from None
    for name in found:
        if "/" in name or name in {"", ".", ".."}:
            raise ValueError(f"{FILE} names {name!r}, which is no file of the folder")
    return found


def check(folder: Path, digests: Mapping[str, Digest], names: Iterable[str]) -> None:
    """Compare files with their digests.

    Args:
        folder: where they are.
        digests: by name, as read() gives them.
        names: which of them to look at.

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
