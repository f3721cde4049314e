"""The code as a layer: the context at /app, k8sjob's runtime at /opt/k8sjob.

Equal files give equal bytes, on any machine and at any time: nothing but names, contents and the
executable bit of the user's files is in it. It is streamed to a temporary file; memory does not
grow with it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image import tar
from k8sjob.image.content import BLOCK, FileContent
from k8sjob.image.secrets import Scanner
from k8sjob.rendering.context import runtime_files
from k8sjob.rendering.dockerfile import HOME
from k8sjob.rendering.manifest import IMAGE_UID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.image.context import Context, File
    from k8sjob.image.secrets import Finding

__all__ = ["Layer", "pack"]

_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_FAST: Final = 1
"""zlib's level: code is small, and the network is faster than level 6."""
_GZIP: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""No name, no time, fastest, no particular system: zlib itself would write the one it runs on."""
_OPAQUE: Final = ".wh..wh..opq"
"""In a folder: nothing of it in the layers below is there any more."""
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, ready to be sent.

    Attributes:
        content: compressed.
        diff_id: digest of the archive before it was compressed.
        findings: contents that look like credentials.
    """

    content: FileContent
    diff_id: str
    findings: tuple[Finding, ...]

    def close(self) -> None:
        """Remove the temporary file."""
        self.content.file.close()


def pack(context: Context, *, alone: bool = False) -> Layer:
    """Make the layer.

    Args:
        context: the user's code.
        alone: hide what the layers below have at /app and /opt/k8sjob.

    Returns:
        The layer, to be closed by the caller.

    Raises:
        ImageError: a file cannot be read or changes meanwhile, or there is no space for the layer.
    """
    with ExitStack() as failed:
        try:
            file = failed.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            layer = _written(context, file, alone=alone)
        except OSError as error:
            raise ImageError(
                f"the layer cannot be written to {tempfile.gettempdir()}: {error.strerror}; make"
                " space, or name another folder by TMPDIR"
            ) from None
        failed.pop_all()
    return layer


def _written(context: Context, file: tempfile.SpooledTemporaryFile[bytes], *, alone: bool) -> Layer:
    findings: list[Finding] = []
    out = _Gzip(file)
    for member, source in _members(context, alone=alone):
        out.write(tar.header(member))
        if source is not None:
            findings += _copy(source, member, out)
            out.write(tar.padding(member.size))
    out.close()
    return Layer(FileContent(out.digest, out.size, file), out.diff_id, tuple(findings))


def _members(context: Context, *, alone: bool) -> Iterator[tuple[tar.Member, _Source | None]]:
    """All that stands in the archive, and where its contents are."""
    home, runtime, app = (path.strip("/") for path in (HOME, RUNTIME_HOME, WORKDIR))
    for folder, owner in ((home, IMAGE_UID), (runtime, 0)):
        yield tar.Member(folder.partition("/")[0], "5", 0o755), None
        yield tar.Member(folder, "5", 0o755, owner), None
    if alone:
        yield tar.Member(f"{runtime}/{_OPAQUE}", "0", 0o644), None
    folders = set()
    for name, path in runtime_files():
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders.add(folder)
            yield tar.Member(f"{runtime}/{folder}", "5", 0o755), None
        source = _Source(name, os.fsencode(path), path.stat(), ours=True)
        yield tar.Member(f"{runtime}/{name}", "0", 0o644, size=source.state.st_size), source
    yield tar.Member(app, "5", 0o755, IMAGE_UID), None
    if alone:
        yield tar.Member(f"{app}/{_OPAQUE}", "0", 0o644), None
    for entry in context.entries:
        yield _member(f"{app}/{entry.name}", entry)


def _member(name: str, entry: File) -> tuple[tar.Member, _Source | None]:
    if entry.is_folder:
        return tar.Member(name, "5", 0o755, IMAGE_UID), None
    if entry.is_link:
        return tar.Member(name, "2", 0o777, IMAGE_UID, link=_target(entry)), None
    mode = 0o755 if entry.state.st_mode & stat.S_IXUSR else 0o644
    source = _Source(entry.name, entry.path, entry.state)
    return tar.Member(name, "0", mode, IMAGE_UID, entry.state.st_size), source


def _target(entry: File) -> str:
    try:
        return os.readlink(entry.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{entry.name}: the link leads to a name that is not UTF-8, which an image needs; make"
            " it anew, or leave it out by .dockerignore"
        ) from None
    except OSError:
        raise _changed(entry.name) from None


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to be copied; ours are not looked through for credentials."""

    name: str
    path: bytes
    state: os.stat_result
    ours: bool = False


def _copy(source: _Source, member: tar.Member, out: _Gzip) -> list[Finding]:
    """Copy a file that stays as it is meanwhile; what in it looks like a credential."""
    try:
        file = os.open(source.path, _OPEN)
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(source.path)}: cannot be read: {error.strerror}; make it readable, or"
            " leave it out by .dockerignore"
        ) from None
    scanner = Scanner(source.name)
    left = member.size
    try:
        while left > 0 and (block := _read(file, min(left, BLOCK), source)):
            left -= len(block)
            out.write(block)
            if not source.ours:
                scanner.feed(block)
        after = os.fstat(file)
    finally:
        os.close(file)
    if left or _version(after) != _version(source.state):
        raise _changed(source.name)
    return sorted(scanner.findings)


def _read(file: int, size: int, source: _Source) -> bytes:
    try:
        return os.read(file, size)
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(source.path)}: cannot be read: {error.strerror}; is the disk in order?"
        ) from None


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(name: str) -> ImageError:
    return ImageError(
        f"{name} changed while it was packed; push again when nothing writes to it, or leave it out"
        " by .dockerignore"
    )


class _Gzip:
    """Writes to a file what is compressed, and keeps both digests."""

    def __init__(self, file: tempfile.SpooledTemporaryFile[bytes]) -> None:
        self._file = file
        self._raw, self._packed = hashlib.sha256(), hashlib.sha256()
        self._deflate = zlib.compressobj(_FAST, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc, self._length = 0, 0
        self.size = 0
        self._emit(_GZIP)

    def write(self, data: bytes) -> None:
        """Add to the archive."""
        self._raw.update(data)
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)
        self._emit(self._deflate.compress(data))

    def close(self) -> None:
        """Complete the archive and the compressed file."""
        self.write(tar.end(self._length))
        self._emit(self._deflate.flush())
        self._emit(struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))

    def _emit(self, data: bytes) -> None:
        if data:
            self._packed.update(data)
            self.size += len(data)
            self._file.write(data)

    @property
    def digest(self) -> str:
        """Of what is compressed."""
        return f"sha256:{self._packed.hexdigest()}"

    @property
    def diff_id(self) -> str:
        """Of what was written."""
        return f"sha256:{self._raw.hexdigest()}"
