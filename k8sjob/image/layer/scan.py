"""Scans of a base's layers for a Python and its packages.

Layers are large and never change, so each is read in one stream, once on a machine; what was found
is cached by its digest.
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
from k8sjob.image.layer.archive import ZSTD_ERRORS, ZSTD_MAGIC, zstd_reader
from k8sjob.image.registry.blobs import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from k8sjob.image.registry.blobs import Content

__all__ = ["LayerScan", "scan_layer"]

_CACHE_VERSION: Final = 2
"""Raised when something else is cached: what older versions have cached is read again then."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_METADATA: Final = re.compile(r"(?:^|/)[^/]+\.(?:dist-info/METADATA|egg-info/PKG-INFO|egg-info)$")
_HEADER: Final = re.compile(
    r"^(?:Name|Version|Provides-Extra|Requires-Dist): .*$", re.MULTILINE | re.IGNORECASE
)
_PYTHON: Final = re.compile(r"(?:^|/)bin/python[\d.]*$|(?:^|/)lib/ld-musl-[^/]+$")
_VENV: Final = re.compile(r"(?:^|/)pyvenv\.cfg$")
_LIBC: Final = re.compile(r"(?:usr/)?lib(?:64)?/(?:[\w-]+/)?libc(?:\.so\.6|-2\.\d+\.so)$")
_LIBC_VERSION: Final = re.compile(rb"GNU C Library [^\n]*release version (\d+\.\d+)")
_SITE: Final = re.compile(r"(.*/(?:site|dist)-packages)(?:/|$)")
_MAX_FILE: Final = 16 << 20
"""Bytes that are read of one file."""
_MAX_HEADER: Final = 1 << 20
"""Bytes of an extended header, which is a name and a few numbers."""
_MAX_KEPT: Final = 64 << 20
"""Bytes of names and texts that are kept of one layer: those of large bases are a few MB."""
_MAX_GLOBAL: Final = 1000
"""Keys of pax headers that are for all members."""
_HEADER_TYPES: Final = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)
_READ_ERRORS: Final[tuple[type[Exception], ...]] = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    OSError,
    ValueError,
    RecursionError,  # headers of headers of headers
    *ZSTD_ERRORS,
)


@dataclass(frozen=True, slots=True)
class LayerScan:
    """What was found in a layer; paths begin without "/".

    Attributes:
        links: target of each symbolic link.
        marks: a text for each file of interest: headers of a distribution, the version of the C
            library, a pyvenv.cfg; empty for interpreters and folders of packages.
        hidden: paths of lower layers that are removed; with "/" at the end what is below them.
    """

    links: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Characters of all names and texts."""
        texts = (self.links, self.links.values(), self.marks, self.marks.values())
        return sum(len(text) for part in (*texts, self.hidden) for text in part)


def scan_layer(content: Content, where: str, note: Callable[[int], object]) -> LayerScan:
    """Scan a layer, or take what the cache has of it.

    Args:
        content: the layer, compressed by gzip or zstd, or not at all.
        where: the image's name, for messages.
        note: is called with each number of bytes that came.

    Raises:
        ImageError: it cannot be read, or is no archive.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cached = Path(home) / "k8sjob/layers" / f"{content.digest.replace(':', '-')}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(cached.read_bytes())
        if kept["form"] == _CACHE_VERSION:
            found = LayerScan(**kept["traces"])
            note(content.size)
            return found
    found = _scan(content, f"{where}, layer {content.digest[:19]}", note)
    with suppress(OSError):  # without a cache it is read again
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cached.parent, delete=False) as file:
            json.dump({"form": _CACHE_VERSION, "traces": asdict(found)}, file)
        Path(file.name).replace(cached)
    return found


def _scan(content: Content, what: str, note: Callable[[int], object]) -> LayerScan:
    blocks = _counted(content.blocks(), note)
    failure = None
    found = LayerScan()
    try:
        _scan_archive(_Stream(blocks), what, found)
    except _READ_ERRORS as error:
        failure = error
    for _ in blocks:  # the digest is checked at the very end
        pass
    if failure is not None:
        raise ImageError(f"{what}: not an archive ({failure}); the image is broken")
    return found


def _counted(blocks: Iterator[bytes], note: Callable[[int], object]) -> Iterator[bytes]:
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

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # in fact any buffer
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class _TarInfo(tarfile.TarInfo):
    """A member whose extended headers, which are read whole, have a limit."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADER_TYPES and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]  # no public form


def _scan_archive(stream: io.RawIOBase, what: str, found: LayerScan) -> None:
    raw = io.BufferedReader(stream, BLOCK)
    start = raw.peek(4)[:4]
    opened: IO[bytes] = raw
    if start[:2] == b"\x1f\x8b":
        opened = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    elif start == ZSTD_MAGIC:
        opened = zstd_reader(raw, what)
    kept = 0
    with tarfile.open(fileobj=opened, mode="r|", bufsize=BLOCK, tarinfo=_TarInfo) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
            kept += _scan_member(archive, member, found)
            if kept > _MAX_KEPT or len(archive.pax_headers) > _MAX_GLOBAL:
                raise tarfile.ReadError("it has more names and metadata than any Python needs")


def _scan_member(archive: tarfile.TarFile, member: tarfile.TarInfo, found: LayerScan) -> int:
    """Keep what is of interest of a member; how many bytes were kept."""
    text: str | None = ""
    path = posixpath.normpath(member.name).lstrip("/")
    folder, _, name = path.rpartition("/")
    if name == _OPAQUE:
        found.hidden.append(f"{folder}/")
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
    """What is kept of a file; None: the file is of no interest."""
    if _PYTHON.search(path):
        return ""
    if not (_METADATA.search(path) or _VENV.search(path) or _LIBC.match(path)):
        return None
    file = archive.extractfile(member)
    data = file.read(_MAX_FILE) if file else b""
    if _LIBC.match(path):
        version = _LIBC_VERSION.search(data)
        return version[1].decode() if version else None
    text = data.decode(errors="replace").replace("\r\n", "\n")
    if _VENV.search(path):
        return text
    return "\n".join(_HEADER.findall(text.partition("\n\n")[0]))
