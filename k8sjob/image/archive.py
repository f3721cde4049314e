"""A layer is written: a compressed archive, with the digests of both its forms.

It is streamed to a temporary file; memory does not grow with it.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from k8sjob.errors import ImageError
from k8sjob.image import tar
from k8sjob.image.content import FileContent
from k8sjob.image.zstd import compressor

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Layer", "write_layer"]

_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_FAST: Final = 1
"""zlib's level: code is small, and the network is faster than level 6."""
_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""No name, no time, fastest, no particular system: zlib itself would write the one it runs on."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, ready to be sent.

    Attributes:
        content: compressed.
        diff_id: digest of the archive before it was compressed.
        zstd: it is compressed by zstd, which OCI's manifests alone can say; else by gzip.
    """

    content: FileContent
    diff_id: str
    zstd: bool = field(default=False, kw_only=True)

    def close(self) -> None:
        """Remove the temporary file."""
        self.content.file.close()


def write_layer(
    members: Iterable[tuple[tar.Member, Iterable[bytes]]], *, zstd: bool = False
) -> Layer:
    """Write what stands in a layer.

    Args:
        members: with the blocks of their contents, of as many bytes as the member says.
        zstd: compress by it; else by gzip.

    Returns:
        The layer, to be closed by the caller.

    Raises:
        ImageError: there is no space for it, or no zstd here.
    """
    with ExitStack() as failed:
        try:
            file = failed.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            out = _Archive(file, compressor() if zstd else _Gzip())
            for member, blocks in members:
                out.write(tar.header(member))
                for block in blocks:
                    out.write(block)
                out.write(tar.padding(member.size))
            out.close()
        except OSError as error:
            raise ImageError(
                f"the layer cannot be written to {_desk()}: {error.strerror}; make space, or name"
                " another folder by TMPDIR"
            ) from None
        failed.pop_all()
    return Layer(out.content, out.diff_id, zstd=zstd)


def _desk() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written to
        return "a temporary folder"


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Gzip:
    """gzip's format by zlib, so that nothing but the contents is in it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(_FAST, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc, self._length = 0, 0
        self._header = _HEADER

    def compress(self, data: bytes, /) -> bytes:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)
        header, self._header = self._header, b""
        return header + self._deflate.compress(data)

    def flush(self) -> bytes:
        return self._deflate.flush() + struct.pack("<II", self._crc, self._length & 0xFFFFFFFF)


class _Archive:
    """Writes to a file what is compressed, and keeps both digests."""

    def __init__(self, file: tempfile.SpooledTemporaryFile[bytes], compressor: _Compressor) -> None:
        self._file = file
        self._raw, self._packed = hashlib.sha256(), hashlib.sha256()
        self._compressor = compressor
        self._length, self._size = 0, 0

    def write(self, data: bytes) -> None:
        """Add to the archive."""
        self._raw.update(data)
        self._length += len(data)
        self._emit(self._compressor.compress(data))

    def close(self) -> None:
        """Complete the archive and the compressed file."""
        self.write(tar.end(self._length))
        self._emit(self._compressor.flush())

    def _emit(self, data: bytes) -> None:
        if data:
            self._packed.update(data)
            self._size += len(data)
            self._file.write(data)

    @property
    def content(self) -> FileContent:
        """What is compressed."""
        return FileContent(f"sha256:{self._packed.hexdigest()}", self._size, self._file)

    @property
    def diff_id(self) -> str:
        """Digest of what was written."""
        return f"sha256:{self._raw.hexdigest()}"
