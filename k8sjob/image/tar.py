"""A tar archive whose bytes follow from names, modes and contents alone.

Python's tarfile would do; its headers differ between versions of Python, and it is slower by half.
The format is POSIX pax: a ustar header, and before it an extended one where a name is long or not
ASCII, or a file has 8 GiB and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BLOCK", "Member", "end", "header", "padding"]

BLOCK: Final = 512
_NAME, _LINK, _SIZE = 100, 100, 8 << 30
_RECORD: Final = 20 * BLOCK


@dataclass(frozen=True, slots=True)
class Member:
    """What stands in the archive.

    Attributes:
        name: relative to the root of the image; of folders without a "/" at the end.
        kind: "0" a file, "2" a symbolic link, "5" a folder.
        mode: its permissions.
        owner: number of user and group.
        size: bytes of a file.
        link: where a link leads.
    """

    name: str
    kind: str
    mode: int
    owner: int = 0
    size: int = 0
    link: str = ""


def header(member: Member) -> bytes:
    """What stands before the content of a member."""
    name = member.name + ("/" if member.kind == "5" else "")
    raw, link = name.encode(), member.link.encode()
    records = b""
    if len(raw) > _NAME or not raw.isascii():
        records += _record("path", name)
    if len(link) > _LINK or not link.isascii():
        records += _record("linkpath", member.link)
    if member.size >= _SIZE:
        records += _record("size", str(member.size))
    own = _ustar(raw, member, link)
    if not records:
        return own
    extended = Member("PaxHeader", "x", 0o644, size=len(records))
    return _ustar(b"PaxHeader", extended, b"") + records + padding(len(records)) + own


def padding(size: int) -> bytes:
    """What fills the last block of a content."""
    return bytes(-size % BLOCK)


def end(size: int) -> bytes:
    """What closes an archive of so many bytes."""
    return bytes(2 * BLOCK + -(size + 2 * BLOCK) % _RECORD)


def _ustar(name: bytes, member: Member, link: bytes) -> bytes:
    size = member.size if member.size < _SIZE else 0
    fields = (
        name[:_NAME].ljust(_NAME, b"\0"),
        b"%07o\0" % member.mode,
        b"%07o\0" % member.owner,
        b"%07o\0" % member.owner,
        b"%011o\0" % size,
        b"%011o\0" % 0,  # the time, in seconds since 1970
        b" " * 8,  # the checksum is taken with blanks in its place
        member.kind.encode(),
        link[:_LINK].ljust(_LINK, b"\0"),
        b"ustar\x0000",
        bytes(BLOCK - 265),
    )
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _record(key: str, value: str) -> bytes:
    """A line of an extended header, which begins with its own length."""
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest
