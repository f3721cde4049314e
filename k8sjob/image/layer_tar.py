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
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from k8sjob.errors import ImageError, install_step
from k8sjob.image.appending import Layer
from k8sjob.image.registry.blob_content import FileContent
from k8sjob.threads import start

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO, BinaryIO

    from k8sjob.threads import Call

_IN_MEMORY: Final = 8 << 20
"""Bytes of a layer that need no temporary file."""
_GZIP_LEVEL: Final = 1
"""Code is small, and the network is faster than level 6."""
_GZIP_HEAD: Final = b"\x1f\x8b\x08\0\0\0\0\0\x04\xff"
"""Neither name nor time (RFC 1952)."""
_DEFLATE_END: Final = b"\x03\0"
"""The last block of a deflate stream, with nothing in it."""
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
    """The digest and the size of blocks that have passed."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def passing(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._hash.update(block)
            self.size += len(block)
            yield block


def write_layer(
    members: Iterable[tuple[tarfile.TarInfo, Iterable[bytes]]], *, zstd: bool = False
) -> Layer:
    """Write a layer, to be closed by the caller; each member has as many bytes as its header says.

    Raises:
        ImageError: there is no space for it, or no zstd here.
    """
    raw, packed = _Hashed(), _Hashed()
    try:
        with ExitStack() as failed:
            file = failed.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            archive = raw.passing(_archive(members, raw))
            for block in packed.passing(_zstd(archive) if zstd else _gzip(archive)):
                file.write(block)
            # What is still buffered would fail on a full disk when it is read for the upload.
            file.flush()
            failed.pop_all()
    except OSError as error:  # closing a file writes what is left of it, and fails once more
        raise ImageError(
            f"the layer cannot be written to {tempfile.tempdir or 'a temporary folder'}:"
            f" {error.strerror}; free some space, or set TMPDIR to another folder"
        ) from None
    return Layer(FileContent(packed.digest, packed.size, file), raw.digest, zstd=zstd)


def _archive(
    members: Iterable[tuple[tarfile.TarInfo, Iterable[bytes]]], raw: _Hashed
) -> Iterator[bytes]:
    """The blocks of an archive, each of which passes `raw` before the next one is asked for."""
    for member, blocks in members:
        # TarFile.addfile wants a file object for the content of each member, and keeps all members
        # in memory.
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield from blocks
        yield bytes(-raw.size % tarfile.BLOCKSIZE)
    # The end of an archive: two empty blocks, then zeros to a whole record.
    yield bytes(2 * tarfile.BLOCKSIZE)
    yield bytes(-raw.size % tarfile.RECORDSIZE)


def _gzip(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """One stream of gzip, whose pieces are compressed by all cores."""
    cores, crc, size = os.cpu_count() or 1, 0, 0
    compressed: deque[Call[bytes]] = deque()
    yield _GZIP_HEAD
    for piece in _pieces(blocks):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        compressed.append(start(partial(_deflated, piece)))
        if len(compressed) > 2 * cores:  # more would only wait in memory
            yield compressed.popleft().result()
    yield from (call.result() for call in compressed)
    yield _DEFLATE_END + crc.to_bytes(4, "little") + (size % (1 << 32)).to_bytes(4, "little")


def _pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    begun = bytearray()
    for block in blocks:
        begun += block
        while len(begun) >= _PIECE:
            yield bytes(begun[:_PIECE])
            del begun[:_PIECE]
    yield bytes(begun)


def _deflated(piece: bytes) -> bytes:
    """A piece of a deflate stream (RFC 1951), which ends at a byte."""
    sample = piece[:_SAMPLE] if len(piece) == _PIECE else b""
    stored = len(zlib.compress(sample, _GZIP_LEVEL)) > _WORTH_IT * len(sample) > 0
    deflate = zlib.compressobj(0 if stored else _GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(piece) + deflate.flush(zlib.Z_SYNC_FLUSH)


def _zstd(blocks: Iterable[bytes]) -> Iterator[bytes]:
    _require_zstd("a layer compressed by zstd cannot be written")
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _ZSTD_LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    compressor = zstd.ZstdCompressor(options=options)
    yield from map(compressor.compress, blocks)
    yield compressor.flush()


def zstd_reader(file: BinaryIO, subject: str) -> IO[bytes]:
    """The contents of a compressed file; `subject` names it in messages.

    Raises:
        ImageError: there is no zstd here.
    """
    _require_zstd(f"{subject} is compressed by zstd and cannot be read")
    return cast("IO[bytes]", zstd.ZstdFile(file))


def _require_zstd(subject: str) -> None:
    if not ZSTD_ERRORS:
        raise ImageError(f"{subject}: Python's module for it is missing", install_step("build"))
