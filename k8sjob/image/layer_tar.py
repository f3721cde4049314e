"""Layers as compressed tar archives whose bytes depend only on names, modes and contents.

A layer is streamed to a temporary file: memory does not grow with it.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import FileContent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO, BinaryIO

_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_GZIP_LEVEL: Final = 1
"""Code is small, and the network is faster than level 6."""
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
            with _zstd_writer(packed) if zstd else _gzip_writer(packed) as compressed:
                raw = _Hashed(compressed)
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


def _gzip_writer(file: _Hashed) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))  # no name either


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
