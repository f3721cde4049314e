"""Layers as compressed tar archives whose bytes follow from names, modes and contents alone.

Python's tarfile would do; its headers differ between versions of Python, and it is slower by half.
The format is POSIX pax: a ustar header, and an extended one before it where a name is long or not
ASCII, or a file has 8 GiB and more. A layer is streamed to a temporary file: memory does not grow
with it.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, cast

from k8sjob.errors import ImageError
from k8sjob.image.registry.blobs import FileContent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO, BinaryIO

__all__ = ["ZSTD_ERRORS", "ZSTD_MAGIC", "Layer", "Member", "write_layer", "zstd_reader"]

_BLOCK: Final = 512
_RECORD: Final = 20 * _BLOCK
_MAX_NAME, _MAX_LINK, _MAX_SIZE = 100, 100, 8 << 30  # of a ustar header
_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_GZIP_LEVEL: Final = 1
"""Code is small, and the network is faster than level 6."""
_GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""No name, no time, fastest, no particular system: zlib itself would write the one it runs on."""
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""The first bytes of zstd frames."""
_ZSTD_LEVEL: Final = 3
ZSTD_ERRORS: tuple[type[Exception], ...] = ()
"""What reading raises for data that is not zstd; empty where Python has no zstd."""

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    ZSTD_ERRORS = (zstd.ZstdError,)
except ImportError:  # an extra
    pass


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of a tar archive.

    Attributes:
        name: relative to the root of the image; of folders without a "/" at the end.
        kind: "0" a file, "2" a symbolic link, "5" a folder.
        mode: its permissions.
        owner: number of user and group.
        size: bytes of a file.
        link: target of a symbolic link.
    """

    name: str
    kind: str
    mode: int
    owner: int = 0
    size: int = 0
    link: str = ""


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


def write_layer(members: Iterable[tuple[Member, Iterable[bytes]]], *, zstd: bool = False) -> Layer:
    """Write a layer, to be closed by the caller.

    Args:
        members: each with the blocks of its content, of as many bytes as the member says.
        zstd: compress by zstd; else by gzip.

    Raises:
        ImageError: there is no space for it, or no zstd here.
    """
    with ExitStack() as failed:
        try:
            file = failed.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            archive = _Archive(file, _zstd_compressor() if zstd else _Gzip())
            for member, blocks in members:
                archive.write(tar_header(member))
                for block in blocks:
                    archive.write(block)
                archive.write(tar_padding(member.size))
            archive.close()
        except OSError as error:
            raise ImageError(
                f"the layer cannot be written to {_temporary_folder()}: {error.strerror}; make"
                " space, or name another folder by TMPDIR"
            ) from None
        failed.pop_all()
    content = FileContent(f"sha256:{archive.packed.hexdigest()}", archive.packed_size, file)
    return Layer(content, f"sha256:{archive.raw.hexdigest()}", zstd=zstd)


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written to
        return "a temporary folder"


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Archive:
    """Compresses to a file, and keeps the digests of both forms."""

    def __init__(self, file: tempfile.SpooledTemporaryFile[bytes], compressor: _Compressor) -> None:
        self.raw, self.packed = hashlib.sha256(), hashlib.sha256()
        self.raw_size, self.packed_size = 0, 0
        self._file = file
        self._compressor = compressor

    def write(self, data: bytes) -> None:
        self.raw.update(data)
        self.raw_size += len(data)
        self._emit(self._compressor.compress(data))

    def close(self) -> None:
        self.write(tar_end(self.raw_size))
        self._emit(self._compressor.flush())

    def _emit(self, data: bytes) -> None:
        self.packed.update(data)
        self.packed_size += len(data)
        self._file.write(data)


class _Gzip:
    """The gzip format with nothing but the contents in it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc, self._length = 0, 0
        self._header = _GZIP_HEADER

    def compress(self, data: bytes, /) -> bytes:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)
        header, self._header = self._header, b""
        return header + self._deflate.compress(data)

    def flush(self) -> bytes:
        return self._deflate.flush() + struct.pack("<II", self._crc, self._length & 0xFFFFFFFF)


def _zstd_compressor() -> zstd.ZstdCompressor:
    _require_zstd("a layer compressed by zstd cannot be written")
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _ZSTD_LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return zstd.ZstdCompressor(options=options)


def zstd_reader(file: BinaryIO, what: str) -> IO[bytes]:
    """The contents of a compressed file; `what` it is, for messages.

    Raises:
        ImageError: there is no zstd here.
    """
    _require_zstd(f"{what} is compressed by zstd and cannot be read")
    return cast("IO[bytes]", zstd.ZstdFile(file))


def _require_zstd(what: str) -> None:
    if not ZSTD_ERRORS:
        raise ImageError(f"{what}: Python's module for it is missing; pip install 'k8sjob[deps]'")


def tar_header(member: Member) -> bytes:
    """The blocks before a member's content."""
    name = member.name + ("/" if member.kind == "5" else "")
    raw, link = name.encode(), member.link.encode()
    records = b""
    if len(raw) > _MAX_NAME or not raw.isascii():
        records += pax_record("path", name)
    if len(link) > _MAX_LINK or not link.isascii():
        records += pax_record("linkpath", member.link)
    if member.size >= _MAX_SIZE:
        records += pax_record("size", str(member.size))
    header = _ustar(raw, member, link)
    if not records:
        return header
    extended = Member("PaxHeader", "x", 0o644, size=len(records))
    return _ustar(b"PaxHeader", extended, b"") + records + tar_padding(len(records)) + header


def tar_padding(size: int) -> bytes:
    """The rest of a content's last block."""
    return bytes(-size % _BLOCK)


def tar_end(size: int) -> bytes:
    """The end of an archive of so many bytes."""
    return bytes(2 * _BLOCK + -(size + 2 * _BLOCK) % _RECORD)


def _ustar(name: bytes, member: Member, link: bytes) -> bytes:
    size = member.size if member.size < _MAX_SIZE else 0
    fields = (
        name[:_MAX_NAME].ljust(_MAX_NAME, b"\0"),
        b"%07o\0" % member.mode,
        b"%07o\0" % member.owner,
        b"%07o\0" % member.owner,
        b"%011o\0" % size,
        b"%011o\0" % 0,  # the time, in seconds since 1970
        b" " * 8,  # the checksum is taken with blanks in its place
        member.kind.encode(),
        link[:_MAX_LINK].ljust(_MAX_LINK, b"\0"),
        b"ustar\x0000",
        bytes(_BLOCK - 265),
    )
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def pax_record(key: str, value: str) -> bytes:
    """A line of an extended header, which begins with its own length."""
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest
