"""What a layer shows of a Python and its packages; read in one stream, and kept by digest.

The layers of a base are large and never change, so each is looked through once on a machine.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import posixpath
import re
import tarfile
import tempfile
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from k8sjob.errors import ImageError
from k8sjob.image import zstd
from k8sjob.image.content import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from k8sjob.image.content import Content

__all__ = ["Traces", "read_traces"]

_FORM: Final = 1
"""Raised when something else is kept: what older versions have kept is read anew then."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_METADATA: Final = re.compile(r"(?:^|/)[^/]+\.(?:dist-info/METADATA|egg-info/PKG-INFO|egg-info)$")
_HEADER: Final = re.compile(
    r"^(?:Name|Version|Provides-Extra|Requires-Dist): .*$", re.MULTILINE | re.IGNORECASE
)
_PYTHON: Final = re.compile(r"(?:^|/)bin/python[\d.]*$|(?:^|/)lib/ld-musl-[^/]+$")
_VENV: Final = re.compile(r"(?:^|/)pyvenv\.cfg$")
_LIBC: Final = re.compile(r"(?:usr/)?lib(?:64)?/(?:[\w-]+/)?libc(?:\.so\.6|-2\.\d+\.so)$")
_LIBC_SAYS: Final = re.compile(rb"GNU C Library [^\n]*release version (\d+\.\d+)")
_SITE: Final = re.compile(r"(.*/(?:site|dist)-packages)(?:/|$)")
_LARGEST: Final = 16 << 20
"""Bytes that are read of one file."""
_LARGEST_HEADER: Final = 1 << 20
"""Bytes of an extended header, which is a name and a few numbers."""
_MOST_KEPT: Final = 64 << 20
"""Bytes of names and texts that are kept of one layer: those of large bases are a few MB."""
_MOST_GLOBAL: Final = 1000
"""Keys of pax headers that are for all members."""
_HEADERS: Final = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)
_BROKEN: Final[tuple[type[Exception], ...]] = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    OSError,
    ValueError,
    RecursionError,  # headers of headers of headers
    *zstd.BROKEN,
)


@dataclass(frozen=True, slots=True)
class Traces:
    """What matters of a layer; paths begin without "/".

    Attributes:
        links: where each symbolic link leads.
        marks: a text for each file that tells something: headers of a distribution, the version of
            the C library, a pyvenv.cfg; empty for interpreters and folders of packages.
        hidden: paths of layers below that are not there any more.
        emptied: folders of which nothing in layers below is there any more.
    """

    links: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Characters of all names and texts."""
        texts = (self.links, self.links.values(), self.marks, self.marks.values())
        return sum(len(text) for part in (*texts, self.hidden, self.emptied) for text in part)


def read_traces(content: Content, where: str, note: Callable[[int], object]) -> Traces:
    """Look through a layer, or remember what was found in it.

    Args:
        content: the layer, compressed by gzip or zstd, or as it is.
        where: the image's name, for messages.
        note: is called with each number of bytes that came.

    Raises:
        ImageError: it cannot be read, or is no archive.
    """
    kept = _cache() / f"{content.digest.replace(':', '-')}.json"
    if (found := _remembered(kept)) is not None:
        note(content.size)
        return found
    found = _streamed(content, f"{where}, layer {content.digest[:19]}", note)
    _remember(kept, found)
    return found


def _streamed(content: Content, what: str, note: Callable[[int], object]) -> Traces:
    blocks = _noted(content.blocks(0), note)
    failure = None
    found = Traces()
    try:
        found = _traces(_Stream(blocks), what)
    except _BROKEN as error:
        failure = error
    for _ in blocks:  # what comes is compared with the digest at its very end
        pass
    if failure is not None:
        raise ImageError(f"{what}: not an archive ({failure}); the image is broken")
    return found


def _noted(blocks: Iterator[bytes], note: Callable[[int], object]) -> Iterator[bytes]:
    for block in blocks:
        note(len(block))
        yield block


class _Stream(io.RawIOBase):
    """Blocks as a file that is read once."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any buffer in truth
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _traces(stream: io.RawIOBase, what: str) -> Traces:
    found = Traces()
    raw = io.BufferedReader(stream, BLOCK)
    start = raw.peek(4)[:4]
    opened: IO[bytes] = raw
    if start[:2] == b"\x1f\x8b":
        opened = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    elif start == zstd.MAGIC:
        opened = zstd.reader(raw, what)
    kept = 0
    with tarfile.open(fileobj=opened, mode="r|", bufsize=BLOCK, tarinfo=_Info) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
            kept += _note_member(archive, member, found)
            if kept > _MOST_KEPT or len(archive.pax_headers) > _MOST_GLOBAL:
                raise tarfile.ReadError("it has more names and metadata than any Python needs")
    return found


class _Info(tarfile.TarInfo):
    """A member whose extended headers, which are read at once, have a limit."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]  # no public form


def _note_member(archive: tarfile.TarFile, member: tarfile.TarInfo, found: Traces) -> int:
    """Keep what the member tells; how many bytes were kept."""
    text: str | None = ""
    path = posixpath.normpath(member.name).lstrip("/")
    folder, _, name = path.rpartition("/")
    if name == _OPAQUE:
        found.emptied.append(folder)
    elif name.startswith(_WHITEOUT):
        found.hidden.append(posixpath.join(folder, name.removeprefix(_WHITEOUT)))
    elif member.issym():
        found.links[path] = member.linkname
    elif member.islnk():
        same = posixpath.normpath(member.linkname).lstrip("/")
        if same in found.marks or _PYTHON.search(path):
            found.marks[path] = found.marks.get(same, "")
    elif member.isfile() and (text := _text(archive, member, path)) is not None:
        found.marks[path] = text
    if site := _SITE.match(f"/{path}"):
        found.marks.setdefault(site[1].lstrip("/"), "")
    is_kept = path in found.links or path in found.marks or name.startswith(_WHITEOUT)
    return len(path) + len(member.linkname) + len(text or "") if is_kept else 0


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> str | None:
    """What a file tells; None: nothing."""
    if _PYTHON.search(path):
        return ""
    if not (_METADATA.search(path) or _VENV.search(path) or _LIBC.match(path)):
        return None
    file = archive.extractfile(member)
    data = file.read(_LARGEST) if file else b""
    if _LIBC.match(path):
        said = _LIBC_SAYS.search(data)
        return said[1].decode() if said else None
    text = data.decode(errors="replace").replace("\r\n", "\n")
    if _VENV.search(path):
        return text
    return "\n".join(_HEADER.findall(text.partition("\n\n")[0]))


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "k8sjob" / "layers"


def _remembered(path: Path) -> Traces | None:
    try:
        content = json.loads(path.read_bytes())
        return Traces(**content["traces"]) if content["form"] == _FORM else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, found: Traces) -> None:
    """Keep it, where that can be; it is read again otherwise."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"form": _FORM, "traces": asdict(found)}, file)
        Path(file.name).replace(path)
