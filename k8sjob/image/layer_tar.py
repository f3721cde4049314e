"""Layers as compressed tar archives whose bytes depend only on names, modes and contents.

A layer is streamed to a temporary file: memory does not grow with it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import FileContent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from typing import IO, BinaryIO, Self

_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_GZIP_LEVEL: Final = 1
"""Code is small, and the network is faster than level 6."""
_GZIP_HEAD: Final = b"\x1f\x8b\x08\0\0\0\0\0\x04\xff"
"""Neither name nor time (RFC 1952)."""
_PIECE: Final = 1 << 20
"""Bytes that are compressed at once; whatever the number of cores, so that equal code gives equal
bytes on every machine."""
_SAMPLE: Final = 1 << 16
_WORTH_IT: Final = 0.9
"""A piece whose sample stays larger than this part of itself, as one of random data or of weights,
is stored: it would take most of the time, for next to nothing."""
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""The first bytes of zstd frames."""
_ZSTD_LEVEL: Final = 3
ZSTD_ERRORS: tuple[type[Exception], ...] = ()
"""The errors raised for data that is not zstd; empty if Python has no zstd."""

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    ZSTD_ERRORS = (zstd.ZstdError,)
except ImportError:  # an extra
    pass


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, ready to be uploaded.

    Attributes:
        content: compressed.
        diff_id: digest of the archive before it was compressed.
        zstd: compressed by zstd, which only OCI's manifests can express; else by gzip.
    """

    content: FileContent
    diff_id: str
    zstd: bool = field(default=False, kw_only=True)

    def close(self) -> None:
        """Remove the temporary file."""
        self.content.file.close()


def entry(
    name: str, mode: int, owner: int = 0, *, size: int = 0, kind: bytes = tarfile.REGTYPE
) -> tarfile.TarInfo:
    """The header of a file, a folder or a link, without times and the names of owners.

    The name is relative to the root of the image; the owner is a user's number, the group is 0.
    """
    member = tarfile.TarInfo(name)
    member.mode, member.size, member.type = mode, size, kind
    member.uid = owner
    return member


class _Hashed:
    """A file that is written to, with the digest and the size of what it got."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Called by compressors; the file is read through the same object."""


def write_layer(
    members: Iterable[tuple[tarfile.TarInfo, Iterable[bytes]]], *, zstd: bool = False
) -> Layer:
    """Write a layer, to be closed by the caller; each member has as many bytes as its header says.

    Raises:
        ImageError: there is no space for it, or no zstd here.
    """
    try:
        with ExitStack() as failed:
            file = failed.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            packed = _Hashed(cast("IO[bytes]", file))
            with _zstd_writer(packed) if zstd else _GzipWriter(packed) as compressed:
                raw = _Hashed(cast("IO[bytes]", compressed))
                for member, blocks in members:
                    # TarFile.addfile wants a file object for the content of each member, and keeps
                    # all members in memory.
                    raw.write(member.tobuf(tarfile.PAX_FORMAT))
                    for block in blocks:
                        raw.write(block)
                    raw.write(bytes(-raw.size % tarfile.BLOCKSIZE))
                # The end of an archive: two empty blocks, then zeros to a whole record.
                raw.write(bytes(2 * tarfile.BLOCKSIZE))
                raw.write(bytes(-raw.size % tarfile.RECORDSIZE))
            # What is still buffered would fail on a full disk when it is read for the upload.
            file.flush()
            failed.pop_all()
    except OSError as error:  # closing a file writes what is left of it, and fails once more
        raise ImageError(
            f"the layer cannot be written to {tempfile.tempdir or 'a temporary folder'}:"
            f" {error.strerror}; free some space, or set TMPDIR to another folder"
        ) from None
    return Layer(FileContent(packed.digest, packed.size, file), raw.digest, zstd=zstd)


class _GzipWriter:
    """One stream of gzip, whose pieces are compressed by all cores."""

    def __init__(self, file: _Hashed) -> None:
        self._file, self._cores = file, os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._cores)
        self._pieces: deque[Future[bytes]] = deque()
        self._open, self._crc, self._size = bytearray(), 0, 0

    def __enter__(self) -> Self:
        self._file.write(_GZIP_HEAD)
        return self

    def write(self, data: bytes) -> int:
        """Take more of the content."""
        self._open += data
        while len(self._open) > _PIECE:
            self._compress(bytes(self._open[:_PIECE]), last=False)
            del self._open[:_PIECE]
        return len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._compress(bytes(self._open), last=True)
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self._write_done(0)
            for number in (self._crc, self._size & 0xFFFFFFFF):
                self._file.write(number.to_bytes(4, "little"))

    def _compress(self, piece: bytes, *, last: bool) -> None:
        self._crc, self._size = zlib.crc32(piece, self._crc), self._size + len(piece)
        self._pieces.append(self._pool.submit(_deflated, piece, last=last))
        self._write_done(2 * self._cores)  # more would only wait in memory

    def _write_done(self, most_open: int) -> None:
        while len(self._pieces) > most_open:
            self._file.write(self._pieces.popleft().result())


def _deflated(piece: bytes, *, last: bool) -> bytes:
    """A piece of a deflate stream (RFC 1951), which ends at a byte."""
    sample = piece[:_SAMPLE] if len(piece) == _PIECE else b""
    stored = len(zlib.compress(sample, _GZIP_LEVEL)) > _WORTH_IT * len(sample) > 0
    deflate = zlib.compressobj(0 if stored else _GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(piece) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def _zstd_writer(file: _Hashed) -> IO[bytes]:
    _require_zstd("a layer compressed by zstd cannot be written")
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _ZSTD_LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return cast("IO[bytes]", zstd.ZstdFile(cast("IO[bytes]", file), "w", options=options))


def zstd_reader(file: BinaryIO, subject: str) -> IO[bytes]:
    """The contents of a compressed file; `subject` names it in messages.

    Raises:
        ImageError: there is no zstd here.
    """
    _require_zstd(f"{subject} is compressed by zstd and cannot be read")
    return cast("IO[bytes]", zstd.ZstdFile(file))


def _require_zstd(subject: str) -> None:
    if not ZSTD_ERRORS:
        raise ImageError(
            f"{subject}: Python's module for it is missing; pip install 'k8sjob[build]'"
        )
